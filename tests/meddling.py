"""A viewer at its worst: control calls at random. As a program it does so from a process of its own, without torch.

The program reads one request a line and answers each with one line, both JSON: {"folder", "seed", "calls"} meddles
with the run in the folder, {"folder", "pause": true} holds it, {"folder", "end": true} says what became of all wishes.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from megatrain.remote import RemoteControl
from megatrain.steering import Steering, Wish

LAYERS = 3  # of the model that is trained
END_S = 20.0


def meddle(steering: Steering, status: Callable[[], object], seed: int, calls: int) -> list[Wish]:
    """Make random calls with random breaks between them; returns the wishes."""
    choose = random.Random(seed)
    possible: list[Callable[[], Any]] = [
        *(steering.pause, steering.finish_step, status),
        *(steering.resume, steering.step_layer) * 2,
        lambda: steering.run_to_layer(choose.randrange(LAYERS), choose.choice(["forward", "backward", None])),
        lambda: steering.set_prefetch_depth(choose.randrange(6)),
        lambda: steering.set_grad_buffers(choose.randrange(1, 5)),
        lambda: steering.set_resident_layers(choose.randrange(5)),
    ]
    wishes = []
    for _ in range(calls):
        made = choose.choice(possible)()
        if isinstance(made, Wish):
            wishes.append(made)
        if choose.random() < 0.2:
            time.sleep(choose.random() * 0.002)
    return wishes


def fates(wishes: list[Wish]) -> dict[str, int]:
    """How many wishes took effect, were overtaken, or still wait."""
    names = ("pending" if w.pending else "overtaken" if w.overtaken else "took effect" for w in wishes)
    return dict(Counter(names))


class Visitor:
    """Steers runs of other processes, each through one connection."""

    def __init__(self) -> None:
        self._remotes: dict[str, RemoteControl] = {}
        self._wishes: dict[str, list[Wish]] = {}

    def obey(self, request: dict[str, Any]) -> object:
        folder = request["folder"]
        remote = self._remotes.setdefault(folder, RemoteControl(folder))
        if "seed" in request:
            self._wishes[folder] = meddle(remote, remote.status, request["seed"], request["calls"])
            return len(self._wishes[folder])
        if "pause" in request:
            return remote.pause().wait(END_S)
        return self._end(folder)

    def _end(self, folder: str) -> dict[str, int]:
        wishes = self._wishes.pop(folder)
        give_up_s = time.monotonic() + END_S
        while any(wish.pending for wish in wishes) and time.monotonic() < give_up_s:
            self._remotes[folder].poll()
        found = fates(wishes)  # before closing, which overtakes whatever waits
        self._remotes.pop(folder).close()
        return found


def main() -> None:
    visitor = Visitor()
    for line in sys.stdin:
        print(json.dumps(visitor.obey(json.loads(line))), flush=True)
    assert "torch" not in sys.modules


if __name__ == "__main__":
    main()

"""The viewer's side: steering a run of another process as if it were in this one."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from megatrain.folder import RunFolder
from megatrain.plain import from_plain, to_plain
from megatrain.remote.link import Link, NobodyThereError
from megatrain.remote.protocol import STATUS, Message
from megatrain.report import Status
from megatrain.steering import Phase, Position, Wish

LOOK_S = 0.02  # how often `Wish.wait` looks for an answer


class RunUnreachableError(RuntimeError):
    """A run did not answer. The message says what to do; the run itself is not harmed."""


class RemoteControl:
    """`Steering` of the run in a folder, from any process of its user. Thread-safe; each call is one round trip.

    A refused wish raises ValueError with the run's reason; a run that does not answer within `timeout_s`, or is not
    there, RunUnreachableError. What becomes of a wish is heard with the next call of any method, `poll` or
    `Wish.wait`. When the run ends or its process dies, wishes that wait are overtaken; a run that begins in the same
    folder later is reached by the same object.
    """

    def __init__(self, folder: str | Path, timeout_s: float = 5.0) -> None:
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be a number of seconds > 0; got {timeout_s!r}")
        self._folder = RunFolder(folder)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._ids = count()
        self._pending: dict[int, Wish] = {}
        self._closed = False

    # ---- wishes: see `Steering` ----

    def pause(self) -> Wish:
        return self._wish("pause")

    def resume(self) -> Wish:
        return self._wish("resume")

    def step_layer(self) -> Wish:
        return self._wish("step_layer")

    def finish_step(self) -> Wish:
        return self._wish("finish_step")

    def run_to_layer(self, layer: int, phase: Phase | None = None) -> Wish:
        return self._wish("run_to_layer", layer=layer, phase=phase)

    def set_prefetch_depth(self, depth: int) -> Wish:
        return self._wish("set_prefetch_depth", depth=depth)

    def set_grad_buffers(self, count: int) -> Wish:
        return self._wish("set_grad_buffers", count=count)

    def set_resident_layers(self, count: int) -> Wish:
        return self._wish("set_resident_layers", count=count)

    def set_micro_batch_size(self, rows: int) -> Wish:
        return self._wish("set_micro_batch_size", rows=rows)

    def checkpoint(self) -> Wish:
        return self._wish("checkpoint")

    def stop(self, *, save: bool = False) -> Wish:
        return self._wish("stop", save=save)

    # ---- answers ----

    def status(self) -> Status:
        """What is so at this moment, by the run's own word."""
        with self._lock:
            _, answer = self._ask(STATUS)
            return from_plain(Status, _given(answer, "status"))

    def poll(self) -> None:
        """Hear what became of wishes meanwhile; never waits for the run."""
        with self._lock:
            if self._link is not None:
                self._hear_all(self._link)
                if not self._link.alive:
                    self._hang_up()

    def close(self) -> None:
        """Let go of the run, which goes on; wishes that wait count as overtaken, as nobody will tell of them."""
        with self._lock:
            self._hang_up()
            self._closed = True

    # ---- one round trip ----

    def _wish(self, name: str, **arguments: Any) -> Wish:
        with self._lock:
            request, answer = self._ask(name, **arguments)
            wish = _RemoteWish(_given(answer, "accepted"), self.poll)
            self._pending[request] = wish
            return wish

    def _ask(self, name: str, **arguments: Any) -> tuple[int, Message]:
        if self._closed:
            raise RuntimeError("this RemoteControl is closed; make another one to steer the run")
        request = next(self._ids)
        text = json.dumps({"id": request, "do": name, "with": to_plain(arguments)})
        give_up_s = time.monotonic() + self._timeout_s
        try:
            link = self._linked()
            link.send(text.encode())
            return request, self._answer(link, request, give_up_s)
        except NobodyThereError:
            self._hang_up()
            raise RunUnreachableError(
                f"nobody answers at {self._folder.socket}: the run has not begun, or has ended, or its process is "
                f"gone; RunFolder({str(self._folder.path)!r}).status() says which"
            ) from None
        except TimeoutError:
            raise RunUnreachableError(
                f"the run in {self._folder.path} did not answer {name!r} within {self._timeout_s} s, though its "
                "process is there: it is very busy or suspended. Ask again later; what was asked for may still happen"
            ) from None

    def _linked(self) -> Link:
        if self._link is not None and not self._link.alive:
            self._hang_up()
        if self._link is None:
            self._link = Link(self._folder.path, self._timeout_s)
        return self._link

    def _answer(self, link: Link, request: int, give_up_s: float) -> Message:
        while True:
            message = link.receive(max(0.0, give_up_s - time.monotonic()))
            if message is not None:
                self._hear(message)
                if message.get("id") == request:
                    return message
            elif not link.alive:
                raise NobodyThereError
            elif time.monotonic() >= give_up_s:
                raise TimeoutError

    def _hear_all(self, link: Link) -> None:
        while (message := link.receive(0.0)) is not None:
            self._hear(message)

    def _hear(self, message: Message) -> None:
        if not message.keys() & {"effect", "overtaken", "failed"}:
            return
        wish = self._pending.pop(message["id"], None)
        if wish is None:
            return
        if "effect" in message:
            wish.fulfil(from_plain(_EFFECT, message["effect"]))
        elif "failed" in message:
            wish.fail(str(message["failed"]))
        else:
            wish.overtake()

    def _hang_up(self) -> None:
        if self._link is not None:
            self._hear_all(self._link)  # the last words of a run that is no more
            self._link.close()
            self._link = None
        for wish in self._pending.values():
            wish.overtake()
        self._pending.clear()


_EFFECT: Any = Position | None


class _RemoteWish(Wish):
    """A wish that asks for news of itself while somebody waits for it."""

    def __init__(self, text: str, poll: Callable[[], None]) -> None:
        super().__init__(text)
        self._poll = poll

    def wait(self, timeout_s: float | None = None) -> bool:
        give_up_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while self.pending:
            self._poll()
            left_s = give_up_s - time.monotonic()
            if super().wait(max(0.0, min(LOOK_S, left_s))) or left_s <= 0:
                break
        return not self.pending


def _given(answer: Message, name: str) -> Any:
    if name not in answer:
        raise ValueError(answer.get("refused", f"the run gave no {name}, but {answer!r}"))
    return answer[name]

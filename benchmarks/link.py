"""How fast bytes move each way and both ways at once, over the very lanes that the engine uses.

On a card these are copy engines; on a CPU the lanes' own memmoves.
"""

from __future__ import annotations

import time
from typing import Any, Literal

import torch

from megatrain.host import Arena
from megatrain.lanes import Done, Label, Lanes, Stream
from megatrain.trace import Recorder

Memory = Literal["registered", "torch"]
DIRECTIONS = (("h2d",), ("d2h",), ("h2d", "d2h"))
OPS = {"h2d": "load", "d2h": "unload"}


def measure(device: str, nbytes: int, copies: int) -> dict[str, dict[str, float]]:
    """Bytes per second: by kind of host memory, by direction ("h2d", "d2h", "h2d of both", "d2h of both").

    nbytes: of one copy. "registered" is the engine's arena, "torch" is what torch's pin_memory gives.
    """
    kinds: tuple[Memory, Memory] = ("registered", "torch")
    return {kind: _measure(kind, torch.device(device), nbytes, copies) for kind in kinds}


def _measure(kind: Memory, device: torch.device, nbytes: int, copies: int) -> dict[str, float]:
    recorder = Recorder()
    lanes = Lanes.on(device, recorder)
    arena = Arena("link", 2 * nbytes, pin=device.type == "cuda") if kind == "registered" else None
    hosts = {lane: _host(arena, nbytes, device) for lane in OPS}
    cards = {lane: torch.ones(nbytes, dtype=torch.uint8, device=device) for lane in OPS}
    try:
        for step, busy in enumerate(DIRECTIONS):
            _run(lanes, busy, 2, -1 - step, hosts, cards)  # the first ones touch pages and wake the link
            _run(lanes, busy, copies, step, hosts, cards)
        lanes.record_spans()
        return {_name(lane, busy): _rate(recorder, step, lane) for step, busy in enumerate(DIRECTIONS) for lane in busy}
    finally:
        lanes.close()
        if arena is not None:
            arena.close()


def _host(arena: Arena | None, nbytes: int, device: torch.device) -> torch.Tensor:
    if arena is None:
        return torch.ones(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return arena.take(nbytes).fill_(1)


def _run(lanes: Lanes, busy: tuple[str, ...], copies: int, step: int, hosts: Any, cards: Any) -> None:
    """Queue all copies at once, then wait for the last of each lane."""
    last: dict[str, Done] = {}
    for _ in range(copies):
        for lane in busy:
            target, source = (cards[lane], hosts[lane]) if lane == "h2d" else (hosts[lane], cards[lane])

            def work(stream: Stream, target: torch.Tensor = target, source: torch.Tensor = source) -> int:
                stream.copy(target, source)
                return target.nbytes

            last[lane] = lanes[lane].submit(work, (), Label(OPS[lane], step))
    for done in last.values():
        done.wait()


def _name(lane: str, busy: tuple[str, ...]) -> str:
    return lane if len(busy) == 1 else f"{lane} of both"


def _rate(recorder: Recorder, step: int, lane: str) -> float:
    spans = [span for span in recorder.spans() if span.lane == lane and span.step == step]
    seconds = max(span.end_s for span in spans) - min(span.start_s for span in spans)
    return sum(span.nbytes for span in spans) / seconds


def matmul_flops_per_s(device: str, size: int, seconds: float) -> float:
    """What a big bfloat16 product reaches, kept up for so long that power and clocks have settled."""
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = left @ right
    _synchronize(device)
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        torch.mm(left, right, out=product)
        count += 1
        _synchronize(device)
    return 2 * size**3 * count / (time.perf_counter() - start)


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()

"""What lanes keep of their rates beside each other: the link both ways, and both ways beside AdamW.

Copies and updates are those of an engine, over its own host arrays, on lanes of their own; the engine does nothing
meanwhile. Weights change, so it must be one that was made to be measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean, median

import torch

from megatrain.config import AdamWConfig
from megatrain.engine import StreamingEngine
from megatrain.host import HostLayer
from megatrain.lanes import Done, Label, Lanes, Stream, Work
from megatrain.trace import Recorder, Span
from megatrain.update import Hyperparameters, bytes_touched, update_layer

PIECE_BYTES = 256 << 20  # of a copy, at most
PERIOD_S = 0.15  # for which lanes are kept busy together
MOST_PIECES = 100
ALONE_PIECES = 4  # of which the first touches pages and wakes the link
SHORTEST_S = 1e-7  # that a clock can tell
NOTICED = 0.95  # of their rates; what keeps more is not slowed down
OPS = {"h2d": "load", "d2h": "unload", "host": "update"}


@dataclass(frozen=True)
class Sharing:
    """both_ways: share of its rate that the link keeps each way while both are in use.

    beside_adamw: share that all three keep while AdamW runs, too; 1 where they do not meet.
    """

    both_ways: float
    beside_adamw: float


def sharing(engine: StreamingEngine) -> Sharing:
    """Measure an engine that is at rest; takes about half a second, and two pieces' memory on the device."""
    recorder, device = Recorder(), torch.device("cpu" if engine.device_index is None else "cuda")
    lanes = Lanes.on(device, recorder)
    try:
        return _shared(_Together(lanes, recorder, _works(engine, device)))
    finally:
        lanes.close()


def _shared(lanes: _Together) -> Sharing:
    link = [lane for lane in lanes.names if lane != "host"]
    both_ways = mean(lanes.kept(link).values())
    every = lanes.kept(lanes.names)
    beside = mean(share if lane == "host" else share / both_ways for lane, share in every.items())
    return Sharing(_noticed(both_ways), _noticed(beside))


def _noticed(share: float) -> float:
    return share if share < NOTICED else 1.0


def _works(engine: StreamingEngine, device: torch.device) -> dict[str, Work]:
    """By lane: a layer's weights in, its gradient out, AdamW over another; what has no bytes is left out."""
    layers = [host for _, host in engine.parts()[1:]]
    first, last = layers[0], layers[-1]
    assert first.gradient is not None
    weights, gradient = first.weights[:PIECE_BYTES], first.gradient[:PIECE_BYTES]
    works: dict[str, Work] = {"h2d": partial(_copy, torch.zeros_like(weights, device=device), weights)}
    if gradient.nbytes:
        works["d2h"] = partial(_copy, gradient, torch.zeros_like(gradient, device=device))
    if last.layout.trained_nbytes:
        works["host"] = partial(_update, last)
    return works


def _copy(target: torch.Tensor, source: torch.Tensor, stream: Stream) -> int:
    stream.copy(target, source)
    return target.nbytes


def _update(host: HostLayer, stream: Stream) -> int:
    assert host.gradient is not None
    numbers = Hyperparameters(AdamWConfig(), lr=0.0, grad_scale=1.0)
    update_layer(host, host.gradient, {entry.name for entry in host.layout.trained}, numbers)
    return bytes_touched(host.layout.trained, split=host.low is not None, moment_bytes=host.exp_avg.itemsize)


class _Together:
    """Keeps some lanes busy at one time, and says what share of its rate each of them keeps."""

    def __init__(self, lanes: Lanes, recorder: Recorder, works: dict[str, Work]) -> None:
        self._lanes, self._recorder, self._works = lanes, recorder, works
        self._runs = 0
        self._alone_s = {lane: self._seconds({lane: ALONE_PIECES})[lane] for lane in works}

    @property
    def names(self) -> list[str]:
        return list(self._works)

    def kept(self, busy: Sequence[str]) -> dict[str, float]:
        pieces = {lane: min(MOST_PIECES, 2 + math.ceil(PERIOD_S / self._alone_s[lane])) for lane in busy}
        return {lane: self._alone_s[lane] / seconds for lane, seconds in self._seconds(pieces).items()}

    def _seconds(self, pieces: dict[str, int]) -> dict[str, float]:
        """Of a piece of each lane's work, while these lanes do so many pieces each."""
        self._runs += 1
        last = {lane: [self._submit(lane) for _ in range(count)][-1] for lane, count in pieces.items()}
        for done in last.values():
            done.wait()
        self._lanes.record_spans()
        spans = {lane: [s for s in self._recorder.spans() if (s.lane, s.step) == (lane, self._runs)] for lane in pieces}
        return {lane: _median_within(spans[lane], *_window(spans)) for lane in pieces}

    def _submit(self, lane: str) -> Done:
        return self._lanes[lane].submit(self._works[lane], (), Label(OPS[lane], self._runs))


def _window(spans: dict[str, list[Span]]) -> tuple[float, float]:
    """In which every lane is past its first piece, and none has ended."""
    return max(found[0].end_s for found in spans.values()), min(found[-1].end_s for found in spans.values())


def _median_within(spans: list[Span], start_s: float, end_s: float) -> float:
    inside = [span for span in spans if span.start_s >= start_s and span.end_s <= end_s] or spans
    return max(SHORTEST_S, median(span.end_s - span.start_s for span in inside))

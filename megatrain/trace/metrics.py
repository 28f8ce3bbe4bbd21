"""What one step's spans say: how busy each lane was, what hid under compute, what compute waited for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

from megatrain.trace.intervals import Intervals, busy, intersection, length
from megatrain.trace.records import Lane, Span, StepRecord
from megatrain.trace.waits import WaitCause, compute_waits


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Figures of one step; seconds lie inside its window, rates are per second of it.

    busy_s: per lane, seconds in which it worked. hidden: share (0..1) of the seconds of weights in ("h2d"),
    gradients out ("d2h") and AdamW ("update") that ran under compute; None where there were none.
    waits_s: seconds without compute, per cause; with busy_s["compute"] they add up to duration_s.
    Rates per second of the step leave out what the user held.
    h2d_bytes_per_s, d2h_bytes_per_s: bytes over busy seconds; None for a lane that did nothing.
    tokens_per_s: tokens processed, padding not counted. model_flops_per_s: see `model_flops`.
    mfu: model_flops_per_s over the peak of the device; None where no peak was given.
    """

    step: int
    duration_s: float
    busy_s: dict[Lane, float]
    h2d_hidden: float | None
    d2h_hidden: float | None
    update_hidden: float | None
    waits_s: dict[WaitCause, float]
    h2d_bytes_per_s: float | None
    d2h_bytes_per_s: float | None
    tokens_per_s: float
    model_flops_per_s: float
    mfu: float | None

    @property
    def compute_share(self) -> float:
        """Share (0..1) of the step in which something was computed."""
        return self.busy_s["compute"] / self.active_s

    @property
    def active_s(self) -> float:
        """Seconds of the step in which the user let it run; never zero."""
        return (self.duration_s - self.waits_s["paused"]) or self.duration_s


def step_metrics(
    spans: Iterable[Span],
    record: StepRecord,
    peak_flops_per_s: float | None = None,
    held: Sequence[tuple[float, float]] = (),
) -> StepMetrics:
    """Return the figures of one step.

    What counts is what ran between the step's start and end, clipped to it, whichever step it belongs to: the
    updates of one step run under the forward of the next, and it is there that they hide or are waited for.

    spans: any spans of the run, in any order. peak_flops_per_s: the device's peak in the compute type, for MFU.
    held: when the user held the run, in order.
    Raises ValueError for a step that took no time.
    """
    start_s, end_s = record.start_s, record.end_s
    duration_s = end_s - start_s
    if duration_s <= 0:
        raise ValueError(f"a step must end after it starts; step {record.step} took {duration_s} s")
    inside = [span for span in spans if span.end_s > start_s and span.start_s < end_s]
    by_lane = {lane: [span for span in inside if span.lane == lane] for lane in get_args(Lane)}
    lanes = {lane: busy(by_lane[lane], start_s, end_s) for lane in by_lane}
    updates = busy((span for span in by_lane["host"] if span.op == "update"), start_s, end_s)
    waits_s = _waits_s(inside, start_s, end_s, held)
    active_s = (duration_s - waits_s["paused"]) or duration_s
    flops_per_s = record.flops / active_s
    return StepMetrics(
        step=record.step,
        duration_s=duration_s,
        busy_s={lane: length(lanes[lane]) for lane in lanes},
        h2d_hidden=_hidden(lanes["h2d"], lanes["compute"]),
        d2h_hidden=_hidden(lanes["d2h"], lanes["compute"]),
        update_hidden=_hidden(updates, lanes["compute"]),
        waits_s=waits_s,
        h2d_bytes_per_s=_rate(by_lane["h2d"], start_s, end_s),
        d2h_bytes_per_s=_rate(by_lane["d2h"], start_s, end_s),
        tokens_per_s=record.sequence_tokens / active_s,
        model_flops_per_s=flops_per_s,
        mfu=flops_per_s / peak_flops_per_s if peak_flops_per_s else None,
    )


def _hidden(work: Intervals, compute: Intervals) -> float | None:
    return length(intersection(work, compute)) / length(work) if work else None


def _waits_s(
    spans: list[Span], start_s: float, end_s: float, held: Sequence[tuple[float, float]]
) -> dict[WaitCause, float]:
    seconds: dict[WaitCause, float] = dict.fromkeys(get_args(WaitCause), 0.0)
    for wait in compute_waits(spans, start_s, end_s, held):
        seconds[wait.cause] += wait.end_s - wait.start_s
    return seconds


def _rate(spans: list[Span], start_s: float, end_s: float) -> float | None:
    """Return bytes per busy second; a span that the window cuts counts for the part of its bytes inside."""
    seconds = length(busy(spans, start_s, end_s))
    nbytes = sum(
        span.nbytes * (min(span.end_s, end_s) - max(span.start_s, start_s)) / (span.end_s - span.start_s)
        for span in spans
        if span.end_s > span.start_s
    )
    return nbytes / seconds if seconds else None

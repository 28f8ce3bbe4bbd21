"""Records to columns: pure functions from lists of records to the arrays that a figure draws."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from dashboard.bars import LIMIT, Bars, Column, Piece, Words, make_bars
from dashboard.words import STATE_WORDS, layer_name, milliseconds, span_words, wait_words
from megatrain.trace import (
    Marker,
    MemorySample,
    Records,
    SlotChange,
    SlotKind,
    Span,
    StepMetrics,
    StepRecord,
    WaitCause,
    compute_waits,
    step_metrics,
)

ROWS = ("h2d", "compute", "d2h", "host", "wait")

Floats = npt.NDArray[np.float64]
Reduce = Callable[[Floats], float]


class Window(NamedTuple):
    """Seconds of the run that the timeline shows."""

    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Lines:
    """Curves over one x; NaN where there is no value."""

    x: Column
    y: dict[str, Column]


@dataclass(frozen=True, slots=True)
class Segment:
    """A device buffer in one state, from one change to the next."""

    change: SlotChange
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Flag:
    """Something that happened at a moment of the timeline, with what to say about it."""

    time_ms: float
    text: str


@dataclass(frozen=True, slots=True)
class Frame:
    """All that one drawing of the figure needs."""

    width_ms: float
    bars: dict[str, Bars]  # by op, and "wait"
    slots: dict[str, Bars]  # by state
    slot_names: list[str]
    steps: list[Flag]
    markers: list[Flag]
    memory: Lines
    progress: Lines
    hidden: Lines
    waited: Lines


def make_frame(records: Records, metrics: Sequence[StepMetrics], window: Window) -> Frame:
    """Return the columns of everything: bars of the window, curves of the whole run."""
    slots, slot_names = slot_bars(records.slots, window)
    return Frame(
        width_ms=(window.end_s - window.start_s) * 1e3,
        bars=span_bars(records.spans, window) | wait_bars(records.spans, window),
        slots=slots,
        slot_names=slot_names,
        steps=step_flags(records.steps, window),
        markers=marker_flags(records.markers, window),
        memory=memory_lines(records.memory),
        progress=progress_lines(records.steps),
        hidden=hidden_lines(metrics),
        waited=waited_lines(metrics),
    )


def last_steps(records: Records, count: int) -> Window:
    """Return the window of the last steps, up to the last thing recorded; of everything where no step has ended."""
    ends = [span.end_s for span in records.spans] + [step.end_s for step in records.steps]
    starts = [step.start_s for step in records.steps[-count:]] or [span.start_s for span in records.spans]
    return Window(min(starts, default=0.0), max(ends, default=0.0))


def span_bars(spans: Iterable[Span], window: Window, limit: int = LIMIT) -> dict[str, Bars]:
    """Return the bars of the spans that touch the window, by op; rows are the lanes in the order of ROWS."""
    pieces = [
        Piece(span.op, ROWS.index(span.lane), span.start_s, span.end_s, span)
        for span in spans
        if span.end_s > window.start_s and span.start_s < window.end_s
    ]
    return make_bars(pieces, window.start_s, _describe_span, limit)


def wait_bars(spans: Iterable[Span], window: Window, limit: int = LIMIT) -> dict[str, Bars]:
    """Return bars, under "wait", of the seconds between the first and the last compute in which there was none."""
    compute = [span for span in spans if span.lane == "compute"]
    start_s = max(window.start_s, min((span.start_s for span in compute), default=window.end_s))
    end_s = min(window.end_s, max((span.end_s for span in compute), default=window.start_s))
    row = ROWS.index("wait")
    waits = compute_waits(spans, start_s, end_s) if start_s < end_s else []
    pieces = [Piece("wait", row, wait.start_s, wait.end_s, wait) for wait in waits]
    return make_bars(pieces, window.start_s, lambda wait: Words(wait.cause, wait_words(wait)), limit)


def slot_bars(changes: Iterable[SlotChange], window: Window, limit: int = LIMIT) -> tuple[dict[str, Bars], list[str]]:
    """Return the bars of device buffers in the window, by state, and the names of their rows."""
    segments = slot_segments(changes, window)
    buffers = sorted({_buffer(segment.change) for segment in segments})
    pieces = [
        Piece(
            segment.change.state,
            buffers.index(_buffer(segment.change)),
            segment.start_s,
            segment.end_s,
            segment,
        )
        for segment in segments
    ]
    names = [f"{get_args(SlotKind)[kind]} {slot}" for kind, slot in buffers]
    return make_bars(pieces, window.start_s, _describe_segment, limit), names


def slot_segments(changes: Iterable[SlotChange], window: Window) -> list[Segment]:
    """Return who held which buffer when, cut to the window; a state lasts until the buffer's next change.

    A removed buffer is not drawn, and a change that lasted no time is not either.
    """
    ordered = sorted(changes, key=lambda change: change.time_s)
    segments: list[Segment] = []
    current: dict[tuple[int, int], SlotChange] = {}
    for change in ordered:
        before = current.get(_buffer(change))
        if before:
            segments.append(Segment(before, before.time_s, change.time_s))
        current[_buffer(change)] = change
    segments += [Segment(change, change.time_s, window.end_s) for change in current.values()]
    cut = [Segment(s.change, max(s.start_s, window.start_s), min(s.end_s, window.end_s)) for s in segments]
    return [segment for segment in cut if segment.end_s > segment.start_s and segment.change.state != "removed"]


def step_flags(steps: Iterable[StepRecord], window: Window) -> list[Flag]:
    return [
        Flag((step.start_s - window.start_s) * 1e3, f"step {step.step}")
        for step in steps
        if window.start_s <= step.start_s < window.end_s
    ]


def marker_flags(markers: Iterable[Marker], window: Window) -> list[Flag]:
    return [
        Flag(
            (marker.time_s - window.start_s) * 1e3,
            f"<b>{marker.name}</b>: {marker.old} → {marker.new}<br>step {marker.step}, {layer_name(marker.layer)}",
        )
        for marker in markers
        if window.start_s <= marker.time_s <= window.end_s
    ]


def memory_lines(samples: Sequence[MemorySample], limit: int = LIMIT) -> Lines:
    """Return GB over seconds of the run; where samples are merged each point is their maximum, so peaks stay."""
    columns: dict[str, list[int | None]] = {
        "arena": [sample.arena_bytes for sample in samples],
        "allocated": [sample.device_allocated_bytes for sample in samples],
        "reserved": [sample.device_reserved_bytes for sample in samples],
        "whole card": [sample.device_used_bytes for sample in samples],
        "process (RSS)": [sample.host_rss_bytes for sample in samples],
        "pinned": [sample.host_pinned_bytes for sample in samples],
    }
    y = {name: np.array(values, np.float64) / 1e9 for name, values in columns.items()}
    return _thin(np.array([sample.time_s for sample in samples], np.float64), y, np.max, limit)


def progress_lines(steps: Sequence[StepRecord], limit: int = LIMIT) -> Lines:
    """Return loss and tokens per second over steps; where steps are merged each point is their mean."""
    y = {
        "loss": np.array([step.loss for step in steps], np.float64),
        "tokens/s": np.array([step.sequence_tokens / (step.end_s - step.start_s) for step in steps], np.float64),
    }
    return _thin(_steps(steps), y, np.mean, limit)


def hidden_lines(metrics: Sequence[StepMetrics], limit: int = LIMIT) -> Lines:
    """Return percent of the seconds of each kind of work that ran under compute, over steps."""
    shares: dict[str, list[float | None]] = {
        "weights in": [step.h2d_hidden for step in metrics],
        "gradients out": [step.d2h_hidden for step in metrics],
        "optimizer": [step.update_hidden for step in metrics],
    }
    y = {name: 100 * np.array(values, np.float64) for name, values in shares.items()}
    return _thin(_steps(metrics), y, np.mean, limit)


def waited_lines(metrics: Sequence[StepMetrics], limit: int = LIMIT) -> Lines:
    """Return percent of each step that compute waited, per cause, over steps."""
    causes: tuple[WaitCause, ...] = get_args(WaitCause)
    y: dict[str, Floats] = {
        cause: 100 * np.array([step.waits_s[cause] / step.duration_s for step in metrics], np.float64)
        for cause in causes
    }
    return _thin(_steps(metrics), y, np.mean, limit)


def metrics_by_step(records: Records, peak_flops_per_s: float | None = None) -> list[StepMetrics]:
    """Return the figures of each step whose spans are all still there, in one walk over the spans."""
    ordered = sorted(records.spans, key=lambda span: span.start_s)
    starts = [span.start_s for span in ordered]
    longest_s = max((span.end_s - span.start_s for span in ordered), default=0.0)
    oldest_s = starts[0] if starts and records.lost else float("-inf")
    return [
        step_metrics(
            ordered[bisect_left(starts, step.start_s - longest_s) : bisect_left(starts, step.end_s)],
            step,
            peak_flops_per_s,
        )
        for step in records.steps
        if step.start_s >= oldest_s
    ]


def _steps(steps: Sequence[StepRecord | StepMetrics]) -> Floats:
    return np.array([step.step for step in steps], np.float64)


def _thin(x: Floats, y: dict[str, Floats], reduce: Reduce, limit: int) -> Lines:
    """Replace every k neighbouring points by one, at the x of their last, with the smallest k that fits the limit.

    A value is reduced over those that exist; NaN stays only where there is none.
    """
    size = max(-(-len(x) // limit), 1)
    groups = [slice(start, start + size) for start in range(0, len(x), size)]
    thinned = {name: [_reduce_known(values[group], reduce) for group in groups] for name, values in y.items()}
    return Lines(
        np.array([x[group][-1] for group in groups], np.float32),
        {name: np.array(values, np.float32) for name, values in thinned.items()},
    )


def _reduce_known(values: Floats, reduce: Reduce) -> float:
    known = values[~np.isnan(values)]
    return float(reduce(known)) if len(known) else float("nan")


def _buffer(change: SlotChange) -> tuple[int, int]:
    return get_args(SlotKind).index(change.kind), change.slot


def _describe_span(span: Span) -> Words:
    return Words("shell" if span.layer is None else str(span.layer), span_words(span))


def _describe_segment(segment: Segment) -> Words:
    change = segment.change
    holder = "" if change.layer is None else f"<br>layer {change.layer}"
    hover = f"<b>{change.kind} buffer {change.slot}: {STATE_WORDS[change.state]}</b>{holder}"
    label = "" if change.layer is None else str(change.layer)
    return Words(label, f"{hover}<br>{milliseconds(segment.end_s - segment.start_s)}")

"""What is known of a run to the columns that one drawing of the figure needs: pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import get_args

import numpy as np

from dashboard.axis import Axis, Window
from dashboard.bars import LIMIT, Bars, Words, make_bars
from dashboard.beside import Beside, around
from dashboard.curves import Lines
from dashboard.history import Buffer, History
from dashboard.layers import HeatMap, LayerRow, heat_map
from dashboard.pieces import KINDS, OPS, PAUSED, REMOVED, STATES, Noted, joined
from dashboard.words import layer_name, marker_label, marker_words, milliseconds, span_words, state_word, wait_words
from megatrain.report import RunInfo
from megatrain.trace import Marker, SlotChange, SlotKind, Span, StepRecord, Wait

CROWDED = 0.09  # of the width: markers nearer than this share one flag
REMEMBERED = 20_000  # texts of records kept, since a record is drawn many times

LIVE_BARS, LIVE_SEGMENTS = 400, 150  # limits with which an update stays within milliseconds


@dataclass(frozen=True, slots=True)
class Flag:
    """Something that happened at a moment of the timeline: what stands there, and what to say about it."""

    time_ms: float
    text: str
    hover: str = ""


@dataclass(frozen=True, slots=True)
class Frame:
    """All that one drawing of the figure needs.

    work: kinds are OPS. waits: kinds are CAUSES. buffers: kinds are STATES. follow: the layer that stands out, if any.
    memory, per_step, held_out: see `history.MEMORY_COLUMNS`, STEP_COLUMNS and EVALUATION_COLUMNS.
    limits: GB or GB/s by name, where known.
    """

    width_ms: float
    work: Bars
    waits: Bars
    buffers: Bars
    buffer_names: list[str]
    steps: list[Flag]
    markers: list[Flag]
    memory: Lines
    per_step: Lines
    held_out: Lines
    layers: HeatMap
    limits: dict[str, float]
    has_gpu: bool
    follow: int | None


def make_frame(
    history: History,
    window: Window,
    *,
    info: RunInfo | None = None,
    planned_bytes: int = 0,
    follow: int | None = None,
    most_bars: int = LIMIT,
    most_segments: int = LIMIT,
    rows: tuple[LayerRow, ...] | None = None,
) -> Frame:
    """Return the columns of everything: bars of the window, curves of the whole run.

    info, planned_bytes: what limits are drawn from. rows: of the heat map, by default those of the newest step.
    """
    axis = Axis(window, history.held(window))
    beside = history.beside(window)
    bars = lane_bars(history.work(window), history.waited(window), axis, most_bars, follow, beside)
    buffers, names = buffer_bars(history.states(window), axis, most_segments, follow)
    sample = history.newest_memory
    return Frame(
        width_ms=axis.width_ms,
        work=bars.where(bars.kind < len(OPS)),
        waits=bars.where(bars.kind >= len(OPS)),
        buffers=buffers,
        buffer_names=names,
        steps=step_flags(history.steps, axis, beside, history.running_s),
        markers=marker_flags(history.markers, axis),
        memory=history.memory_lines(),
        per_step=history.step_lines(),
        held_out=history.evaluation_lines(),
        layers=heat_map(history.layer_rows() if rows is None else rows),
        limits=limits_of(info, planned_bytes),
        has_gpu=sample is not None and sample.device_used_bytes is not None,
        follow=follow,
    )


def last_steps(history: History, count: int) -> Window:
    """Return the window of the last steps, up to the last thing recorded; of everything where no step has ended."""
    return history.window(None, count)


def limits_of(info: RunInfo | None, planned_bytes: int) -> dict[str, float]:
    """Return what memory and links cannot exceed, in GB and GB/s, without what nobody knows."""
    nbytes: dict[str, float | None] = {"planned": planned_bytes}
    if info is not None:
        nbytes |= {"device": info.device_limit_bytes, "host": info.host_total_bytes}
        nbytes |= {"weights in": info.h2d_bytes_per_s, "gradients out": info.d2h_bytes_per_s}
    return {name: value / 1e9 for name, value in nbytes.items() if value}


# ---- timeline ----


def lane_bars(
    spans: Noted[Span],
    waits: Noted[Wait],
    axis: Axis,
    limit: int = LIMIT,
    follow: int | None = None,
    beside: Sequence[Beside] = (),
) -> Bars:
    """Return bars of spans, and of the seconds in which compute waited, in the row of compute; rows are ROWS.

    beside: what was computed between steps, and says so.
    """
    shown = waits.where(waits.pieces["kind"] != PAUSED)
    records: list[Span | Wait] = [*spans.records, *shown.records]
    pieces = joined([spans.pieces, shown.pieces])

    def words(number: int) -> Words:
        record = records[number]
        apart = around(beside, record.start_s, record.end_s)
        return _describe(record, "" if apart is None else f"{apart.what} before step {apart.step}")

    return make_bars(pieces, axis, KINDS, words, limit, follow)


@lru_cache(REMEMBERED)
def _describe(record: Span | Wait, beside: str) -> Words:
    if isinstance(record, Wait):
        return Words(record.cause, wait_words(record))
    label = "emb/head" if record.layer is None else str(record.layer)
    return Words(label, span_words(record, beside or f"step {record.step}"))


def step_flags(
    steps: Sequence[StepRecord], axis: Axis, beside: Sequence[Beside] = (), running_s: float | None = None
) -> list[Flag]:
    """Return a flag where each step begins, the running one too, and where something else was computed between two."""
    start_s, end_s = axis.window
    begun = [(step.start_s, f"step {step.step}") for step in steps if start_s <= step.start_s < end_s]
    begun += [(each.start_s, each.what) for each in beside if start_s <= each.start_s < end_s]
    if running_s is not None and start_s <= running_s < end_s:
        begun.append((running_s, f"step {steps[-1].step + 1 if steps else 0}"))
    return [Flag(axis.ms(time_s), text) for time_s, text in sorted(begun)]


def marker_flags(markers: Iterable[Marker], axis: Axis) -> list[Flag]:
    """Return a flag for each marker of the window; those that would lie on each other share one."""
    near_ms = CROWDED * axis.width_ms
    groups: list[list[Marker]] = []
    for marker in markers:
        if not axis.window.start_s <= marker.time_s <= axis.window.end_s:
            continue
        if groups and axis.ms(marker.time_s) - axis.ms(groups[-1][0].time_s) < near_ms:
            groups[-1].append(marker)
        else:
            groups.append([marker])
    return [_flag(group, axis) for group in groups]


def _flag(markers: list[Marker], axis: Axis) -> Flag:
    more = f" +{len(markers) - 1}" if len(markers) > 1 else ""
    hover = "<br><br>".join(marker_words(marker) for marker in markers[:12])
    named = next((marker for marker in markers if marker.name != "paused"), markers[0])  # says more
    return Flag(axis.ms(markers[0].time_s), marker_label(named) + more, hover)


# ---- buffers ----


def buffer_bars(
    changes: dict[Buffer, Noted[SlotChange]], axis: Axis, limit: int = LIMIT, follow: int | None = None
) -> tuple[Bars, list[str]]:
    """Return the bars of the device buffers that exist in the window, and the names of their rows.

    changes: of each buffer, in order of time.
    """
    found = {buffer: buffer_segments(its, axis.window) for buffer, its in sorted(changes.items())}
    found = {buffer: segments for buffer, segments in found.items() if segments.records}
    for row, segments in enumerate(found.values()):
        segments.pieces["row"] = row
    records = [change for segments in found.values() for change in segments.records]
    pieces = joined(segments.pieces for segments in found.values())
    seconds = (pieces["end_s"] - pieces["start_s"]).tolist()
    names = [f"{get_args(SlotKind)[kind]} {slot}" for kind, slot in found]
    words = [state_word(state) for state in STATES]
    bars = make_bars(pieces, axis, words, lambda n: _describe_state(records[n], seconds[n]), limit, follow)
    return bars, names


def buffer_segments(changes: Noted[SlotChange], window: Window) -> Noted[SlotChange]:
    """Return when a buffer was in which state, cut to the window; a state lasts until the buffer's next change.

    A removed buffer is not drawn, a change that lasted no time is not either, and one that changed nothing goes on.
    """
    pieces = changes.pieces
    differs = np.ones(len(pieces), np.bool_)
    differs[1:] = (np.diff(pieces["kind"]) != 0) | (np.diff(pieces["layer"]) != 0)
    records, segments = changes.where(differs)
    segments = segments.copy()
    segments["end_s"] = np.minimum(np.append(segments["start_s"][1:], window.end_s), window.end_s)
    segments["start_s"] = np.maximum(segments["start_s"], window.start_s)
    kept = (segments["end_s"] > segments["start_s"]) & (segments["kind"] != REMOVED)
    return Noted(records, segments).where(kept)


@lru_cache(REMEMBERED)
def _describe_state(change: SlotChange, seconds: float) -> Words:
    holder = "" if change.layer is None else f"<br>{layer_name(change.layer)}"
    hover = f"<b>{change.kind} buffer {change.slot}: {state_word(change.state)}</b>{holder}"
    label = "" if change.layer is None else str(change.layer)
    return Words(label, f"{hover}<br>{milliseconds(seconds)}")

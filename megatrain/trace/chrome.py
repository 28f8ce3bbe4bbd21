"""Chrome-trace export: JSON that opens in Perfetto (ui.perfetto.dev) and in chrome://tracing.

Format: Trace Event Format (Google, "Trace Event Format" document; JSON array of events under "traceEvents").

Note: time is counted in eighths of a microsecond. They are exact in binary, so a reader that turns the decimal
microseconds into whole nanoseconds by truncating cannot make two spans of a lane overlap by one.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from itertools import count
from math import inf, isfinite
from pathlib import Path
from typing import Any, get_args

from megatrain.trace.files import write_atomically
from megatrain.trace.flows import flow_chains
from megatrain.trace.recorder import Recorder, Records
from megatrain.trace.records import HELD, Lane, Marker, MemorySample, SlotChange, SlotKind, Span, StepRecord

Event = dict[str, Any]

PROCESS = 1
STEPS_THREAD = 1
THREADS: dict[Lane, int] = {lane: number for number, lane in enumerate(get_args(Lane), start=2)}
TICKS_PER_US = 8


def require_trace_name(path: str | Path) -> None:
    """Raise ValueError for an ending by which no viewer knows a Chrome trace."""
    if not str(path).endswith((".json", ".json.gz")):
        raise ValueError(f"a trace is JSON, and its name must end in .json or .json.gz (packed); got {path}")


def write_chrome_trace(
    path: str | Path, source: Recorder | Records, start_s: float = -inf, end_s: float = inf, *, mode: int = 0o644
) -> None:
    """Write the records that touch a time window as a Chrome trace, .json or .json.gz; ValueError for other names.

    One track per lane, arrows that follow a layer from load to update, counters for memory and slots, knob changes
    as instants. Perfetto gives up on very large JSON: for a long run give a window of a few steps.
    mode: permissions of the file.
    """
    require_trace_name(path)
    records = source.snapshot() if isinstance(source, Recorder) else source
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in _events(records, start_s, end_s))
    text = f'{{"displayTimeUnit":"ms","otherData":{{"producer":"megatrain"}},"traceEvents":[\n{lines}\n]}}\n'
    data = text.encode()
    write_atomically(path, gzip.compress(data) if str(path).endswith(".gz") else data, mode)


def _events(records: Records, start_s: float, end_s: float) -> Iterator[Event]:
    spans = [span for span in records.spans if span.end_s >= start_s and span.start_s <= end_s]
    ticks = {lane: _lane_ticks(span for span in spans if span.lane == lane) for lane in THREADS}
    yield from _names()
    for lane in THREADS:
        yield from (_slice(span, start, end) for span, (start, end) in ticks[lane])
    inside = {id(span): min(start + 1, end) for lane in THREADS for span, (start, end) in ticks[lane]}
    yield from _flows(spans, inside)
    yield from (_step(step) for step in records.steps if step.end_s >= start_s and step.start_s <= end_s)
    yield from (event for event in _counters(records) if start_s <= event["ts"] / 1e6 <= end_s)
    yield from (_instant(m) for m in records.markers if m.name != HELD and start_s <= m.time_s <= end_s)


def _lane_ticks(spans: Iterable[Span]) -> list[tuple[Span, tuple[int, int]]]:
    """Return each span's start and end in ticks such that spans follow each other or nest, and never cross.

    A lane works in order, so two spans can only cross by the clock's rounding: the later one then starts where the
    earlier one ends.
    """
    placed: list[tuple[Span, tuple[int, int]]] = []
    enclosing: list[tuple[int, int]] = []
    for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
        start, end = _ticks(span.start_s), _ticks(span.end_s)
        while enclosing and (enclosing[-1][1] <= start or enclosing[-1][1] < end):
            start = max(start, enclosing.pop()[1])
        if enclosing:
            start = max(start, enclosing[-1][0])
        end = max(start, end)
        enclosing.append((start, end))
        placed.append((span, (start, end)))
    return placed


def _slice(span: Span, start: int, end: int) -> Event:
    args: Event = {"step": span.step, "layer": "shell" if span.layer is None else span.layer}
    args |= {"micro_batch": span.micro_batch, "slot": span.slot, "bytes": span.nbytes}
    if span.nbytes and span.end_s > span.start_s:
        args["GB/s"] = round(span.nbytes / (span.end_s - span.start_s) / 1e9, 3)
    name = f"{span.op} {'shell' if span.layer is None else span.layer}"
    return _event("X", THREADS[span.lane], start) | {
        "dur": (end - start) / TICKS_PER_US,
        "name": name,
        "cat": span.op,
        "args": {key: value for key, value in args.items() if value is not None},
    }


def _step(record: StepRecord) -> Event:
    args: Event = {"loss": record.loss, "grad_norm": record.grad_norm, "lr": record.lr, "tokens": record.tokens}
    args |= {"prefetch_depth": record.prefetch_depth, "skipped": record.skipped}
    start, end = _ticks(record.start_s), _ticks(record.end_s)
    return _event("X", STEPS_THREAD, start) | {
        "dur": (end - start) / TICKS_PER_US,
        "name": f"step {record.step}",
        "cat": "step",
        "args": {key: _plain(value) for key, value in args.items()},
    }


def _flows(spans: list[Span], inside: dict[int, int]) -> Iterator[Event]:
    for number, chain in zip(count(1), flow_chains(spans), strict=False):
        phases = ["s", *["t"] * (len(chain) - 2), "f"]
        for phase, span in zip(phases, chain, strict=True):
            event = _event(phase, THREADS[span.lane], inside[id(span)])
            yield event | {"id": number, "name": "layer", "cat": "flow", "bp": "e"}


def _counters(records: Records) -> Iterator[Event]:
    for kind in get_args(SlotKind):
        changes = [change for change in records.slots if change.kind == kind]
        yield from _slots_in_use(f"{kind} slots in use", changes)
    for sample in records.memory:
        yield from _memory(sample)


def _slots_in_use(name: str, changes: list[SlotChange]) -> Iterator[Event]:
    held: set[int] = set()
    for change in sorted(changes, key=lambda change: change.time_s):
        if change.state in ("free", "removed"):
            held.discard(change.slot)
        else:
            held.add(change.slot)
        yield _counter(name, change.time_s, {"slots": len(held)})


def _memory(sample: MemorySample) -> Iterator[Event]:
    yield _counter("device arena", sample.time_s, {"bytes": sample.arena_bytes})
    yield _counter("host RSS", sample.time_s, {"bytes": sample.host_rss_bytes})
    if sample.device_used_bytes is not None:
        yield _counter("device used", sample.time_s, {"bytes": sample.device_used_bytes})


def _instant(marker: Marker) -> Event:
    args = {"old": _plain(marker.old), "new": _plain(marker.new), "step": marker.step, "layer": marker.layer}
    name = f"{marker.name} {marker.old} → {marker.new}"
    return _event("i", STEPS_THREAD, _ticks(marker.time_s)) | {"s": "g", "name": name, "args": args}


def _names() -> Iterator[Event]:
    yield {"ph": "M", "pid": PROCESS, "name": "process_name", "args": {"name": "megatrain"}}
    for name, thread in [("steps", STEPS_THREAD), *THREADS.items()]:
        track = {"ph": "M", "pid": PROCESS, "tid": thread}
        yield track | {"name": "thread_name", "args": {"name": name}}
        yield track | {"name": "thread_sort_index", "args": {"sort_index": thread}}


def _event(phase: str, thread: int, ticks: int) -> Event:
    return {"ph": phase, "pid": PROCESS, "tid": thread, "ts": ticks / TICKS_PER_US}


def _counter(name: str, time_s: float, values: dict[str, int]) -> Event:
    return {"ph": "C", "pid": PROCESS, "ts": _ticks(time_s) / TICKS_PER_US, "name": name, "args": values}


def _plain(value: object) -> object:
    """Return what JSON can say; it has no word for NaN and infinity."""
    if isinstance(value, float):
        return value if isfinite(value) else str(value)
    return value if isinstance(value, int | str | None) else str(value)


def _ticks(time_s: float) -> int:
    return round(time_s * 1e6 * TICKS_PER_US)

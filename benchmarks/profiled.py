"""Steady steps as torch's profiler saw them, beside what the engine's own recorder says of the very same ones.

Lanes: the seconds in which each stream was busy, by either. A span lasts from one event to the next and so has the gaps
between its kernels in it: the two agree where kernels are long beside what it takes to launch one.
Issuing: what a thread takes to hand one operation to its stream, beside how long the stream is at it. While that ratio
is below one the device never waits for Python.
Driver: calls that wait for the whole device or ask for memory, of any thread.
Trace: the profiler's own, with the engine's lanes as one more process, on the same clock; it opens in Perfetto.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile

from benchmarks.peers.contender import Contender
from benchmarks.table import Cell, table
from megatrain import StreamingEngine
from megatrain.trace import Span, write_chrome_trace
from megatrain.trace.files import write_atomically
from megatrain.trace.intervals import length, union

STREAMS = ("h2d", "compute", "d2h")
COPIES = {"h2d": "Memcpy HtoD", "d2h": "Memcpy DtoH"}
DRIVER = (
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaMalloc",
    "cudaFree",
    "cudaHostAlloc",
    "cudaHostRegister",
)
ALLOWED = 0.02  # recorder ÷ profiler − 1
OUR_PROCESS = 1_000_000  # no process of a system, nor the number of a card

Interval = tuple[float, float]


@dataclass
class Issuing:
    """How long the thread of a lane was at it, and how often."""

    seconds: float = 0.0
    operations: int = 0


@dataclass
class Watched:
    """A stream that says how long its thread takes to issue each operation."""

    stream: Any
    issuing: Issuing = field(default_factory=Issuing)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    @contextmanager
    def active(self) -> Iterator[None]:
        with self.stream.active():
            began_s = time.perf_counter()
            yield
            self.issuing.seconds += time.perf_counter() - began_s
            self.issuing.operations += 1


def measure(device: str, engine: StreamingEngine, ours: Contender, steps: int, trace: Path | None) -> dict[str, Any]:
    """`steps` steps of an engine that is warm, then as many under the profiler. trace: .json.gz, written if given."""
    with watched(engine) as issuing:
        spans, _ = trained(engine, ours, steps)
    found = {name: its for name in STREAMS if (its := _issued(issuing[name], name, spans))}
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    everything = _ExperimentalConfig(profile_all_threads=True)  # type: ignore[no-untyped-call]
    with profile(activities=activities, experimental_config=everything) as profiler:
        origin_unix_s = time.time() - engine.recorder.now()
        spans, window = trained(engine, ours, steps)
    events = list(profiler.events() or ())  # type: ignore[no-untyped-call]
    if trace is not None:
        merged(profiler, engine, origin_unix_s, window, trace)
    calls = Counter(event.name for event in events if event.name in DRIVER)
    return {"steps": steps, "lanes": compared(spans, events), "issuing": found, "driver": dict(calls)}


def trained(engine: StreamingEngine, ours: Contender, steps: int) -> tuple[list[Span], Interval]:
    """What was recorded of these steps, and from when to when they took."""
    began_s = engine.recorder.now()
    for _ in range(steps):
        ours.step()
    ours.settle()
    ended_s = engine.recorder.now()
    return [span for span in engine.recorder.spans() if began_s <= span.start_s and span.end_s <= ended_s], (
        began_s,
        ended_s,
    )


@contextmanager
def watched(engine: StreamingEngine) -> Iterator[dict[str, Issuing]]:
    """Within, the streams of an engine say how long issuing takes."""
    lanes = {name: engine._executor._lanes[name] for name in STREAMS}
    before = {name: lane.stream for name, lane in lanes.items()}
    watching = {name: Watched(lane.stream) for name, lane in lanes.items()}
    for name, lane in lanes.items():
        lane.stream = watching[name]  # type: ignore[assignment]
    try:
        yield {name: its.issuing for name, its in watching.items()}
    finally:
        for name, lane in lanes.items():
            lane.stream = before[name]


def _issued(issuing: Issuing, lane: str, spans: Sequence[Span]) -> dict[str, float]:
    own = [span for span in spans if span.lane == lane]
    if not issuing.operations or not own:
        return {}
    device_s = sum(span.end_s - span.start_s for span in own) / len(own)
    issue_s = issuing.seconds / issuing.operations
    return {"operations": issuing.operations, "issue_s": issue_s, "device_s": device_s, "ratio": issue_s / device_s}


# ---- the same seconds, twice ----


def compared(spans: Sequence[Span], events: Sequence[Any]) -> dict[str, dict[str, float]]:
    """By lane, where the profiler saw its stream: busy seconds by either, and their ratio."""
    seen = by_lane([event for event in events if event.device_type == DeviceType.CUDA])
    found = {}
    for lane, intervals in seen.items():
        ours = length(union((span.start_s, span.end_s) for span in spans if span.lane == lane))
        theirs = length(union(intervals)) / 1e6
        found[lane] = {"recorder_s": ours, "profiler_s": theirs, "ratio": ours / theirs}
    return found


def by_lane(events: Sequence[Any]) -> dict[str, list[Interval]]:
    """What ran on the stream of each lane, in the profiler's microseconds: copies tell theirs, the rest is compute."""
    streams: dict[int, list[Any]] = defaultdict(list)
    for event in events:
        if not event.is_user_annotation:
            streams[event.device_resource_id].append(event)
    found: dict[str, list[Interval]] = {}
    for lane, copies in COPIES.items():
        moved = {stream: sum(_length(e) for e in own if e.name.startswith(copies)) for stream, own in streams.items()}
        if any(moved.values()):
            found[lane] = _intervals(streams.pop(max(moved, key=lambda stream: moved[stream])))
    if streams:
        found["compute"] = _intervals(max(streams.values(), key=lambda own: sum(map(_length, own))))
    return found


def _length(event: Any) -> float:
    return float(event.time_range.end - event.time_range.start)


def _intervals(events: Sequence[Any]) -> list[Interval]:
    return [(float(event.time_range.start), float(event.time_range.end)) for event in events]


# ---- one trace of both ----


def merged(profiler: Any, engine: StreamingEngine, origin_unix_s: float, window: Interval, path: Path) -> None:
    """Write the profiler's trace with the engine's lanes in it. origin_unix_s: wall-clock time of the recorder's 0."""
    with tempfile.TemporaryDirectory() as folder:
        theirs, ours = Path(folder) / "profiler.json", Path(folder) / "megatrain.json"
        profiler.export_chrome_trace(str(theirs))
        write_chrome_trace(ours, engine.recorder, *window)
        both, added = json.loads(theirs.read_text()), json.loads(ours.read_text())["traceEvents"]
    shift_us = origin_unix_s * 1e6 - both.get("baseTimeNanoseconds", 0) / 1e3
    for event in added:
        event["pid"] = OUR_PROCESS
        if "ts" in event:
            event["ts"] += shift_us
    both["traceEvents"] += added
    write_atomically(path, gzip.compress(json.dumps(both).encode()))


# ---- in words ----


def summary(found: dict[str, Any]) -> str:
    """Two short tables and a line."""
    lanes: list[list[Cell]] = [
        [lane, its["recorder_s"], its["profiler_s"], its["ratio"], _verdict(its["ratio"])]
        for lane, its in found["lanes"].items()
    ]
    issuing: list[list[Cell]] = [
        [lane, int(its["operations"]), 1e6 * its["issue_s"], 1e6 * its["device_s"], its["ratio"]]
        for lane, its in found["issuing"].items()
    ]
    blocks = [table(["busy, s", "recorder", "profiler", "ratio", f"within {ALLOWED:.0%}"], lanes)] if lanes else []
    blocks += [table(["an operation, µs", "number", "to issue", "on the stream", "ratio"], issuing)] if issuing else []
    calls = ", ".join(f"{name} {count}" for name, count in found["driver"].items()) or "none"
    return "\n".join([*blocks, f"calls of the driver that wait for all or ask for memory: {calls}"])


def _verdict(ratio: float) -> str:
    return "yes" if abs(ratio - 1) <= ALLOWED else "NO"

"""What one update of the live dashboard costs the process that draws: milliseconds and bytes, without a browser.

    python -m benchmarks.dashboard_update

A made-up run is fed to a `History` in portions, as a feed would; each is one update of frame, figure and panels. Time
is that of the thread alone, so that a busy machine changes little.
Bytes are what ipywidgets would send for the figure: the JSON and the binary buffers of its messages.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

import plotly.graph_objects as go
from comm.base_comm import BaseComm
from ipywidgets import Widget

from benchmarks.table import table
from dashboard import panels, post_training
from dashboard.columns import LIVE_SEGMENTS, make_frame
from dashboard.figures import build_figure, update_figure
from dashboard.history import History, window_of
from dashboard.words import advice
from megatrain.report import RunInfo, RunState, Status
from megatrain.steering import Knobs, Position
from megatrain.trace import LayerStats, MemorySample, Records, SlotChange, Span, StepRecord

LAYERS, MICRO_BATCHES, LAYER_BYTES = 36, 4, 436_000_000
UPDATES, WARM_UP = 120, 20
CASES = ((12, 400), (36, 100), (36, 400), (36, 1000))  # layers, most bars; beyond them bars stand for several spans
INFO = RunInfo(
    *("made up", LAYERS, 10_000, 1, 0.0, "cuda", LAYER_BYTES, LAYER_BYTES, LAYER_BYTES, {"weights": 10**11}),
    *(10**12, 8 * 10**10, None, 55e9, 50e9, 1e15),
)


def main() -> None:
    heads = ["layers", "bars", "drawn", "ms, median", "ms, p90", "kB a message, median"]
    print(table(heads, [[str(layers), *measure(bars, layers)] for layers, bars in CASES]))


def measure(bars: int, layers: int = LAYERS) -> list[str | float]:
    """Feed two steps, then a portion at a time, so many that the bars of two steps come and go."""
    comm = CountingComm()
    figure = go.FigureWidget(build_figure())
    figure.comm = comm
    history, drawn, milliseconds, sizes = History(peak_flops_per_s=1e15), 0, [], []
    for number, records in zip(range(UPDATES), portions(layers), strict=False):
        comm.nbytes = 0
        start = time.thread_time()
        drawn = update(history, records, figure, bars)
        if number >= WARM_UP:
            milliseconds.append((time.thread_time() - start) * 1e3)
            sizes.append(comm.nbytes / 1e3)
    p90 = statistics.quantiles(milliseconds, n=10)[-1]
    return [str(bars), drawn, statistics.median(milliseconds), p90, statistics.median(sizes)]


def update(history: History, records: Records, figure: Any, bars: int) -> int:
    """What the dashboard does at every tick; returns how many bars it drew."""
    history.add(records)
    status = Status(RunState.RUNNING, 3, Knobs(2, 2, 0), 1, Position(3, "forward", 7), planned_bytes=10**10)
    rows = history.layer_rows()
    frame = make_frame(
        history,
        window_of(history, None, 2),
        info=INFO,
        planned_bytes=status.planned_bytes,
        most_bars=bars,
        most_segments=LIVE_SEGMENTS,
        rows=rows,
    )
    update_figure(figure, frame)
    metrics, record = history.metrics_of(None), history.record(None)
    newest = history.evaluations[-1] if history.evaluations else None
    beside, between_s = history.now_beside, history.between_s
    panels.headline(status, INFO, history.steps, history.newest_memory, newest, beside=beside, between_s=between_s)
    post_training.metric_table(history.metric_rows())
    post_training.sample_list(history.samples)
    panels.buffer_strip(history, INFO)
    panels.layer_table(rows)
    if metrics is not None and record is not None:
        panels.step_summary(metrics, INFO)
        advice(metrics, record)
    return len(frame.work) + len(frame.waits) + len(frame.buffers)


class CountingComm(BaseComm):
    """Stands for the channel to the browser, and counts what would go through it."""

    def __init__(self) -> None:
        self.nbytes = 0
        super().__init__(target_name="jupyter.widget")

    def publish_msg(
        self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **keys: Any
    ) -> None:
        self.nbytes += len(json.dumps(data)) + sum(memoryview(buffer).nbytes for buffer in buffers or ())


# ---- a made-up run ----


def portions(layers: int) -> Iterator[Records]:
    """Records as a poll brings them: a step's first, then twelve portions to each step."""
    for step in range(10_000):
        records = a_step(step, layers)
        size = -(-len(records.spans) // 12)
        for first in range(0, len(records.spans), size):
            spans = records.spans[first : first + size]
            start_s, end_s = spans[0].start_s, spans[-1].start_s
            changes = [change for change in records.slots if start_s <= change.time_s < end_s]
            whole = first + size >= len(records.spans)
            samples = [sample(start_s), sample(end_s)]
            yield Records(spans, changes, samples, records.steps * whole, records.layers * whole)


def a_step(step: int, layers: int) -> Records:
    start_s = now_s = step * 1.0
    spans, changes = [Span("compute", "record", step, None, 0, None, now_s, now_s + 1e-3, 0)], []
    now_s += 2e-3
    length_s = 0.9 / (layers * MICRO_BATCHES * 4)
    for op in ("forward", "backward"):
        for layer in range(layers) if op == "forward" else reversed(range(layers)):
            slot = layer % 3
            load = Span("h2d", "load", step, layer, None, slot, now_s, now_s + 2 * length_s, LAYER_BYTES)
            spans.append(load)
            changes += [change(load.start_s, slot, "loading", load), change(load.end_s, slot, "ready", load)]
            for micro_batch in range(MICRO_BATCHES):
                jitter_s = length_s * (1 + random.random() * 0.5)
                busy = Span("compute", op, step, layer, micro_batch, slot, now_s, now_s + jitter_s, 0)
                spans.append(busy)
                now_s = busy.end_s + 1e-5
            changes += [change(load.end_s, slot, "in_use", load), change(now_s, slot, "free", load)]
            if op == "backward":
                spans.append(Span("d2h", "unload", step, layer, None, 0, now_s, now_s + length_s, LAYER_BYTES))
                spans.append(Span("host", "update", step, layer, None, None, now_s, now_s + length_s, 0))
    record = StepRecord(step, start_s, now_s, 3.0, 1.0, 1e-4, 8000, 8192, 10**13, 2, MICRO_BATCHES, None)
    stats = [LayerStats(now_s, step, layer, random.random(), 40.0, 1.0) for layer in range(layers)]
    return Records(sorted(spans, key=lambda span: span.start_s), changes, [], [record], stats)


def change(time_s: float, slot: int, state: Any, span: Span) -> SlotChange:
    return SlotChange(time_s, "weights", slot, state, None if state == "free" else span.layer, span.step)


def sample(time_s: float) -> MemorySample:
    arena, allocated, reserved, ours, used, total, rss, pinned, free = (
        random.randrange(n * 10**9, n * 10**9 + 10**8) for n in (38, 40, 44, 46, 51, 80, 30, 20, 90)
    )
    return MemorySample(time_s, allocated, reserved, ours, used, total, arena, rss, pinned, free)


if __name__ == "__main__":
    Widget.close_all()
    main()

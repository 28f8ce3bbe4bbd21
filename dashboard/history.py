"""All that a viewer remembers of a run: records sorted by time, figures per step, bounded however long the run.

`add` takes what a feed brings, in any order. Records of one window, and curves of the whole run, come out cheaply.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from itertools import islice, takewhile
from statistics import median
from typing import get_args

from dashboard.axis import Interval, Window
from dashboard.beside import Beside, around, between, since
from dashboard.curves import Curve, Lines, largest, mean
from dashboard.gradients import GradientWay, HostGradient
from dashboard.layers import LayerRow, rows_of_step
from dashboard.log import Log
from dashboard.pieces import COMPUTE, Noted, Pieces, joined, pieces_of_changes, pieces_of_spans, pieces_of_waits
from dashboard.post_training import perplexity
from dashboard.recipe_metrics import MetricRow, RecipeMetrics
from megatrain.trace import (
    HELD,
    EvaluationRecord,
    LayerStats,
    Marker,
    MemorySample,
    Records,
    SampleRecord,
    SlotChange,
    SlotKind,
    Span,
    StepMetrics,
    StepRecord,
    Wait,
    WaitCause,
    compute_waits,
    step_metrics,
)
from megatrain.trace.intervals import gaps, intersection, length

SPANS, CHANGES, STEPS, MARKERS = 200_000, 20_000, 100_000, 10_000  # most that are kept; changes: of one buffer
EVALUATIONS, SAMPLES = 256, 1_000  # newest ones that are kept as they are
DETAILED = 256  # newest steps whose metrics, waits and layer statistics are kept
UNSETTLED = 2  # newest steps that late spans may still change
CLOCK_SLACK_S = 1e-4  # lanes read the clock a little after each other
RECENT_STEPS = 20  # whose median says how long a step takes
CAUSES: tuple[WaitCause, ...] = tuple(cause for cause in get_args(WaitCause) if cause != "paused")  # no wait of its own

Buffer = tuple[int, int]  # kind, slot

MEMORY_COLUMNS = ("arena", "this process", "other processes", "reserved", "card", "RSS", "pinned", "free")
EVALUATION_COLUMNS = ("held-out loss", "perplexity")
STEP_COLUMNS = (
    *("loss", "gradient norm", "learning rate", "tokens/s", "TFLOP/s", "MFU"),
    *("hidden: weights in", "hidden: gradients out", "hidden: optimizer"),
    *("link: weights in", "link: gradients out"),
    *(f"waited: {cause}" for cause in CAUSES),
)


class History:
    """What is known of one run. peak_flops_per_s: of the device, for MFU; None = not known."""

    def __init__(self, records: Records | None = None, peak_flops_per_s: float | None = None) -> None:
        self.peak_flops_per_s = peak_flops_per_s
        self.version = 0  # grows with whatever changes
        self.clear()
        if records is not None:
            self.add(records)

    def clear(self) -> None:
        """Forget everything: the run began anew."""
        self.steps: list[StepRecord] = []
        self.markers: list[Marker] = []
        self._held: list[Interval] = []
        self.newest_memory: MemorySample | None = None
        self.lost = 0
        self._spans: Log[Span] = Log(SPANS, pieces_of_spans)
        self._changes: dict[Buffer, Log[SlotChange]] = {}
        self._gradients = GradientWay()
        self._layers: dict[int, dict[int, LayerStats]] = {}  # by step and layer
        self._loads: dict[int, int] = {}  # bytes of the newest load of each layer
        self._memory = Curve(MEMORY_COLUMNS, largest)
        self._curve = Curve(STEP_COLUMNS, mean)
        self._held_out = Curve(EVALUATION_COLUMNS, mean)
        self.evaluations: list[EvaluationRecord] = []  # the newest
        self.samples: list[SampleRecord] = []  # of the newest look at prompts
        self._recipe = RecipeMetrics()
        self._metric_rows: tuple[MetricRow, ...] | None = None
        self._between_s: float | None = None
        self._metrics: dict[int, StepMetrics] = {}
        self._waits: dict[int, Noted[Wait]] = {}
        self._rows: dict[int, tuple[LayerRow, ...]] = {}  # of steps that were asked for
        self._gaps: dict[Window, list[Wait]] = {}  # waits between the steps that were shown last
        self._tail: tuple[float, list[Wait]] = (math.nan, [])  # waits of the step that runs, from where on
        self._news_s = math.inf  # the start of the earliest span that came after those were found
        self._settled = 0  # steps that are in the curve
        self.version += 1

    def add(self, records: Records) -> None:
        """Take further records, in any order; none twice."""
        if records == Records():
            return
        self.version += 1
        self.lost += records.lost
        self._spans.add(records.spans)
        self._gradients.add(records.spans)
        self._loads |= {
            span.layer: span.nbytes for span in records.spans if span.op == "load" and span.layer is not None
        }
        self._add_changes(records.slots)
        held = [_interval(marker) for marker in records.markers if marker.name == HELD]
        self._held = sorted([*self._held, *held])[-MARKERS:]
        for marker in (marker for marker in records.markers if marker.name != HELD):
            insort(self.markers, marker, key=lambda marker: marker.time_s)
        del self.markers[:-MARKERS]
        self._add_memory(records.memory)
        self._add_layers(records.layers)
        self._add_steps(records.steps)
        self._add_evaluations(records.evaluations)
        self._add_samples(records.samples)
        earliest_s = min((span.start_s for span in records.spans), default=math.inf)
        self._news_s = min(self._news_s, earliest_s - CLOCK_SLACK_S)
        self._gaps = {part: waits for part, waits in self._gaps.items() if part.end_s <= earliest_s}
        self._measure(earliest_s)

    def _add_changes(self, changes: Iterable[SlotChange]) -> None:
        by_buffer: dict[Buffer, list[SlotChange]] = {}
        for change in changes:
            by_buffer.setdefault(_buffer(change), []).append(change)
        for buffer, its in by_buffer.items():
            self._changes.setdefault(buffer, Log(CHANGES, pieces_of_changes)).add(its)

    def _add_memory(self, samples: Sequence[MemorySample]) -> None:
        if samples:
            self._memory.extend(sorted(_memory_row(sample) for sample in samples))
            newest = max(samples, key=lambda sample: sample.time_s)
            if self.newest_memory is None or newest.time_s > self.newest_memory.time_s:
                self.newest_memory = newest

    def _add_layers(self, stats: Iterable[LayerStats]) -> None:
        for layer in stats:
            self._layers.setdefault(layer.step, {})[layer.layer] = layer
            self._rows.pop(layer.step, None)
        for step in sorted(self._layers)[:-DETAILED]:
            del self._layers[step]

    def _add_steps(self, steps: Iterable[StepRecord]) -> None:
        for step in steps:
            insort(self.steps, step, key=lambda step: step.step)
        dropped = max(0, len(self.steps) - STEPS)
        del self.steps[:dropped]
        self._settled = max(0, self._settled - dropped)
        self._metric_rows = self._between_s = None

    def _add_evaluations(self, evaluations: Sequence[EvaluationRecord]) -> None:
        if evaluations:
            found = sorted(evaluations, key=lambda evaluation: evaluation.time_s)
            self._held_out.extend([(each.step, each.loss, perplexity(each)) for each in found])
            self.evaluations = [*self.evaluations, *found][-EVALUATIONS:]
            self._metric_rows = None

    def _add_samples(self, samples: Iterable[SampleRecord]) -> None:
        """Keep those of the newest look only, in the order of the prompts."""
        for sample in samples:
            if self.samples and sample.step > self.samples[0].step:
                self.samples = []
            if not self.samples or sample.step == self.samples[0].step:
                self.samples = [*self.samples, sample][:SAMPLES]

    # ---- figures per step ----

    def _measure(self, changed_s: float) -> None:
        """Find the figures of steps that are new, or that spans from `changed_s` on may have changed."""
        for record in self.steps[self._settled :]:
            if record.step not in self._metrics or record.end_s > changed_s:
                self._measure_step(record)
        settled = max(self._settled, len(self.steps) - UNSETTLED)
        self._curve.extend([self._row(record) for record in self.steps[self._settled : settled]])
        self._recipe.extend(self.steps[self._settled : settled])
        self._settled = settled
        for step in sorted(self._metrics)[:-DETAILED]:
            del self._metrics[step]
            self._waits.pop(step, None)
        for step in sorted(self._rows)[:-DETAILED]:
            del self._rows[step]

    def _measure_step(self, record: StepRecord) -> None:
        if record.start_s < self._complete_since_s or record.end_s <= record.start_s:
            return
        self._rows.pop(record.step, None)
        spans = self._spans.between(record.start_s, record.end_s).records
        self._metrics[record.step] = step_metrics(spans, record, self.peak_flops_per_s, self._held)
        self._waits[record.step] = _noted(compute_waits(spans, record.start_s, record.end_s, self._held))

    def _row(self, record: StepRecord) -> list[float]:
        seconds = record.end_s - record.start_s
        per_s = 1 / seconds if seconds > 0 else math.nan
        scales = [record.loss, record.grad_norm, record.lr, record.sequence_tokens * per_s, record.flops * per_s / 1e12]
        metrics = self._metrics.get(record.step)
        return [record.step, *scales, *(_overlap(metrics) if metrics else [math.nan] * (len(STEP_COLUMNS) - 5))]

    @property
    def metrics(self) -> list[StepMetrics]:
        """Figures of the newest steps whose spans were all still there, oldest first."""
        return [self._metrics[step] for step in sorted(self._metrics)]

    def metrics_of(self, step: int | None) -> StepMetrics | None:
        """Figures of a step (None = the newest that ended), if they are known."""
        record = self.record(step)
        return None if record is None else self._metrics.get(record.step)

    @property
    def newest_step(self) -> int | None:
        """The newest that ended."""
        return self.steps[-1].step if self.steps else None

    @property
    def step_s(self) -> float | None:
        """What one of the last steps took; the median."""
        recent = [step.end_s - step.start_s for step in self.steps[-RECENT_STEPS:]]
        return median(recent) if recent else None

    @property
    def between_s(self) -> float:
        """What lies between two steps (data, held-out data, answers), on average; what the user held is left out."""
        if self._between_s is None:
            self._between_s = self._mean_between_s()
        return self._between_s

    def _mean_between_s(self) -> float:
        known = [step for step in self.steps[-DETAILED:] if step.start_s >= 0]  # not those before a checkpoint
        if len(known) < 2:
            return 0.0
        apart = gaps([(step.start_s, step.end_s) for step in known], known[0].start_s, known[-1].end_s)
        return (length(apart) - length(intersection(apart, self._held))) / (len(known) - 1)

    def step_lines(self) -> Lines:
        """Curves over steps, named by STEP_COLUMNS."""
        return self._curve.lines([self._row(record) for record in self.steps[self._settled :]])

    def evaluation_lines(self) -> Lines:
        """Curves over optimizer steps done, named by EVALUATION_COLUMNS."""
        return self._held_out.lines()

    def metric_rows(self) -> tuple[MetricRow, ...]:
        """What the recipe tells; empty where it tells nothing."""
        if self._metric_rows is None:
            held_out = self.evaluations[-1].metrics if self.evaluations else {}
            recent = self.steps[-RECENT_STEPS:]
            self._metric_rows = self._recipe.rows(self.steps[self._settled :], recent, held_out)
        return self._metric_rows

    def memory_lines(self) -> Lines:
        """Curves over seconds of the run, in GB, named by MEMORY_COLUMNS."""
        return self._memory.lines()

    def layer_rows(self, step: int | None = None) -> tuple[LayerRow, ...]:
        """Rows of a step, by default of the newest complete one; empty where nothing is known of it."""
        record = self.record(step)
        if record is None:
            return ()
        if record.step not in self._rows:
            spans = [
                span for span in self._spans.between(record.start_s, record.end_s).records if span.step == record.step
            ]
            stats = self._layers.get(record.step, {}).values()
            self._rows[record.step] = rows_of_step(spans, stats, self._loads)
        return self._rows[record.step]

    def record(self, step: int | None) -> StepRecord | None:
        """What is recorded of a step (None = the newest that ended)."""
        if step is None:
            return self.steps[-1] if self.steps else None
        index = bisect_left(self.steps, step, key=lambda record: record.step)
        return self.steps[index] if index < len(self.steps) and self.steps[index].step == step else None

    # ---- a window ----

    def window(self, last_step: int | None, steps: int) -> Window:
        """See `window_of`."""
        if last_step is None:
            return self._live_window(steps)
        shown = [record for record in self.steps if record.step <= last_step][-steps:]
        return Window(shown[0].start_s, shown[-1].end_s) if shown else self._live_window(steps)

    def _live_window(self, steps: int) -> Window:
        newest = self.steps[-1].step if self.steps else -1
        running_s = self._first_after(newest, self.steps[-1].start_s if self.steps else -math.inf)
        shown = self.steps[-steps:] if running_s is None else self.steps[max(0, len(self.steps) - steps + 1) :]
        starts = [record.start_s for record in shown[:1]] or [running_s if running_s is not None else 0.0]
        return Window(starts[0], max(self.newest_s, starts[0]))

    def _first_after(self, step: int, start_s: float) -> float | None:
        """The start of the first span, from `start_s` on, of a step later than `step`."""
        spans = self._spans.items
        later = range(bisect_left(self._spans.starts_s, start_s), len(spans))
        return next((spans[index].start_s for index in later if spans[index].step > step), None)

    @property
    def _complete_since_s(self) -> float:
        """From when on all spans are there."""
        spans = self._spans
        return spans.items[0].start_s if spans.items and (self.lost or spans.dropped) else -math.inf

    @property
    def span_count(self) -> int:
        """How many spans are kept."""
        return len(self._spans.items)

    @property
    def newest_s(self) -> float:
        """The end of what is newest."""
        return max(self._spans.newest_s, self.steps[-1].end_s if self.steps else 0.0)

    def work(self, window: Window) -> Noted[Span]:
        """Spans that touch the window, in order of their start."""
        return self._spans.between(*window)

    def spans(self, window: Window) -> list[Span]:
        """The same, without their pieces."""
        return list(self.work(window).records)

    def waits(self, window: Window) -> list[Wait]:
        """Seconds of the window without compute, between its first and its last."""
        return list(self.waited(window).records)

    def waited(self, window: Window) -> Noted[Wait]:
        """The same, with their pieces."""
        pieces = self.work(window).pieces
        compute = pieces[pieces["row"] == COMPUTE]
        if not len(compute):
            return _noted([])
        start_s = max(window.start_s, float(compute["start_s"][0]))
        end_s = min(window.end_s, float(compute["end_s"].max()))
        known = [r for r in self._records_within(start_s, end_s) if r.step in self._waits]
        edges = [start_s, *(edge for record in known for edge in (record.start_s, record.end_s)), end_s]
        apart = [Window(*pair) for pair in zip(edges[::2], edges[1::2], strict=True) if pair[1] > pair[0]]
        self._gaps = {part: self._gap_waits(part) for part in apart[:-1]}
        found = [wait for waits in self._gaps.values() for wait in waits]
        found += self._tail_waits(apart[-1]) if apart else []
        beside = self.beside(window)
        found = [wait for wait in found if wait.cause != "other" or around(beside, wait.start_s, wait.end_s) is None]
        parts = [_noted(found), *(self._waits[record.step] for record in known)]
        return Noted([wait for part in parts for wait in part.records], joined(part.pieces for part in parts))

    def _gap_waits(self, part: Window) -> list[Wait]:
        known = self._gaps.get(part)
        return compute_waits(self.spans(part), *part, self._held) if known is None else known

    def _tail_waits(self, part: Window) -> list[Wait]:
        """Waits of the step that runs: those before the earliest news stay as they were found."""
        start_s, before = self._tail
        kept = [wait for wait in before if wait.end_s < self._news_s and wait.end_s <= part.end_s]
        if start_s != part.start_s:
            kept = []
        rest = Window(kept[-1].end_s if kept else part.start_s, part.end_s)
        waits = kept + compute_waits(self.spans(rest), *rest, self._held)
        self._tail, self._news_s = (part.start_s, waits), math.inf
        return waits

    def _records_within(self, start_s: float, end_s: float) -> list[StepRecord]:
        return [r for r in self.steps[-DETAILED:] if r.start_s >= start_s and r.end_s <= end_s]

    # ---- between steps ----

    def beside(self, window: Window) -> list[Beside]:
        """What was computed between the steps of a window, before its first and after its last, in order."""
        first = bisect_right(self.steps, window.start_s, key=lambda step: step.end_s)
        inside = [*takewhile(lambda step: step.start_s < window.end_s, islice(self.steps, first, None))]
        starts = [window.start_s, *(step.end_s for step in inside)]
        found = [self._between(start_s, step.start_s, step.step) for start_s, step in zip(starts, inside, strict=False)]
        if first + len(inside) == len(self.steps):
            found.append(self._after_all(starts[-1]))
        return [each for each in found if each is not None]

    def _between(self, start_s: float, end_s: float, step: int) -> Beside | None:
        computed = self._computed(start_s, end_s)
        return between(computed, step, evaluated=self._evaluated(start_s, end_s))

    def _after_all(self, start_s: float) -> Beside | None:
        """What was computed since the newest step, less the one that runs."""
        computed = since(self._computed(start_s, math.inf)).beside
        return between(computed, self._coming, evaluated=self._evaluated(start_s, math.inf))

    def _computed(self, start_s: float, end_s: float) -> Pieces:
        """Pieces of compute that start there."""
        pieces = self._spans.starting(start_s, end_s)
        computed: Pieces = pieces[pieces["row"] == COMPUTE]
        return computed

    def _evaluated(self, start_s: float, end_s: float) -> bool:
        return any(start_s <= found.time_s <= end_s for found in self.evaluations)

    @property
    def _coming(self) -> int:
        """The number of the step that runs, or would come next."""
        return self.steps[-1].step + 1 if self.steps else 0

    @property
    def running_s(self) -> float | None:
        """When the step that runs began, as far as is known; where nothing was computed since the newest, its end."""
        ended_s = self.steps[-1].end_s if self.steps else -math.inf
        begun = since(self._computed(ended_s, math.inf))
        return ended_s if self.steps and not len(begun.beside) else begun.running_s

    @property
    def now_beside(self) -> str:
        """What the engine is at, where that is no step; empty where it is, or nobody knows."""
        if self.running_s is not None:
            return ""
        newest = self._after_all(self.steps[-1].end_s if self.steps else -math.inf)
        return newest.what if newest else ""

    def held(self, window: Window) -> list[Interval]:
        """When the run was held by its user, as far as it touches the window."""
        return [(start_s, end_s) for start_s, end_s in self._held if end_s > window.start_s and start_s < window.end_s]

    def changes(self, window: Window) -> list[SlotChange]:
        """Changes of device buffers inside the window, and of each buffer the last before it."""
        return [change for _, noted in sorted(self.states(window).items()) for change in noted.records]

    def states(self, window: Window) -> dict[Buffer, Noted[SlotChange]]:
        """The same, by buffer, in order of time."""
        return {buffer: log.reaching(window) for buffer, log in self._changes.items()}

    def buffers(self) -> list[SlotChange]:
        """The newest change of every device buffer that there is: weights slots first."""
        newest = [self._changes[buffer].items[-1] for buffer in sorted(self._changes)]
        return [change for change in newest if change.state != "removed"]

    def records(self, window: Window) -> Records:
        """What touches the window, for an export; memory is not kept sample by sample."""
        steps = [step for step in self.steps if step.end_s > window.start_s and step.start_s < window.end_s]
        markers = [marker for marker in self.markers if window.start_s <= marker.time_s <= window.end_s]
        layers = [stats for step in steps for stats in self._layers.get(step.step, {}).values()]
        newest = [self.newest_memory] if self.newest_memory is not None else []
        return Records(self.spans(window), self.changes(window), newest, steps, layers, markers)

    def host_gradients(self, layers: int) -> list[HostGradient]:
        return self._gradients.states(layers, self.buffers())


def window_of(history: History, last_step: int | None, steps: int) -> Window:
    """Return the window of `steps` steps that end with `last_step`.

    None = the live end: up to the last thing recorded; a step that still runs is one of them.
    """
    return history.window(last_step, steps)


def _noted(waits: list[Wait]) -> Noted[Wait]:
    return Noted(waits, pieces_of_waits(waits))


def _interval(marker: Marker) -> Interval:
    """A marker of a hold says, as old and new value, from when to when."""
    return float(str(marker.old)), float(str(marker.new))


def _buffer(change: SlotChange) -> Buffer:
    return get_args(SlotKind).index(change.kind), change.slot


def _memory_row(sample: MemorySample) -> tuple[float, ...]:
    used, ours = sample.device_used_bytes, sample.process_device_bytes
    nbytes = (
        sample.arena_bytes,
        ours,
        used - ours if used is not None and ours is not None else None,
        sample.device_reserved_bytes,
        sample.device_total_bytes,
        sample.host_rss_bytes,
        sample.host_pinned_bytes,
        sample.host_available_bytes,
    )
    return sample.time_s, *(math.nan if value is None else value / 1e9 for value in nbytes)


def _overlap(metrics: StepMetrics) -> list[float]:
    """The columns from MFU on, in percent and GB/s."""
    shares = [metrics.mfu, metrics.h2d_hidden, metrics.d2h_hidden, metrics.update_hidden]
    rates = [metrics.h2d_bytes_per_s, metrics.d2h_bytes_per_s]
    return [
        *(math.nan if share is None else 100 * share for share in shares),
        *(math.nan if rate is None else rate / 1e9 for rate in rates),
        *(100 * metrics.waits_s[cause] / metrics.active_s for cause in CAUSES),
    ]

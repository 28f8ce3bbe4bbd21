import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traced_run import TracedRun, memory_sample

from dashboard import history as module
from dashboard.history import History, Window, window_of
from megatrain.trace import LayerStats, Marker, Records, SlotChange, Span, StepRecord, compute_waits, step_metrics

ALL = Window(-math.inf, math.inf)


def span(number: int, start_s: float, end_s: float, lane: str = "compute", op: str = "forward", step: int = 0) -> Span:
    return Span(lane, op, step, number, None, None, start_s, end_s, 0)  # type: ignore[arg-type]


def step(number: int, loss: float = 1.0) -> StepRecord:
    return StepRecord(number, float(number), number + 0.5, loss, 1.0, 1e-4, 90, 100, 0, 1, 1, None)


def change(time_s: float, slot: int, state: str, layer: int | None = None, kind: str = "weights") -> SlotChange:
    return SlotChange(time_s, kind, slot, state, layer, 0)  # type: ignore[arg-type]


def portions(records: Records, count: int, seed: int) -> list[Records]:
    """The same records, shuffled, in so many parts."""
    shuffle = random.Random(seed).shuffle
    lists = [list(getattr(records, name)) for name in ("spans", "slots", "memory", "steps", "layers", "markers")]
    for some in lists:
        shuffle(some)
    return [Records(*(some[part::count] for some in lists)) for part in range(count)]


def test_nothing_known() -> None:
    history = History()
    assert window_of(history, None, 3) == window_of(history, 5, 3) == Window(0.0, 0.0)
    assert (
        history.spans(ALL) == history.waits(ALL) == history.changes(ALL) == history.metrics == history.buffers() == []
    )
    assert history.layer_rows() == ()
    assert history.metrics_of(None) is history.record(None) is history.newest_step is history.step_s is None
    assert len(history.memory_lines().x) == len(history.step_lines().x) == 0


def test_only_what_touches_the_window_is_returned() -> None:
    history = History(Records(spans=[span(0, 0, 9), *(span(number, number, number + 1) for number in range(1, 5))]))
    assert [s.layer for s in history.spans(Window(2.5, 3.5))] == [0, 2, 3]
    assert [s.layer for s in history.spans(Window(1, 2))] == [0, 1]


@settings(deadline=None, max_examples=12)
@given(st.integers(1, 9), st.integers(0, 99))
def test_the_order_of_arrival_does_not_matter(count: int, seed: int) -> None:
    records = TracedRun(layers=3).steps(2).snapshot()
    whole, parts = History(records), History()
    for portion in portions(records, count, seed):
        parts.add(portion)
        parts.waits(parts.window(None, 2))  # what it finds in between must not stay
    window = whole.window(None, 2)
    assert parts.window(None, 2) == window
    assert set(parts.spans(window)) == set(whole.spans(window)) == set(records.spans)
    assert [s.start_s for s in parts.spans(window)] == sorted(s.start_s for s in records.spans)
    assert parts.metrics == whole.metrics
    assert set(parts.waits(window)) == set(whole.waits(window))
    ours, theirs = parts.step_lines(), whole.step_lines()
    for name in ours.y:
        np.testing.assert_array_equal(ours.y[name], theirs.y[name])


def test_metrics_are_those_of_each_step_alone() -> None:
    run = TracedRun().steps(3)
    assert History(run.snapshot(), 1e15).metrics == [step_metrics(run.spans(), s, 1e15) for s in run.steps()]


def test_a_span_that_comes_after_its_step_ended_changes_its_figures() -> None:
    run = TracedRun().steps(2)
    late = [s for s in run.spans() if s.op == "unload"]
    history = History(replace(run.snapshot(), spans=[s for s in run.spans() if s.op != "unload"]))
    assert history.metrics[-1].d2h_hidden is None
    history.add(Records(spans=late))
    assert history.metrics == [step_metrics(run.spans(), s) for s in run.steps()]
    assert history.step_lines().y["hidden: gradients out"].tolist() == pytest.approx(
        [100 * (metrics.d2h_hidden or 0) for metrics in history.metrics]
    )


def test_a_step_whose_spans_were_dropped_has_no_metrics_but_a_loss() -> None:
    run = TracedRun().steps(3)
    history = History(Records(spans=run.spans()[60:], steps=run.steps(), lost=60))
    assert [metrics.step for metrics in history.metrics] == [2]
    assert len(history.step_lines().y["loss"]) == 3
    assert np.isnan(history.step_lines().y["hidden: weights in"][:2]).all()


def test_the_live_window_counts_the_step_that_runs() -> None:
    steps = [step(0), step(1), step(2)]
    over = History(Records(spans=[span(0, 0, 0.5), span(0, 2.4, 2.7, step=2)], steps=steps))
    assert window_of(over, None, 2) == Window(1.0, 2.7)
    running = History(Records(spans=[span(0, 2.4, 2.7, step=2), span(0, 3, 3.25, step=3)], steps=steps))
    assert window_of(running, None, 2) == Window(2.0, 3.25)
    assert window_of(running, None, 1) == Window(3.0, 3.25)
    assert window_of(running, None, 9) == Window(0.0, 3.25)
    assert window_of(History(Records(spans=[span(0, 3, 4)])), None, 2) == Window(3, 4)


def test_a_window_of_the_past_ends_with_its_step() -> None:
    history = History(Records(steps=[step(number) for number in range(9)]))
    assert window_of(history, 5, 2) == Window(4.0, 5.5)
    assert window_of(history, 0, 3) == Window(0.0, 0.5)


def test_waits_lie_between_the_first_and_the_last_compute() -> None:
    spans = [span(0, 1, 2), span(1, 4, 5), span(1, 2, 4, "h2d", "load"), span(0, 5, 7, "d2h", "unload")]
    (wait,) = History(Records(spans=spans)).waits(Window(0, 9))
    assert (wait.start_s, wait.end_s, wait.cause) == (2, 4, "weights")


def test_waits_while_a_step_runs_are_those_of_all_that_is_known() -> None:
    run = TracedRun(layers=4).steps(3)
    spans = sorted(run.spans(), key=lambda span: span.end_s)  # as they are recorded
    history = History(Records(steps=run.steps()[:2]))
    for first in range(0, len(spans), 7):
        history.add(Records(spans=spans[first : first + 7]))
        known = spans[: first + 7]
        compute = [s for s in known if s.lane == "compute"]
        start_s = run.steps()[2].start_s
        window = Window(start_s, max(s.end_s for s in known))
        if window.end_s > start_s and any(s.start_s >= start_s for s in compute):
            inside = [s for s in compute if s.end_s > start_s]
            expected = compute_waits(known, max(start_s, inside[0].start_s), max(s.end_s for s in inside))
            assert history.waits(window) == expected


def test_changes_reach_into_the_window_from_before() -> None:
    changes = [change(0, 0, "loading", 3), change(2, 0, "ready", 3), change(4, 0, "in_use", 3), change(9, 0, "free")]
    history = History(Records(slots=changes[::-1]))
    assert history.changes(Window(3, 5)) == changes[1:3]
    assert history.buffers() == changes[-1:]


def test_a_removed_buffer_is_not_there_any_more() -> None:
    history = History(Records(slots=[change(0, 0, "ready", 1), change(0, 1, "free"), change(1, 1, "removed")]))
    assert [buffer.slot for buffer in history.buffers()] == [0]


def test_memory_without_a_gpu_has_gaps() -> None:
    history = History(Records(memory=[memory_sample(1.0), memory_sample(0.0)]))
    with_gpu = {"process_device_bytes": 2 * 10**9, "device_used_bytes": 5 * 10**9}
    history.add(Records(memory=[replace(memory_sample(2.0), **with_gpu)]))
    lines = history.memory_lines()
    assert lines.x.tolist() == [0, 1, 2]
    assert lines.y["arena"].tolist() == pytest.approx([3.6] * 3)
    assert lines.y["other processes"][2] == 3
    assert np.isnan(lines.y["other processes"][:2]).all()
    assert history.newest_memory is not None
    assert history.newest_memory.time_s == 2


def test_clear_forgets_a_run_that_began_anew() -> None:
    history, run = History(TracedRun().steps(3).snapshot()), TracedRun(layers=2).steps(1).snapshot()
    version = history.version
    history.clear()
    assert history.metrics == [] == history.spans(ALL)
    history.add(run)
    assert history.version > version
    assert history.metrics == History(run).metrics
    assert history.layer_rows() == History(run).layer_rows()


def test_the_version_grows_only_with_news() -> None:
    history = History()
    version = history.version
    history.add(Records())
    assert history.version == version
    history.add(Records(lost=1))
    assert history.version > version


def test_days_take_a_bounded_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, most in (("SPANS", 400), ("CHANGES", 40), ("STEPS", 50), ("MARKERS", 5), ("DETAILED", 8)):
        monkeypatch.setattr(module, name, most)
    history = History()
    for number in range(2000):
        spans = [span(layer, number + layer / 10, number + (layer + 1) / 10, step=number) for layer in range(5)]
        stats = [LayerStats(number + 0.5, number, 0, 1.0, 1.0, 1.0)]
        marker = Marker(float(number), "paused", False, True, number, 0)
        slots = [change(float(number), 0, "ready", number)]
        history.add(Records(spans, slots, [memory_sample(float(number))], [step(number)], stats, [marker]))
        history.layer_rows()
    assert history.span_count <= 400
    assert len(history.steps) == 50
    assert len(history.markers) == 5
    assert len(history.metrics) == 8
    assert len(history.changes(ALL)) <= 40
    assert len(history.step_lines().x) <= 400 + module.UNSETTLED
    assert history.step_lines().x[0] < 20  # the curve still begins where the run began
    assert history.step_lines().x[-1] == 1999
    assert [s.step for s in history.spans(Window(1999, 2000))] == [1999] * 5


def test_records_of_a_window_can_be_exported() -> None:
    run = TracedRun().steps(3).snapshot()
    window = Window(run.steps[1].start_s, run.steps[1].end_s)
    records = History(run).records(window)
    assert records.steps == [run.steps[1]]
    assert {s.step for s in records.spans} == {0, 1}  # updates of step 0 run under step 1
    assert records.slots


def test_rows_of_a_step_know_the_size_of_layers_that_it_did_not_load() -> None:
    load = Span("h2d", "load", 0, 3, None, 0, 0.0, 0.1, 5_000_000)
    spans = [load, span(3, 0.1, 0.2), span(3, 1.1, 1.3, step=1)]
    history = History(Records(spans=spans, steps=[step(0), step(1)]))
    (row,) = history.layer_rows()
    assert (row.layer, row.weight_mb, row.forward_ms) == (3, 5, pytest.approx(200))
    assert history.layer_rows(0)[0].forward_ms == pytest.approx(100)
    assert history.layer_rows(7) == ()

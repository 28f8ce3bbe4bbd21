import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from traced_run import TracedRun, memory_sample

from dashboard.bars import Bars, Piece, Words, make_bars
from dashboard.columns import (
    ROWS,
    Window,
    hidden_lines,
    last_steps,
    make_frame,
    marker_flags,
    memory_lines,
    metrics_by_step,
    progress_lines,
    slot_bars,
    slot_segments,
    span_bars,
    step_flags,
    wait_bars,
    waited_lines,
)
from megatrain.trace import Marker, Records, SlotChange, Span, StepRecord, step_metrics

ALL = Window(-math.inf, math.inf)


def span(number: int, start_s: float, end_s: float, lane: str = "compute", op: str = "forward") -> Span:
    return Span(lane, op, 0, number, None, None, start_s, end_s, 0)  # type: ignore[arg-type]


def step(number: int, loss: float = 1.0) -> StepRecord:
    return StepRecord(number, float(number), number + 0.5, loss, 1.0, 1e-4, 90, 100, 0, 1, 1, None)


def change(time_s: float, slot: int, state: str, layer: int | None = None, kind: str = "weights") -> SlotChange:
    return SlotChange(time_s, kind, slot, state, layer, 0)  # type: ignore[arg-type]


def total(bars: dict[str, Bars]) -> int:
    return int(sum(kind.count.sum() for kind in bars.values()))


def test_nothing_to_draw() -> None:
    frame = make_frame(Records(), [], last_steps(Records(), 3))
    assert frame.bars == frame.slots == {}
    assert frame.steps == frame.markers == frame.slot_names == []
    assert len(frame.memory.x) == len(frame.progress.x) == len(frame.hidden.x) == 0


def test_one_span() -> None:
    load = Span("h2d", "load", 7, 3, None, 1, 10.25, 10.5, 5_000_000_000)
    bars = span_bars([load], Window(10.0, 11.0))["load"]
    assert (bars.start_ms, bars.duration_ms, bars.row, bars.count) == ([250], [250], [ROWS.index("h2d")], [1])
    assert bars.label == ["3"]
    assert bars.hover == ["<b>load</b>, layer 3, step 7<br>buffer 1<br>5 GB at 20 GB/s<br>250 ms"]


def test_a_span_of_the_shell_and_a_micro_batch() -> None:
    head = Span("compute", "head", 7, None, 2, None, 0.0, 1.5, 0)
    bars = span_bars([head], Window(0.0, 2.0))["head"]
    assert bars.label == ["shell"]
    assert bars.hover == ["<b>head</b>, shell (embeddings, norm, head), step 7<br>micro-batch 2<br>1.50 s"]


def test_arrays_travel_as_binary() -> None:
    for bars in span_bars(TracedRun().steps(1).spans(), Window(0, 1)).values():
        for column in (bars.start_ms, bars.duration_ms, bars.row, bars.count):
            assert column.dtype == np.float32
            assert column.ndim == 1
            assert column.flags.c_contiguous


def test_milliseconds_stay_exact_hours_into_a_run() -> None:
    late_s = 36_000.0
    bars = span_bars([span(0, late_s + 0.001, late_s + 0.0012)], Window(late_s, late_s + 1))["forward"]
    assert bars.start_ms[0] == pytest.approx(1.0, abs=1e-4)
    assert bars.duration_ms[0] == pytest.approx(0.2, abs=1e-4)


def test_only_what_touches_the_window_is_drawn() -> None:
    spans = [span(number, number, number + 1) for number in range(5)]
    assert span_bars(spans, Window(1.5, 3.5))["forward"].label == ["1", "2", "3"]


def test_the_order_of_arrival_does_not_matter() -> None:
    spans = TracedRun().steps(1).spans()
    forward, backward = (span_bars(order, Window(0, 1)) for order in (spans, spans[::-1]))
    for op in forward:
        assert sorted(forward[op].hover) == sorted(backward[op].hover)
        assert np.array_equal(forward[op].start_ms, backward[op].start_ms)


@settings(deadline=None)
@example([(kind, row, start, 0.0) for kind in "abc" for row in range(3) for start in (0.0, 1.0)], 9)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.floats(0, 9), st.floats(0, 1)), max_size=60),
    st.integers(9, 40),
)
def test_no_piece_is_lost_or_drawn_twice(parts: list[tuple[str, int, float, float]], limit: int) -> None:
    pieces = [
        Piece(kind, row, start_s, start_s + length_s, number)
        for number, (kind, row, start_s, length_s) in enumerate(parts)
    ]
    bars = make_bars(pieces, 0.0, lambda number: Words(str(number), ""), limit)
    assert total(bars) == len(pieces)
    assert sum(len(kind.row) for kind in bars.values()) <= limit
    for kind, row in {(piece.kind, piece.row) for piece in pieces}:
        drawn = bars[kind].count[bars[kind].row == row]
        assert drawn.sum() == sum((piece.kind, piece.row) == (kind, row) for piece in pieces)
    alone = [int(label) for kind in bars.values() for label in kind.label if label]
    assert len(alone) == len(set(alone)) == sum((kind.count == 1).sum() for kind in bars.values())
    if len(pieces) <= limit:
        assert sorted(alone) == list(range(len(pieces)))


def test_a_very_long_run_has_few_bars_of_the_same_busy_time() -> None:
    spans = [span(n, n * 1e-3, n * 1e-3 + 4e-4) for n in range(30_000)]
    spans += [span(n, n * 1e-3, n * 1e-3 + 7e-4, "h2d", "load") for n in range(30_000)]
    bars = span_bars(spans, Window(0, 30))
    assert 500 < sum(len(kind.row) for kind in bars.values()) <= 1000
    assert total(bars) == 60_000
    assert bars["forward"].duration_ms.sum() == pytest.approx(12_000, rel=1e-4)
    assert bars["load"].duration_ms.sum() == pytest.approx(21_000, rel=1e-4)
    ends = bars["forward"].start_ms + bars["forward"].duration_ms
    assert (ends[:-1] <= bars["forward"].start_ms[1:] + 0.01).all()
    assert "× forward" in bars["forward"].hover[0]


def test_waits_lie_between_the_first_and_the_last_compute() -> None:
    spans = [span(0, 1, 2), span(1, 4, 5), span(1, 2, 4, "h2d", "load"), span(0, 5, 7, "d2h", "unload")]
    bars = wait_bars(spans, Window(0, 9))["wait"]
    assert (bars.start_ms, bars.duration_ms, bars.label) == ([2000], [2000], ["weights"])
    assert bars.hover == ["<b>compute waited: weights</b><br>before layer 1<br>2.00 s"]
    assert wait_bars([], Window(0, 9)) == {}


def test_a_state_lasts_until_the_next_change_and_is_cut_to_the_window() -> None:
    changes = [change(4, 0, "in_use", 3), change(0, 0, "loading", 3), change(6, 0, "free")]
    segments = slot_segments(changes, Window(1, 10))
    assert [(s.change.state, s.start_s, s.end_s) for s in segments] == [
        ("loading", 1, 4),
        ("in_use", 4, 6),
        ("free", 6, 10),
    ]


def test_a_removed_buffer_is_not_drawn() -> None:
    bars, names = slot_bars([change(0, 2, "ready", 1), change(1, 2, "removed")], Window(0, 9))
    assert list(bars) == ["ready"]
    assert names == ["weights 2"]
    assert bars["ready"].duration_ms == [1000]


def test_rows_are_weights_and_then_gradients_by_number() -> None:
    changes = [change(0, 1, "free", kind="gradients"), change(0, 1, "ready", 5), change(0, 0, "loading", 6)]
    bars, names = slot_bars(changes, Window(0, 1))
    assert names == ["weights 0", "weights 1", "gradients 1"]
    assert {state: kind.row.tolist() for state, kind in bars.items()} == {"loading": [0], "ready": [1], "free": [2]}
    assert bars["ready"].hover == ["<b>weights buffer 1: loaded, not yet used</b><br>layer 5<br>1.00 s"]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2), st.sampled_from(["free", "ready"])), max_size=30))
def test_segments_of_a_buffer_follow_each_other_without_gaps(rows: list[tuple[int, int, str]]) -> None:
    segments = slot_segments([change(*row) for row in rows], Window(0, 10))
    for slot in {slot for time_s, slot, _ in rows}:
        own = sorted((s.start_s, s.end_s) for s in segments if s.change.slot == slot)
        first_s = min(time_s for time_s, other, _ in rows if other == slot)
        assert [start for start, _ in own] == [first_s, *(end for _, end in own[:-1])]
        assert own[-1][1] == 10


def test_flags_count_from_the_window() -> None:
    assert [(f.time_ms, f.text) for f in step_flags([step(0), step(1), step(2)], Window(1, 2))] == [(0, "step 1")]
    (flag,) = marker_flags([Marker(3.5, "prefetch_depth", 1, 2, 3, 4)], Window(3, 4))
    assert (flag.time_ms, flag.text) == (500, "<b>prefetch_depth</b>: 1 → 2<br>step 3, layer 4")


def test_the_window_is_the_last_steps_and_what_still_runs_after_them() -> None:
    run = TracedRun().steps(3)
    window = last_steps(run.snapshot(), 2)
    assert window.start_s == run.steps()[1].start_s
    assert window.end_s == max(span.end_s for span in run.spans()) > run.steps()[-1].end_s
    assert last_steps(Records(spans=[span(0, 3, 4)]), 2) == Window(3, 4)


def test_memory_without_a_gpu_has_gaps_and_keeps_its_peak_when_thinned() -> None:
    samples = [memory_sample(float(n), arena_bytes=9_000_000_000 if n == 1234 else 10**9) for n in range(5000)]
    lines = memory_lines(samples)
    assert len(lines.x) == 1000
    assert lines.x[-1] == 4999
    assert lines.y["arena"].max() == 9
    assert np.isnan(lines.y["allocated"]).all()
    with_gpu = memory_lines([replace(samples[0], device_allocated_bytes=2_000_000_000), samples[1]])
    assert with_gpu.y["allocated"][0] == 2
    assert math.isnan(with_gpu.y["allocated"][1])


def test_progress_of_few_and_of_many_steps() -> None:
    lines = progress_lines([step(0, 3.0), step(1, math.nan), step(2, 1.0)])
    assert np.array_equal(lines.y["loss"], np.array([3, math.nan, 1], np.float32), equal_nan=True)
    assert lines.y["tokens/s"].tolist() == [200, 200, 200]
    many = progress_lines([step(n, 4.0 if n % 2 else 2.0) for n in range(2000)])
    assert many.y["loss"].tolist() == [3.0] * 1000
    assert many.x[:2].tolist() == [1, 3]


def test_shares_are_percent_of_what_the_metrics_say() -> None:
    run = TracedRun().steps(2)
    metrics = metrics_by_step(run.snapshot())
    hidden, waited = hidden_lines(metrics), waited_lines(metrics)
    assert hidden.y["weights in"].tolist() == pytest.approx([100 * (step.h2d_hidden or 0) for step in metrics])
    assert math.isnan(hidden.y["optimizer"][0])
    in_all = sum(column for column in waited.y.values())
    assert in_all == pytest.approx([100 * (1 - step.compute_share) for step in metrics], rel=1e-5)


def test_metrics_by_step_see_the_same_spans_as_one_step_alone() -> None:
    run = TracedRun().steps(3)
    assert metrics_by_step(run.snapshot(), 1e15) == [step_metrics(run.spans(), s, 1e15) for s in run.steps()]


def test_a_step_whose_spans_were_dropped_has_no_metrics() -> None:
    run = TracedRun().steps(3)
    records = Records(spans=run.spans()[60:], steps=run.steps(), lost=60)
    assert [metrics.step for metrics in metrics_by_step(records)] == [2]


def test_merging_keeps_rows_apart() -> None:
    pieces = [Piece("ready", row, time_s, time_s + 0.25, None) for time_s in range(100) for row in (0, 1)]
    bars = make_bars(pieces, 0.0, lambda _: Words("", ""), limit=10)["ready"]
    assert len(bars.row) <= 10
    assert bars.count[bars.row == 0].sum() == bars.count[bars.row == 1].sum() == 100
    assert bars.duration_ms[bars.row == 0].sum() == pytest.approx(25_000)

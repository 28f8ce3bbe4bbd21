import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from traced_run import TracedRun, memory_sample

from dashboard.axis import Axis, Window
from dashboard.bars import Bars
from dashboard.columns import (
    buffer_bars,
    buffer_segments,
    lane_bars,
    last_steps,
    limits_of,
    make_frame,
    marker_flags,
    step_flags,
)
from dashboard.history import Buffer, History
from dashboard.pieces import (
    CAUSES,
    NO_LAYER,
    OPS,
    ROWS,
    STATES,
    Noted,
    pieces_of_changes,
    pieces_of_spans,
    pieces_of_waits,
)
from megatrain.report import RunInfo
from megatrain.trace import Marker, Records, SlotChange, Span, StepRecord, Wait

INFO = RunInfo("m", 6, 9, 1, 0.0, "cpu", 1, 1, 1, {}, 64 * 10**9, 8 * 10**9)


def change(time_s: float, slot: int, state: str, layer: int | None = None, kind: str = "weights") -> SlotChange:
    return SlotChange(time_s, kind, slot, state, layer, 0)  # type: ignore[arg-type]


NO_WAITS: Noted[Wait] = Noted([], pieces_of_waits([]))


def noted(*spans: Span) -> Noted[Span]:
    return Noted(spans, pieces_of_spans(spans))


def by_buffer(*changes: SlotChange) -> dict[Buffer, Noted[SlotChange]]:
    return History(Records(slots=list(changes))).states(Window(-1, 99))


def segments_of(changes: list[SlotChange], window: Window) -> list[tuple[str, float, float]]:
    """Of one buffer: state, start and end."""
    in_order = sorted(changes, key=lambda change: change.time_s)
    found = buffer_segments(Noted(in_order, pieces_of_changes(in_order)), window)
    pairs = zip(found.records, found.pieces, strict=True)
    return [(change.state, float(piece["start_s"]), float(piece["end_s"])) for change, piece in pairs]


def step(number: int) -> StepRecord:
    return StepRecord(number, float(number), number + 0.5, 1.0, 1.0, 1e-4, 90, 100, 0, 1, 1, None)


def ops(bars: Bars) -> list[str]:
    return [OPS[int(kind)] for kind in bars.kind]


def states(bars: Bars) -> list[str]:
    return [STATES[int(kind)] for kind in bars.kind]


def test_nothing_to_draw() -> None:
    frame = make_frame(History(), last_steps(History(), 3))
    assert len(frame.work) == len(frame.waits) == len(frame.buffers) == 0
    assert frame.steps == frame.markers == frame.buffer_names == frame.layers.layers == []
    assert len(frame.memory.x) == len(frame.per_step.x) == 0


def test_one_span() -> None:
    load = Span("h2d", "load", 7, 3, None, 1, 10.25, 10.5, 5_000_000_000)
    bars = lane_bars(noted(load), NO_WAITS, Axis(Window(10.0, 11.0)))
    assert (bars.start_ms, bars.duration_ms, bars.row, bars.count) == ([250], [250], [ROWS.index("h2d")], [1])
    assert (bars.label, bars.layer, ops(bars)) == (["3"], [3], ["load"])
    assert bars.hover == ["<b>load</b>, layer 3, step 7<br>buffer 1<br>5 GB at 20 GB/s<br>250 ms"]


def test_a_span_of_the_shell_and_a_micro_batch() -> None:
    head = Span("compute", "head", 7, None, 2, None, 0.0, 1.5, 0)
    bars = lane_bars(noted(head), NO_WAITS, Axis(Window(0.0, 2.0)))
    assert (bars.label, bars.layer) == (["emb/head"], [NO_LAYER])
    assert bars.hover == ["<b>head</b>, shell (embeddings, norm, head), step 7<br>micro-batch 2<br>1.50 s"]


def test_a_wait_stands_in_the_row_of_compute_and_says_its_cause() -> None:
    spans = [
        Span("compute", "forward", 0, 0, 0, 0, 1, 2, 0),
        Span("compute", "forward", 0, 1, 0, 0, 4, 5, 0),
        Span("h2d", "load", 0, 1, None, 0, 2, 4, 0),
    ]
    waits = make_frame(History(Records(spans=spans)), Window(0, 9)).waits
    assert (waits.start_ms, waits.duration_ms, waits.row, waits.layer) == ([2000], [2000], [ROWS.index("compute")], [1])
    assert [CAUSES[int(kind) - len(OPS)] for kind in waits.kind] == waits.label == ["weights"]
    assert waits.hover == ["<b>compute waited: weights</b><br>before layer 1<br>2.00 s"]


def test_work_and_waits_share_one_limit_and_none_is_lost() -> None:
    history = History(TracedRun(layers=24).steps(6).snapshot())
    window = last_steps(history, 6)
    for limit in (60, 400, 5000):
        frame = make_frame(history, window, most_bars=limit, most_segments=50)
        assert frame.work.count.sum() == len(history.spans(window))
        assert frame.waits.count.sum() == len(history.waits(window))
        assert len(frame.work) + len(frame.waits) <= limit
        assert len(frame.buffers) <= 50


def test_a_followed_layer_keeps_bars_of_its_own() -> None:
    history = History(TracedRun(layers=24).steps(6).snapshot())
    window = last_steps(history, 6)
    frame = make_frame(history, window, follow=7, most_bars=100)
    of_seven = frame.work.count[frame.work.layer == 7].sum()
    assert of_seven == sum(span.layer == 7 for span in history.spans(window))


def test_a_state_lasts_until_the_next_change_and_is_cut_to_the_window() -> None:
    changes = [change(4, 0, "in_use", 3), change(0, 0, "loading", 3), change(6, 0, "free")]
    assert segments_of(changes, Window(1, 10)) == [
        ("loading", 1, 4),
        ("in_use", 4, 6),
        ("free", 6, 10),
    ]


def test_a_removed_buffer_is_not_drawn() -> None:
    bars, names = buffer_bars(by_buffer(change(0, 2, "ready", 1), change(1, 2, "removed")), Axis(Window(0, 9)))
    assert (states(bars), names) == (["ready"], ["weights 2"])
    assert bars.duration_ms == [1000]
    gone_before = buffer_bars(by_buffer(change(0, 2, "ready", 1), change(1, 2, "removed")), Axis(Window(5, 9)))
    assert (len(gone_before[0]), gone_before[1]) == (0, [])


def test_a_change_that_changes_nothing_goes_on() -> None:
    changes = [change(0, 0, "in_use", 1), change(1, 0, "in_use", 1), change(2, 0, "in_use", 2)]
    bars, _ = buffer_bars(by_buffer(*changes), Axis(Window(0, 3)))
    assert (bars.duration_ms.tolist(), bars.label) == ([2000, 1000], ["1", "2"])


def test_rows_are_weights_and_then_gradients_by_number() -> None:
    changes = [change(0, 1, "free", kind="gradients"), change(0, 1, "ready", 5), change(0, 0, "loading", 6)]
    bars, names = buffer_bars(by_buffer(*changes), Axis(Window(0, 1)))
    assert names == ["weights 0", "weights 1", "gradients 1"]
    assert dict(zip(states(bars), bars.row.tolist(), strict=True)) == {"loading": 0, "ready": 1, "free": 2}
    assert "<b>weights buffer 1: loaded, not in use</b><br>layer 5<br>1.00 s" in bars.hover
    assert sorted(bars.layer.tolist()) == [NO_LAYER, 5, 6]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2), st.sampled_from(["free", "ready"])), max_size=30))
def test_segments_of_a_buffer_follow_each_other_without_gaps(rows: list[tuple[int, int, str]]) -> None:
    for slot in {slot for _, slot, _ in rows}:
        own = [edges for _, *edges in segments_of([change(*row) for row in rows if row[1] == slot], Window(0, 10))]
        first_s = min(time_s for time_s, other, _ in rows if other == slot)
        assert [start for start, _ in own] == [first_s, *(end for _, end in own[:-1])]
        assert own[-1][1] == 10


def test_flags_of_steps_count_from_the_window_and_tell_of_the_one_that_runs() -> None:
    flags = step_flags([step(0), step(1), step(2)], Axis(Window(1, 2)))
    assert [(flag.time_ms, flag.text) for flag in flags] == [(0, "step 1")]
    running = step_flags([step(0), step(1)], Axis(Window(1, 2)), running_s=1.5)
    assert [(flag.time_ms, flag.text) for flag in running] == [(0, "step 1"), (500, "step 2")]


@pytest.mark.parametrize(
    ("name", "old", "new", "text"),
    [
        ("prefetch_depth", 1, 3, "depth 1→3"),
        ("grad_buffers", 2, 1, "grad buffers 2→1"),
        ("resident_layers", 0, 4, "resident 0→4"),
        ("micro_batch_size", None, 4, "micro-batch None→4"),
        ("paused", False, True, "paused"),
        ("paused", True, False, "resumed"),
        ("resumed", "paused", "running", "resumed"),
        ("stopped", False, True, "stopped"),
    ],
)
def test_a_marker_is_a_short_text_and_says_where_it_took_effect(name: str, old: object, new: object, text: str) -> None:
    (flag,) = marker_flags([Marker(3.5, name, old, new, 3, 4)], Axis(Window(3, 4)))
    assert (flag.time_ms, flag.text) == (500, text)
    assert flag.hover.startswith(f"<b>{text}</b>")
    assert flag.hover.endswith("since step 3, layer 4")


def test_markers_that_would_lie_on_each_other_share_a_flag() -> None:
    markers = [Marker(time_s, "paused", False, True, 0, None) for time_s in (0.0, 0.1, 0.2, 5.0)]
    flags = marker_flags(markers, Axis(Window(0, 10)))
    assert [flag.text for flag in flags] == ["paused +2", "paused"]
    assert flags[0].hover.count("since step 0") == 3


def test_the_window_is_the_last_steps_and_what_still_runs_after_them() -> None:
    run = TracedRun().steps(3)
    window = last_steps(History(run.snapshot()), 2)
    assert window.start_s == run.steps()[1].start_s
    assert window.end_s == max(span.end_s for span in run.spans()) > run.steps()[-1].end_s


def test_curves_are_percent_of_what_the_metrics_say() -> None:
    history = History(TracedRun().steps(2).snapshot())
    lines = make_frame(history, last_steps(history, 1)).per_step
    shares = [100 * (metrics.h2d_hidden or 0) for metrics in history.metrics]
    assert lines.y["hidden: weights in"].tolist() == pytest.approx(shares)
    assert math.isnan(lines.y["hidden: optimizer"][0])
    waited = sum(lines.y[f"waited: {cause}"] for cause in CAUSES)
    assert waited == pytest.approx([100 * (1 - metrics.compute_share) for metrics in history.metrics], rel=1e-5)
    assert lines.y["link: weights in"].tolist() == pytest.approx([436 / 9] * 2, rel=1e-5)
    assert np.isnan(lines.y["MFU"]).all()


def test_limits_that_nobody_knows_are_left_out() -> None:
    assert limits_of(None, 0) == {}
    assert limits_of(INFO, 0) == {"device": 8, "host": 64}
    measured = replace(INFO, h2d_bytes_per_s=50e9, d2h_bytes_per_s=40e9)
    assert limits_of(measured, 10**9) == {"planned": 1, "device": 8, "host": 64, "weights in": 50, "gradients out": 40}


def test_a_gpu_is_known_by_its_memory() -> None:
    without = History(Records(memory=[memory_sample(0.0)]))
    assert not make_frame(without, Window(0, 1)).has_gpu
    assert make_frame(History(Records(memory=[replace(memory_sample(0.0), device_used_bytes=1)])), Window(0, 1)).has_gpu


def test_a_wait_of_the_shell_has_no_layer() -> None:
    waits = [Wait(0, 1, "other", None), Wait(1, 2, "paused", None)]
    drawn = lane_bars(noted(), Noted(waits, pieces_of_waits(waits)), Axis(Window(0, 2)))
    assert drawn.layer.tolist() == [NO_LAYER]

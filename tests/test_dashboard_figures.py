from dataclasses import replace
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from looking_run import looking_run
from traced_run import TracedRun, memory_sample

from dashboard.colours import OP_COLOURS, STATE_COLOURS, WAIT_COLOURS
from dashboard.columns import Frame, last_steps, make_frame
from dashboard.figures import (
    CURVES,
    FADED,
    FIRST_CURVE,
    FIRST_LIMIT,
    FLAGS,
    HEAT,
    LIMITS,
    MARKER_LINES,
    NAMES,
    SEGMENTS,
    STEP_LINES,
    WAITS,
    WORK,
    build_figure,
    forget,
    layer_at,
    update_figure,
)
from dashboard.history import History
from dashboard.places import DEVICE, HEIGHT, NO_GPU_TITLE, PLACES
from megatrain.report import RunInfo
from megatrain.trace import Records

INFO = RunInfo("m", 6, 9, 1, 0.0, "cuda", 1, 1, 1, {}, 64 * 10**9, 8 * 10**9, None, 55e9, None)


def frame(records: Records, steps: int = 3, **more: Any) -> Frame:
    history = History(records)
    return make_frame(history, last_steps(history, steps), **more)


def drawn(figure: go.Figure) -> list[Any]:
    """What a reader sees of each trace; of nothing, all forms are alike."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(inner) for name, inner in value.items()}
        return repr(value.tolist()) if isinstance(value, np.ndarray) else repr(value)

    return [plain(trace) for trace in figure.to_plotly_json()["data"]]


def test_every_span_of_the_window_is_one_bar() -> None:
    records = TracedRun().steps(2).snapshot()
    figure = build_figure()
    update_figure(figure, frame(records))
    assert len(figure.data[WORK].x) == len(records.spans)
    colours = list(figure.data[WORK].marker.color)
    for colour in set(OP_COLOURS.values()):
        ops = [op for op, its in OP_COLOURS.items() if its == colour]
        assert colours.count(colour) == sum(span.op in ops for span in records.spans), ops
    assert len(figure.data[WAITS].x) > 0
    assert len(figure.data[SEGMENTS].x) > 0


RUNS = [Records(), *(TracedRun(layers=layers).steps(steps).snapshot() for layers, steps in ((1, 1), (3, 2), (6, 3)))]


@settings(deadline=None, max_examples=12)
@given(
    st.lists(
        st.tuples(st.sampled_from(RUNS), st.integers(1, 3), st.none() | st.integers(0, 3), st.booleans()),
        min_size=1,
        max_size=4,
    )
)
def test_no_two_updates_leave_anything_stale(updates: list[tuple[Records, int, int | None, bool]]) -> None:
    figure = build_figure()
    for records, steps, follow, known in updates:
        last = frame(records, steps, follow=follow, info=INFO if known else None)
        update_figure(figure, last)
    fresh = build_figure()
    update_figure(fresh, last)
    assert drawn(figure) == drawn(fresh)
    assert figure.layout.to_plotly_json() == fresh.layout.to_plotly_json()


def test_only_what_changed_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    figure, sent = build_figure(), []
    monkeypatch.setattr(type(figure), "plotly_update", lambda _, *values: sent.append(values))
    run = TracedRun().steps(2).snapshot()
    update_figure(figure, frame(run))
    update_figure(figure, frame(run))
    assert len(sent) == 1
    update_figure(figure, frame(replace(run, memory=[*run.memory, memory_sample(99.0)])))
    restyle, relayout, traces = sent[1]
    shown = {
        (CURVES[trace - FIRST_CURVE].source, CURVES[trace - FIRST_CURVE].plot)
        for trace in traces
        if trace < FIRST_LIMIT
    }
    assert {source for source, _ in shown} == {"memory"}
    assert set(restyle) == {"x", "y"}
    assert relayout == {}


def test_a_widget_takes_the_figure_and_gets_one_message_for_each_update(monkeypatch: pytest.MonkeyPatch) -> None:
    widget = go.FigureWidget(build_figure())
    messages: list[Any] = []
    monkeypatch.setattr(widget, "_send_update_msg", lambda **message: messages.append(message))
    update_figure(widget, frame(TracedRun().steps(2).snapshot()))
    assert len(messages) == 1
    binary = [values for name in ("base", "x") for values in messages[0]["restyle_data"][name][:3]]
    assert {values.dtype for values in binary} == {np.dtype(np.float32)}


def test_what_is_forgotten_is_sent_anew() -> None:
    figure = build_figure()
    update_figure(figure, frame(TracedRun().steps(2).snapshot()))
    forget(figure)
    assert all(trace.x is None or not len(trace.x) for trace in figure.data)
    update_figure(figure, frame(TracedRun().steps(2).snapshot()))
    assert len(figure.data[WORK].x) > 0


def test_a_zoom_stays_until_the_whole_is_asked_for() -> None:
    figure, run = build_figure(), TracedRun()
    first = frame(run.steps(2).snapshot())
    update_figure(figure, first)
    assert figure.layout.xaxis.range == (0, first.width_ms)
    figure.plotly_relayout({"xaxis.range[0]": 3.0, "xaxis.range[1]": 5.0})
    later = frame(run.steps(1).snapshot())
    assert later.width_ms > first.width_ms
    update_figure(figure, later)
    assert figure.layout.xaxis.range == (3.0, 5.0)
    update_figure(figure, later, whole=True)
    assert figure.layout.xaxis.range == (0, later.width_ms)


def test_the_whole_is_said_again_to_a_page_whose_zoom_never_came_here() -> None:
    figure, now = build_figure(), frame(TracedRun().steps(2).snapshot())
    update_figure(figure, now)
    for _ in range(3):
        before = figure.layout.xaxis.range
        update_figure(figure, now, whole=True)
        assert figure.layout.xaxis.range != before  # else plotly would send nothing
        assert figure.layout.xaxis.range == pytest.approx((0, now.width_ms))


def test_a_double_click_ends_a_zoom_and_another_may_follow() -> None:
    figure, now = build_figure(), frame(TracedRun().steps(2).snapshot())
    update_figure(figure, now)
    for _ in range(2):
        figure.plotly_relayout({"xaxis.range[0]": 3.0, "xaxis.range[1]": 5.0})
        update_figure(figure, now)
        assert figure.layout.xaxis.range == (3.0, 5.0)
        figure.plotly_relayout({"xaxis.autorange": True})
        update_figure(figure, now)
        assert figure.layout.xaxis.range == (0, now.width_ms)
        assert not figure.layout.xaxis.autorange


def test_titles_and_legends_say_no_more_than_there_is() -> None:
    figure = build_figure()
    records = TracedRun().steps(2).snapshot()

    def said() -> str:
        return " ".join(note.text for note in figure.layout.annotations)

    update_figure(figure, frame(records))
    assert NO_GPU_TITLE in said()
    assert "MFU" not in said()
    assert "reserved" not in said()
    gpu = [replace(memory_sample(t), device_used_bytes=7 * 10**9) for t in (0.0, 1.0)]
    history = History(replace(records, memory=gpu), peak_flops_per_s=1e15)
    update_figure(figure, make_frame(history, last_steps(history, 3)))
    assert said().count("MFU") == 2
    assert "reserved" in said()


def test_following_a_layer_fades_all_others() -> None:
    figure = build_figure()
    followed = frame(TracedRun().steps(1).snapshot(), follow=2)
    update_figure(figure, followed)
    for trace, bars in ((WORK, followed.work), (WAITS, followed.waits), (SEGMENTS, followed.buffers)):
        opacity = figure.data[trace].marker.opacity
        assert set(opacity[bars.layer == 2].tolist()) <= {1.0}
        assert opacity[bars.layer != 2].tolist() == pytest.approx([FADED] * int((bars.layer != 2).sum()))
    update_figure(figure, frame(TracedRun().steps(1).snapshot()))
    assert figure.data[WORK].marker.opacity == 1


def test_a_click_finds_the_layer() -> None:
    now = frame(TracedRun().steps(2).snapshot())
    for trace, bars in ((WORK, now.work), (WAITS, now.waits), (SEGMENTS, now.buffers)):
        for point in range(len(bars)):
            expected = int(bars.layer[point])
            assert layer_at(now, trace, point) == (None if expected < 0 else expected)
    assert layer_at(now, HEAT, (0, 4)) == 4
    assert layer_at(now, HEAT, (0, 99)) is layer_at(now, WORK, 9999) is layer_at(now, FLAGS, 0) is None
    assert layer_at(now, WORK, next(i for i, span in enumerate(now.work.label) if span == "emb/head")) is None


def test_curves_with_nothing_to_show_are_left_out() -> None:
    figure = build_figure()
    update_figure(figure, frame(TracedRun().steps(2).snapshot()))
    shown = {trace.name: trace.visible for trace in figure.data[FIRST_CURVE:]}
    assert shown["arena"]
    assert shown["loss"]
    assert not shown["this process (driver)"]
    assert not shown["saved inputs"]
    assert not shown["MFU (%)"]
    assert not shown["all host memory"]


def test_held_out_losses_are_points_of_the_loss_plot() -> None:
    figure = build_figure()

    def said() -> str:
        return " ".join(note.text for note in figure.layout.annotations)

    update_figure(figure, frame(TracedRun().steps(2).snapshot()))
    by_name = {trace.name: trace for trace in figure.data}
    assert not by_name["held-out loss"].visible
    assert "held-out loss" not in said()
    update_figure(figure, frame(looking_run()))
    points = by_name["held-out loss"]
    assert points.visible
    assert (points.xaxis, points.yaxis) == (by_name["loss"].xaxis, by_name["loss"].yaxis)
    assert (points.x.tolist(), points.y.tolist()) == ([1, 2], [2.5, 2.25])
    assert points.hovertext.tolist() == [
        "after 1 step: 2.5000, perplexity 12.18",
        "after 2 steps: 2.2500, perplexity 9.488",
    ]
    assert "held-out loss" in said()


def test_a_loss_may_be_negative() -> None:
    records = looking_run()
    figure = build_figure()
    update_figure(figure, frame(replace(records, steps=[replace(step, loss=-0.5) for step in records.steps])))
    assert next(trace for trace in figure.data if trace.name == "loss").visible


def test_limits_are_dashed_lines_where_they_are_known() -> None:
    figure = build_figure()
    records = TracedRun().steps(2).snapshot()
    update_figure(figure, frame(records, info=INFO, planned_bytes=5 * 10**9))
    by_name = {trace.name: trace for trace in figure.data[FIRST_LIMIT:]}
    assert by_name["planned arena"].y.tolist() == [5, 5]
    assert by_name["all host memory"].y.tolist() == [64, 64]
    assert by_name["measured, weights in"].y.tolist() == [55, 55]
    assert not by_name["measured, gradients out"].visible
    assert not by_name["limit of the device"].visible  # there is none to be seen
    assert {trace.line.dash for trace in figure.data[FIRST_LIMIT:]} == {"dash"}
    assert figure.layout.annotations[DEVICE - 1].text == NO_GPU_TITLE
    with_gpu = replace(records, memory=[replace(memory_sample(t), device_used_bytes=7 * 10**9) for t in (0.0, 1.0)])
    update_figure(figure, frame(with_gpu, info=INFO))
    assert by_name["limit of the device"].y.tolist() == [8, 8]
    assert figure.layout.annotations[DEVICE - 1].text == PLACES[DEVICE].title


def test_steps_and_markers_are_lines_through_timeline_and_buffers() -> None:
    figure, now = build_figure(), frame(TracedRun().steps(2).snapshot())
    update_figure(figure, now)
    for traces, flags in ((STEP_LINES, now.steps), (MARKER_LINES, now.markers)):
        for trace in traces:
            assert figure.data[trace].x[::3].tolist() == pytest.approx([flag.time_ms for flag in flags])
    assert [text.strip() for text in figure.data[NAMES].text] == ["step 0", "step 1", "step 2"]
    assert figure.data[FLAGS].text.tolist() == ["depth 0→1"]


def test_names_of_many_steps_are_thinned() -> None:
    figure = build_figure()
    update_figure(figure, frame(TracedRun(layers=1).steps(40).snapshot(), 40))
    assert len(figure.data[NAMES].text) <= 12
    assert len(figure.data[STEP_LINES[0]].x) == 3 * 41


def test_rows_are_named_and_the_axes_fit_the_window() -> None:
    history = History(TracedRun().steps(2).snapshot())
    figure = build_figure()
    start_s, end_s = last_steps(history, 1)
    update_figure(figure, make_frame(history, last_steps(history, 1)))
    assert figure.layout.xaxis.range == (0, (end_s - start_s) * 1e3)
    names = [name.strip() for name in figure.layout.yaxis.ticktext]
    assert names == ["weights in", "compute", "gradients out", "optimizer"]
    names = [name.strip() for name in figure.layout.yaxis2.ticktext]
    assert names == ["weights 0", "weights 1", "gradients 0", "gradients 1"]
    assert figure.layout.xaxis3.range == (-0.5, 5.5)


def test_plots_and_what_is_written_above_them_do_not_overlap() -> None:
    """In pixels: a plot, its tick labels below, titles and legends above."""
    for plot, place in PLACES.items():
        above = place.top - 17 * len(place.legend) - 22
        for other, below in PLACES.items():
            beside = place.x[1] <= below.left or below.x[1] <= place.left
            if other != plot and below.top < place.top and not beside:
                assert below.top + below.height + 20 <= above + 4, (plot, other)
    assert max(place.top + place.height for place in PLACES.values()) == HEIGHT - figure_margins()


def figure_margins() -> int:
    margin = build_figure().layout.margin
    return int(margin.t + margin.b)


def test_colours_differ_within_a_row() -> None:
    for row in (("load", "fetch"), ("record", "forward", "head", "backward", "norm"), ("unload", "offload")):
        assert len({OP_COLOURS[op] for op in row}) == len(row)
    assert len(set(STATE_COLOURS.values())) == len(STATE_COLOURS)
    assert len(set(WAIT_COLOURS.values())) == len(WAIT_COLOURS)
    assert len({limit.name for limit in LIMITS}) == len(LIMITS)

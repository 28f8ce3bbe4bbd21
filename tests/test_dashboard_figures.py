import plotly.graph_objects as go
from traced_run import TracedRun

from dashboard.columns import Frame, last_steps, make_frame, metrics_by_step
from dashboard.figures import BAR_COLOURS, STATE_COLOURS, build_figure, update_figure
from megatrain.trace import Records

OKABE_ITO = {"#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#999999"}


def frame(records: Records, steps: int = 3) -> Frame:
    return make_frame(records, metrics_by_step(records), last_steps(records, steps))


def bars(figure: go.Figure) -> int:
    return sum(len(trace.x) for trace in figure.data if trace.type == "bar" and trace.name in BAR_COLOURS)


def test_every_span_of_the_window_is_one_bar() -> None:
    records = TracedRun().steps(2).snapshot()
    figure = build_figure()
    update_figure(figure, frame(records))
    drawn = {trace.name: len(trace.x) for trace in figure.data if trace.type == "bar"}
    for op in set(BAR_COLOURS) - {"wait"}:
        assert drawn[op] == sum(span.op == op for span in records.spans), op
    assert drawn["wait"] > 0


def test_an_update_replaces_data_and_adds_no_traces() -> None:
    figure = build_figure()
    traces = len(figure.data)
    update_figure(figure, frame(TracedRun().steps(2).snapshot()))
    full = bars(figure)
    update_figure(figure, frame(TracedRun().steps(1).snapshot()))
    assert 0 < bars(figure) < full
    update_figure(figure, frame(Records()))
    assert bars(figure) == 0
    assert len(figure.data) == traces


def test_curves_with_nothing_to_show_are_left_out() -> None:
    figure = build_figure()
    update_figure(figure, frame(TracedRun().steps(2).snapshot()))
    shown = {trace.name: trace.visible for trace in figure.data if trace.type == "scatter"}
    assert shown["arena"]
    assert shown["loss"]
    assert not shown["allocated"]
    assert not shown["saved inputs"]


def test_rows_are_named_and_the_axes_fit_the_window() -> None:
    records = TracedRun().steps(2).snapshot()
    figure = build_figure()
    update_figure(figure, frame(records, steps=1))
    start_s, end_s = last_steps(records, 1)
    assert figure.layout.xaxis.range == (0, (end_s - start_s) * 1e3)
    assert figure.layout.yaxis.ticktext == ("weights in", "compute", "gradients out", "optimizer", "waiting")
    assert figure.layout.yaxis2.ticktext == ("weights 0", "weights 1", "gradients 0", "gradients 1")


def test_colours_are_safe_for_the_colour_blind_and_differ_within_a_row() -> None:
    assert set(BAR_COLOURS.values()) <= OKABE_ITO
    for row in (("load", "fetch"), ("record", "forward", "head", "backward"), ("unload", "offload")):
        assert len({BAR_COLOURS[op] for op in row}) == len(row)
    assert len(set(STATE_COLOURS.values())) == len(STATE_COLOURS)

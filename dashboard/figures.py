"""The figure: built once with empty traces; an update sends what changed, in one message.

Note: what an update costs
    Assigning a property of a plotly trace validates every element and takes longer than everything else together (14.6
    ms for 850 bars against 2). `plotly_update` takes values as they are. So what changed since the last update is
    found here, and goes out in a single call; numbers as one-dimensional float32 arrays, which travel as binary. All
    bars of a plot are one trace, whose colours are numbers on a scale with steps.
Backgrounds are transparent, so that a page or notebook may be light or dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
from plotly.basedatatypes import Undefined

from dashboard.axis import Window
from dashboard.bars import Bars
from dashboard.colours import (
    BLUE,
    GREEN,
    GREY,
    GRID,
    INK,
    OP_COLOURS,
    ORANGE,
    PURPLE,
    SKY,
    STATE_COLOURS,
    VERMILLION,
    WAIT_COLOURS,
    YELLOW,
)
from dashboard.columns import Flag, Frame, make_frame
from dashboard.curves import Lines
from dashboard.history import History
from dashboard.layers import QUANTITIES, HeatMap
from dashboard.pieces import NO_LAYER, ROWS
from dashboard.places import (
    BOTTOM,
    BUFFERS,
    DEVICE,
    FLOPS,
    HEIGHT,
    HIDDEN,
    HOST,
    LAYERS,
    LEFT,
    LINK,
    LOSS,
    NO_GPU_TITLE,
    NO_MFU_TITLE,
    NORM,
    PLACES,
    RIGHT,
    TIMELINE,
    TOKENS,
    TOP,
    WAITED,
    WIDE,
    legend_text,
)
from dashboard.post_training import held_out_words, steps
from dashboard.words import LANE_WORDS

NORM_RIGHT, FLOPS_RIGHT = 13, 14  # y axes on the right of two plots
NAMES_AT, FLAGS_AT = -1.3, -0.78  # heights of step names and markers, above the rows of the timeline
CEILING, FLOOR = -1.65, len(ROWS) - 0.5  # edges of the timeline, whose rows count downwards
THINNEST = 1 / 1200  # of the width: about a pixel, so that a short load is seen at all
OUTLINED = 400  # most bars of a plot that are set off against each other
FADED = 0.13
GAP = " "  # between a row and its name
MOST_NAMES = 12  # of steps that stand side by side

Values = dict[str, Any]  # property path → value


@dataclass(frozen=True)
class CurveOf:
    """A curve: which plot, which column of the frame's lines, how it looks."""

    plot: int
    column: str
    name: str
    colour: str
    source: Literal["memory", "per_step", "held_out"] = "per_step"
    y_axis: int | None = None
    stacked: bool = False
    dashed: bool = False


@dataclass(frozen=True)
class LimitOf:
    """A dashed line across a plot, at the height of a limit of the frame."""

    plot: int
    limit: str
    name: str
    colour: str
    source: Literal["memory", "per_step"]


CURVES = (
    CurveOf(HIDDEN, "hidden: weights in", "weights in", SKY),
    CurveOf(HIDDEN, "hidden: gradients out", "gradients out", PURPLE),
    CurveOf(HIDDEN, "hidden: optimizer", "optimizer", GREEN),
    *(CurveOf(WAITED, f"waited: {cause}", cause, colour, stacked=True) for cause, colour in WAIT_COLOURS.items()),
    CurveOf(LINK, "link: weights in", "weights in", SKY),
    CurveOf(LINK, "link: gradients out", "gradients out", PURPLE),
    CurveOf(DEVICE, "arena", "arena", BLUE, "memory"),
    CurveOf(DEVICE, "this process", "this process (driver)", ORANGE, "memory"),
    CurveOf(DEVICE, "other processes", "other processes", GREY, "memory"),
    CurveOf(DEVICE, "reserved", "reserved by the allocator", YELLOW, "memory"),
    CurveOf(DEVICE, "card", "the whole card", GREY, "memory", dashed=True),
    CurveOf(HOST, "RSS", "process (RSS)", BLUE, "memory"),
    CurveOf(HOST, "pinned", "pinned", GREEN, "memory"),
    CurveOf(HOST, "free", "free", GREY, "memory"),
    CurveOf(NORM, "gradient norm", "gradient norm", BLUE),
    CurveOf(NORM, "learning rate", "learning rate", ORANGE, y_axis=NORM_RIGHT),
    CurveOf(LOSS, "loss", "loss", BLUE),
    CurveOf(LOSS, "held-out loss", "held-out loss", ORANGE, "held_out"),
    CurveOf(TOKENS, "tokens/s", "tokens per second", GREEN),
    CurveOf(FLOPS, "TFLOP/s", "model TFLOP/s", BLUE),
    CurveOf(FLOPS, "MFU", "MFU (%)", ORANGE, y_axis=FLOPS_RIGHT),
)
LIMITS = (
    LimitOf(LINK, "weights in", "measured, weights in", SKY, "per_step"),
    LimitOf(LINK, "gradients out", "measured, gradients out", PURPLE, "per_step"),
    LimitOf(DEVICE, "planned", "planned arena", BLUE, "memory"),
    LimitOf(DEVICE, "device", "limit of the device", VERMILLION, "memory"),
    LimitOf(HOST, "host", "all host memory", VERMILLION, "memory"),
)

WORK, WAITS, SEGMENTS, HEAT, RANGES, NAMES, FLAGS = range(7)  # traces, by their place in the figure
STEP_LINES, MARKER_LINES = (7, 8), (9, 10)  # in the timeline, in the buffers
FIRST_CURVE = 11
FIRST_LIMIT = FIRST_CURVE + len(CURVES)


def build_figure() -> go.Figure:
    """Return the figure with all its traces, empty."""
    bars = [
        _bar_trace(TIMELINE),
        _bar_trace(TIMELINE).update(marker_pattern={"shape": "/", "size": 5}),
        _bar_trace(BUFFERS),
    ]
    texts = [_text_trace(LAYERS), _text_trace(TIMELINE), _flag_trace()]
    lines = [_rule(plot, colour) for colour in (INK, VERMILLION) for plot in (TIMELINE, BUFFERS)]
    curves = [*map(_curve_trace, CURVES), *map(_limit_trace, LIMITS)]
    return go.Figure([*bars, _heat_trace(), *texts, *lines, *curves], _layout())


def update_figure(figure: go.Figure, frame: Frame, *, whole: bool = False) -> None:
    """Bring the figure to show `frame`; a FigureWidget sends the browser what changed, in one message.

    whole: show all of the frame's time, also where somebody has zoomed in; else a zoom stays.
    """
    drawn: dict[int, Values] = figure.__dict__.setdefault("_drawn", {})  # what this function last put in
    wanted = _wanted(frame)
    changed = {trace: _changes(drawn.setdefault(trace, {}), values) for trace, values in wanted.items()}
    changed = {trace: values for trace, values in changed.items() if values}
    relayout = _changes(drawn.setdefault(-1, {}), _axes(frame) | _span(figure, drawn[-1], frame, whole=whole))
    names = {name for values in changed.values() for name in values}
    restyle = {name: [values.get(name, Undefined) for values in changed.values()] for name in sorted(names)}
    if restyle or relayout:
        kept = deepcopy(relayout)  # plotly writes a zoom into the very list that it was given
        figure.plotly_update(restyle, kept, list(changed) if changed else [0])


def forget(figure: go.Figure) -> None:
    """Empty the figure, so that the next update sends everything: a page that was reloaded starts with none of it."""
    update_figure(figure, make_frame(History(), Window(0.0, 0.0)), whole=True)


def layer_at(frame: Frame, trace_index: int, point_index: int | Sequence[int]) -> int | None:
    """Return the layer of what was clicked: a bar, or a column of the heat map; None for anything else.

    point_index: as plotly counts; for the heat map (row, column).
    """
    if trace_index == HEAT:
        column = point_index if isinstance(point_index, int) else point_index[1]
        return frame.layers.layers[column] if column < len(frame.layers.layers) else None
    bars = {WORK: frame.work, WAITS: frame.waits, SEGMENTS: frame.buffers}.get(trace_index)
    if bars is None or not isinstance(point_index, int) or point_index >= len(bars):
        return None
    layer = int(bars.layer[point_index])
    return None if layer == NO_LAYER else layer


# ---- what changed ----


def _changes(drawn: Values, wanted: Values) -> Values:
    changed = {name: value for name, value in wanted.items() if name not in drawn or not _same(drawn[name], value)}
    drawn.update(changed)
    return changed


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        alike = left.dtype == right.dtype and left.shape == right.shape
        return alike and (bool((left == right).all()) if left.dtype == object else left.tobytes() == right.tobytes())
    return type(left) is type(right) and bool(left == right)


# ---- what a frame wants of each trace ----


def _wanted(frame: Frame) -> dict[int, Values]:
    lanes, buffers = np.array([*OP_COLOURS.values(), *WAIT_COLOURS.values()]), np.array([*STATE_COLOURS.values()])
    bars = {WORK: (frame.work, lanes), WAITS: (frame.waits, lanes), SEGMENTS: (frame.buffers, buffers)}
    segments_end = len(frame.buffer_names) - 0.5
    wanted = {trace: _bars(*drawn, frame) for trace, drawn in bars.items()}
    wanted |= {HEAT: _heat(frame.layers), RANGES: _ranges(frame.layers)}
    wanted |= {NAMES: _names(frame.steps), FLAGS: _flags(frame.markers, frame.width_ms)}
    for traces, flags in ((STEP_LINES, frame.steps), (MARKER_LINES, frame.markers)):
        wanted |= {traces[0]: _verticals(flags, FLOOR, CEILING), traces[1]: _verticals(flags, segments_end, -0.5)}
    return wanted | _curves(frame) | _limits(frame)


def _bars(bars: Bars, colours: npt.NDArray[np.str_], frame: Frame) -> Values:
    opacity = 1.0 if frame.follow is None else np.where(bars.layer == frame.follow, 1, FADED).astype(np.float32)
    return {
        "base": bars.start_ms,
        "x": np.maximum(bars.duration_ms, np.float32(frame.width_ms * THINNEST)),
        "y": bars.row,
        "marker.color": colours[bars.kind.astype(np.intp)].astype(object),
        "marker.opacity": opacity,
        "marker.line.width": 0.4 if len(bars) <= OUTLINED else 0,  # an outline would wash out thin bars
        "text": np.array(bars.label, object),
        "hovertext": np.array(bars.hover, object),
    }


def _heat(layers: HeatMap) -> Values:
    return {"x": layers.layers, "z": layers.shade, "customdata": layers.value}


def _ranges(layers: HeatMap) -> Values:
    """The least and most of each row, behind its end."""
    count = len(layers.ranges) if layers.layers else 0
    edge = layers.layers[-1] + 0.5 if layers.layers else 0.0
    rows = np.arange(count, dtype=np.float32)
    return {
        "x": np.full(count, edge, np.float32),
        "y": rows,
        "text": np.array([GAP + words for words in layers.ranges[:count]], object),
    }


def _names(flags: Sequence[Flag]) -> Values:
    shown = flags[:: max(1, -(-len(flags) // MOST_NAMES))]
    x = np.array([flag.time_ms for flag in shown], np.float32)
    return {"x": x, "y": np.full_like(x, NAMES_AT), "text": np.array([GAP + flag.text for flag in shown], object)}


def _flags(flags: Sequence[Flag], width_ms: float) -> Values:
    x = np.array([flag.time_ms for flag in flags], np.float32)
    sides = ["middle left" if flag.time_ms > 0.85 * width_ms else "middle right" for flag in flags]
    return {
        "x": x,
        "y": np.full_like(x, FLAGS_AT),
        "text": np.array([flag.text for flag in flags], object),
        "hovertext": np.array([flag.hover for flag in flags], object),
        "textposition": np.array(sides, object),
    }


def _verticals(flags: Sequence[Flag], bottom: float, top: float) -> Values:
    """A line from bottom to top at each flag, broken by NaN."""
    x = np.array([flag.time_ms for flag in flags], np.float32)
    y = np.array([bottom, top, np.nan], np.float32)
    return {"x": np.repeat(x, 3), "y": np.tile(y, len(flags))}


def _curves(frame: Frame) -> dict[int, Values]:
    """Curves; one that is nowhere above zero is left out (no GPU, no such wait), but a loss may be below."""
    wanted = {}
    for trace, curve in enumerate(CURVES, FIRST_CURVE):
        lines = getattr(frame, curve.source)
        y = lines.y[curve.column]
        seen = np.isfinite(y) if curve.plot == LOSS else y > 0
        wanted[trace] = {"x": lines.x, "y": y, "visible": bool(seen.any())}
        if curve.source == "held_out":
            wanted[trace]["hovertext"] = _held_out_words(lines)
    return wanted


def _held_out_words(lines: Lines) -> npt.NDArray[np.object_]:
    rows = zip(lines.x, *lines.y.values(), strict=True)
    words = [f"after {steps(int(done))}: {held_out_words(loss, perplexity)}" for done, loss, perplexity in rows]
    return np.array(words, object)


def _limits(frame: Frame) -> dict[int, Values]:
    wanted = {}
    for trace, limit in enumerate(LIMITS, FIRST_LIMIT):
        x = getattr(frame, limit.source).x
        value = None if limit.limit == "device" and not frame.has_gpu else frame.limits.get(limit.limit)
        y = np.full(2, np.nan if value is None else value, np.float32)
        wanted[trace] = {"x": x[[0, -1]] if len(x) else x, "y": y[: len(x)], "visible": value is not None}
    return wanted


def _axes(frame: Frame) -> Values:
    rows, layers = len(frame.buffer_names), frame.layers.layers
    per_step = frame.per_step.x
    steps = max(1, round(float(per_step[-1] - per_step[0]) / 6)) if len(per_step) else 1
    return {
        "yaxis2.range": [max(rows, 1) - 0.5, -0.5],
        "yaxis2.tickvals": list(range(rows)),
        "yaxis2.ticktext": [name + GAP for name in frame.buffer_names],
        "xaxis3.range": [layers[0] - 0.5, layers[-1] + 0.5] if layers else [-0.5, 0.5],
        **{f"xaxis{plot}.dtick": steps for plot in _PER_STEP},  # x counts steps: no ticks between them
        **_words(frame),
    }


def _words(frame: Frame) -> Values:
    """Titles and legends say no more than there is to see."""
    mfu = bool((frame.per_step.y["MFU"] > 0).any())
    wanted: Values = {f"yaxis{FLOPS_RIGHT}.visible": mfu}
    held_out = bool(np.isfinite(frame.held_out.y["held-out loss"]).any())
    less = (
        (DEVICE, frame.has_gpu, NO_GPU_TITLE),
        (FLOPS, mfu, NO_MFU_TITLE),
        (LOSS, held_out, PLACES[LOSS].title),
    )
    for plot, known, title in less:
        place = PLACES[plot]
        (legend,) = place.legend
        wanted[f"annotations[{plot - 1}].text"] = place.title if known else title
        wanted[f"annotations[{_LEGEND[plot]}].text"] = legend_text(legend if known else legend[:1], place.glyph)
    return wanted


_LEGEND = {  # number of the annotation that is the first line of a plot's legend: titles come before all legends
    plot: len(PLACES) + sum(len(place.legend) for place in [*PLACES.values()][:before])
    for before, plot in enumerate(PLACES)
}


def _span(figure: go.Figure, drawn: Values, frame: Frame, *, whole: bool) -> Values:
    """The time that is to be seen; nothing where somebody has zoomed in and wants to stay there."""
    shown, autorange = figure.layout.xaxis.range, figure.layout.xaxis.autorange
    zoomed = shown is not None and drawn.get("xaxis.range") not in (None, list(shown))
    if zoomed and not autorange and not whole:
        return {}
    if zoomed or autorange:  # by a double click, for one
        drawn.pop("xaxis.range", None)
        drawn.pop("xaxis.autorange", None)
    end_ms = frame.width_ms
    if whole and shown is not None and list(shown) == [0, end_ms]:  # the page may show a zoom that never came here
        end_ms = math.nextafter(end_ms, math.inf)  # plotly sends nothing that it takes to be there
    return {"xaxis.range": [0, end_ms], "xaxis.autorange": False}


# ---- empty traces ----

_PER_STEP = sorted({curve.plot for curve in CURVES if curve.source == "per_step"})
_PLOT_AXES = {plot: {"xaxis": f"x{plot}", "yaxis": f"y{plot}"} for plot in PLACES} | {
    TIMELINE: {"xaxis": "x", "yaxis": "y"}
}


def _bar_trace(plot: int) -> go.Bar:
    """Bars get their colours by name: numbers on a colour scale make plotly.js complain of every label."""
    return go.Bar(
        orientation="h",
        width=0.8,
        marker={"line": {"color": "rgba(255,255,255,0.5)"}},
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        hovertemplate="%{hovertext}<extra></extra>",
        **_PLOT_AXES[plot],
    )


def _heat_trace() -> go.Heatmap:
    return go.Heatmap(
        y=list(range(len(QUANTITIES))),
        text=[[name] for name in QUANTITIES.values()],
        colorscale=[[0, "rgba(0,114,178,0.06)"], [1, "rgba(0,114,178,1)"]],
        zmin=0,
        zmax=100,
        showscale=False,
        hoverongaps=False,
        xgap=0.5,
        ygap=3,
        hovertemplate="layer %{x}, %{y}: %{customdata}<extra></extra>",
        **_PLOT_AXES[LAYERS],
    )


def _text_trace(plot: int) -> go.Scatter:
    place = "middle right"
    axes = _PLOT_AXES[plot]
    return go.Scatter(
        mode="text", textposition=place, cliponaxis=False, hoverinfo="skip", textfont={"size": 11}, **axes
    )


def _flag_trace() -> go.Scatter:
    return go.Scatter(
        mode="markers+text",
        marker={"symbol": "triangle-down", "size": 9, "color": VERMILLION},
        textfont={"size": 11},
        hovertemplate="%{hovertext}<extra></extra>",
        **_PLOT_AXES[TIMELINE],
    )


def _rule(plot: int, colour: str) -> go.Scatter:
    return go.Scatter(mode="lines", line={"color": colour, "width": 1}, hoverinfo="skip", **_PLOT_AXES[plot])


def _curve_trace(curve: CurveOf) -> go.Scatter:
    axes = _PLOT_AXES[curve.plot] | ({"yaxis": f"y{curve.y_axis}"} if curve.y_axis else {})
    return go.Scatter(
        name=curve.name,
        mode="lines" if curve.source == "memory" else "lines+markers",  # a single step must show
        line={"color": curve.colour, "width": 2, "dash": _dash(curve)},
        marker={"size": 7 if curve.source == "held_out" else 3},  # looks are few
        stackgroup="all" if curve.stacked else None,
        visible=False,
        hovertemplate=f"%{{{'hovertext' if curve.source == 'held_out' else 'y:.4g'}}}<extra>{curve.name}</extra>",
        **axes,
    )


def _dash(curve: CurveOf) -> str:
    """Limits are dashed; dots go with an axis on the right, and let a curve beneath them show."""
    return "dash" if curve.dashed else "dot" if curve.y_axis else "solid"


def _limit_trace(limit: LimitOf) -> go.Scatter:
    return go.Scatter(
        name=limit.name,
        mode="lines",
        line={"color": limit.colour, "width": 1.5, "dash": "dash"},
        visible=False,
        hovertemplate=f"%{{y:.4g}}<extra>{limit.name}</extra>",
        **_PLOT_AXES[limit.plot],
    )


# ---- layout ----


def _layout() -> go.Layout:
    layout = go.Layout(
        height=HEIGHT,
        autosize=True,
        barmode="overlay",
        showlegend=False,
        hovermode="closest",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 12, "color": INK},
        margin={"l": LEFT, "r": RIGHT, "t": TOP, "b": BOTTOM, "autoexpand": False},
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": INK},
        uniformtext={"minsize": 8, "mode": "hide"},
        annotations=[*_titles(), *_legends()],
    )
    for plot, place in PLACES.items():
        layout[_axis("x", plot)] = {
            "domain": place.x,
            "anchor": f"y{_suffix(plot)}",
            "gridcolor": GRID,
            "zeroline": False,
        }
        layout[_axis("y", plot)] = {
            "domain": place.y,
            "anchor": f"x{_suffix(plot)}",
            "gridcolor": GRID,
            "zeroline": False,
        }
        layout[_axis("y", plot)].update(ticksuffix=" ", nticks=5)
    for plot, right in ((NORM, NORM_RIGHT), (FLOPS, FLOPS_RIGHT)):
        layout[_axis("y", right)] = {"overlaying": f"y{plot}", "side": "right", "anchor": f"x{plot}", "showgrid": False}
        layout[_axis("y", right)].update(zeroline=False, rangemode="tozero", tickmode="auto", nticks=4, tickprefix=" ")
    return _named_rows(layout)


def _named_rows(layout: go.Layout) -> go.Layout:
    rows = [LANE_WORDS[row] + GAP for row in ROWS]
    quantities = [name + GAP for name in QUANTITIES.values()]
    layout[_axis("y", NORM_RIGHT)].tickformat = "~e"
    layout.yaxis.update(range=[FLOOR, CEILING], tickvals=list(range(len(rows))), ticktext=rows)
    layout.yaxis3.update(
        range=[len(quantities) - 0.5, -0.5], tickvals=list(range(len(quantities))), ticktext=quantities
    )
    layout.yaxis3.showgrid = layout.xaxis3.showgrid = False
    layout.xaxis2.matches = "x"
    layout.yaxis.fixedrange = layout.yaxis2.fixedrange = True  # zooming is choosing a stretch of time
    layout[_axis("x", DEVICE)].ticksuffix = layout[_axis("x", HOST)].ticksuffix = " s"
    for plot in (LINK, DEVICE, HOST, TOKENS, FLOPS, NORM, WAITED):
        layout[_axis("y", plot)].rangemode = "tozero"
    layout[_axis("y", HIDDEN)].range = [0, 104]
    return layout


def _titles() -> list[Values]:
    return [
        _above(plot, place.title, 4 + 17 * len(place.legend), 14 if plot in WIDE else 13)
        for plot, place in PLACES.items()
    ]


def _legends() -> list[Values]:
    return [
        _above(
            plot, legend_text(entries, place.glyph), 3 + 17 * (len(place.legend) - 1 - line), 11 if plot in WIDE else 10
        )
        for plot, place in PLACES.items()
        for line, entries in enumerate(place.legend)
    ]


def _above(plot: int, text: str, shift_px: int, size: int) -> Values:
    place = PLACES[plot]
    where = {"xref": "paper", "yref": "paper", "x": place.left, "y": place.y[1], "yshift": shift_px}
    return {**where, "text": text, "showarrow": False, "xanchor": "left", "yanchor": "bottom", "font": {"size": size}}


def _suffix(plot: int) -> str:
    return "" if plot == 1 else str(plot)


def _axis(letter: str, plot: int) -> str:
    return f"{letter}axis{_suffix(plot)}"

"""The figure: built once with empty traces, then only its data are replaced.

Colours are Okabe and Ito's (2008, "Color Universal Design"), told apart with the common colour blindnesses. One
colour means one thing in all plots: sky blue is loading, blue is forward or in use, purple is leaving for the host.
Backgrounds are transparent, so that a page or notebook may be light or dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dashboard.bars import Bars, Column, no_bars
from dashboard.columns import ROWS, Flag, Frame, Lines
from dashboard.words import STATE_WORDS

SKY, BLUE, PURPLE, ORANGE = "#56B4E9", "#0072B2", "#CC79A7", "#E69F00"
GREEN, YELLOW, VERMILLION, GREY, PALE = "#009E73", "#F0E442", "#D55E00", "#999999", "rgba(128,128,128,0.18)"
GRID = "rgba(128,128,128,0.22)"
INK = "#777777"  # readable on white and on black, for whoever does not set a font colour

BAR_COLOURS = {
    "load": SKY,
    "record": GREY,
    "forward": BLUE,
    "head": YELLOW,
    "norm": GREY,
    "backward": ORANGE,
    "unload": PURPLE,
    "update": GREEN,
    "offload": GREY,
    "fetch": GREY,
    "wait": VERMILLION,
}
STATE_COLOURS: dict[str, str] = {
    "free": PALE,
    "loading": SKY,
    "ready": YELLOW,
    "in_use": BLUE,
    "draining": PURPLE,
}
DEVICE_MEMORY = {"arena": BLUE, "allocated": ORANGE, "reserved": YELLOW, "whole card": GREY}
HOST_MEMORY = {"process (RSS)": BLUE, "pinned": GREEN}
HIDDEN = {"weights in": SKY, "gradients out": PURPLE, "optimizer": GREEN}
WAITED = {
    "weights": SKY,
    "gradient buffer": PURPLE,
    "saved inputs": YELLOW,
    "optimizer": GREEN,
    "other": GREY,
}
ROW_NAMES = {"h2d": "weights in", "compute": "compute", "d2h": "gradients out", "host": "optimizer", "wait": "waiting"}

TIMELINE, SLOTS, DEVICE, HOST, HIDDEN_SHARE, LOSS, TOKENS, WAITED_SHARE = range(1, 9)  # plots, as plotly counts them
TITLES = (
    "What each lane does (ms; numbers are layers)",
    "Who holds the device buffers (ms; numbers are layers)",
    "Device memory (GB)",
    "Host memory (GB)",
    "Hidden under compute (% per step)",
    "Loss",
    "Tokens per second",
    "Step time compute waited (%)",
)
PLACES = {
    TIMELINE: (1, 1),
    SLOTS: (2, 1),
    DEVICE: (3, 1),
    HOST: (3, 2),
    HIDDEN_SHARE: (3, 3),
    LOSS: (4, 1),
    TOKENS: (4, 2),
    WAITED_SHARE: (4, 3),
}

CURVES = {
    DEVICE: DEVICE_MEMORY,
    HOST: HOST_MEMORY,
    HIDDEN_SHARE: HIDDEN,
    LOSS: {"loss": BLUE},
    TOKENS: {"tokens/s": GREEN},
    WAITED_SHARE: WAITED,
}

OUTLINED = 150  # most bars of one colour that are set off against each other
STEP_LINES, STEP_NAMES, MARKERS = "step lines", "step names", "markers"  # further traces of the timeline
TOP, BOTTOM = -0.5, len(ROWS) - 0.5  # edges of the timeline, whose rows count downwards
RIGHT = 0.01  # of the width: between a wide plot and its legend

Key = tuple[int, str]  # plot and name of a trace
KEYS: tuple[Key, ...] = (  # in the order in which the figure holds its traces
    *((TIMELINE, name) for name in (*BAR_COLOURS, STEP_LINES, STEP_NAMES, MARKERS)),
    *((SLOTS, state) for state in STATE_COLOURS),
    *((plot, name) for plot, colours in CURVES.items() for name in colours),
)


def build_figure() -> go.Figure:
    """Return the figure with all its traces, empty."""
    figure = make_subplots(
        rows=4,
        cols=3,
        specs=[[{"colspan": 3}, None, None]] * 2 + [[{}, {}, {}]] * 2,
        row_heights=[0.33, 0.23, 0.22, 0.22],
        vertical_spacing=0.09,
        horizontal_spacing=0.06,
        subplot_titles=TITLES,
    )
    for plot, name in KEYS:
        row, column = PLACES[plot]
        trace = _new_trace((plot, name)).update(legend=_numbered("legend", plot))
        figure.add_trace(trace, row=row, col=column)
    _style(figure)
    return figure


def update_figure(figure: go.Figure, frame: Frame) -> None:
    """Replace the data of every trace; a FigureWidget sends them to the browser in one message."""
    traces = dict(zip(KEYS, figure.data, strict=True))
    with figure.batch_update():
        for op in BAR_COLOURS:
            _set_bars(traces[TIMELINE, op], frame.bars.get(op) or no_bars())
        for state in STATE_COLOURS:
            _set_bars(traces[SLOTS, state], frame.slots.get(state) or no_bars())
        _set_steps(traces[TIMELINE, STEP_LINES], traces[TIMELINE, STEP_NAMES], frame.steps)
        _set_markers(traces[TIMELINE, MARKERS], frame.markers)
        for plot, lines in _lines(frame).items():
            for name in CURVES[plot]:
                _set_line(traces[plot, name], lines.x, lines.y[name])
        _set_axes(figure, frame)


def _new_trace(key: Key) -> Any:
    plot, name = key
    if key == (TIMELINE, STEP_LINES):
        return go.Scatter(mode="lines", line={"color": INK, "width": 1}, hoverinfo="skip", showlegend=False)
    if key == (TIMELINE, STEP_NAMES):
        return go.Scatter(mode="text", textposition="top right", cliponaxis=False, hoverinfo="skip", showlegend=False)
    if key == (TIMELINE, MARKERS):
        return _marker_trace()
    if plot == TIMELINE:
        return _bar_trace(name, BAR_COLOURS[name])
    if plot == SLOTS:
        return _bar_trace(STATE_WORDS[name], STATE_COLOURS[name])
    return _line_trace(plot, name, CURVES[plot][name])


def _marker_trace() -> go.Scatter:
    return go.Scatter(
        name="knob turned",
        mode="markers",
        marker={"symbol": "diamond", "size": 11, "color": VERMILLION},
        hovertemplate="%{text}<extra></extra>",
        cliponaxis=False,
    )


def _bar_trace(name: str, colour: str) -> go.Bar:
    return go.Bar(
        name=name,
        orientation="h",
        width=0.8,
        marker={"color": colour, "line": {"color": "rgba(255,255,255,0.5)"}},
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        hovertemplate="%{hovertext}<extra></extra>",
    )


def _line_trace(plot: int, name: str, colour: str) -> go.Scatter:
    points = plot in (HIDDEN_SHARE, LOSS, TOKENS)  # a single step must show
    return go.Scatter(
        name=name,
        mode="lines+markers" if points else "lines",
        line={"color": colour, "width": 2},
        marker={"size": 4},
        stackgroup="all" if plot == WAITED_SHARE else None,
        hovertemplate=f"%{{y:.4g}}<extra>{name}</extra>",
    )


def _set_bars(trace: Any, bars: Bars) -> None:
    trace.base, trace.x, trace.y = bars.start_ms, bars.duration_ms, bars.row
    trace.text, trace.hovertext = bars.label, bars.hover
    trace.marker.line.width = 0.4 if len(bars.row) <= OUTLINED else 0  # an outline would wash out thin bars


def _set_steps(line_trace: Any, name_trace: Any, flags: Sequence[Flag]) -> None:
    """Draw a line from bottom to top where each step begins, broken by NaN, with its name on top.

    Two traces, because plotly 7.1 leaves out some texts of a line that is broken.
    """
    starts = np.array([flag.time_ms for flag in flags], np.float32)
    top, bottom = np.full_like(starts, TOP), np.full_like(starts, BOTTOM)
    gap = np.full_like(starts, np.nan)
    line_trace.update(x=np.repeat(starts, 3), y=np.stack([bottom, top, gap], axis=1).ravel())
    name_trace.update(x=starts, y=top, text=[flag.text for flag in flags])


def _set_markers(trace: Any, flags: Sequence[Flag]) -> None:
    x = np.array([flag.time_ms for flag in flags], np.float32)
    trace.update(x=x, y=np.full_like(x, TOP), text=[flag.text for flag in flags])


def _set_line(trace: Any, x: Column, y: Column) -> None:
    """Draw a curve; one that is nowhere above zero is left out, with its legend entry (no GPU, no such wait)."""
    trace.x, trace.y, trace.visible = x, y, bool(np.nan_to_num(y).any())


def _lines(frame: Frame) -> dict[int, Lines]:
    return {
        DEVICE: frame.memory,
        HOST: frame.memory,
        HIDDEN_SHARE: frame.hidden,
        LOSS: frame.progress,
        TOKENS: frame.progress,
        WAITED_SHARE: frame.waited,
    }


def _set_axes(figure: go.Figure, frame: Frame) -> None:
    figure.layout.xaxis.range = [0, frame.width_ms]
    rows = len(frame.slot_names)
    figure.layout.yaxis2.update(range=[rows - 0.5, -0.5], tickvals=list(range(rows)), ticktext=frame.slot_names)
    for plot, lines in _lines(frame).items():
        if plot not in (DEVICE, HOST):  # x counts steps: no ticks between them
            steps = lines.x[-1] - lines.x[0] if len(lines.x) else 0
            figure.layout[_numbered("xaxis", plot)].dtick = max(1, round(steps / 6))


def _style(figure: go.Figure) -> None:
    figure.update_layout(
        height=1050,
        autosize=True,
        barmode="overlay",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 12, "color": INK},
        margin={"l": 100, "r": 20, "t": 60, "b": 40},
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": INK},
        uniformtext={"minsize": 8, "mode": "hide"},
        uirevision="keep what the reader zoomed to",
    )
    figure.update_xaxes(gridcolor=GRID, zeroline=False)
    figure.update_yaxes(gridcolor=GRID, zeroline=False, ticksuffix=" ")
    names = [ROW_NAMES[row] for row in ROWS]
    figure.layout.yaxis.update(range=[BOTTOM, TOP], tickvals=list(range(len(ROWS))), ticktext=names)
    figure.layout.xaxis2.matches = "x"
    for plot in (DEVICE, HOST, TOKENS, WAITED_SHARE):
        figure.layout[_numbered("yaxis", plot)].rangemode = "tozero"
    figure.layout[_numbered("yaxis", HIDDEN_SHARE)].range = [0, 104]
    for plot in PLACES:
        _place_title_and_legend(figure, plot)


def _place_title_and_legend(figure: go.Figure, plot: int) -> None:
    """Put a plot's title above its left edge, its legend to the right (wide plots) or below the title (narrow ones).

    Beside the title a wide plot's legend would wrap over it on a narrow page.
    """
    left, right = figure.layout[_numbered("xaxis", plot)].domain
    top = figure.layout[_numbered("yaxis", plot)].domain[1]
    wide = plot in (TIMELINE, SLOTS)
    title = {"x": left, "xanchor": "left", "yshift": 20 if wide else 18, "font": {"size": 14}}
    figure.layout.annotations[plot - 1].update(title)
    figure.layout[_numbered("legend", plot)] = {
        "orientation": "v" if wide else "h",
        "x": right + RIGHT if wide else left,
        "xanchor": "left",
        "y": top,
        "yanchor": "top" if wide else "bottom",
        "bgcolor": "rgba(0,0,0,0)",
    }
    if len(CURVES.get(plot, HIDDEN)) == 1:
        figure.update_traces(showlegend=False, selector={"legend": _numbered("legend", plot)})


def _numbered(name: str, plot: int) -> str:
    return name if plot == 1 else f"{name}{plot}"

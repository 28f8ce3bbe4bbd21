"""The comparison as a picture: tokens per second with their range over steps, and all loss curves on one chart."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from benchmarks.cpu import measured

# Okabe and Ito's, which also the colour-blind can tell apart. Curves that agree lie on each other: the first is widest.
COLOURS = ["#0072B2", "#56B4E9", "#444444", "#999999", "#E69F00", "#009E73"]
WIDTH, HEIGHT = 1100, 420
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


def figure(found: Mapping[str, Any]) -> go.Figure:
    """Left a group of bars for each dtype, right the curves of the first."""
    dtypes: Mapping[str, Any] = found["dtypes"]
    first = next(iter(dtypes))
    titles = ("tokens per second (range: slowest and fastest step)", f"loss by step, {first}")
    drawn = make_subplots(1, 2, subplot_titles=titles, horizontal_spacing=0.08)
    names = dict.fromkeys(name for result in dtypes.values() for name in measured(result))
    widths = [1.5 + 2.5 * below for below in range(len(names))]
    for name, colour, width in zip(names, COLOURS, reversed(widths), strict=False):
        drawn.add_trace(_bars(found, name, colour), 1, 1)
        curve = measured(dtypes[first]).get(name)
        if curve is not None:
            drawn.add_trace(_curve(name, curve["losses"], colour, width), 1, 2)
    drawn.update_layout(
        template="plotly_white", width=WIDTH, height=HEIGHT, margin={"t": 40, "b": 70, "l": 50, "r": 20}
    )
    drawn.update_layout(legend={"orientation": "h", "y": -0.1})
    return drawn


def _bars(found: Mapping[str, Any], name: str, colour: str) -> go.Bar:
    tokens = found["settings"]["batch"] * found["settings"]["sequence"]
    each = {d: f for d, result in found["dtypes"].items() if (f := measured(result).get(name)) is not None}
    rates = [[tokens / second for turn in figures["turns_s"] for second in turn] for figures in each.values()]
    middle = [statistics.median(some) for some in rates]
    above = [max(some) - centre for some, centre in zip(rates, middle, strict=True)]
    below = [centre - min(some) for some, centre in zip(rates, middle, strict=True)]
    error = {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 1.2}
    return go.Bar(x=[*each], y=middle, name=name, marker={"color": colour}, error_y=error, legendgroup=name)


def _curve(name: str, losses: list[float], colour: str, width: float) -> go.Scatter:
    steps = [*range(1, len(losses) + 1)]
    line = {"color": colour, "width": width}
    return go.Scatter(x=steps, y=losses, name=name, mode="lines", line=line, legendgroup=name, showlegend=False)


def chromium() -> str | None:
    """Where a browser is that can draw it; None: nowhere."""
    return next(filter(None, map(shutil.which, CHROMIUM)), None)


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Write the picture as SVG. RuntimeError without Chromium, which plotly draws in."""
    browser = chromium()
    if browser is None:
        raise RuntimeError(f"{path.name} was not drawn: it needs Chromium, for instance by `apt-get install chromium`")
    address = _in_browser(browser, figure(found).to_html(include_plotlyjs=True))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(unquote(address.split(",", 1)[1]))


def _in_browser(browser: str, page: str) -> str:
    """The drawn figure as a data address."""
    from playwright.sync_api import sync_playwright

    export = "element => Plotly.toImage(element, {format: 'svg'})"
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"])
        try:
            shown = running.new_page()
            shown.set_content(page)
            return str(shown.eval_on_selector(".plotly-graph-div", export))
        finally:
            running.close()

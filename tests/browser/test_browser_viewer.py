"""The page of `megatrain dashboard` in a real browser: it needs no network, follows light and dark, and ends."""

from __future__ import annotations

from collections.abc import Iterator

import nbformat
import pytest
from pages import Watch
from playwright.sync_api import Browser, Page
from servers import wait_until
from viewers import RunningViewer, a_run, viewing

# What a dashboard is made of. The label says what the browser has answered.
CELL = """
import threading, time
import ipywidgets as widgets, plotly.graph_objects as go
from dashboard.pulse import Pulse
pulse, label = Pulse(), widgets.Label("nothing seen")
button = widgets.Button(description="press", icon="play")
button.on_click(lambda _: setattr(button, "description", "pressed"))
def draw():
    while pulse.seen < 3:
        time.sleep(0.1)
        pulse.sent += 1
    label.value = "three seen"
threading.Thread(target=draw, daemon=True).start()
widgets.VBox([pulse, label, button, go.FigureWidget(go.Scatter(y=[1, 3, 2]))])
"""


@pytest.fixture(scope="module")
def viewer(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningViewer]:
    folder = tmp_path_factory.mktemp("viewer")
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)]), folder / "stand_in.ipynb")
    with viewing(a_run(folder / "run"), folder, folder / "stand_in.ipynb") as running:
        yield running


@pytest.fixture(params=["light", "dark"])
def page(request: pytest.FixtureRequest, chromium: Browser, viewer: RunningViewer) -> Iterator[tuple[Page, str]]:
    with chromium.new_context(color_scheme=request.param) as context:
        page = context.new_page()
        watch = Watch(page)
        page.goto(viewer.url, wait_until="commit")
        page.wait_for_selector(".js-plotly-plot", timeout=120_000)
        yield page, request.param
        assert not watch.problems, "\n".join(watch.problems)
        assert not watch.foreign, "\n".join(watch.foreign)


def test_widgets_live_without_a_network_in_the_colours_asked_for(page: tuple[Page, str], viewer: RunningViewer) -> None:
    shown, scheme = page
    shown.get_by_text("three seen").wait_for()
    shown.get_by_role("button", name="press").click()
    shown.get_by_role("button", name="pressed").wait_for()
    assert "FigureWidget" not in shown.content()  # the notebook's source
    background = shown.evaluate("getComputedStyle(document.body).backgroundColor")
    assert sum(map(int, background.removeprefix("rgb(").removesuffix(")").split(","))) in (
        range(3 * 64) if scheme == "dark" else range(3 * 192, 3 * 255 + 1)
    )


def test_a_page_that_is_closed_takes_its_kernel_with_it(page: tuple[Page, str], viewer: RunningViewer) -> None:
    before = len(viewer.kernels())
    assert before > 0
    page[0].close(run_before_unload=True)
    wait_until(lambda: len(viewer.kernels()) == before - 1, "the kernel ends")

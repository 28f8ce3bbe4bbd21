"""The dashboard in real browsers: a run is watched and steered, and found again after reloads and restarts."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from dashboards import DashboardPage
from pages import NotebookPage, Watch
from playwright.sync_api import Browser
from servers import LabServer, wait_until
from slow_runs import LAYERS, slow_run

from megatrain import TrainingRun

HERE = Path(__file__).parent
IMPORTS = f"import sys\nsys.path += {[str(HERE.parent), str(HERE)]}\nfrom dashboard import Dashboard"
START = "from slow_runs import slow_run\nrun = slow_run({folder!r}).start()"
SHOW = "shown = Dashboard(run)\nshown"
ATTACH = "shown = Dashboard.attach({folder!r})\nshown"
BUSY = "import time\nwhile not run.status().position or time.sleep(0.1):\n    pass"


@pytest.fixture
def board(notebook: NotebookPage) -> DashboardPage:
    return DashboardPage(notebook.page)


@pytest.fixture(scope="module")
def run(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingRun]:
    """A run that goes on through the tests of this module, whoever watches."""
    run = slow_run(tmp_path_factory.mktemp("runs") / "run").start()
    wait_until(lambda: run.steps_done >= 2, "two steps are done")
    yield run
    run.stop()
    run.wait(60)


def test_a_run_is_watched_and_steered(
    notebook: NotebookPage, board: DashboardPage, server: LabServer, tmp_path: Path, chromium: Browser
) -> None:
    folder = tmp_path / "run"
    name = server.write_notebook("steered.ipynb", IMPORTS, START.format(folder=str(folder)), SHOW)
    notebook.open_notebook(server.lab_url(name))
    notebook.run_all()
    board.page.get_by_text("The run is being prepared").wait_for()
    notebook.screenshot("preparing")
    grows(notebook, board)
    turned_by_keyboard(notebook, board)
    stepped(notebook, board)
    looked_back(notebook, board)
    files_written(notebook, board, folder, chromium)
    board.press("Stop")
    notebook.wait_for(lambda: board.fact("state") == "stopped", "the state is shown")
    notebook.screenshot("stopped")
    assert notebook.kernel_value("(run.state.value, shown.error)") == "('stopped', None)"


def grows(notebook: NotebookPage, board: DashboardPage) -> None:
    notebook.wait_for(lambda: board.bars() > 10, "the first bars are drawn")
    before = board.bars()
    notebook.wait_for(lambda: board.bars() > before + 10, "more bars come")
    done = int(board.fact("steps done").split()[0])
    notebook.wait_for(lambda: int(board.fact("steps done").split()[0]) > done, "steps are counted")


def turned_by_keyboard(notebook: NotebookPage, board: DashboardPage) -> None:
    assert board.rows("weights") == 2
    board.turn("prefetch depth")
    notebook.wait_for(lambda: board.answers()[0].startswith("✓ prefetch depth 2"), "it took effect")
    board.press("Pause")  # so that what is shown does not pass by
    notebook.wait_for(lambda: board.rows("weights") == 3, "a third buffer is in the picture")
    notebook.wait_for(lambda: "depth 1→2" in board.flags(), "a marker says since when")
    notebook.screenshot("depth_2")
    board.turn("prefetch depth")
    board.turn("prefetch depth")
    notebook.wait_for(lambda: "leaves" in board.answers()[0] or "GB" in board.answers()[0], "a refusal says why")
    notebook.screenshot("refused")
    handle = board.slider("prefetch depth")
    notebook.wait_for(lambda: handle.get_attribute("aria-valuetext") == "3", "the slider says what is so")


def stepped(notebook: NotebookPage, board: DashboardPage) -> None:
    notebook.wait_for(lambda: board.fact("state") == "paused", "it is held")
    run_to(notebook, board, 0, "forward")
    for layer in (1, 2, 3):
        board.press("Step one layer")
        notebook.wait_for(lambda at=layer: f"forward of layer {at}" in board.held(), f"layer {layer} is next")
    held = board.held()
    assert "Layer 2, which ran last (forward)" in held
    assert "forward layer 3, micro-batch 0" in held.split("What comes next")[1]
    notebook.screenshot("stepped")
    run_to(notebook, board, 2, "backward")
    board.enter("layer", 99)
    board.press("Run to")
    notebook.wait_for(lambda: f"layers are 0 to {LAYERS - 1}" in board.answers()[0], "a refusal says why")
    notebook.screenshot("held")


def run_to(notebook: NotebookPage, board: DashboardPage, layer: int, phase: str) -> None:
    board.enter("layer", layer)
    board.page.get_by_role("combobox").first.select_option(phase)
    board.press("Run to")
    notebook.wait_for(lambda: board.fact("at") == f"{phase} of layer {layer}", "it is held there")
    notebook.wait_for(lambda: f"{phase} of layer {layer}" in board.held(), "the place is shown")


def looked_back(notebook: NotebookPage, board: DashboardPage) -> None:
    """While it is held, so that what is clicked stays where it is."""
    board.page.locator(".js-plotly-plot").scroll_into_view_if_needed()
    board.click_bar(2)
    notebook.wait_for(lambda: board.opacities() == {0.13, 1.0}, "other layers fade")
    assert board.page.get_by_label("follow layer", exact=True).input_value() == "2"
    notebook.screenshot("followed")
    board.enter("follow layer", -1)
    notebook.wait_for(lambda: board.opacities() == set(), "nothing is faded")
    board.press("Resume")
    notebook.wait_for(lambda: board.fact("state") == "running", "it runs on")
    before = board.width_ms()
    board.press("Earlier")
    notebook.wait_for(lambda: board.width_ms() != before and board.bars() > 10, "two earlier steps are shown")
    notebook.screenshot("earlier")
    board.press("Live")


def files_written(notebook: NotebookPage, board: DashboardPage, folder: Path, chromium: Browser) -> None:
    board.press("Export trace")
    notebook.wait_for(lambda: "ui.perfetto.dev" in board.answers()[0], "it says where")
    with gzip.open(board.answers()[0].split(": ")[1]) as file:
        assert json.load(file)["traceEvents"]
    board.press("Save page")
    notebook.wait_for(lambda: "opens in any browser" in board.answers()[0], "it says where")
    with chromium.new_context() as context:
        page = context.new_page()
        watch = Watch(page)
        page.goto((folder / "dashboard.html").as_uri())
        page.wait_for_selector(".js-plotly-plot .bars .point")
        assert not watch.problems
        assert not watch.foreign

"""The dashboard in real browsers: a run is watched and steered, and found again after reloads and restarts."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from dashboards import DashboardPage
from pages import NotebookPage, Watch
from playwright.sync_api import Browser
from servers import LabServer, wait_until
from slow_runs import LAYERS, PROMPT, end_run, looking_run, slow_run
from viewers import viewing

from megatrain import TrainingRun
from megatrain.report import RunState

HERE = Path(__file__).parent
IMPORTS = f"import sys\nsys.path += {[str(HERE.parent), str(HERE)]}\nfrom dashboard import Dashboard"
START = "from slow_runs import slow_run\nrun = slow_run({folder!r}).start()"
SHOW = "shown = Dashboard(run)\nshown"
ATTACH = "shown = Dashboard.attach({folder!r})\nshown"
BUSY = "import time\nfrom pathlib import Path\nwhile not Path({flag!r}).exists():\n    time.sleep(0.1)"


@pytest.fixture
def board(notebook: NotebookPage) -> DashboardPage:
    return DashboardPage(notebook.page)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """For a run that the test starts; it ends with the test, also with one that failed."""
    yield tmp_path / "run"
    end_run(tmp_path / "run")


@pytest.fixture(scope="module")
def run(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingRun]:
    """A run that goes on through the tests of this module, whoever watches."""
    run = slow_run(tmp_path_factory.mktemp("runs") / "run").start()
    wait_until(lambda: run.steps_done >= 2, "two steps are done")
    yield run
    run.stop()
    run.wait(60)


def test_a_run_is_watched_and_steered(
    notebook: NotebookPage, board: DashboardPage, server: LabServer, folder: Path, chromium: Browser
) -> None:
    name = server.write_notebook("steered.ipynb", IMPORTS, START.format(folder=str(folder)), SHOW)
    notebook.open_notebook(server.lab_url(name))
    notebook.run_all()
    board.page.get_by_text("The run is being prepared").wait_for()
    notebook.screenshot("preparing")
    grows(board)
    turned_by_keyboard(notebook, board)
    stepped(notebook, board)
    looked_back(notebook, board)
    files_written(notebook, board, folder, chromium)
    board.press("Stop")
    board.until(lambda: board.fact("state") == "stopped", "the state is shown")
    notebook.screenshot("stopped")
    assert notebook.kernel_value("(run.state.value, shown.error)") == "('stopped', None)"


def grows(board: DashboardPage) -> None:
    board.until(lambda: board.bars() > 10, "the first bars are drawn")
    board.until(lambda: board.bars() > 40, "more bars come")
    done = board.steps_done()
    board.until(lambda: board.steps_done() > done, "steps are counted")


def turned_by_keyboard(notebook: NotebookPage, board: DashboardPage) -> None:
    assert board.rows("weights") == 2
    board.press("Pause")  # so that what is shown does not pass by
    board.until(lambda: board.fact("state") == "paused", "it is held")
    board.turn("prefetch depth")
    board.press("Step one layer")
    board.until(lambda: "✓ prefetch depth 2" in str(board.answers()), "it took effect")
    board.until(lambda: board.rows("weights") == 3, "a third buffer is in the picture")
    board.until(lambda: "depth 1→2" in board.flags(), "a marker says since when")
    notebook.screenshot("depth_2")
    board.turn("prefetch depth")
    board.turn("prefetch depth")
    board.until(lambda: "need 0.1 MB on the device" in board.answers()[0], "a refusal says why")
    notebook.screenshot("refused")
    handle = board.slider("prefetch depth")
    board.until(lambda: handle.get_attribute("aria-valuetext") == "3", "the slider says what is so")


def stepped(notebook: NotebookPage, board: DashboardPage) -> None:
    run_to(notebook, board, 0, "forward")
    for layer in (1, 2, 3):
        board.press("Step one layer")
        board.until(lambda at=layer: f"forward of layer {at}" in board.held(), f"layer {layer} is next")
    held = board.held()
    assert "Layer 2, which ran last (forward)" in held
    assert "forward layer 3, micro-batch 0" in held.split("What comes next")[1]
    notebook.screenshot("stepped")
    run_to(notebook, board, 2, "backward")
    board.enter("layer", 99)
    board.press("Run to")
    board.until(lambda: f"layers are 0 to {LAYERS - 1}" in board.answers()[0], "a refusal says why")
    notebook.screenshot("held")


def run_to(notebook: NotebookPage, board: DashboardPage, layer: int, phase: str) -> None:
    board.enter("layer", layer)
    board.page.locator(".mt-controls select").first.select_option(phase)
    board.press("Run to")
    reached = f"✓ run to the {phase} of layer {layer}"  # it may have been held there before, too
    board.until(lambda: board.answers()[0].startswith(reached), "it took effect")
    board.until(lambda: board.fact("at") == f"{phase} of layer {layer}", "it is held there")
    board.until(lambda: f"{phase} of layer {layer}" in board.held(), "the place is shown")


def looked_back(notebook: NotebookPage, board: DashboardPage) -> None:
    """While it is held, so that what is clicked stays where it is."""
    board.page.locator(".js-plotly-plot").scroll_into_view_if_needed()
    board.click_bar(2)
    board.until(lambda: board.opacities() == {0.13, 1.0}, "other layers fade")
    assert board.page.get_by_label("follow layer", exact=True).input_value() == "2"
    notebook.screenshot("followed")
    board.enter("follow layer", -1)
    board.until(lambda: board.opacities() == set(), "nothing is faded")
    board.press("Resume")
    board.until(lambda: board.fact("state") == "running", "it runs on")
    board.press("Earlier")
    done = board.steps_done()
    board.until(lambda: board.steps_done() > done + 3, "the run goes on")
    assert max(board.steps()) <= done
    board.press("Later")
    board.press("Live")
    board.until(lambda: max(board.steps()) > done, "what happens now is shown again")


def files_written(notebook: NotebookPage, board: DashboardPage, folder: Path, chromium: Browser) -> None:
    board.press("Export trace")
    board.until(lambda: "ui.perfetto.dev" in board.answers()[0], "it says where")
    with gzip.open(board.answers()[0].split(": ")[1]) as file:
        assert json.load(file)["traceEvents"]
    board.press("Save page")
    board.until(lambda: "opens in any browser" in board.answers()[0], "it says where")
    with chromium.new_context() as context:
        page = context.new_page()
        watch = Watch(page)
        page.goto((folder / "dashboard.html").as_uri())
        page.wait_for_selector(".js-plotly-plot .bars .point")
        assert not watch.problems
        assert not watch.foreign


def test_a_run_is_found_again_after_a_reload_and_a_restart(
    notebook: NotebookPage, board: DashboardPage, server: LabServer, run: TrainingRun, tmp_path: Path
) -> None:
    busy = BUSY.format(flag=str(tmp_path / "enough"))
    name = server.write_notebook("found.ipynb", IMPORTS, ATTACH.format(folder=str(run.folder)), busy)
    notebook.open_notebook(server.lab_url(name))
    notebook.run_all(wait=False)
    board.until(lambda: board.bars() > 30, "the past is drawn")
    steered(board, run)  # while the last cell runs
    assert notebook.page.evaluate("window.megatrainRan") is False
    (tmp_path / "enough").touch()
    notebook.wait_for_run()
    notebook.reload()
    board.until(lambda: board.bars() > 30, "the whole picture is back")
    steered(board, run)
    named(board)
    notebook.screenshot("reloaded")
    notebook.restart_kernel()
    notebook.run_cell(0)
    notebook.run_cell(1)
    board.until(lambda: board.bars() > 30, "a new kernel shows what it missed")
    steered(board, run)


def named(board: DashboardPage) -> None:
    board.until(lambda: board.slider("prefetch depth").count() == 1, "the slider has its name")
    assert board.nameless() == []


def steered(board: DashboardPage, run: TrainingRun) -> None:
    board.press("Pause")
    board.until(lambda: run.state is RunState.PAUSED, "it is held")
    board.press("Resume")
    board.until(lambda: run.state is RunState.RUNNING, "it runs on")


def test_two_windows_and_two_kernels_show_one_run(
    notebook: NotebookPage, board: DashboardPage, server: LabServer, run: TrainingRun, chromium: Browser
) -> None:
    attach = ATTACH.format(folder=str(run.folder))
    first, second = (server.write_notebook(name, IMPORTS, attach) for name in ("one.ipynb", "two.ipynb"))
    notebook.open_notebook(server.lab_url(first))
    notebook.run_all()
    notebook.save()
    for name, same_kernel in ((first, True), (second, False)):
        with another_window(chromium) as other:
            other.open_notebook(server.lab_url(name))
            if not same_kernel:
                other.run_all()
            there = DashboardPage(other.page)
            board.until(lambda there=there: min(board.bars(), there.bars()) > 30, "both are drawn")
            turned_there_seen_here(there, board)
            steered(board, run)
            named(there)
            if not same_kernel:
                other.shut_down_kernel()


def turned_there_seen_here(there: DashboardPage, here: DashboardPage) -> None:
    both = [page.slider("prefetch depth") for page in (there, here)]
    here.until(lambda: len({handle.get_attribute("aria-valuetext") for handle in both}) == 1, "both show the same")
    value = "2" if here.slider("prefetch depth").get_attribute("aria-valuetext") == "1" else "1"
    there.turn("prefetch depth", "ArrowRight" if value == "2" else "ArrowLeft")
    handle = here.slider("prefetch depth")
    here.until(lambda: handle.get_attribute("aria-valuetext") == value, "the knob turns here, too")


@contextmanager
def another_window(chromium: Browser) -> Iterator[NotebookPage]:
    with chromium.new_context(viewport={"width": 1400, "height": 1000}) as context:
        page = NotebookPage(context.new_page())
        yield page
        assert not page.watch.problems, "\n".join(page.watch.problems)


def frames_later(board: DashboardPage, frames: int = 3) -> None:
    """So many that none is left of those that were on their way."""
    for _ in range(frames):
        done = board.steps_done()
        board.until(lambda done=done: board.steps_done() != done, "the run goes on")


def test_a_zoom_stays_until_live_is_pressed(
    notebook: NotebookPage, board: DashboardPage, server: LabServer, run: TrainingRun
) -> None:
    name = server.write_notebook("zoomed.ipynb", IMPORTS, ATTACH.format(folder=str(run.folder)))
    notebook.open_notebook(server.lab_url(name))
    notebook.run_all()
    board.until(lambda: board.bars() > 30, "it is drawn")
    board.zoom()
    frames_later(board)  # one may have undone the zoom until the kernel heard of it
    part = board.time_shown()
    assert part[0] > 0
    frames_later(board)
    assert board.time_shown() == part
    board.press("Live")
    board.until(lambda: board.time_shown()[0] == 0, "all is shown again")
    end = board.time_shown()[1]
    board.until(lambda: board.time_shown()[1] != end, "and what comes")
    frames_later(board)
    assert board.time_shown()[0] == 0


def test_what_the_model_answers_is_text_and_can_be_folded_away(
    notebook: NotebookPage, board: DashboardPage, server: LabServer, folder: Path
) -> None:
    run = looking_run(folder).start()
    name = server.write_notebook("answers.ipynb", IMPORTS, ATTACH.format(folder=str(folder)))
    notebook.page.set_viewport_size({"width": 1400, "height": 2900})
    notebook.open_notebook(server.lab_url(name))
    notebook.run_all()
    board.until(lambda: PROMPT in board.said(), "it answers, and the prompt is as it stands there")
    assert board.page.locator(".mt.samples script").count() == 0
    board.until(lambda: "perplexity" in board.fact("held-out loss"), "its loss on other data is told")
    board.until(lambda: "generation" in str(board.names()), "the timeline says what it does")
    first = board.said()
    board.until(lambda: board.said() != first, "there are newer answers")
    assert "taken over" not in board.page.title()
    notebook.screenshot("answers_light_1400")
    board.fold("What the model answers")
    board.until(lambda: not board.said(), "it is gone")
    done = board.steps_done()
    board.until(lambda: board.steps_done() > done + 2, "the run goes on, and answers anew")
    assert not board.said()
    board.fold("What the model answers")
    board.until(lambda: PROMPT in board.said(), "it is back")
    notebook.page.set_viewport_size({"width": 1000, "height": 2900})
    notebook.darken()
    first = board.said()
    board.until(lambda: board.said() not in ("", first), "there are newer answers, in another light")
    notebook.screenshot("answers_dark_1000")
    run.stop()
    run.wait(60)


def test_in_the_dark_and_on_any_page_all_controls_can_be_reached(
    notebook: NotebookPage, board: DashboardPage, server: LabServer, run: TrainingRun
) -> None:
    name = server.write_notebook("dark.ipynb", IMPORTS, ATTACH.format(folder=str(run.folder)))
    notebook.page.set_viewport_size({"width": 1000, "height": 2600})
    notebook.open_notebook(server.lab_url(name))
    notebook.darken()
    notebook.run_all()
    for width in (1000, 1800, 1000):
        notebook.page.set_viewport_size({"width": width, "height": 2600})
        done = board.steps_done()
        board.until(lambda done=done: board.bars() > 30 and board.steps_done() > done, "it is drawn")
        notebook.screenshot(f"dark_{width}")
        assert board.beyond_edge() <= 1


def test_in_notebook_7(notebook: NotebookPage, board: DashboardPage, server: LabServer, run: TrainingRun) -> None:
    name = server.write_notebook("seven.ipynb", IMPORTS, ATTACH.format(folder=str(run.folder)))
    notebook.open_notebook(server.notebook_url(name))
    notebook.run_all()
    board.until(lambda: board.bars() > 30, "it is drawn")
    steered(board, run)
    notebook.screenshot("notebook_7")


def test_as_a_page_of_its_own(chromium: Browser, run: TrainingRun, tmp_path: Path) -> None:
    assert run.folder
    with viewing(run.folder, tmp_path) as viewer, chromium.new_context() as context:
        page = context.new_page()
        watch, board = Watch(page), DashboardPage(page)
        page.goto(viewer.url, wait_until="commit")
        page.wait_for_selector(".js-plotly-plot", timeout=120_000)
        waiting = NotebookPage(page)
        board.until(lambda: board.bars() > 30, "it is drawn")
        steered(board, run)
        named(board)
        waiting.screenshot("viewer")
        assert not watch.problems, "\n".join(watch.problems)
        assert not watch.foreign, "\n".join(watch.foreign)

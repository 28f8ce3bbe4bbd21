"""Where a dashboard finds a run: in this process or in a folder, before, while and after it trains."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from stages import INFO, MadeUpRun, Stage
from traced_run import TracedRun

from dashboard import Dashboard
from dashboard.sources import FolderSource, LiveSource, source_of
from megatrain.folder import RunFolder
from megatrain.journal import Journal
from megatrain.remote import RunUnreachableError
from megatrain.report import RunState, Status

HERE = replace(INFO, process_id=os.getpid())


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


@pytest.fixture
def stage(folder: RunFolder) -> Iterator[Stage]:
    """A dashboard of a folder in which nothing is yet."""
    stage = Stage(FolderSource(folder.path))
    stage.browser_says(hello=True)
    yield stage
    stage.shown.close()


def record(folder: RunFolder, steps: int) -> None:
    """Leave the records of so many steps."""
    with closing(Journal(TracedRun().steps(steps), folder.path)) as journal:
        journal.flush()


def headline(stage: Stage) -> str:
    html: str = stage.shown._drawing.headline.value
    return html


def test_a_run_in_this_process() -> None:
    run = MadeUpRun(TracedRun().steps(2))
    source = source_of(run)
    assert isinstance(source, LiveSource)
    assert (source.folder, source.generation, source.log()) == (None, 0, "")
    assert source.info() == INFO
    assert source.status() == run.status()
    assert source.control() is run
    assert len(source.poll().steps) == 2
    assert source.poll().steps == []
    source.close()


def test_a_run_in_another_process_is_followed_through_its_folder(tmp_path: Path) -> None:
    run = MadeUpRun(TracedRun().steps(1), tmp_path)
    run.recorder = None  # type: ignore[assignment]
    source = source_of(run)
    assert isinstance(source, FolderSource)
    assert source.folder == tmp_path
    assert source_of(source) is source


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a run's folder is needed; .* has no run\.json"):
        Dashboard.attach(tmp_path)
    with pytest.raises(ValueError, match="is no folder"):
        Dashboard.attach(tmp_path / "nowhere")


def test_a_run_that_was_not_started_says_so(stage: Stage) -> None:
    stage.tick()
    assert "The run is being prepared" in stage.shown._drawing.log.value
    assert stage.shown.error is None


def test_a_run_that_still_loads_shows_what_it_prints(stage: Stage, folder: RunFolder) -> None:
    folder.prepare()
    for line in ("Loading weights:  12%", "Loading weights:  <34%>"):
        with folder.open_log() as log:
            log.write(f"{line}\n".encode())
        stage.tick()
    assert "Loading weights:  &lt;34%&gt;" in stage.shown._drawing.log.value
    stage.shown.controls.buttons["pause"].click()
    stage.shown.controls._carrier.submit(lambda: None).result(10)
    stage.tick()
    assert "the run has not begun" in stage.said()
    folder.create(HERE)
    folder.write_status(Status(RunState.RUNNING))
    record(folder, 2)
    stage.tick()
    assert stage.shown._drawing.log.value == ""
    assert "running" in headline(stage)
    assert stage.bars > 20


def test_a_wish_for_a_run_that_is_not_there_is_an_error_that_says_so(folder: RunFolder) -> None:
    source = FolderSource(folder.path)
    with pytest.raises(RunUnreachableError, match="nobody answers"):
        source.control().pause()
    source.close()


@pytest.mark.parametrize("state", [RunState.FAILED, RunState.FINISHED, RunState.STOPPED])
def test_a_run_that_is_over_shows_its_past(stage: Stage, folder: RunFolder, state: RunState) -> None:
    folder.create(HERE)
    with folder.open_log() as log:
        log.write(b"Traceback: the last words\n")
    record(folder, 3)
    folder.write_status(Status(state, 3, error="OutOfMemory" if state is RunState.FAILED else None))
    stage.tick(2)
    assert state.value in headline(stage)
    assert stage.bars > 20
    assert ("the last words" in stage.shown._drawing.log.value) == (state is RunState.FAILED)


def test_a_run_whose_process_is_gone_is_lost_and_its_last_words_are_shown(stage: Stage, folder: RunFolder) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    folder.create(replace(INFO, process_id=process.pid))
    with folder.open_log() as log:
        log.write(b"Killed\n")
    stage.tick()
    process.communicate(b"\n")
    stage.tick()
    assert "lost" in headline(stage)
    assert "Killed" in stage.shown._drawing.log.value


def test_another_run_in_the_same_folder_begins_with_an_empty_picture(stage: Stage, folder: RunFolder) -> None:
    folder.create(HERE)
    record(folder, 3)
    folder.write_status(Status(RunState.FINISHED, 3))
    stage.tick()
    assert [step.step for step in stage.shown._history.steps] == [0, 1, 2]
    folder.prepare()
    stage.tick()
    folder.create(replace(HERE, steps=7))
    record(folder, 1)
    folder.write_status(Status(RunState.RUNNING, 1))
    stage.tick(3)
    assert [step.step for step in stage.shown._history.steps] == [0]
    assert "1 of 7" in headline(stage)
    assert stage.shown.error is None

"""The folder of a run: who may begin in it, and what it says of a run whose process may be gone."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from megatrain.folder import RunFolder
from megatrain.report import Inspection, RunInfo, RunState, Status
from megatrain.steering import Knobs, Position

BEGAN_UNIX_S = 1_800_000_000.0  # 2027-01-15, 08:00 UTC
INFO = RunInfo("tiny", 4, 10, os.getpid(), BEGAN_UNIX_S, "cpu", 1, 2, 3, {"weights": 4}, 5, 6)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "runs" / "first")


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """Another process."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_keeps_what_a_run_says(folder: RunFolder) -> None:
    assert folder.create(INFO) is folder
    assert folder.info() == INFO
    assert folder.status() == Status(RunState.NEW)
    status = Status(RunState.PAUSED, 3, Knobs(1, 2, 0), 2, Position(3, "forward", 1), {"h2d": ["load 3"]}, 7)
    folder.write_status(status)
    assert RunFolder(folder.path).status() == status
    assert folder.path.is_absolute()


def test_only_its_user_may_look(folder: RunFolder) -> None:
    folder.create(INFO).open_log().close()
    assert mode(folder.path) == 0o700
    assert [mode(path) for path in folder.path.iterdir()] == [0o600] * 3
    assert folder.run.read_text().count("\n") > len(json.loads(folder.run.read_text())) > 10  # for people, too


def test_a_folder_that_holds_other_things_is_left_open(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    tmp_path.chmod(0o755)
    RunFolder(tmp_path).create(INFO)
    assert mode(tmp_path) == 0o755
    assert mode(tmp_path / "run.json") == 0o600


def test_refuses_a_folder_in_which_a_run_is_alive(folder: RunFolder) -> None:
    folder.create(INFO)
    folder.write_status(Status(RunState.RUNNING))
    for begin in (folder.prepare, lambda: RunFolder(folder.path).create(INFO)):
        with pytest.raises(ValueError, match=rf"alive in .*first \(process {os.getpid()}, running\): attach .* stop"):
            begin()
    assert folder.status().state is RunState.RUNNING
    folder.write_status(Status(RunState.FINISHED))
    RunFolder(folder.path).create(INFO)


def test_the_records_of_an_ended_run_move_away(folder: RunFolder) -> None:
    folder.create(INFO)
    folder.write_status(Status(RunState.FINISHED, 10))
    folder.model.mkdir()
    for path in (folder.metrics, folder.segment(3), folder.segment(12), folder.model / "weights", folder.path / "mine"):
        path.write_text("first")
    folder.create(replace(INFO, model="second"))
    earlier = RunFolder(folder.earlier / "2027-01-15T08-00-00Z")
    assert earlier.info() == INFO
    assert earlier.status() == Status(RunState.FINISHED, 10)
    assert earlier.segments() == [3, 12]
    assert (earlier.model / "weights").read_text() == earlier.metrics.read_text() == "first"
    assert folder.info().model == "second"
    assert sorted(os.listdir(folder.path)) == ["earlier", "mine", "run.json", "status.json"]


def test_runs_that_began_in_the_same_second_move_apart(folder: RunFolder) -> None:
    for step in range(4):
        folder.create(INFO)
        folder.write_status(Status(RunState.STOPPED, step))
    names = [f"2027-01-15T08-00-00Z{suffix}" for suffix in ("", "-2", "-3")]
    assert [RunFolder(folder.earlier / name).status().steps_done for name in names] == [0, 1, 2]
    assert sorted(os.listdir(folder.earlier)) == names


def test_records_without_a_run_move_away_too(folder: RunFolder) -> None:
    folder.path.mkdir(parents=True)
    folder.metrics.write_text("{}\n")
    os.utime(folder.metrics, (BEGAN_UNIX_S, BEGAN_UNIX_S))
    folder.create(INFO)
    assert (folder.earlier / "2027-01-15T08-00-00Z" / "metrics.jsonl").read_text() == "{}\n"


def test_a_run_in_preparation_is_new_and_keeps_its_log(folder: RunFolder) -> None:
    folder.prepare()
    with folder.open_log() as log:
        log.write(b"loading\n")
    assert folder.status() == Status(RunState.NEW)
    with pytest.raises(ValueError, match=r"first has no run.json"):
        folder.info()
    RunFolder(folder.path).create(INFO)
    assert folder.log_tail() == "loading"
    assert not folder.earlier.exists()


def test_a_run_that_failed_in_preparation_makes_room_for_the_next(folder: RunFolder) -> None:
    folder.prepare()
    folder.write_status(Status(RunState.FAILED, error="no such model"))
    assert folder.status().error == "no such model"
    folder.create(INFO)
    assert folder.status().state is RunState.NEW
    (earlier,) = folder.earlier.iterdir()
    assert RunFolder(earlier).status().state is RunState.FAILED


def test_the_log_ends_with_its_last_lines(folder: RunFolder) -> None:
    assert folder.log_tail() == ""
    folder.prepare()
    for numbers in (range(300), range(300, 600)):
        with folder.open_log() as log:
            log.write("".join(f"line {number} of many …\n" for number in numbers).encode())
    assert folder.log_tail(2) == "line 598 of many …\nline 599 of many …"


@pytest.mark.parametrize("said", [RunState.NEW, RunState.RUNNING, RunState.PAUSED])
def test_a_run_whose_process_is_gone_is_lost(
    folder: RunFolder, stranger: subprocess.Popen[bytes], said: RunState
) -> None:
    folder.create(replace(INFO, process_id=stranger.pid))
    RunFolder(folder.path)._write(folder.status_file, {"state": said.value, "held": {}, "steps_done": 3})
    assert folder.status().state is said
    assert folder.status().held == Inspection()
    stranger.kill()
    until_dead(stranger.pid)
    status = folder.status()  # a zombie still, as nobody waited for it
    assert (status.state, status.steps_done, status.held) == (RunState.LOST, 3, None)
    assert re.search(rf"process {stranger.pid} is gone .*run.log", status.error or "")
    stranger.wait()
    assert folder.status() == status
    folder.create(INFO)  # nobody is in the way


def until_dead(process_id: int) -> None:
    give_up_s = time.monotonic() + 20
    while psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < give_up_s
        time.sleep(0.005)


def test_the_steps_of_a_lost_run_are_those_in_its_records(folder: RunFolder) -> None:
    """Its status is as old as its last change of state."""
    folder.create(INFO)
    folder.write_status(Status(RunState.RUNNING, steps_done=1))
    values = json.loads(folder.run.read_text())
    folder.run.write_text(json.dumps(values | {"process_began_unix_s": 1.0}))
    folder.metrics.write_text("{}\n" * 7)
    assert (folder.status().state, folder.status().steps_done) == (RunState.LOST, 7)


@pytest.mark.parametrize("over", [RunState.FINISHED, RunState.STOPPED, RunState.FAILED])
def test_a_run_that_said_goodbye_is_not_lost(folder: RunFolder, over: RunState) -> None:
    folder.create(replace(INFO, process_id=2**22 + 1))  # more than Linux gives out
    folder.write_status(Status(over))
    assert folder.status() == Status(over)


def test_another_process_with_the_same_number_is_not_the_run(folder: RunFolder) -> None:
    folder.create(INFO)
    folder.write_status(Status(RunState.RUNNING))
    values = json.loads(folder.run.read_text())
    values["process_began_unix_s"] -= 60
    folder.run.write_text(json.dumps(values))
    assert folder.status().state is RunState.LOST


def test_nobody_speaks_for_the_living_run_of_another_process(
    folder: RunFolder, stranger: subprocess.Popen[bytes]
) -> None:
    folder.create(replace(INFO, process_id=stranger.pid))
    with pytest.raises(ValueError, match=rf"a run is alive in .* \(process {stranger.pid}"):
        RunFolder(folder.path).write_status(Status(RunState.FAILED))
    assert folder.status().state is RunState.NEW


def test_names_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name, missing in (("none", "is no folder"), ("file", "is no folder"), (".", r"has no run.json")):
        folder = RunFolder(tmp_path / name)
        for look in (folder.info, folder.status):
            with pytest.raises(ValueError, match=rf"a run's folder is needed; .*{missing}: give the run_dir of a run"):
                look()
    assert folder.identity() is None


def test_names_what_is_damaged(folder: RunFolder) -> None:
    folder.create(INFO)
    folder.status_file.write_text('{"state": "dreaming"}')
    with pytest.raises(ValueError, match=r"status.json does not say what a run's does: Status.state: must be one of"):
        folder.status()
    for text in ("{", "[]"):
        folder.run.write_text(text)
        with pytest.raises(ValueError, match=r"run.json is damaged: "):
            folder.info()


def test_identity_changes_with_the_run_and_with_nothing_else(folder: RunFolder) -> None:
    folder.create(INFO)
    first = folder.identity()
    folder.write_status(Status(RunState.FINISHED))
    assert RunFolder(folder.path).identity() == first
    folder.create(INFO)
    assert folder.identity() not in (first, None)


def test_viewers_load_no_torch() -> None:
    modules = "megatrain.trace, megatrain.folder, megatrain.journal, megatrain.remote, megatrain.plain, dashboard.feed"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_checkpoints_that_were_left_alone_in_a_folder_are_put_away(tmp_path: Path) -> None:
    """Whoever removed everything else meant to begin anew."""
    (tmp_path / "checkpoints").mkdir()
    RunFolder(tmp_path).prepare()
    assert not (tmp_path / "checkpoints").exists()
    assert len(list((tmp_path / "earlier").glob("*/checkpoints"))) == 1

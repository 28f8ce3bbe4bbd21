"""Runs in a process of their own: steered, watched, and alive when whoever started them is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from pairs import LR, engine_config
from reference import make_batch
from tiny_models import tiny

from megatrain import AdamWConfig, StreamingEngine, TrainingRun
from megatrain.folder import RunFolder
from megatrain.remote import RemoteRun
from megatrain.report import RunState
from megatrain.run import RunFailedError
from megatrain.steering import Position

TIMEOUT_S = 60
LAYERS = 3
ENDLESS = 1_000_000
BATCHES = [make_batch(tiny(), 4, 12, seed=seed) for seed in range(3)]


def make_engine(**config: Any) -> StreamingEngine:
    return StreamingEngine(tiny(layers=LAYERS), engine_config(**config), AdamWConfig(lr=LR))


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A run folder; whatever still trains in it at the end is killed."""
    path = tmp_path / "run"
    yield path
    if (path / "run.json").exists():
        kill(path)


def kill(folder: Path) -> None:
    info = RunFolder(folder).info()
    try:
        process = psutil.Process(info.process_id)
    except psutil.NoSuchProcess:
        return
    if process.is_running() and process.pid != os.getpid():
        process.kill()


def test_it_trains_as_a_thread_does_and_leaves_the_model(folder: Path) -> None:
    run = TrainingRun(make_engine, BATCHES, steps=4, run_dir=folder, save=True).start().wait(TIMEOUT_S)
    assert (run.state, run.steps_done, run.error) == (RunState.FINISHED, 4, None)
    with make_engine() as engine:
        here = TrainingRun(engine, BATCHES, steps=4).start().wait(TIMEOUT_S)
        assert [result.loss for result in run.results] == [result.loss for result in here.results]
    assert (folder / "model" / "model.safetensors").exists()
    assert (folder / "trace.json.gz").exists()
    with pytest.raises(RuntimeError, match="this run's engine lives in another process"):
        _ = run.engine


def test_it_is_steered_layer_by_layer(folder: Path) -> None:
    run = TrainingRun(partial(make_engine, prefetch_depth=0), lambda: BATCHES, steps=ENDLESS, run_dir=folder).start()
    assert run.pause().wait(TIMEOUT_S)
    assert run.state is RunState.PAUSED
    wish = run.control.run_to_layer(1, "backward")
    assert wish.wait(TIMEOUT_S)
    assert wish.effect is not None
    step = wish.effect.step
    assert wish.effect == Position(step, "backward", 1)
    held = run.status().held
    assert held is not None
    assert held.next[0].startswith("load layer 1, weights slot 0")
    assert run.step_layer().wait(TIMEOUT_S)
    depth = run.control.set_prefetch_depth(2)
    assert run.resume().wait(TIMEOUT_S)
    assert depth.wait(TIMEOUT_S)
    assert depth.effect == Position(step, "backward", 0)
    with pytest.raises(ValueError, match="prefetch_depth must be a whole number ≥ 0"):
        run.control.set_prefetch_depth(-1)
    run.stop(save=True)
    run.wait(TIMEOUT_S)
    assert run.state is RunState.STOPPED
    assert (folder / "model" / "config.json").exists()


def broken_engine() -> StreamingEngine:
    raise OSError("the weights are gone")


def wrong_batches() -> list[dict[str, torch.Tensor]]:
    return [BATCHES[0], {**BATCHES[0], "input_ids": BATCHES[0]["input_ids"] + 1_000_000}]


@pytest.mark.parametrize(
    ("engine", "batches", "said"),
    [(broken_engine, BATCHES, "OSError: the weights are gone"), (make_engine, wrong_batches, "outside the model's")],
)
def test_what_goes_wrong_there_is_raised_here(folder: Path, engine: Any, batches: Any, said: str) -> None:
    run = TrainingRun(engine, batches, steps=4, run_dir=folder).start()
    with pytest.raises(RunFailedError, match=said):
        run.wait(TIMEOUT_S)
    assert run.state is RunState.FAILED
    assert said in str(run.status().error)


def test_a_killed_process_is_told_from_a_finished_one(folder: Path) -> None:
    run = TrainingRun(make_engine, BATCHES, steps=ENDLESS, run_dir=folder).start()
    eventually(lambda: run.control is not None and run.steps_done > 0)
    kill(folder)
    with pytest.raises(RunFailedError, match="exit code -9"):
        run.wait(TIMEOUT_S)
    assert run.state is RunState.LOST
    assert "is gone and did not say why" in str(run.status().error)
    assert all(line.endswith("}") for line in (folder / "metrics.jsonl").read_text().splitlines())


def test_a_terminated_process_finishes_its_step_and_its_files(folder: Path) -> None:
    run = TrainingRun(make_engine, BATCHES, steps=ENDLESS, run_dir=folder).start()
    eventually(lambda: run.control is not None and run.steps_done > 0)
    os.kill(run.info.process_id, signal.SIGTERM)
    run.wait(TIMEOUT_S)
    assert run.state is RunState.STOPPED
    assert (folder / "trace.json.gz").exists()


STARTER = """
    import sys
    sys.path.insert(0, {tests!r})
    import test_run_process as t
    run = t.TrainingRun(t.make_engine, t.BATCHES, steps=t.ENDLESS, run_dir={folder!r}).start()
    run.control.status()
"""


def starter(folder: Path) -> str:
    return textwrap.dedent(STARTER.format(tests=str(Path(__file__).parent), folder=str(folder)))


def test_it_outlives_the_process_that_started_it(folder: Path) -> None:
    subprocess.run([sys.executable, "-c", starter(folder)], check=True, timeout=TIMEOUT_S)
    require_training(folder)


def test_it_outlives_the_restart_of_a_notebook_kernel(folder: Path) -> None:
    from jupyter_client.manager import start_new_kernel  # every run of this module is a process that imports it

    manager, client = start_new_kernel()
    try:
        reply = client.execute_interactive(starter(folder), timeout=TIMEOUT_S, output_hook=lambda _: None)
        assert reply["content"]["status"] == "ok", reply["content"]
        manager.interrupt_kernel()
        manager.restart_kernel(now=False)
        require_training(folder)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert RunFolder(folder).status().state.over


def require_training(folder: Path) -> None:
    """Somebody who comes later sees it go on, steers it, and ends it."""
    remote = RemoteRun(folder)
    done = remote.status().steps_done
    eventually(lambda: remote.status().steps_done > done)
    assert remote.control().pause().wait(TIMEOUT_S)
    assert remote.status().state is RunState.PAUSED
    remote.control().stop()
    eventually(lambda: remote.status().state is RunState.STOPPED)
    remote.close()


def test_two_runs_do_not_share_a_folder(folder: Path) -> None:
    run = TrainingRun(make_engine, BATCHES, steps=ENDLESS, run_dir=folder).start()
    run.control.status()
    with (
        make_engine() as engine,
        pytest.raises(ValueError, match="attach to it, stop it, or give the new run another"),
    ):
        TrainingRun(engine, BATCHES, steps=1, run_dir=folder).start()
    with pytest.raises(ValueError, match="a run is alive in"):
        TrainingRun(make_engine, BATCHES, steps=1, run_dir=folder).start()
    run.stop()
    run.wait(TIMEOUT_S)
    first = (folder / "metrics.jsonl").read_text()
    TrainingRun(make_engine, BATCHES, steps=1, run_dir=folder).start().wait(TIMEOUT_S)
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 1
    (kept,) = (folder / "earlier").iterdir()
    assert (kept / "metrics.jsonl").read_text() == first


def test_what_a_process_cannot_have_is_refused(tmp_path: Path) -> None:
    with make_engine() as engine, pytest.raises(ValueError, match="an engine lives in the process that made it"):
        TrainingRun(engine, BATCHES, steps=1, run_dir=tmp_path, process=True)
    with pytest.raises(ValueError, match="followed through its folder; give run_dir"):
        TrainingRun(make_engine, BATCHES, steps=1)
    with pytest.raises(ValueError, match="on_step cannot be called from another process"):
        TrainingRun(make_engine, BATCHES, steps=1, run_dir=tmp_path, on_step=lambda *_: None)
    with pytest.raises(ValueError, match="functions that make them are for process=True"):
        TrainingRun(make_engine, BATCHES, steps=1, run_dir=tmp_path, process=False)
    with pytest.raises(RuntimeError, match="was not started"):
        _ = TrainingRun(make_engine, BATCHES, steps=1, run_dir=tmp_path).control

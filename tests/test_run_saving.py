"""Runs that are broken off and go on: the same bits as without the break, at whatever moment it came."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import LR, differing, engine_config
from reference import make_batch
from tiny_models import tiny

from megatrain import AdamWConfig, StreamingEngine, TrainingRun
from megatrain.checkpoint import CheckpointError, Checkpoints, Keep
from megatrain.remote import RemoteControl
from megatrain.report import RunState
from megatrain.run import cosine_schedule

TIMEOUT_S = 60
STEPS = 11
LISTED = [make_batch(tiny(), 4, 12, seed=seed) for seed in range(3)]
SCHEDULE = cosine_schedule(LR, STEPS, warmup=2)


def engine_for(**config: Any) -> StreamingEngine:
    return StreamingEngine(tiny(layers=3), engine_config(**config), AdamWConfig(lr=LR))


def run_for(engine: StreamingEngine, folder: Path | None, *, steps: int = STEPS, **options: Any) -> TrainingRun:
    batches = options.pop("batches", LISTED)
    return TrainingRun(engine, batches, steps=steps, lr_schedule=SCHEDULE, run_dir=folder, **options)


def losses(run: TrainingRun) -> list[float]:
    return [result.loss for result in run.results]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stopped_after", [1, 4, 5, 10])
def test_a_run_goes_on_as_if_it_had_not_been_stopped(tmp_path: Path, dtype: str, stopped_after: int) -> None:
    with engine_for(dtype=dtype) as engine:
        straight = losses(run_for(engine, None).start().wait(TIMEOUT_S))
        weights = engine.state_dict()
    with engine_for(dtype=dtype) as engine:

        def stop(done: int, _: object) -> None:
            if done == stopped_after:
                run.stop()

        run = run_for(engine, tmp_path, checkpoint_every=4, on_step=stop)
        first = losses(run.start().wait(TIMEOUT_S))
        assert run.state is RunState.STOPPED
    with engine_for(dtype=dtype, prefetch_depth=3) as engine:
        run = run_for(engine, tmp_path, checkpoint_every=4, resume=True).start().wait(TIMEOUT_S)
        assert first + losses(run) == straight
        assert run.status().steps_done == STEPS
        assert differing(engine.state_dict(), weights) == []
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(STEPS))  # the whole run, each step once
    assert [line["loss"] for line in lines] == straight
    assert all(a["end_s"] <= b["start_s"] for a, b in pairwise(lines))


def test_data_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    with engine_for() as engine:
        straight = losses(run_for(engine, None, batches=Resumable()).start().wait(TIMEOUT_S))
    for part in (3, 5, 8, STEPS):  # in, at the end of, and after an epoch
        with engine_for() as engine:
            run = run_for(engine, tmp_path, steps=part, batches=Resumable(), checkpoint_every=100, resume=True)
            done = run.start().wait(TIMEOUT_S).status().steps_done
            assert losses(run) == straight[done - len(run.results) : done]
            assert done == part


class Resumable:
    """Five batches an epoch, in another order each time; knows its position, as megatrain.data.Batches does."""

    def __init__(self) -> None:
        self.epoch = self.position = 0

    def __iter__(self) -> Resumable:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        if self.position == 5:
            self.epoch, self.position = self.epoch + 1, 0
            raise StopIteration
        order = random.Random(self.epoch).sample(range(5), 5)
        self.position += 1
        return make_batch(tiny(), 4, 12, seed=order[self.position - 1])

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


def test_to_resume_where_nothing_is_is_to_begin(tmp_path: Path) -> None:
    with engine_for() as engine:
        run = run_for(engine, tmp_path, steps=2, checkpoint_every=1, resume=True).start().wait(TIMEOUT_S)
        assert run.steps_done == 2
    assert Checkpoints(tmp_path / "checkpoints").steps() == [1, 2]


def test_a_finished_run_that_is_resumed_is_finished(tmp_path: Path) -> None:
    for expected in (3, 0):
        with engine_for() as engine:
            run = run_for(engine, tmp_path, steps=3, checkpoint_every=2, resume=True).start().wait(TIMEOUT_S)
            assert (run.state, run.steps_done) == (RunState.FINISHED, expected)
    assert Checkpoints(tmp_path / "checkpoints").steps() == [2, 3]


def test_a_damaged_checkpoint_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    with engine_for() as engine:
        run_for(engine, tmp_path, steps=2, checkpoint_every=1).start().wait(TIMEOUT_S)
    shard = tmp_path / "checkpoints" / "step-00000002" / "layer-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4])
    records = (tmp_path / "metrics.jsonl").read_bytes()
    with engine_for() as engine, pytest.raises(CheckpointError, match=r"layer-00000.*; the one before is of step 1"):
        run_for(engine, tmp_path, resume=True).start()
    assert (tmp_path / "metrics.jsonl").read_bytes() == records


def test_keep(tmp_path: Path) -> None:
    with engine_for() as engine:
        run_for(engine, tmp_path, steps=9, checkpoint_every=1, keep=Keep(last=1, every=4)).start().wait(TIMEOUT_S)
    assert Checkpoints(tmp_path / "checkpoints").steps() == [4, 8, 9]


def test_what_needs_a_folder_or_a_number_says_so() -> None:
    with engine_for() as engine:
        with pytest.raises(ValueError, match="left in the run's folder; give run_dir"):
            run_for(engine, None, checkpoint_every=1)
        with pytest.raises(ValueError, match="checkpoint_every must be a whole number ≥ 1 of steps"):
            run_for(engine, None, checkpoint_every=0)


# ---- kill -9 ----

# One process imports torch once; each life is a fork of it that is killed at a random moment, checkpoints being written
# all the time, or trains to the end.
LIVES = """
    import json, os, random, signal, sys, time
    sys.path.insert(0, {tests!r})
    import test_run_saving as t

    def live(folder, state):
        with t.engine_for() as engine:
            run = t.run_for(engine, t.Path(folder), checkpoint_every=1, keep=t.Keep(last=2), resume=True)
            run.start().wait(60)
            weights = {{name: tensor.double().sum().item() for name, tensor in engine.state_dict().items()}}
            losses = [json.loads(line)["loss"] for line in open(folder + "/metrics.jsonl")]
            json.dump([losses, weights], open(state, "w"))

    def fork(folder, state):
        child = os.fork()
        if child == 0:
            try:
                live(folder, state)
            finally:
                os._exit(0)
        return child

    kills = 0
    choose = random.Random({seed})
    for life in range(1000):
        folder, state = f"{folder}/{{life}}", f"{folder}/{{life}}.json"
        for attempt in range(100):
            child = fork(folder, state)
            if kills < {kills}:
                time.sleep(choose.uniform(0.05, 0.6))
                os.kill(child, signal.SIGKILL)
                kills += 1
            _, status = os.waitpid(child, 0)
            if os.path.exists(state) and os.path.getsize(state):
                print(state)
                break
        else:
            sys.exit("never came to its end")
        if kills >= {kills}:
            break
"""


def test_it_survives_being_killed_at_any_moment(tmp_path: Path) -> None:
    """Fifty times in a row; more by MEGATRAIN_KILLS."""
    kills = int(os.environ.get("MEGATRAIN_KILLS", "50"))
    with engine_for() as engine:
        straight = losses(run_for(engine, None).start().wait(TIMEOUT_S))
        weights = {name: tensor.double().sum().item() for name, tensor in engine.state_dict().items()}
    script = LIVES.format(tests=str(Path(__file__).parent), folder=str(tmp_path), kills=kills, seed=kills)
    lived = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60 + 3 * kills
    )
    assert lived.returncode == 0, lived.stderr
    ends = lived.stdout.split()
    assert ends
    for end in ends:
        assert json.loads(Path(end).read_text()) == [straight, weights]
        left = Path(end).with_suffix("") / "checkpoints"
        assert [path.name for path in left.iterdir() if path.name.startswith(".")] == []


def test_a_process_killed_in_the_middle_is_resumed_by_another(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with engine_for() as engine:
        straight = losses(run_for(engine, None).start().wait(TIMEOUT_S))
    run = TrainingRun(engine_for, LISTED, steps=STEPS, lr_schedule=SCHEDULE, run_dir=folder, checkpoint_every=2).start()
    run.pause()
    while Checkpoints(folder / "checkpoints").steps() == []:
        run.control.finish_step().wait(TIMEOUT_S)
    os.kill(run.info.process_id, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="exit code -9"):
        run.wait(TIMEOUT_S)
    again = TrainingRun(
        engine_for, LISTED, steps=STEPS, lr_schedule=SCHEDULE, run_dir=folder, checkpoint_every=2, resume=True
    )
    again.start().wait(TIMEOUT_S)
    assert losses(again) == straight  # of a process, the record of the whole run


def test_a_checkpoint_can_be_asked_for_at_any_moment(tmp_path: Path) -> None:
    with engine_for() as engine:
        run = run_for(engine, tmp_path)
        run.pause()
        run.start()
        wish = run.checkpoint()
        run.control.finish_step().wait(TIMEOUT_S)
        assert wish.wait(TIMEOUT_S)
        assert Checkpoints(tmp_path / "checkpoints").steps() == [1]  # over when it is on the disk, and not before
        assert not wish.overtaken
        run.stop()
        run.wait(TIMEOUT_S)
        with pytest.raises(ValueError, match="checkpoint: the run is stopped"):
            run.checkpoint()


@pytest.mark.parametrize("apart", [False, True])
def test_a_checkpoint_that_cannot_be_written_is_told_to_whoever_asked(tmp_path: Path, apart: bool) -> None:
    """Training goes on; the answer says why, also over the socket."""
    with engine_for() as engine:
        run = run_for(engine, tmp_path, steps=40)
        held = run.pause()
        run.start()
        assert held.wait(TIMEOUT_S)
        (tmp_path / "checkpoints").write_text("a file where the folder should be")
        control = RemoteControl(tmp_path) if apart else run.control
        wish = control.checkpoint()
        run.control.finish_step().wait(TIMEOUT_S)
        assert wish.wait(TIMEOUT_S)
        assert wish.failed is not None
        assert "checkpoints" in str(wish)
        assert str(wish).startswith("checkpoint: failed: ")
        run.resume()
        run.wait(TIMEOUT_S)
        assert run.steps_done == 40


def test_a_run_without_a_folder_has_nowhere_to_leave_one() -> None:
    with engine_for() as engine:
        run = run_for(engine, None)
        run.pause()
        run.start()
        with pytest.raises(ValueError, match="this run has no folder to leave one in; give it a run_dir"):
            run.checkpoint()
        run.stop()
        run.wait(TIMEOUT_S)


def test_a_new_run_does_not_take_another_s_checkpoints_for_its_own(tmp_path: Path) -> None:
    for steps, checkpoints in ((5, [3, 4, 5]), (2, [1, 2])):
        with engine_for() as engine:
            run = run_for(engine, tmp_path, steps=steps, checkpoint_every=1).start().wait(TIMEOUT_S)
            assert run.steps_done == steps
        assert Checkpoints(tmp_path / "checkpoints").steps() == checkpoints
        with pytest.raises(ValueError, match=r"checkpoint: .* run is over"):
            run.checkpoint()
    (earlier,) = (tmp_path / "earlier").iterdir()
    assert Checkpoints(earlier / "checkpoints").steps() == [3, 4, 5]

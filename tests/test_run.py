"""Training runs: the loop in its thread, its folder, its schedule, and how it ends."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from families import build
from reference import make_batch

from megatrain import AdamWConfig, EngineConfig, StreamingEngine, TrainingRun
from megatrain.run import RunState, cosine_schedule

Batch = dict[str, torch.Tensor]
TIMEOUT_S = 60


@pytest.fixture
def engine() -> Iterator[StreamingEngine]:
    config = EngineConfig(device="cpu", dtype="float32", micro_batch_size=3)
    with StreamingEngine(build("llama"), config, AdamWConfig(lr=1e-3)) as engine:
        yield engine


@pytest.fixture
def batches(engine: StreamingEngine) -> list[Batch]:
    return [make_batch(engine.model, seed=seed) for seed in range(2)]


def test_a_run_goes_through_its_batches_again_until_its_steps_are_done(
    engine: StreamingEngine, batches: list[Batch]
) -> None:
    run = TrainingRun(engine, batches, steps=5).start().wait(TIMEOUT_S)
    assert (run.state, run.steps_done, run.error) == (RunState.FINISHED, 5, None)
    assert run.results[4].loss < run.results[0].loss  # the same batch, two updates later


def test_a_run_equals_a_loop_of_steps(batches: list[Batch]) -> None:
    config, adamw = EngineConfig(device="cpu", dtype="float32"), AdamWConfig(lr=1e-3)
    with StreamingEngine(build("llama"), config, adamw) as engine:
        by_hand = [engine.step(batch).loss for batch in batches]
    with StreamingEngine(build("llama"), config, adamw) as engine:
        run = TrainingRun(engine, batches, steps=2).start().wait(TIMEOUT_S)
        assert [result.loss for result in run.results] == by_hand


def test_the_schedule_sets_each_step_s_learning_rate(engine: StreamingEngine, batches: list[Batch]) -> None:
    TrainingRun(engine, batches, steps=3, lr_schedule=lambda step: (step + 1) * 1e-4).start().wait(TIMEOUT_S)
    assert [record.lr for record in engine.recorder.steps()] == pytest.approx([1e-4, 2e-4, 3e-4])


def test_cosine_schedule_warms_up_and_ends_at_its_floor() -> None:
    lr = cosine_schedule(1.0, 11, warmup=2, floor=0.1)
    assert [lr(0), lr(1), lr(2)] == pytest.approx([0.5, 1.0, 1.0])
    assert lr(6) == pytest.approx(0.55)  # half-way down
    assert lr(10) == pytest.approx(0.1)
    assert lr(50) == pytest.approx(0.1)


def test_the_folder_gets_a_line_for_each_step_and_a_trace(
    engine: StreamingEngine, batches: list[Batch], tmp_path: Path
) -> None:
    run = TrainingRun(engine, batches, steps=2, run_dir=tmp_path / "run").start().wait(TIMEOUT_S)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    assert [line["loss"] for line in lines] == [result.loss for result in run.results]
    with gzip.open(tmp_path / "run" / "trace.json.gz") as file:
        assert json.load(file)["traceEvents"]


def test_a_skipped_step_is_written_as_null_not_nan(
    engine: StreamingEngine, batches: list[Batch], tmp_path: Path
) -> None:
    empty = {**batches[0], "labels": torch.full_like(batches[0]["labels"], -100)}
    TrainingRun(engine, [empty], steps=1, run_dir=tmp_path).start().wait(TIMEOUT_S)
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line["loss"] is None
    assert "every label is -100" in line["skipped"]


def test_an_error_in_the_loop_ends_the_run_and_reaches_whoever_waits(
    engine: StreamingEngine, batches: list[Batch]
) -> None:
    wrong = {**batches[0], "input_ids": batches[0]["input_ids"] + 1_000_000}
    run = TrainingRun(engine, [batches[0], wrong], steps=4).start()
    with pytest.raises(ValueError, match="outside the model's vocabulary"):
        run.wait(TIMEOUT_S)
    assert (run.state, run.steps_done) == (RunState.FAILED, 1)


def test_stop_ends_after_the_step_in_progress(engine: StreamingEngine, batches: list[Batch]) -> None:
    def stop_after_two(done: int, _: object) -> None:
        if done == 2:
            run.stop()

    run = TrainingRun(engine, batches, steps=1000, on_step=stop_after_two)
    run.start().wait(TIMEOUT_S)
    assert (run.state, run.steps_done) == (RunState.STOPPED, 2)
    assert len(engine.state_dict()) > 0  # what was trained can still be read


def test_pause_holds_and_resume_goes_on(engine: StreamingEngine, batches: list[Batch]) -> None:
    first = threading.Event()
    run = TrainingRun(engine, batches, steps=6, on_step=lambda *_: first.set())
    run.start()
    assert first.wait(TIMEOUT_S)
    run.pause()
    assert run.state in (RunState.PAUSED, RunState.FINISHED)
    run.step_layer()
    run.resume()
    run.wait(TIMEOUT_S)
    assert run.steps_done == 6


def test_a_paused_run_can_be_stopped(engine: StreamingEngine, batches: list[Batch]) -> None:
    run = TrainingRun(engine, batches, steps=1000)
    run.pause()
    run.start()
    run.stop()
    run.wait(TIMEOUT_S)
    assert run.state is RunState.STOPPED


def test_waiting_has_a_limit(engine: StreamingEngine, batches: list[Batch]) -> None:
    run = TrainingRun(engine, batches, steps=2)
    run.pause()
    run.start()
    with pytest.raises(TimeoutError, match="still paused after"):
        run.wait(0.05)
    run.resume()
    run.wait(TIMEOUT_S)


def test_memory_is_sampled_while_a_run_lasts(engine: StreamingEngine, batches: list[Batch]) -> None:
    TrainingRun(engine, batches, steps=1).start().wait(TIMEOUT_S)
    samples = engine.recorder.memory()
    assert samples[0].arena_bytes > 0
    assert samples[0].host_rss_bytes > 0


def test_what_a_run_refuses(engine: StreamingEngine, batches: list[Batch]) -> None:
    with pytest.raises(ValueError, match="steps must be a whole number ≥ 1"):
        TrainingRun(engine, batches, steps=0)
    with pytest.raises(RuntimeError, match="was not started"):
        TrainingRun(engine, batches, steps=1).wait()
    run = TrainingRun(engine, iter(()), steps=1).start()
    with pytest.raises(ValueError, match="gave nothing to train on"):
        run.wait(TIMEOUT_S)
    with pytest.raises(RuntimeError, match="was started before"):
        run.start()

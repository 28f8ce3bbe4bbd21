"""Whole runs on a card: in a process of their own, broken off and gone on with, and what they record of the card."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from card import config_for, every_bit_repeats, needs_card
from families import build
from pairs import LR, MICRO_ROWS, differing
from reference import make_batch

from megatrain import AdamWConfig, StreamingEngine, TrainingRun
from megatrain.report import RunState

TIMEOUT_S, STEPS = 120, 8
BATCHES = [make_batch(build("llama"), 6, 24, seed=seed) for seed in range(3)]
MOVING = {"load", "forward", "backward", "unload", "update"}


def make_engine(**config: Any) -> StreamingEngine:
    settings = config_for(**{"micro_batch_size": MICRO_ROWS, "attention": "math", **config})
    return StreamingEngine(build("llama", layers=3), settings, AdamWConfig(lr=LR))


@pytest.fixture(autouse=True)
def bits() -> Iterator[None]:
    with every_bit_repeats():
        yield


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stopped_after", [1, 5])
def test_a_run_goes_on_as_if_it_had_not_been_stopped(tmp_path: Path, dtype: str, stopped_after: int) -> None:
    with make_engine(dtype=dtype) as engine:
        straight = TrainingRun(engine, BATCHES, steps=STEPS).start().wait(TIMEOUT_S)
        expected, weights = [result.loss for result in straight.results], engine.state_dict()
    with make_engine(dtype=dtype) as engine:

        def stop(done: int, _: object) -> None:
            if done == stopped_after:
                run.stop()

        run = TrainingRun(engine, BATCHES, steps=STEPS, run_dir=tmp_path, checkpoint_every=3, on_step=stop)
        first = [result.loss for result in run.start().wait(TIMEOUT_S).results]
    with make_engine(dtype=dtype) as engine:
        run = TrainingRun(engine, BATCHES, steps=STEPS, run_dir=tmp_path, checkpoint_every=3, resume=True)
        second = [result.loss for result in run.start().wait(TIMEOUT_S).results]
        assert (first + second)[: len(first)] == expected[: len(first)]
        assert second == expected[-len(second) :]
        assert differing(engine.state_dict(), weights) == []


def test_a_process_of_its_own_trains_and_records(tmp_path: Path) -> None:
    run = TrainingRun(make_engine, BATCHES, steps=STEPS, run_dir=tmp_path, save=True).start().wait(TIMEOUT_S)
    assert (run.state, run.steps_done, run.error) == (RunState.FINISHED, STEPS, None)
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert (tmp_path / "trace.json.gz").exists()


@needs_card
def test_what_a_run_records_of_the_card(tmp_path: Path) -> None:
    with make_engine(prefetch_depth=2) as engine:
        run = TrainingRun(engine, BATCHES, steps=STEPS, run_dir=tmp_path).start().wait(TIMEOUT_S)
        engine.flush()
        spans, samples, info = engine.recorder.spans(), engine.recorder.memory(), run.info
    assert {span.op for span in spans} >= MOVING
    assert all(span.end_s >= span.start_s for span in spans)
    total = torch.cuda.get_device_properties(0).total_memory
    assert all(0 < sample.device_allocated_bytes <= sample.device_reserved_bytes <= total for sample in samples)  # type: ignore[operator]
    assert all(0 < sample.host_pinned_bytes < psutil.virtual_memory().total for sample in samples)
    assert torch.cuda.get_device_name() in json.dumps(vars(info), default=str)


@needs_card
def test_lanes_of_a_card_overlap() -> None:
    """Weights arrive while a layer computes, on the device's own clock."""
    model = build("llama", layers=8, hidden_size=1024, intermediate_size=4096, head_dim=64, num_attention_heads=16)
    with StreamingEngine(model, config_for(dtype="bfloat16", prefetch_depth=2), AdamWConfig(lr=LR)) as engine:
        for seed in range(4):
            engine.step(make_batch(build("llama"), 8, 128, seed=seed))
        engine.flush()
        spans = [span for span in engine.recorder.spans() if span.step == 3]
    loads = [span for span in spans if span.op == "load" and span.layer is not None]
    works = [span for span in spans if span.op in ("forward", "backward")]
    assert any(load.start_s < work.end_s and work.start_s < load.end_s for load in loads for work in works)
    for lane in ("h2d", "compute", "d2h"):
        own = sorted((span.start_s, span.end_s) for span in spans if span.lane == lane)
        assert all(end <= start + 1e-5 for (_, end), (start, _) in pairwise(own))

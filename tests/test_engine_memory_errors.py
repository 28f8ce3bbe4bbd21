"""The device runs out of memory, injected at every place: "auto" settings give way, the rest is said and survived."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from families import build
from pairs import engine_config
from reference import Batch, make_batch

from megatrain import AdamWConfig, StreamingEngine
from megatrain.anatomy import Saved
from megatrain.engine import DeviceMemoryError
from megatrain.lanes import LaneError

BATCHES = [make_batch(build("llama"), seed=seed) for seed in range(4)]
ROOMY = 200_000_000
PLACES = {
    "the recorded call": "megatrain.anatomy.model.Anatomy.record",
    "a layer forward": "megatrain.executor.parts.forward",
    "the head": "megatrain.executor.backward",
    "a layer backward": "megatrain.executor.parts.Graph.backward",
    "a new buffer": "megatrain.slots.BufferPool.add",
}


def engine_for(**changes: Any) -> StreamingEngine:
    return StreamingEngine(build("llama", attention_dropout=0.1), engine_config(**changes), AdamWConfig(lr=1e-3))


def failing(monkeypatch: pytest.MonkeyPatch, place: str, when: Callable[[], bool]) -> list[int]:
    """Let `place` run out of memory while `when()`; returns where its failures are counted."""
    failures: list[int] = []
    real = resolve_name(PLACES[place])

    def fails(*args: Any, **kwargs: Any) -> Any:
        if when():
            failures.append(1)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return real(*args, **kwargs)

    monkeypatch.setattr(PLACES[place], fails)
    return failures


def trained(engine: StreamingEngine, batches: list[Batch]) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    losses = [engine.step(batch).loss for batch in batches]
    return losses, engine.state_dict()


@pytest.mark.parametrize("place", PLACES)
def test_auto_settings_lower_themselves_and_nothing_is_lost(
    place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With resident layers above one every attempt fails; the result is that of an engine that never had any."""
    with engine_for() as engine:
        expected = trained(engine, BATCHES)
    with engine_for(resident_layers="auto", device_memory_bytes=ROOMY, micro_batch_size=None) as engine:
        calls = iter(range(10**9))
        failures = failing(monkeypatch, place, lambda: engine.control.knobs.resident_layers > 1 and next(calls) >= 1)
        with caplog.at_level(logging.WARNING, "megatrain"):
            losses, weights = trained(engine, BATCHES)
        assert engine.control.knobs.resident_layers <= 1
    assert failures
    assert "resident_layers lowered from" in caplog.text
    assert losses == expected[0]
    for name, tensor in weights.items():
        assert torch.equal(tensor, expected[1][name]), name


def test_saved_inputs_are_offloaded_when_nothing_else_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with engine_for() as engine:
        expected = trained(engine, BATCHES)
    with engine_for(device_memory_bytes=ROOMY) as engine:
        failing(monkeypatch, "a layer backward", lambda: engine._offloaded is None)
        with caplog.at_level(logging.WARNING, "megatrain"):
            losses, weights = trained(engine, BATCHES)
        assert engine._offloaded is not None
    assert "saved inputs of layers go to the host" in caplog.text
    assert losses == expected[0]
    for name, tensor in weights.items():
        assert torch.equal(tensor, expected[1][name]), name


@pytest.mark.parametrize("place", PLACES)
def test_what_cannot_be_lowered_is_said_and_the_engine_goes_on(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_for() as engine:
        expected = trained(engine, BATCHES)
    with engine_for(offload_activations=False) as engine:
        torch.manual_seed(0)
        losses = [engine.step(BATCHES[0]).loss]
        state = torch.get_rng_state()
        with monkeypatch.context() as broken:
            failing(broken, place, lambda: True)
            if place == "a new buffer":
                engine.set_prefetch_depth(3)
            with pytest.raises(DeviceMemoryError, match=r"nothing was applied\. what can be lowered.*prefetch_depth"):
                engine.step(BATCHES[1])
        torch.set_rng_state(state)
        losses += [engine.step(batch).loss for batch in BATCHES[1:]]
        weights = engine.state_dict()
    assert losses == expected[0]
    for name, tensor in weights.items():
        assert torch.equal(tensor, expected[1][name]), name


def test_scoring_and_generating_survive_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_for() as engine, engine_for() as other:
        with monkeypatch.context() as broken:
            failing(broken, "a layer forward", lambda: True)
            with pytest.raises(DeviceMemoryError, match="lowered"):
                engine.scores(BATCHES[0])
            broken.setattr("megatrain.executor.parts.call", _out_of_memory)
            with pytest.raises(DeviceMemoryError, match="lowered"), engine.inference() as model:
                model(input_ids=BATCHES[0]["input_ids"])
        assert torch.equal(engine.scores(BATCHES[0]), other.scores(BATCHES[0]))
        torch.manual_seed(0)
        loss = engine.step(BATCHES[0]).loss
        torch.manual_seed(0)
        assert other.step(BATCHES[0]).loss == loss


def _out_of_memory(*_args: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_where_updates_follow_each_gradient_the_engine_cannot_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    config = engine_config(optimizer_overlap="backward")
    with StreamingEngine(build("llama"), config, AdamWConfig(lr=1e-3, max_grad_norm=None)) as engine:
        failing(monkeypatch, "a layer backward", lambda: True)
        with pytest.raises(LaneError, match="CUDA out of memory"):
            engine.step(BATCHES[0])
        with pytest.raises(RuntimeError, match="failed earlier"):
            engine.step(BATCHES[0])


# ---- a card is at rest before memory that it may still use is given back ----


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of a card, and when its memory goes."""
    said: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: said.append("rest"))
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: said.append("cuBLAS"), raising=False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: said.append("empty cache"))
    monkeypatch.setattr("megatrain.slots.BufferPool.clear", lambda pool, step: said.append(pool.kind))
    monkeypatch.setattr("megatrain.host.HostStore.close", lambda host: said.append("host"))
    return said


def test_a_card_rests_before_host_memory_is_unpinned(said: list[str]) -> None:
    engine = engine_for()
    engine._executor._device = torch.device("cuda")
    engine.close()
    assert said == ["rest", "cuBLAS", "host"]


def test_a_card_rests_before_its_buffers_are_freed(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_for() as engine:
        engine._executor._device = torch.device("cuda")
        monkeypatch.setattr(engine._executor, "_start_lanes", lambda: None)
        engine._executor.restart(0)
        assert said == ["rest", "cuBLAS", "weights", "gradients", "optimizer", "empty cache"]


def test_a_card_that_failed_does_not_keep_the_engine_from_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    model = build("llama")
    engine = StreamingEngine(model, engine_config())
    engine._executor._device = torch.device("cuda")
    engine.close()
    assert model(**make_batch(model)).loss.isfinite()


def test_a_step_that_is_tried_again_holds_nothing_of_the_first_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """What autograd saved refers to its graph, that to hooks, and an error to all frames that it came through."""
    saved: list[weakref.ref[Saved]] = []

    class Watched(Saved):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            saved.append(weakref.ref(self))

    monkeypatch.setattr("megatrain.executor.parts.Saved", Watched)
    calls = iter(range(10**9))
    failures = failing(monkeypatch, "the head", lambda: next(calls) == 0)
    with engine_for(kept_graphs=3, micro_batch_size=2) as engine:
        assert engine.step(BATCHES[0]).skipped is None
    assert failures == [1]
    assert len(saved) > 9
    assert [each for each in saved if each() is not None] == []

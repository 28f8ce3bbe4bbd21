"""Layers that keep their graph from forward to backward: the same bits as if they were computed again."""

from __future__ import annotations

import gc
import weakref
from functools import cache
from typing import Any

import pytest
import torch
from crossed import each_pair
from families import build
from operations import depth, drawn, lines, play, schedule
from pairs import Outcome, Pair, batches_for, engine_config, outcome, require_same
from peft import LoraConfig, get_peft_model
from tiny_models import SharedBiasForCausalLM, tiny

from megatrain import AdamWConfig, EngineConfig, StreamingEngine
from megatrain.anatomy import Saved
from megatrain.plan import plan
from megatrain.schedule import StepShape

ADAMW = AdamWConfig(lr=1e-3)
ALL = 99  # more than there are


def require_same_as_computed_again(make: Any, kept: int = ALL, adamw: AdamWConfig = ADAMW, **config: Any) -> None:
    model = make()
    batches = batches_for(model)
    torch.manual_seed(0)
    again = outcome(model, batches, adamw, **config)
    torch.manual_seed(0)
    require_same(outcome(make(), batches, adamw, kept_graphs=kept, **config), again)


FAMILIES = ["llama", "gpt_oss", "qwen3_moe", "gemma3_text", "gpt2", "qwen3_next", "mixtral"]


@pytest.mark.parametrize(("family", "rows", "dtype"), each_pair(FAMILIES, [None, 2], ["float32", "bfloat16"]))
def test_no_bit_changes(family: str, rows: int | None, dtype: str) -> None:
    require_same_as_computed_again(lambda: build(family), micro_batch_size=rows, dtype=dtype)


@pytest.mark.parametrize("family", ["doge", "inkling_text"])
def test_masks_that_need_a_gradient_go_plain_pytorchs_way(family: str) -> None:
    """PyTorch takes another kernel for them where no gradient is wanted, as in a forward that is computed again."""
    pair = Pair.of(build(family), kept_graphs=ALL)
    pair.require_equal_bits(batches_for(pair.plain))


@pytest.mark.parametrize(("kept", "depth", "offload"), each_pair([1, 2, 3], [0, 1, 3], [False, True]))
def test_weights_may_lie_in_another_slot_by_backward(kept: int, depth: int, offload: bool) -> None:
    config = {"prefetch_depth": depth, "offload_activations": offload, "micro_batch_size": 2}
    model = build("llama", layers=4)
    batches = batches_for(model)
    require_same(outcome(model, batches, ADAMW, kept_graphs=kept, **config), computed_again())


@cache
def computed_again() -> Outcome:
    """Where weights lie does not change a bit."""
    model = build("llama", layers=4)
    return outcome(model, batches_for(model), ADAMW, micro_batch_size=2)


@pytest.mark.parametrize("rows", [None, 2])
def test_updates_that_follow_each_gradient(rows: int | None) -> None:
    adamw = AdamWConfig(lr=1e-3, max_grad_norm=None)
    make = lambda: build("llama", layers=4)  # noqa: E731
    require_same_as_computed_again(make, 2, adamw, optimizer_overlap="backward", micro_batch_size=rows)


def test_random_draws_are_made_once() -> None:
    require_same_as_computed_again(lambda: build("llama", attention_dropout=0.2), 2, micro_batch_size=2)


def test_what_the_shell_computes_for_layers_gets_its_gradient() -> None:
    require_same_as_computed_again(lambda: tiny(SharedBiasForCausalLM), micro_batch_size=2)


def test_adapters_on_a_frozen_base() -> None:
    def make() -> Any:
        torch.manual_seed(0)
        return get_peft_model(
            build("llama", layers=4), LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        )

    require_same_as_computed_again(make, 2, prefetch_depth=0, micro_batch_size=2)


def test_a_loss_of_ones_own_and_a_changed_depth() -> None:
    found = []
    for kept in (0, 2):
        with StreamingEngine(build("llama", layers=4), engine_config(kept_graphs=kept), ADAMW) as engine:
            losses = []
            for number, batch in enumerate(batches_for(engine.model)):
                engine.set_prefetch_depth(number % 3)
                losses.append(engine.step(batch, lambda scores: -(scores.square().mean())).loss)
            found.append((losses, engine.state_dict()))
    (losses, weights), (as_again, expected) = found
    assert losses == as_again
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


# ---- the order of operations ----


def test_the_top_layer_keeps_its_graph_and_its_input_stays() -> None:
    ops = play(schedule(3), StepShape(micro_batches=1, offload=True, kept_graphs=1), depth(1)).ops
    layers = [op for op in drawn(ops) if op.split()[1] in ("forward", "backward", "offload", "fetch")]
    assert [line.split(" after")[0].split(" ", 1)[1] for line in layers] == lines("""
        offload 0 mb0
        forward 0 mb0 slot0
        offload 1 mb0
        forward 1 mb0 slot1
        forward 2 mb0 slot0 graph
        backward 2 mb0 slot0 grad0 graph
        fetch 1 mb0
        backward 1 mb0 slot1 grad1
        fetch 0 mb0
        backward 0 mb0 slot0 grad0
        backward shell mb0
    """)


# ---- memory ----


def test_the_device_holds_what_was_saved_and_lets_it_go() -> None:
    model = build("llama", layers=4)
    batch = batches_for(model)[0]
    peaks = {}
    for kept in (0, 2, 4):
        with StreamingEngine(build("llama", layers=4), engine_config(kept_graphs=kept), ADAMW) as engine:
            engine.step(batch)
            idle = engine.arena_bytes
            engine.step(batch)
            assert engine.arena_bytes == idle
            peaks[kept] = engine.device_peak_bytes
    assert peaks[0] < peaks[2] < peaks[4]
    assert peaks[4] - peaks[2] == pytest.approx(peaks[2] - peaks[0], rel=0.1)


def test_a_graph_goes_without_waiting_for_the_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    pack = Saved._pack

    def watching(self: Saved, tensor: torch.Tensor) -> Any:
        packed = pack(self, tensor)
        if isinstance(packed, torch.Tensor):
            made.append(weakref.ref(packed))
        return packed

    monkeypatch.setattr(Saved, "_pack", watching)
    with StreamingEngine(build("llama"), engine_config(kept_graphs=ALL), ADAMW) as engine:
        batch = batches_for(engine.model)[0]
        engine.step(batch)
        engine.flush()
        made.clear()
        gc.collect()
        gc.disable()
        try:
            engine.step(batch)
            engine.flush()
            assert made
            assert not [ref for ref in made if ref() is not None]
        finally:
            gc.enable()


def test_auto_fills_what_the_device_has_left() -> None:
    model = build("llama", layers=4)
    batch = batches_for(model)[0]
    counts = []
    for nbytes in (1_000_000, 1_500_000, 3_000_000, 100_000_000):
        config = engine_config(kept_graphs="auto", device_memory_bytes=nbytes)
        with StreamingEngine(build("llama", layers=4), config, ADAMW) as engine:
            engine.step(batch)
            counts.append(engine._room.kept_graphs)
            assert engine.device_peak_bytes <= nbytes
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == 4


def test_a_cpu_without_a_budget_fills_nothing_unasked() -> None:
    model = build("llama")
    planned = plan(model, EngineConfig(device="cpu", kept_graphs="auto"), ADAMW, batch=2, sequence=16)
    assert planned.needs.kept_graphs == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [None, 2])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_oss", "qwen3_moe"])
def test_the_plan_says_about_what_graphs_take(family: str, rows: int | None, dtype: Any) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    config = engine_config(kept_graphs=ALL, dtype=dtype, micro_batch_size=rows)
    model = build(family, layers=2, **sizes)
    planned = plan(model, config, ADAMW, batch=4, sequence=128)
    assert planned.needs.kept_graphs == 2
    ids = torch.randint(3, 50, (4, 128))
    with StreamingEngine(model, config, ADAMW) as engine:
        engine.step({"input_ids": ids, "labels": ids})
        held = engine.device_peak_bytes - (planned.held_bytes - planned.device["kept graphs"])
    assert 0.7 < planned.device["kept graphs"] / held < 1.5

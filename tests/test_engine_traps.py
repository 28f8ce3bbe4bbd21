"""Faults found in other training systems, each of which would show here.

Further ones have their tests elsewhere: dropout not replayed in the recompute (test_engine_modes), a non-finite
step applied, an empty batch stepping the optimizer, an endless join with a dead thread (test_engine_errors), a
norm computed in bfloat16 (test_engine_bfloat16), logits of all chunks kept (test_loss).
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
import tiny_models as tm
import torch
from families import VOCAB, build
from live_logits import LiveLogits
from pairs import LR, MICRO_ROWS, Pair, batches_for, engine_config, gap, outcome, require_same
from reference import Batch, make_batch
from tiny_models import tiny
from torch import Tensor

from megatrain import AdamWConfig, StreamingEngine
from megatrain.lanes import CpuStream, Lane
from megatrain.loss import backward

STILL = AdamWConfig(lr=0.0)


def loss_of(engine: StreamingEngine, batch: Batch) -> float:
    return engine.step(batch).loss


# ---- gradients in a flat buffer ----


def test_a_parameter_without_gradient_does_not_shift_its_neighbours() -> None:
    """`a_never` lies before the others and never has a gradient; `sometimes` lies among them."""
    pair = Pair.of(tiny(tm.SometimesForCausalLM), prefetch_depth=0)
    before = pair.engine.state_dict()["layers.1.a_never"]
    with pair.engine:
        pair.require_equal_bits([make_batch(pair.plain, 6, seq, seed=seq) for seq in (16, 17, 19, 18)])
        assert torch.equal(pair.engine.state_dict()["layers.1.a_never"], before)


def test_a_gradient_left_over_from_another_layer_is_not_applied() -> None:
    """Gradient buffers are reused: where a parameter has no gradient now, the buffer holds an older one's bytes."""
    model = tiny(tm.SometimesForCausalLM)
    pair = Pair.of(model, AdamWConfig(lr=LR, weight_decay=0.1, max_grad_norm=0.1), grad_buffers=1)
    with pair.engine:
        pair.require_equal_bits([make_batch(pair.plain, 6, seq, seed=seq) for seq in (16, 17, 16, 17)])


# ---- masks ----


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma3_text", "gpt2", "qwen3_next", "mamba2"])
def test_no_position_sees_a_later_one(family: str) -> None:
    model = build(family)
    batch = make_batch(model, padding=False)
    batch["labels"][:, 12:] = -100
    other = {**batch, "input_ids": batch["input_ids"].clone()}
    other["input_ids"][:, 12:] = batch["input_ids"][:, 12:].flip(0)
    with StreamingEngine(model, engine_config(), STILL) as engine:
        assert loss_of(engine, other) == pytest.approx(loss_of(engine, batch), rel=1e-6)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma3_text", "gpt2", "qwen3_next"])
@pytest.mark.parametrize("padding", ["left", "right"])
def test_what_stands_in_padding_does_not_matter(family: str, padding: Any) -> None:
    model = build(family)
    batch = make_batch(model, padding=padding)
    mask = batch["attention_mask"]
    batch["labels"][:, 1:][mask[:, :-1] == 0] = -100  # what stands in padding predicts nothing
    other = {**batch, "input_ids": torch.where(mask == 0, 7, batch["input_ids"])}
    with StreamingEngine(model, engine_config(), STILL) as engine:
        assert loss_of(engine, other) == pytest.approx(loss_of(engine, batch), rel=1e-6)


# ---- buffers ----


@pytest.mark.parametrize("slots", [0, 3])
def test_layers_do_not_see_each_others_buffers(slots: int) -> None:
    """Buffers of a layer travel with its weights, whichever slot it gets; also those that are not saved."""
    pair = Pair.of(tiny(tm.OwnBuffersForCausalLM), prefetch_depth=slots, micro_batch_size=MICRO_ROWS)
    with pair.engine:
        pair.require_close(batches_for(pair.plain))


# ---- accumulation ----


def test_accumulation_divides_by_all_tokens_once() -> None:
    """Rows of very different length: neither a mean of means nor a sum of means gives the same."""
    model = build("llama")
    batch = make_batch(model, padding=False)
    for row in range(6):
        batch["labels"][row, 3 + 4 * row :] = -100
    outcomes = [outcome(build("llama"), [batch], micro_batch_size=rows) for rows in (6, 3, 2, 1)]
    for found in outcomes[1:]:
        assert found.losses == pytest.approx(outcomes[0].losses, rel=1e-6)
        assert found.norms == pytest.approx(outcomes[0].norms, rel=1e-6)
        assert gap(found.state, outcomes[0].state) <= 1e-6
    with torch.no_grad():
        assert outcomes[0].losses[0] == pytest.approx(float(model(**batch).loss), rel=1e-6)


def test_the_last_partial_micro_batch_is_trained_too() -> None:
    """Only the fifth row, alone in its micro-batch, holds id 50."""
    model = build("llama")
    batch = make_batch(model, 5, padding=False)
    for name in ("input_ids", "labels"):
        batch[name][batch[name] == 50] = 51
    batch["input_ids"][4, 3] = 50
    before = model.state_dict()["model.embed_tokens.weight"][50].clone()
    with StreamingEngine(model, engine_config(micro_batch_size=MICRO_ROWS), AdamWConfig(lr=LR)) as engine:
        result = engine.step(batch)
        after = engine.state_dict()["model.embed_tokens.weight"][50]
    assert result.tokens == int((batch["labels"][:, 1:] != -100).sum())
    assert not torch.equal(before, after)


# ---- memory ----


def test_logits_of_a_step_are_bounded_by_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times the batch, the same peak."""
    peaks = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        with LiveLogits(VOCAB, hidden=64) as watch:  # a mode counts in the thread that enters it
            result = backward(*args, **kwargs)
        peaks.append(watch.peak_bytes)
        return result

    monkeypatch.setattr("megatrain.executor.backward", watched)
    with StreamingEngine(build("llama"), engine_config(loss_chunk_tokens=16)) as engine:
        for rows, seq in ((2, 32), (8, 128)):
            engine.step(make_batch(build("llama"), rows, seq))
    assert peaks[0] == peaks[1] < 6 * 16 * VOCAB * 4


def test_what_the_device_holds_does_not_grow_with_the_number_of_layers() -> None:
    peaks = []
    for layers in (4, 8, 16):
        model = build("llama", layers=layers)
        batches = batches_for(model, steps=2)
        with StreamingEngine(model, engine_config(offload_activations=True, micro_batch_size=MICRO_ROWS)) as engine:
            for batch in batches:
                engine.step(batch)
            peaks.append(engine.device_peak_bytes)
    assert peaks[0] == peaks[1] == peaks[2]


def test_nothing_is_left_behind_by_a_step() -> None:
    with StreamingEngine(build("mixtral"), engine_config(micro_batch_size=MICRO_ROWS)) as engine:
        batch = make_batch(build("mixtral"))
        engine.step(batch)
        held = engine.arena_bytes
        for _ in range(5):
            engine.step(batch)
            engine.flush()
            assert engine.arena_bytes == held
            assert not engine._executor.saved._held
            assert not engine._executor._dones


# ---- races ----


class SlowLane:
    """Waits at random before every piece of work of one lane (and before its copies), as a busy machine would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lane: str, seed: int, longest_s: float = 0.004) -> None:
        self._random = random.Random(seed)
        self._naps_s = [0.0, longest_s / 4, longest_s]
        self._lane = f"megatrain-{lane}"
        execute, copy = Lane._execute, CpuStream.copy

        def slow_execute(lane: Lane, item: Any) -> bool:
            self._wait()
            return execute(lane, item)

        def slow_copy(stream: CpuStream, target: Tensor, source: Tensor) -> None:
            self._wait()
            copy(stream, target, source)

        monkeypatch.setattr(Lane, "_execute", slow_execute)
        monkeypatch.setattr(CpuStream, "copy", slow_copy)

    def _wait(self) -> None:
        if threading.current_thread().name == self._lane:
            time.sleep(self._random.choice(self._naps_s))


@pytest.mark.parametrize("lane", ["h2d", "compute", "d2h", "host"])
@pytest.mark.parametrize(
    "mode",
    [
        {"prefetch_depth": 0, "grad_buffers": 1},
        {"prefetch_depth": 2, "grad_buffers": 1, "offload_activations": True},
        {"prefetch_depth": 1, "grad_buffers": 3, "resident_layers": 1},
    ],
    ids=["no-prefetch", "offload", "resident"],
)
def test_a_slow_lane_changes_nothing(lane: str, mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """No gradient is freed or overwritten while a copy reads it, and no weight is read before it is there."""
    batches = [make_batch(tiny(), 4, 16, seed=seed) for seed in range(3)]
    expected = outcome(tiny(layers=4), batches, micro_batch_size=MICRO_ROWS)
    SlowLane(monkeypatch, lane, seed=1)
    require_same(outcome(tiny(layers=4), batches, micro_batch_size=MICRO_ROWS, **mode), expected)


@pytest.mark.parametrize("lane", ["compute", "d2h", "host"])
def test_a_slow_lane_changes_nothing_where_updates_follow_gradients(lane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adamw = AdamWConfig(lr=LR, max_grad_norm=None)
    batches = [make_batch(tiny(), 4, 16, seed=seed) for seed in range(3)]
    expected = outcome(tiny(layers=6), batches, adamw, micro_batch_size=MICRO_ROWS)
    SlowLane(monkeypatch, lane, seed=2, longest_s=0.02)  # so that gradients pile up
    found = outcome(tiny(layers=6), batches, adamw, micro_batch_size=MICRO_ROWS, optimizer_overlap="backward")
    require_same(found, expected)


def test_reading_the_weights_right_after_a_step_waits_for_its_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair.of(tiny())
    SlowLane(monkeypatch, "host", seed=3)
    with pair.engine:
        pair.require_equal_bits(batches_for(pair.plain))


# ---- throughput ----


def test_throughput_does_not_count_padding() -> None:
    model = build("llama")
    padded, bare = make_batch(model, padding=True), make_batch(model, padding=False)
    with StreamingEngine(model, engine_config()) as engine:
        for batch in (padded, bare):
            engine.step(batch)
        first, second = engine.recorder.steps()
    assert first.sequence_tokens == int(padded["attention_mask"].sum())
    assert second.sequence_tokens == 6 * 24
    assert first.tokens < first.sequence_tokens
    assert first.flops < second.flops


def test_throughput_counts_only_the_experts_that_a_token_meets() -> None:
    flops = []
    for chosen in (1, 2, 4):
        model = build("mixtral", num_experts_per_tok=chosen)
        with StreamingEngine(model, engine_config()) as engine:
            engine.step(make_batch(model))
            flops.append(engine.recorder.steps()[0].flops)
    one, two, four = flops
    assert two - one == pytest.approx((four - one) / 3, rel=1e-3)
    experts = sum(p.numel() for name, p in build("mixtral").named_parameters() if ".experts." in name)
    tokens = int(make_batch(build("mixtral"))["attention_mask"].sum())
    assert four - one == pytest.approx(6 * tokens * experts * 3 / 4, rel=1e-3)

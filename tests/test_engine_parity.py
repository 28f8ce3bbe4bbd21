"""Streamed training equals plain PyTorch training of the same model, step by step."""

from __future__ import annotations

import pytest
import torch
from families import build
from pairs import LR, MICRO_ROWS, Pair, batches_for
from reference import Padding, make_batch

from megatrain import AdamWConfig

FAMILIES = ["llama", "qwen3", "qwen3_moe", "gpt_oss", "gemma3_text", "mixtral", "phi3", "qwen3_next", "gpt2"]
CLIPPING = AdamWConfig(lr=LR, weight_decay=0.1, max_grad_norm=0.5)  # norms here are 1 to 3
NO_CLIPPING = AdamWConfig(lr=LR, weight_decay=0.1, max_grad_norm=None, betas=(0.8, 0.95), eps=1e-6)


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_micro_batch_gives_the_same_bits(family: str, padding: Padding) -> None:
    pair = Pair.of(build(family), CLIPPING)
    with pair.engine:
        pair.require_equal_bits(batches_for(pair.plain, padding=padding))


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("family", FAMILIES)
def test_several_micro_batches_give_the_same_up_to_rounding(family: str, padding: Padding) -> None:
    pair = Pair.of(build(family), CLIPPING, micro_batch_size=MICRO_ROWS)
    with pair.engine:
        pair.require_close(batches_for(pair.plain, padding=padding))


@pytest.mark.parametrize("family", FAMILIES)
def test_without_clipping(family: str) -> None:
    pair = Pair.of(build(family), NO_CLIPPING)
    with pair.engine:
        pair.require_equal_bits(batches_for(pair.plain))


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_several_micro_batches_without_clipping(family: str) -> None:
    pair = Pair.of(build(family), NO_CLIPPING, micro_batch_size=MICRO_ROWS)
    with pair.engine:
        pair.require_close(batches_for(pair.plain))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_learning_rate_that_changes_between_steps(family: str) -> None:
    pair = Pair.of(build(family), CLIPPING)
    with pair.engine:
        for lr, batch in zip((0.0, 3e-3, 1e-4), batches_for(pair.plain), strict=True):
            pair.set_lr(lr)
            pair.require_equal_bits([batch])


def test_a_gradient_below_the_limit_is_not_scaled() -> None:
    pair = Pair.of(build("llama"), AdamWConfig(lr=LR, max_grad_norm=1e6))
    with pair.engine:
        pair.require_equal_bits(batches_for(pair.plain))


@pytest.mark.parametrize("layers", [1, 2, 7])
def test_any_number_of_layers(layers: int) -> None:
    pair = Pair.of(build("llama", layers=layers), CLIPPING, prefetch_depth=2)
    with pair.engine:
        pair.require_equal_bits(batches_for(pair.plain))


def test_a_batch_without_attention_mask() -> None:
    pair = Pair.of(build("llama"), CLIPPING)
    batches = [{k: v for k, v in b.items() if k != "attention_mask"} for b in batches_for(pair.plain, padding=False)]
    with pair.engine:
        pair.require_equal_bits(batches)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma3_text", "gpt2"])
def test_packed_sequences_do_not_see_each_other(family: str) -> None:
    """position_ids that go back to 0 begin another sequence; transformers masks accordingly."""
    pair = Pair.of(build(family), CLIPPING)
    batches = []
    for seed in range(2):
        batch = make_batch(pair.plain, padding=False, seed=seed)
        del batch["attention_mask"]
        starts = torch.tensor([0] * 9 + [9] * 7 + [16] * 8)
        batches.append({**batch, "position_ids": (torch.arange(24) - starts).expand(6, 24).contiguous()})
    with pair.engine:
        pair.require_equal_bits(batches)


def test_a_row_that_predicts_nothing_and_a_sequence_of_two_tokens() -> None:
    pair = Pair.of(build("llama"), CLIPPING, micro_batch_size=MICRO_ROWS)
    batches = batches_for(pair.plain, steps=2, padding=False)
    batches[0]["labels"][3:] = -100  # the last micro-batch and half of the second
    batches[1] = {name: tensor[:, :2].contiguous() for name, tensor in batches[1].items()}
    batches[1]["labels"] = batches[1]["input_ids"].clone()
    with pair.engine:
        pair.require_close(batches)


def test_what_a_step_returns() -> None:
    pair = Pair.of(build("llama"), CLIPPING, micro_batch_size=MICRO_ROWS)
    batch = make_batch(pair.plain)
    with pair.engine:
        result, (loss, norm) = pair.step(batch)
    assert result.loss == pytest.approx(loss, rel=1e-6)
    assert result.grad_norm == pytest.approx(norm, rel=1e-6)
    assert result.tokens == int((batch["labels"][:, 1:] != -100).sum())
    assert result.balancing_loss == 0.0
    assert result.skipped is None

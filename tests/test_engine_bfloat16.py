"""bfloat16 training follows an exact float32 master: what is streamed is that master, rounded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build
from pairs import LR, MICRO_ROWS, batches_for, differing, engine_config, gap
from reference import Batch, make_batch, plain_adamw, predicted_tokens
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatrain import AdamWConfig, StreamingEngine
from megatrain.optim import split

FAMILIES = ["llama", "qwen3", "gpt_oss", "mixtral", "phi3"]
ADAMW = AdamWConfig(lr=LR, weight_decay=0.1, max_grad_norm=0.5)


def rounded(master: Tensor) -> Tensor:
    """To bfloat16, ties away from zero: the upper half of the split master."""
    high, low = torch.empty(master.numel(), dtype=torch.bfloat16), torch.empty(master.numel(), dtype=torch.int16)
    split(master.contiguous().view(-1), high, low)
    return high.view(master.shape)


@dataclass
class ByHand:
    """A bfloat16 model whose float32 master copy torch.optim.AdamW trains."""

    model: PreTrainedModel
    master: PreTrainedModel
    optimizer: torch.optim.AdamW
    max_grad_norm: float | None

    @classmethod
    def of(cls, family: str, adamw: AdamWConfig, **options: Any) -> ByHand:
        model, master = build(family, **options), build(family, **options)
        for parameter in model.parameters():  # buffers stay as they are, as with from_pretrained(dtype="bfloat16")
            parameter.data = parameter.data.bfloat16()
        by_hand = cls(model, master, plain_adamw(master, adamw.lr, adamw.weight_decay), adamw.max_grad_norm)
        by_hand.copy_back()
        return by_hand

    @torch.no_grad()
    def copy_back(self) -> None:
        for parameter, master in zip(self.model.parameters(), self.master.parameters(), strict=True):
            parameter.copy_(rounded(master))

    def step(self, batch: Batch, rows: int | None = None) -> tuple[float, float]:
        """Loss and norm; gradients of several micro-batches are summed in float32 and rounded once."""
        total = predicted_tokens(batch)
        loss, sums = 0.0, dict[str, Tensor]()
        size = rows or len(batch["input_ids"])
        for first in range(0, len(batch["input_ids"]), size):
            self.model.zero_grad(set_to_none=True)
            part = {name: tensor[first : first + size].to(self.model.device) for name, tensor in batch.items()}
            one = self.model(**part, **({} if rows is None else {"num_items_in_batch": total})).loss
            one.backward()
            loss += one.item()
            for name, parameter in self.model.named_parameters():
                if parameter.grad is not None:
                    gradient = parameter.grad.float()
                    sums[name] = sums[name] + gradient if name in sums else gradient
        return loss, self.apply(sums)

    def apply(self, sums: dict[str, Tensor]) -> float:
        for name, parameter in self.master.named_parameters():
            parameter.grad = sums[name].bfloat16().float().cpu() if name in sums else None
        limit = float("inf") if self.max_grad_norm is None else self.max_grad_norm
        norm = float(torch.nn.utils.clip_grad_norm_(self.master.parameters(), limit))
        self.optimizer.step()
        self.copy_back()
        return norm

    def state(self) -> dict[str, Tensor]:
        """The float32 master, under the names of the model; buffers as the model has them."""
        masters = dict(self.master.named_parameters(remove_duplicate=False))
        return {**self.model.state_dict(), **{name: master.detach() for name, master in masters.items()}}


def engine_for(family: str, adamw: AdamWConfig = ADAMW, **config: Any) -> StreamingEngine:
    return StreamingEngine(build(family), engine_config(dtype="bfloat16", **config), adamw)


def require_equal_bits(engine: StreamingEngine, by_hand: ByHand, batches: Iterable[Batch]) -> None:
    for number, batch in enumerate(batches):
        result, expected = engine.step(batch), by_hand.step(batch)
        assert (result.loss, result.grad_norm) == expected, f"step {number}"
        assert differing(engine.state_dict(), by_hand.state()) == [], f"step {number}"


@pytest.mark.parametrize("family", FAMILIES)
def test_one_micro_batch_follows_the_master_bit_by_bit(family: str) -> None:
    by_hand = ByHand.of(family, ADAMW)
    with engine_for(family) as engine:
        require_equal_bits(engine, by_hand, batches_for(by_hand.model))


@pytest.mark.parametrize(
    "mode", [{"prefetch_depth": 0, "offload_activations": True}, {"optimizer_overlap": "backward"}]
)
def test_modes_without_clipping_follow_it_too(mode: dict[str, Any]) -> None:
    adamw = AdamWConfig(lr=LR, weight_decay=0.1, max_grad_norm=None)
    by_hand = ByHand.of("llama", adamw)
    with engine_for("llama", adamw, **mode) as engine:
        require_equal_bits(engine, by_hand, batches_for(by_hand.model))


@pytest.mark.parametrize("family", FAMILIES)
def test_several_micro_batches_are_summed_in_float32(family: str) -> None:
    by_hand = ByHand.of(family, ADAMW)
    with engine_for(family, micro_batch_size=MICRO_ROWS) as engine:
        for batch in batches_for(by_hand.model):
            result, (loss, norm) = engine.step(batch), by_hand.step(batch, MICRO_ROWS)
            assert result.loss == pytest.approx(loss, rel=1e-6)
            assert result.grad_norm == pytest.approx(norm, rel=1e-6)
            assert gap(engine.state_dict(), by_hand.state()) <= 1e-6


def test_small_updates_are_not_lost() -> None:
    """At this learning rate most bfloat16 weights would never change by themselves; the master does."""
    adamw = AdamWConfig(lr=1e-6)
    before = build("llama").state_dict()
    with engine_for("llama", adamw) as engine:
        for batch in batches_for(build("llama")):
            engine.step(batch)
        after = engine.state_dict()
    weight = "model.layers.1.mlp.up_proj.weight"
    assert (after[weight] != before[weight]).float().mean() > 0.9
    assert (after[weight].bfloat16() != before[weight].bfloat16()).float().mean() < 0.2


def test_masters_are_float32_and_exact_before_any_step() -> None:
    model = build("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with StreamingEngine(model, engine_config(dtype="bfloat16")) as engine:
        state = engine.state_dict()
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert differing(state, before) == []


def test_frozen_parameters_have_no_master() -> None:
    model = build("llama")
    model.model.embed_tokens.weight.requires_grad_(False)
    with StreamingEngine(model, engine_config(dtype="bfloat16")) as engine:
        state = engine.state_dict()
    assert state["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert state["lm_head.weight"].dtype == torch.float32


@pytest.mark.parametrize("family", ["deepseek_v3", "llama"])
def test_a_model_that_is_bfloat16_already(family: str, tmp_path: Path) -> None:
    """Buffers keep their dtype; what is saved is what was streamed."""
    model = build(family).to(torch.bfloat16)
    batch = make_batch(model)
    expected = float(model(**batch).loss.detach())
    with StreamingEngine(model, engine_config(dtype="bfloat16"), ADAMW) as engine:
        assert engine.step(batch).loss == pytest.approx(expected, rel=1e-6)
        engine.save_pretrained(tmp_path)
        master = engine.state_dict()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, parameter in loaded.named_parameters():
        assert parameter.dtype == torch.bfloat16, name
        assert torch.equal(parameter, rounded(master[name])), name


def test_the_norm_is_computed_in_float32() -> None:
    """In bfloat16, sums of squares stall after a few hundred terms."""
    by_hand = ByHand.of("llama", ADAMW)
    batch = make_batch(by_hand.model)
    by_hand.model(**batch).loss.backward()
    exact = sum(float(p.grad.double().square().sum()) for p in by_hand.model.parameters()) ** 0.5
    with engine_for("llama") as engine:
        assert engine.step(batch).grad_norm == pytest.approx(exact, rel=1e-6)


def test_half_precision_moments_train_almost_as_well() -> None:
    batches = batches_for(build("llama"), steps=5)
    states = []
    for moments in ("float32", "bfloat16"):
        with engine_for("llama", moments_dtype=moments) as engine:
            losses = [engine.step(batch).loss for batch in batches]
            states.append(engine.state_dict())
    assert losses[-1] < losses[0] + 0.1
    assert 0 < gap(states[1], states[0]) < 1e-2

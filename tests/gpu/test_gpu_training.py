"""Training on a CUDA device beside plain training on it, and beside the host's."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models as tm
import torch
from card import ADAMW, DEVICE, FAMILIES, TOLERANCE, config_for, on_device, require_near
from families import build, families
from pairs import LR, MICRO_ROWS, ROWS, Outcome, Pair, batches_for, gap, outcome
from reference import Batch, make_batch, plain_step
from test_engine_bfloat16 import ByHand
from test_families_exact import EXACT
from test_lora import adapted
from tiny_models import tiny

from megatrain import AdamWConfig, StreamingEngine, optim
from megatrain.optim import DEVICE_CHUNK, AdamWStep


@pytest.mark.parametrize("family", sorted(EXACT & set(families())))
def test_a_family_that_is_exact_on_a_cpu_trains_as_plainly(family: str) -> None:
    """A step of one micro-batch, then two of three, some rows padded."""
    pair = Pair.of(build(family), ADAMW, device=DEVICE, micro_batch_size=MICRO_ROWS)
    with pair.engine:
        pair.require_close([make_batch(pair.plain, MICRO_ROWS)], TOLERANCE)
        pair.require_close([make_batch(pair.plain, ROWS, seed=seed) for seed in (1, 2)], TOLERANCE)


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("micro_rows", [None, MICRO_ROWS])
@pytest.mark.parametrize("family", FAMILIES)
def test_training_equals_plain_training(family: str, micro_rows: int | None, padding: Any) -> None:
    pair = Pair.of(build(family), ADAMW, device=DEVICE, micro_batch_size=micro_rows)
    with pair.engine:
        pair.require_close(batches_for(pair.plain, padding=padding), TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_trains_as_a_cpu_does(family: str) -> None:
    batches = batches_for(build(family))
    cpu = outcome(build(family), batches, ADAMW, micro_batch_size=MICRO_ROWS)
    require_near(on_device(build(family), batches, micro_batch_size=MICRO_ROWS), cpu, 1e-4)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, ROWS])
@pytest.mark.parametrize("depth", [0, 1, 2, 3, 4])
def test_depths_and_micro_batches(depth: int, rows: int, batches: list[Batch], default: Outcome) -> None:
    require_near(on_device(build("llama"), batches, prefetch_depth=depth, micro_batch_size=rows), default)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("resident", [0, 2, "auto"])
def test_buffers_residents_and_offloading(
    count: int, offload: bool, resident: Any, batches: list[Batch], default: Outcome
) -> None:
    config = {"grad_buffers": count, "offload_activations": offload, "resident_layers": resident}
    require_near(on_device(build("llama"), batches, micro_batch_size=MICRO_ROWS, **config), default)


@pytest.mark.parametrize("overlap", ["forward", "backward", "none"])
def test_where_the_updates_run(overlap: Any) -> None:
    adamw = AdamWConfig(lr=LR, eps=1e-4, max_grad_norm=None)
    pair = Pair.of(build("llama"), adamw, device=DEVICE, optimizer_overlap=overlap, micro_batch_size=MICRO_ROWS)
    with pair.engine:
        pair.require_close(batches_for(pair.plain), TOLERANCE)


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("grad_buffers", [1, 2, 3])
def test_adamw_on_the_device(depth: int, grad_buffers: int) -> None:
    """Beside torch.optim.AdamW on the same device."""
    adamw = AdamWConfig(lr=LR, eps=1e-4, weight_decay=0.1, max_grad_norm=None)
    here: dict[str, Any] = {"optimizer_overlap": "backward", "optimizer_device": "device"}
    knobs = {"prefetch_depth": depth, "grad_buffers": grad_buffers, "micro_batch_size": MICRO_ROWS}
    pair = Pair.of(build("llama"), adamw, device=DEVICE, **here, **knobs)
    with pair.engine:
        pair.require_close(batches_for(pair.plain, 4), TOLERANCE)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_adamw_of_a_card_is_that_of_the_host(split: bool, moments: torch.dtype) -> None:
    """Over several pieces; random bits are the same, so that rounded moments differ by what the arithmetic does."""
    count, generator = DEVICE_CHUNK + 1000, torch.Generator().manual_seed(0)
    master = torch.randn(count, generator=generator)
    weight, low = master, None
    if split:
        weight, low = torch.empty(count, dtype=torch.bfloat16), torch.empty(count, dtype=torch.int16)
        optim.split(master, weight, low)
    arrays = [weight, low, torch.zeros(count, dtype=moments), torch.zeros(count, dtype=moments)]
    there = [None if array is None else array.to(DEVICE) for array in arrays]
    for number in range(1, 4):
        gradient = torch.randn(count, generator=generator).to(weight.dtype)
        step = AdamWStep(1e-3, 0.9, 0.99, 1e-8, 0.1, number)
        squares = optim.update(weight, low, gradient, arrays[2], arrays[3], step)  # type: ignore[arg-type]
        found = optim.update_on_device(there[0], there[1], gradient.to(DEVICE), there[2], there[3], step)  # type: ignore[arg-type]
        assert float(found) == pytest.approx(squares, rel=1e-5)
    on_host, on_card = (each[0].float() if low is None else optim.join(each[0], each[1]) for each in (arrays, there))  # type: ignore[union-attr, arg-type]
    assert gap({"weights": on_card.cpu()}, {"weights": on_host}) <= 1e-6
    for mine, other in zip(there[2:], arrays[2:], strict=True):
        assert gap({"moments": mine.cpu().float()}, {"moments": other.float()}) <= 1e-2  # type: ignore[union-attr]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("micro_rows", [None, MICRO_ROWS])
def test_a_router_balancing_loss(family: str, micro_rows: int | None) -> None:
    options: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.05}
    pair = Pair.of(build(family, **options), ADAMW, device=DEVICE, micro_batch_size=micro_rows)
    with pair.engine:
        pair.require_close(batches_for(pair.plain), TOLERANCE)


@pytest.mark.parametrize("offload", [False, True])
def test_dropout_draws_what_plain_training_draws(offload: bool) -> None:
    model = build("gpt2", **dict[str, Any](attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1))
    pair = Pair.of(model, ADAMW, device=DEVICE, offload_activations=offload)
    batches = batches_for(pair.plain)
    with pair.engine:
        torch.manual_seed(7)
        expected = []
        for batch in batches:
            moved = {name: tensor.to(DEVICE) for name, tensor in batch.items()}
            expected.append(plain_step(pair.plain, pair.optimizer, moved, micro_batches=1, max_grad_norm=0.5))
        torch.manual_seed(7)
        for batch, (loss, norm) in zip(batches, expected, strict=True):
            result = pair.engine.step(batch)
            assert result.loss == pytest.approx(loss, rel=TOLERANCE)
            assert result.grad_norm == pytest.approx(norm, rel=TOLERANCE)
        pair.require_close_weights(TOLERANCE, "after all steps")


def test_frozen_parts_and_missing_gradients() -> None:
    model = build("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.2." in name or "norm" in name)
    pair = Pair.of(model, ADAMW, device=DEVICE, micro_batch_size=MICRO_ROWS)
    with pair.engine:
        pair.require_close(batches_for(pair.plain), TOLERANCE)


def test_buffers_and_constants_of_layers_are_on_the_device() -> None:
    pair = Pair.of(build("deepseek_v3"), ADAMW, device=DEVICE, prefetch_depth=0)
    with pair.engine:
        pair.require_close(batches_for(pair.plain), TOLERANCE)


def test_the_model_comes_back_to_the_host_trained() -> None:
    model = build("gpt2")
    pair = Pair.of(model, ADAMW, device=DEVICE)
    pair.step(make_batch(pair.plain))
    pair.engine.close()
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}
    assert gap(model.state_dict(), pair.plain.state_dict()) <= TOLERANCE
    assert model(**make_batch(model)).loss.isfinite()


@pytest.mark.parametrize("micro_rows", [None, MICRO_ROWS])
@pytest.mark.parametrize("model_class", [tm.SharedBiasForCausalLM, tm.OwnBuffersForCausalLM, tm.TiedForCausalLM])
def test_models_of_our_own(model_class: type[tm.TinyForCausalLM], micro_rows: int | None) -> None:
    pair = Pair.of(tiny(model_class), ADAMW, device=DEVICE, micro_batch_size=micro_rows)
    with pair.engine:
        pair.require_close(batches_for(pair.plain), TOLERANCE)


LEVERS: list[dict[str, Any]] = [
    {"kept_graphs": 2},
    {"keep_attention": True},
    {"tile_tokens": 8},
    {"compile": True},
    {"loss_chunk_tokens": 7},
]


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # what inductor would rather use
@pytest.mark.parametrize("lever", LEVERS, ids=str)
@pytest.mark.parametrize("micro_rows", [None, MICRO_ROWS])
def test_levers_change_nothing_but_rounding(lever: dict[str, Any], micro_rows: int | None) -> None:
    pair = Pair.of(build("llama"), ADAMW, device=DEVICE, micro_batch_size=micro_rows, **lever)
    with pair.engine:
        pair.require_close(batches_for(pair.plain), TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_adapters_train_as_plainly(family: str, dtype: torch.dtype) -> None:
    """Float32 ones, also on a bfloat16 base."""
    adamw = AdamWConfig(lr=LR, eps=1e-4)
    engine = {"device": DEVICE, "dtype": str(dtype).removeprefix("torch.")}
    pair = Pair.of(adapted(family, dtype, target_modules="all-linear"), adamw, **engine)
    with pair.engine:
        pair.require_close(batches_for(pair.plain), TOLERANCE if dtype == torch.float32 else 2e-3)


# ---- bfloat16 ----


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt_oss"])
@pytest.mark.parametrize("micro_rows", [None, MICRO_ROWS])
def test_bfloat16_follows_a_float32_master(family: str, micro_rows: int | None) -> None:
    """One bit of a bfloat16 gradient is 0.4 % of it, and three steps move weights by some 5 %."""
    by_hand = ByHand.of(family, ADAMW)
    by_hand.model.to(DEVICE)
    by_hand.optimizer.param_groups[0]["eps"] = by_hand.optimizer.param_groups[1]["eps"] = ADAMW.eps
    with StreamingEngine(build(family), config_for(dtype="bfloat16", micro_batch_size=micro_rows), ADAMW) as engine:
        for batch in batches_for(build(family)):
            result, (loss, norm) = engine.step(batch), by_hand.step(batch, micro_rows)
            assert result.loss == pytest.approx(loss, rel=2e-3)
            assert result.grad_norm == pytest.approx(norm, rel=2e-2)
        state = engine.state_dict()
    expected = {name: tensor.cpu() for name, tensor in by_hand.state().items()}
    assert {name: tensor.dtype for name, tensor in state.items()} == {n: t.dtype for n, t in expected.items()}
    assert gap(state, expected) <= 5e-3


@pytest.mark.parametrize("depth", [0, 2])
def test_bfloat16_depths_agree(depth: int, batches: list[Batch]) -> None:
    expected = on_device(build("llama"), batches, dtype="bfloat16", micro_batch_size=MICRO_ROWS)
    config = {"dtype": "bfloat16", "prefetch_depth": depth, "offload_activations": True, "grad_buffers": 1}
    require_near(on_device(build("llama"), batches, micro_batch_size=MICRO_ROWS, **config), expected, 2e-3)

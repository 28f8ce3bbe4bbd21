"""Every mode of the engine gives the same bits; what is frozen, dropped or shared is as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny_models as tm
import torch
from families import build
from pairs import LR, MICRO_ROWS, Outcome, Pair, batches_for, differing, gap, outcome, require_same
from reference import Batch, make_batch, plain_adamw, plain_step, predicted_tokens
from tiny_models import tiny
from torch import nn
from transformers import PreTrainedModel

from megatrain import AdamWConfig, StreamingEngine

UNCLIPPED = AdamWConfig(lr=LR, weight_decay=0.1, max_grad_norm=None)
DEPTHS = [0, 1, 2, 3, 4]

MODES: list[dict[str, Any]] = [
    *({"prefetch_depth": depth} for depth in DEPTHS),
    *({"grad_buffers": count} for count in (1, 2, 3)),
    *({"resident_layers": count} for count in (1, 4, 99, "auto")),
    {"offload_activations": True},
    {"offload_activations": True, "prefetch_depth": 0},
    {"offload_activations": True, "prefetch_depth": 3, "resident_layers": 2},
    {"offload_activations": False},
    {"optimizer_overlap": "none"},
    {"optimizer_overlap": "none", "prefetch_depth": 0, "grad_buffers": 1},
    {"device_memory_bytes": 10**9, "resident_layers": "auto"},
]


def mode_name(value: object) -> str | None:
    return "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else None


@pytest.fixture(scope="module")
def batches() -> list[Batch]:
    return batches_for(build("llama"))


@pytest.fixture(scope="module")
def default(batches: list[Batch]) -> Outcome:
    return outcome(build("llama"), batches, micro_batch_size=MICRO_ROWS)


@pytest.mark.parametrize("mode", MODES, ids=mode_name)
def test_a_mode_gives_the_same_bits(mode: dict[str, Any], batches: list[Batch], default: Outcome) -> None:
    require_same(outcome(build("llama"), batches, micro_batch_size=MICRO_ROWS, **mode), default)


@pytest.mark.parametrize("mode", [{}, *MODES[::4]], ids=mode_name)
def test_updates_in_backward_give_the_same_bits_as_after_it(mode: dict[str, Any], batches: list[Batch]) -> None:
    """Possible without clipping only."""
    expected = outcome(build("llama"), batches, UNCLIPPED, micro_batch_size=MICRO_ROWS)
    config = {**mode, "micro_batch_size": MICRO_ROWS, "optimizer_overlap": "backward"}
    require_same(outcome(build("llama"), batches, UNCLIPPED, **config), expected)


@pytest.mark.parametrize("model_class", [tm.SharedBiasForCausalLM, tm.OwnBuffersForCausalLM, tm.SometimesForCausalLM])
@pytest.mark.parametrize("mode", [MODES[0], MODES[4], MODES[5], MODES[13], MODES[14]], ids=mode_name)
def test_modes_of_models_with_more_than_weights(model_class: type[tm.TinyForCausalLM], mode: dict[str, Any]) -> None:
    batches = [make_batch(tiny(), 6, seq, seed=seq) for seq in (16, 17, 16)]
    expected = outcome(tiny(model_class), batches, micro_batch_size=MICRO_ROWS)
    require_same(outcome(tiny(model_class), batches, micro_batch_size=MICRO_ROWS, **mode), expected)


@pytest.mark.parametrize("mode", [MODES[0], MODES[8], MODES[14]], ids=mode_name)
def test_modes_of_a_model_with_a_balancing_loss(mode: dict[str, Any]) -> None:
    def model() -> PreTrainedModel:
        return build("mixtral", output_router_logits=True, router_aux_loss_coef=0.05)

    batches = batches_for(model(), steps=2)
    require_same(outcome(model(), batches, micro_batch_size=2, **mode), outcome(model(), batches, micro_batch_size=2))


@pytest.mark.parametrize("tokens", [1, 7, 24, 10**6])
def test_the_head_in_chunks_of_any_size(tokens: int, batches: list[Batch], default: Outcome) -> None:
    found = outcome(build("llama"), batches, micro_batch_size=MICRO_ROWS, loss_chunk_tokens=tokens)
    assert found.losses == pytest.approx(default.losses, rel=1e-6)
    assert found.norms == pytest.approx(default.norms, rel=1e-6)
    assert gap(found.state, default.state) <= 1e-6


@pytest.mark.parametrize("rows", [1, 4, 5, 6, 100])
def test_micro_batches_that_do_not_divide_the_batch(rows: int, batches: list[Batch], default: Outcome) -> None:
    found = outcome(build("llama"), batches, micro_batch_size=rows)
    assert found.losses == pytest.approx(default.losses, rel=1e-6)
    assert found.norms == pytest.approx(default.norms, rel=1e-6)
    assert gap(found.state, default.state) <= 1e-6


@pytest.mark.parametrize("offload", [False, True])
def test_batches_of_changing_shapes(offload: bool) -> None:
    pair = Pair.of(build("llama"), micro_batch_size=MICRO_ROWS, offload_activations=offload)
    shapes = [(6, 24), (2, 16), (8, 9), (2, 100), (6, 24)]
    with pair.engine:
        pair.require_close([make_batch(pair.plain, rows, seq, seed=seq) for rows, seq in shapes])


def test_a_depth_that_changes_between_steps_and_within_one(batches: list[Batch], default: Outcome) -> None:
    def turn(engine: StreamingEngine, number: int) -> None:
        engine.set_prefetch_depth((3, 0, 2)[number])
        engine.control.set_grad_buffers((1, 3, 2)[number])
        engine.control.set_resident_layers((0, 2, 1)[number])

    require_same(outcome(build("llama"), batches, micro_batch_size=MICRO_ROWS, before_step=turn), default)


# ---- frozen parameters ----


def only(*parts: str) -> Callable[[str], bool]:
    return lambda name: any(part in name for part in parts)


def all_but(*parts: str) -> Callable[[str], bool]:
    return lambda name: not any(part in name for part in parts)


TRAINED = {
    "embeddings-frozen": all_but("embed_tokens"),
    "head-frozen": all_but("lm_head"),
    "shell-frozen": only("layers"),
    "top-layer-only": only("layers.3."),
    "bottom-layer-only": only("layers.0."),
    "one-middle-layer-only": only("layers.1."),
    "two-layers-apart": only("layers.0.", "layers.2."),
    "one-parameter-frozen": all_but("layers.1.mlp.up_proj"),
    "one-parameter-trained": only("layers.2.self_attn.k_proj"),
    "norms-only": only("norm"),
    "head-only": only("lm_head"),
    "embeddings-only": only("embed_tokens"),
    "final-norm-only": only("model.norm"),
}
FROZEN_MODES: list[dict[str, Any]] = [{}, {"offload_activations": True, "prefetch_depth": 0}, {"prefetch_depth": 4}]


def partly_frozen(family: str, trained: Callable[[str], bool]) -> PreTrainedModel:
    model = build(family)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained(name))
    return model


@pytest.mark.parametrize("mode", FROZEN_MODES, ids=mode_name)
@pytest.mark.parametrize("trained", TRAINED.values(), ids=TRAINED.keys())
def test_frozen_parameters_stay_and_the_others_train(trained: Callable[[str], bool], mode: dict[str, Any]) -> None:
    model = partly_frozen("llama", trained)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    pair = Pair.of(model, AdamWConfig(lr=LR, weight_decay=0.1), **mode)
    with pair.engine:
        pair.require_equal_bits(batches_for(pair.plain, steps=2))
        changed = set(differing(pair.engine.state_dict(), before))
    assert changed == {name for name in before if trained(name)}


@pytest.mark.parametrize("trained", TRAINED.values(), ids=TRAINED.keys())
def test_frozen_parameters_with_several_micro_batches(trained: Callable[[str], bool]) -> None:
    pair = Pair.of(partly_frozen("llama", trained), micro_batch_size=MICRO_ROWS)
    with pair.engine:
        pair.require_close(batches_for(pair.plain, steps=2))


@pytest.mark.parametrize("trained", [all_but("wte"), only("wte"), only("h.3.")], ids=["all-but", "only", "top"])
def test_tied_embeddings_frozen_or_alone(trained: Callable[[str], bool]) -> None:
    pair = Pair.of(partly_frozen("gpt2", trained))
    with pair.engine:
        pair.require_equal_bits(batches_for(pair.plain, steps=2))


@pytest.mark.parametrize("trained", [only("layers.1."), only("experts"), all_but("experts")])
def test_frozen_parts_of_a_model_with_a_balancing_loss(trained: Callable[[str], bool]) -> None:
    model = build("qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.05)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained(name))
    pair = Pair.of(model)
    with pair.engine:
        pair.require_equal_bits(batches_for(pair.plain, steps=2))


@pytest.mark.parametrize("trained", [only("relative"), only("scale"), all_but("relative", "scale"), only("layers.2.")])
def test_frozen_parts_of_what_the_shell_computes_for_layers(trained: Callable[[str], bool]) -> None:
    model = tiny(tm.SharedBiasForCausalLM)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained(name))
    pair = Pair.of(model)
    with pair.engine:
        pair.require_equal_bits(batches_for(pair.plain, steps=2))


# ---- parameters without a gradient ----


@pytest.mark.parametrize("rows", [None, MICRO_ROWS])
def test_a_parameter_without_gradient_in_some_steps_is_skipped_as_torch_does(rows: int | None) -> None:
    """No decay, no decay of its moments, no step counted."""
    pair = Pair.of(tiny(tm.SometimesForCausalLM), AdamWConfig(lr=LR, weight_decay=0.1), micro_batch_size=rows)
    batches = [make_batch(pair.plain, 6, seq, seed=seed) for seed, seq in enumerate((15, 16, 17, 15, 18, 20))]
    with pair.engine:
        if rows:
            pair.require_close(batches)
        else:
            pair.require_equal_bits(batches)


# ---- dropout ----

GPT2_DROPOUT: dict[str, Any] = {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1}
DROPPING: dict[str, Callable[[], PreTrainedModel]] = {
    "gpt2": lambda: build("gpt2", **GPT2_DROPOUT),
    "llama": lambda: build("llama", attention_dropout=0.1),
    "opt": lambda: build("opt", dropout=0.1, attention_dropout=0.1),
    "own": lambda: tiny(tm.DroppingForCausalLM),
}


@pytest.mark.parametrize("mode", [*FROZEN_MODES, {"optimizer_overlap": "none"}], ids=mode_name)
@pytest.mark.parametrize("name", DROPPING)
def test_dropout_draws_what_plain_training_draws(name: str, mode: dict[str, Any]) -> None:
    pair = Pair.of(DROPPING[name](), **mode)
    batches = batches_for(pair.plain)
    with pair.engine, torch.random.fork_rng():
        torch.manual_seed(7)
        expected = [plain_step(pair.plain, pair.optimizer, b, micro_batches=1, max_grad_norm=1.0) for b in batches]
        torch.manual_seed(7)
        results = [pair.engine.step(batch) for batch in batches]
        assert [(r.loss, r.grad_norm) for r in results] == expected
        assert differing(pair.engine.state_dict(), pair.plain.state_dict()) == []


def layer_major_losses(model: Any, parts: list[Batch], tokens: int) -> list[torch.Tensor]:
    """Losses of gpt2 on unpadded micro-batches, all of which pass a layer before any passes the next."""
    body = model.transformer
    positions = torch.arange(parts[0]["input_ids"].shape[1])
    hidden = [body.drop(body.wte(part["input_ids"]) + body.wpe(positions)) for part in parts]
    for layer in body.h:
        hidden = [layer(h, attention_mask=None, use_cache=False) for h in hidden]
    return [
        nn.functional.cross_entropy(
            model.lm_head(body.ln_f(h))[:, :-1].flatten(0, 1), part["labels"][:, 1:].flatten(), reduction="sum"
        )
        / tokens
        for h, part in zip(hidden, parts, strict=True)
    ]


@pytest.mark.parametrize("mode", FROZEN_MODES, ids=mode_name)
def test_dropout_of_several_micro_batches_is_replayed_in_the_recompute(mode: dict[str, Any]) -> None:
    """Layer by layer each micro-batch draws its own mask; backward sees the same masks as forward."""
    pair = Pair.of(build("gpt2", **GPT2_DROPOUT), AdamWConfig(lr=LR, max_grad_norm=1e9), micro_batch_size=2, **mode)
    batch = make_batch(pair.plain, padding=False)
    parts = [{name: tensor[i : i + 2] for name, tensor in batch.items()} for i in (0, 2, 4)]
    with pair.engine, torch.random.fork_rng():
        torch.manual_seed(7)
        loss = torch.stack(layer_major_losses(pair.plain, parts, predicted_tokens(batch))).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.get_total_norm([p.grad for p in pair.plain.parameters() if p.grad is not None])
        pair.optimizer.step()
        torch.manual_seed(7)
        result = pair.engine.step(batch)
        assert result.loss == pytest.approx(loss.item(), rel=1e-6)
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-6)
        assert gap(pair.engine.state_dict(), pair.plain.state_dict()) <= 1e-6


def test_a_model_in_eval_mode_drops_nothing() -> None:
    model = build("gpt2", **GPT2_DROPOUT).eval()
    pair = Pair.of(model)
    with pair.engine:
        state = torch.get_rng_state()
        pair.require_equal_bits(batches_for(pair.plain, steps=2))
        assert torch.equal(torch.get_rng_state(), state)


# ---- buffers ----


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
@pytest.mark.parametrize("mode", [{"prefetch_depth": 0}, {"prefetch_depth": 3, "offload_activations": True}])
def test_each_layer_streams_its_own_router_bias(family: str, mode: dict[str, Any]) -> None:
    model = build(family)
    biases = {name: b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")}
    assert len(biases) > 1
    for number, bias in enumerate(biases.values()):
        bias.copy_(torch.arange(4.0).roll(number))  # other experts win in every layer
    pair = Pair.of(model, **mode)
    with pair.engine:
        pair.require_equal_bits(batches_for(pair.plain, steps=2))


def test_the_reference_would_notice_a_missing_step() -> None:
    """The comparisons above can fail: one step fewer, or another learning rate, is another model."""
    model, batches = build("llama"), batches_for(build("llama"), steps=2)
    found = outcome(model, batches[:1])
    plain = build("llama")
    optimizer = plain_adamw(plain, LR)
    for batch in batches:
        plain_step(plain, optimizer, batch, micro_batches=1, max_grad_norm=1.0)
    assert gap(found.state, plain.state_dict()) > 1e-3

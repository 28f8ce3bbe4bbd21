from __future__ import annotations

from typing import Any

import pytest
import torch
from families import LAYERS, NOT_BUILDABLE, VOCAB, WINDOW, NotBuildable, build, families, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import IGNORED, make_batch, plain_adamw, plain_step, predicted_tokens, shifts_labels, takes_num_items
from torch import Tensor
from transformers import PreTrainedModel, Trainer

LLAMA = build("llama")
BUILDABLE = [name for name in families() if name not in NOT_BUILDABLE]


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def step(family: str, micro_batches: int, **overrides: Any) -> tuple[float, float, PreTrainedModel]:
    model = build(family, **overrides)
    optimizer = plain_adamw(model, lr=1e-3)
    batch = make_batch(model)
    loss, norm = plain_step(model, optimizer, batch, micro_batches=micro_batches, max_grad_norm=None)
    return loss, norm, model


@pytest.mark.parametrize("family", BUILDABLE)
def test_every_family_builds_tiny_and_none_of_its_parameters_is_constant(family: str) -> None:
    model = build(family)
    assert model.training
    config = model.config.get_text_config()
    assert config.vocab_size <= 128
    assert 0 <= config.pad_token_id < config.vocab_size
    assert not getattr(config, "use_cache", False)
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32, name
        assert parameter.isfinite().all(), name
        assert parameter.numel() == 1 or parameter.std() > 0, name


@pytest.mark.parametrize("family", sorted(set(NOT_BUILDABLE) & set(families())))
def test_a_family_that_cannot_be_built_says_why(family: str) -> None:
    with pytest.raises(NotBuildable, match=f"{family} cannot be built: it"):
        tiny_config(family)


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("gemma3_text", {"sliding_attention", "full_attention"}),
        ("qwen3_next", {"linear_attention", "full_attention"}),
        ("llama4_text", {"chunked_attention", "full_attention"}),
    ],
)
def test_hybrid_families_keep_both_kinds_of_layers(family: str, kinds: set[str]) -> None:
    assert set(tiny_config(family).layer_types) == kinds
    assert set(tiny_config(family, layers=2).layer_types) == kinds


def test_a_multimodal_family_gives_its_text_model() -> None:
    assert tiny_config("gemma3").model_type == "gemma3_text"
    assert tiny_config("gemma3").sliding_window == WINDOW


@pytest.mark.parametrize("layers", [1, 2, 7, 40])
def test_the_number_of_layers_can_be_chosen(layers: int) -> None:
    assert len(build("llama", layers=layers).model.layers) == layers
    assert len(build("gpt2", layers=layers).transformer.h) == layers


def test_one_seed_gives_one_model_and_leaves_the_global_random_state() -> None:
    state = torch.get_rng_state()
    first, again, other = (build("llama", seed=seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert not any(torch.equal(tensor, other[name]) for name, tensor in first.items())
    assert torch.equal(torch.get_rng_state(), state)


def test_dropout_is_off_unless_asked_for() -> None:
    for dropout, repeats in ((0.0, True), (0.5, False)):
        model = build("gpt2", resid_pdrop=dropout) if dropout else build("gpt2")
        batch = make_batch(model)
        assert torch.equal(model(**batch).logits, model(**batch).logits) == repeats


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 9),
    seq=st.integers(16, 32),
    seed=st.integers(0, 10**6),
    padding=st.sampled_from([True, False, "right", "left"]),
)
def test_batches_ignore_padding_and_use_no_special_token(rows: int, seq: int, seed: int, padding: Any) -> None:
    model = LLAMA
    batch = make_batch(model, rows, seq, seed, padding)
    ids, mask, labels = (batch[name] for name in ("input_ids", "attention_mask", "labels"))
    assert {tuple(tensor.shape) for tensor in batch.values()} == {(rows, seq)}
    assert torch.equal(ids == model.config.pad_token_id, mask == 0)
    assert not torch.isin(ids[mask == 1], torch.tensor([model.config.bos_token_id, model.config.eos_token_id])).any()
    assert (labels[mask == 0] == IGNORED).all()
    assert torch.equal(labels[labels != IGNORED], ids[labels != IGNORED])
    assert bool((mask == 0).any()) == bool(padding)
    if padding == "left":
        assert (mask.diff(dim=1) >= 0).all()
    elif padding:
        assert (mask.diff(dim=1) <= 0).all()
    assert (labels[:, 1:] != IGNORED).sum(1).min() > 0


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_next", "gemma3_text", "xlm", "bart"])
def test_micro_batches_add_up_to_the_whole_batch(family: str) -> None:
    whole_loss, whole_norm, whole = step(family, 1)
    loss, norm, model = step(family, 3)
    assert loss == pytest.approx(whole_loss, rel=1e-5)
    assert norm == pytest.approx(whole_norm, rel=1e-4)
    expected = gradients(whole)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-6, msg=name)


def test_the_balancing_loss_is_averaged_by_predicted_tokens() -> None:
    plain_loss, _, _ = step("mixtral", 3)
    model = build("mixtral", output_router_logits=True, router_aux_loss_coef=0.5)
    batch = make_batch(model)
    parts = [{name: tensor[i : i + 2] for name, tensor in batch.items()} for i in (0, 2, 4)]
    with torch.no_grad():
        shares = [predicted_tokens(part) / predicted_tokens(batch) for part in parts]
        balancing = sum(share * float(model(**part).aux_loss) for share, part in zip(shares, parts, strict=True))
    loss, _, _ = step("mixtral", 3, output_router_logits=True, router_aux_loss_coef=0.5)
    assert len(set(shares)) > 1
    assert loss == pytest.approx(plain_loss + 0.5 * balancing, rel=1e-5)


def test_a_loss_says_what_it_counts() -> None:
    bart = build("bart")
    for model, expected in ((LLAMA, True), (bart, False)):
        batch = make_batch(model)
        assert takes_num_items(model, batch) is expected
        assert shifts_labels(model, batch) is expected


def test_gradients_are_clipped_to_the_global_norm_and_the_norm_before_is_returned() -> None:
    model = build("llama")
    optimizer = plain_adamw(model, lr=0.0)
    batch = make_batch(model)
    _, norm = plain_step(model, optimizer, batch, micro_batches=1, max_grad_norm=0.01)
    left = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients(model).values()]))
    assert norm > 0.1
    assert float(left) == pytest.approx(0.01, rel=1e-3)


def test_a_frozen_parameter_is_left_alone() -> None:
    model = build("llama")
    frozen = model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    before = frozen.detach().clone()
    plain_step(model, plain_adamw(model, 1e-2, 0.1), make_batch(model), micro_batches=2, max_grad_norm=1.0)
    assert torch.equal(frozen, before)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "mamba2", "olmo2"])
def test_parameters_decay_as_in_the_trainer(family: str) -> None:
    model = build(family)
    decaying, rest = plain_adamw(model, lr=1e-3, weight_decay=0.1).param_groups
    named = Trainer.get_decay_parameter_names(None, model)
    expected = [id(p) for name, p in model.named_parameters() if name in named]
    assert [id(p) for p in decaying["params"]] == expected
    assert decaying["weight_decay"] == 0.1
    assert rest["weight_decay"] == 0.0
    assert len(decaying["params"]) + len(rest["params"]) == len(list(model.parameters()))


def test_the_defaults_are_what_tests_rely_on() -> None:
    config = tiny_config("llama")
    assert (config.num_hidden_layers, config.vocab_size) == (LAYERS, VOCAB)
    assert config.max_position_embeddings >= 128

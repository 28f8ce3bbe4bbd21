"""A model taken apart: what its layers are, what is refused, and that its parts add up to it."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import tiny_models as tm
import torch
from families import build
from hypothesis import given
from hypothesis import strategies as st
from pairs import Pair, batches_for, differing, engine_config
from reference import IGNORED, make_batch
from tiny_models import tiny
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

from megatrain import StreamingEngine
from megatrain.anatomy import Anatomy, UnsupportedModelError, check, chunks, decayed_parameters
from megatrain.batch import shifted

SHARES_STATE = r"its loss is [\d.]+, that of its parts [\d.]+ \(layers that share state"

REFUSALS: list[tuple[type[tm.TinyForCausalLM], str]] = [
    (tm.ReadsNeighbourForCausalLM, SHARES_STATE),
    (tm.ReadsNeighbourWithoutGradientForCausalLM, SHARES_STATE),
    (tm.NotesForCausalLM, SHARES_STATE),
    (tm.TwoOutputsForCausalLM, "layers.1 reads what another layer computed"),
    (tm.LayerArgumentForCausalLM, "layers.2 reads what another layer computed"),
    (tm.ChangedBetweenForCausalLM, "changes the hidden state between layers.0 and layers.1 outside any layer"),
    (tm.LoopedForCausalLM, "layers.0 is called more than once"),
    (tm.RepeatedLayerForCausalLM, "layers.2 is called more than once"),
    (tm.SkippedLayerForCausalLM, "layers.1 is not called"),
    (tm.ReversedForCausalLM, "layers.2 is called as number 0"),
    (tm.SharedWeightForCausalLM, "layers.2.mix.weight is shared between layers.0 and layers.2"),
    (tm.SharedWithShellForCausalLM, "norm.weight is shared between the shell and layers.1"),
    (tm.BorrowsShellForCausalLM, "the gradient of norm.weight differs"),
    (tm.CountingBufferForCausalLM, "layers.0.calls is a buffer that its layer changes"),
    (tm.RememberingForCausalLM, SHARES_STATE),
    (tm.OverwritingForCausalLM, "called in parts it fails: RuntimeError: a leaf Variable .* in-place"),
    (tm.QuantizedForCausalLM, "layers.1.packed has dtype torch.int8: quantized weights"),
    (tm.NoListForCausalLM, "NoListForCausalLM has no list of decoder layers"),
]


def refuse(model: nn.Module, reason: str, error: type[ValueError] = UnsupportedModelError, **config: Any) -> None:
    """Constructing an engine fails with this reason; the model is as it was, and nothing is left behind."""
    before = copy.deepcopy(model)
    random = torch.get_rng_state()
    threads = set(threading.enumerate())
    with pytest.raises(error, match=reason):
        StreamingEngine(model, engine_config(**config))
    assert set(threading.enumerate()) == threads
    assert torch.equal(torch.get_rng_state(), random)
    assert differing(model.state_dict(), before.state_dict()) == []
    for (name, parameter), old in zip(model.named_parameters(), before.parameters(), strict=True):
        assert parameter.requires_grad == old.requires_grad, name
        assert parameter.dtype == old.dtype, name
        assert parameter.grad is None, name
    assert [type(module) for module in model.modules()] == [type(module) for module in before.modules()]
    assert model.training == before.training


@pytest.mark.parametrize(("model_class", "reason"), REFUSALS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_model_that_breaks_a_rule_is_refused_by_name(model_class: type[tm.TinyForCausalLM], reason: str) -> None:
    model = tiny(model_class)
    refuse(model, reason)
    assert model(**make_batch(model)).loss.isfinite()


def test_an_encoder_decoder_is_refused() -> None:
    config = T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2)
    refuse(T5ForConditionalGeneration(config), "T5ForConditionalGeneration is an encoder-decoder")


def test_a_model_that_says_it_is_quantized_is_refused() -> None:
    model = tiny()
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    refuse(model, "TinyForCausalLM is quantized; load it without quantization")


def test_layers_skipped_at_random_are_refused() -> None:
    refuse(build("opt", layerdrop=0.1), r"skips layers at random \(config.layerdrop=0.1\); set it to 0")


def test_a_model_with_nothing_to_train_is_refused() -> None:
    refuse(tiny().requires_grad_(False), "no parameter requires a gradient; set requires_grad", ValueError)


def test_a_model_that_the_device_cannot_hold_is_refused_and_left_alone() -> None:
    refuse(tiny(), "need .* MB on the device", ValueError, device_memory_bytes=1000, dtype="bfloat16")


@pytest.mark.parametrize("name", ["xlm", "gemma4_text", "zamba2", "mllama", "glm_moe_dsa"])
def test_a_refused_model_still_trains_plainly(name: str) -> None:
    model, same = build(name), build(name)
    refuse(model, "layers|ffns")
    batch = make_batch(model)
    for each in (model, same):
        each(**batch).loss.backward()
    for (parameter_name, parameter), other in zip(model.named_parameters(), same.parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None), parameter_name
        assert parameter.grad is None or torch.equal(parameter.grad, other.grad), parameter_name


STREAMABLE = [
    tm.TinyForCausalLM,
    tm.SharedBiasForCausalLM,
    tm.OwnBuffersForCausalLM,
    tm.TiedForCausalLM,
    tm.SometimesForCausalLM,
    tm.OwnForwardForCausalLM,
]


@pytest.mark.parametrize("model_class", STREAMABLE)
@pytest.mark.parametrize("config", [{}, {"micro_batch_size": 2}, {"micro_batch_size": 2, "offload_activations": True}])
def test_models_of_our_own_are_trained_exactly(model_class: type[tm.TinyForCausalLM], config: dict[str, Any]) -> None:
    pair = Pair.of(tiny(model_class), **config)
    with pair.engine:
        if config:
            pair.require_close(batches_for(pair.plain))
        else:
            pair.require_equal_bits(batches_for(pair.plain))


def test_what_the_shell_computes_for_all_layers_gets_their_gradients_together() -> None:
    model = tiny(tm.SharedBiasForCausalLM)
    before = copy.deepcopy(model.state_dict())
    pair = Pair.of(model, micro_batch_size=2, prefetch_depth=0)
    with pair.engine:
        pair.require_close(batches_for(pair.plain, steps=2))
        after = pair.engine.state_dict()
    assert not torch.equal(after["relative.weight"], before["relative.weight"])
    assert not torch.equal(after["scale"], before["scale"])


# ---- its pieces ----


@given(batch=st.integers(1, 7), length=st.integers(1, 40), tokens=st.integers(1, 100))
def test_chunks_cover_every_token_once_and_keep_to_the_bound(batch: int, length: int, tokens: int) -> None:
    seen = torch.zeros(batch, length, dtype=torch.int64)
    for chunk in chunks(batch, length, tokens):
        part = chunk.of(seen)
        assert part.numel() <= tokens
        part += 1
    assert (seen == 1).all()


def test_labels_are_shifted_as_transformers_shifts_them() -> None:
    labels = torch.tensor([[1, 2, IGNORED, 4], [5, IGNORED, 7, 8]])
    expected = torch.tensor([[2, IGNORED, 4, IGNORED], [IGNORED, 7, 8, IGNORED]])
    assert torch.equal(shifted(labels), expected)


@pytest.mark.parametrize(
    ("family", "path"),
    [
        ("llama", "model.layers"),
        ("gpt2", "transformer.h"),
        ("opt", "model.decoder.layers"),
        ("mamba", "backbone.layers"),
    ],
)
def test_the_decoder_layers_are_found(family: str, path: str) -> None:
    stack = Anatomy(build(family)).stack
    assert stack.path == path
    assert stack.name_of(2) == f"{path}.2"


def test_a_larger_list_of_other_modules_is_not_taken_for_the_layers() -> None:
    model = tiny()
    model.tower = nn.ModuleList(nn.Linear(50, 50) for _ in range(9))
    assert Anatomy(model).stack.path == "layers"


def test_shell_and_layers_hold_every_tensor_once() -> None:
    model = tiny(tm.OwnBuffersForCausalLM)
    names = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    anatomy = Anatomy(model)
    held = [unit.prefix + n for unit in (anatomy.shell, *anatomy.units) for n in (unit.parameters | unit.buffers)]
    assert sorted(held) == sorted(names)
    assert set(anatomy.shell.parameters) == {"embed.weight", "norm.weight", "norm.bias", "head.weight"}


def test_a_tied_head_is_an_alias() -> None:
    shell = Anatomy(tiny(tm.TiedForCausalLM)).shell
    assert shell.aliases == {"head.weight": "embed.weight"}
    views = shell.with_aliases({"embed.weight": torch.ones(1)})
    assert views["head.weight"] is views["embed.weight"]


def test_biases_and_norms_do_not_decay() -> None:
    decayed = decayed_parameters(tiny())
    assert {"embed.weight", "head.weight", "layers.0.mix.weight"} <= decayed
    assert not any(name.endswith("bias") or "norm" in name for name in decayed)


def test_a_hollow_model_has_only_its_shell_and_gets_its_layers_back() -> None:
    model = tiny()
    anatomy = Anatomy(model)
    layers = list(model.layers)
    with anatomy.hollow():
        assert {name for name, _ in model.named_parameters()} == set(anatomy.shell.parameters)
        assert model.layers[1].index == 1, "stubs show their layer's attributes"
    assert list(model.layers) == layers


def test_a_recording_keeps_what_each_layer_is_called_with() -> None:
    model = tiny(tm.SharedBiasForCausalLM)
    anatomy = Anatomy(model)
    check(anatomy)
    batch = make_batch(model)
    with anatomy.hollow():
        tape = anatomy.record({"input_ids": batch["input_ids"]})
    assert len(tape.calls) == 3
    assert torch.equal(tape.hidden, model.embed(batch["input_ids"]))
    assert [len(call.extras) for call in tape.calls] == [2, 2, 2]
    assert {id(t) for t in tape.extra_sources.values()} >= {id(model.scale)}


def test_a_loss_that_cannot_be_summed_over_chunks_is_computed_from_logits() -> None:
    for model, from_logits in ((tiny(), False), (tiny(tm.OwnForwardForCausalLM), True)):
        anatomy = Anatomy(model)
        check(anatomy)
        assert anatomy.loss_from_logits == from_logits


def test_gradients_that_the_model_already_had_stay() -> None:
    model = tiny()
    model(**make_batch(model)).loss.backward()
    before = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    check(Anatomy(model))
    assert all(torch.equal(parameter.grad, before[name]) for name, parameter in model.named_parameters())

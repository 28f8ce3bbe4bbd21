"""The plan against arithmetic done by hand, and against what the engine really holds."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import families
import pytest
import torch
from live_bytes import LiveBytes
from transformers import LlamaConfig, LlamaForCausalLM

from megatrain import anatomy as parts
from megatrain import host
from megatrain.anatomy import calls
from megatrain.anatomy.kernels import attention_by
from megatrain.anatomy.meta import meta_model, token_elements
from megatrain.anatomy.presets import PRESETS, dense_120b, gpt_oss_20b, gpt_oss_120b, llama_8b, named_config
from megatrain.config import AdamWConfig, EngineConfig
from megatrain.engine import StreamingEngine
from megatrain.machine import DGX_SPARK, H200_1_5TB, RTX_4090, Machine, describe, resized
from megatrain.plan import Plan, fit, needs, plan
from megatrain.workspace import workspace

NO_CLIPPING = AdamWConfig(max_grad_norm=None)
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, VOCAB = 64, 96, 4, 2, 128
ROWS, TOKENS = 5, 8  # an odd number of rows, so that micro-batches of 2 are uneven
LAPTOP = describe("a laptop", host_bytes=1 << 40)


def tiny_config(layers: int = 4, **changes: Any) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        vocab_size=VOCAB,
        **changes,
    )


def tiny_model(layers: int = 4, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config(layers, **changes)).train()


def tiny_plan(config: EngineConfig, *, layers: int = 4, machine: Machine | None = LAPTOP, **changes: Any) -> Plan:
    optimizer = NO_CLIPPING if config.optimizer_overlap == "backward" else AdamWConfig()
    sizes = {"batch": ROWS, "sequence": TOKENS} | changes
    return plan(tiny_config(layers), config, optimizer, machine=machine, **sizes)


def trained_engine(model: Any, config: EngineConfig, *, rows: int = ROWS, tokens: int = TOKENS) -> StreamingEngine:
    """An engine after two steps; the caller closes it."""
    clipping = None if config.optimizer_overlap == "backward" else 1.0
    engine = StreamingEngine(model, config, AdamWConfig(max_grad_norm=clipping))
    ids = torch.randint(3, 100, (rows, tokens), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        engine.step({"input_ids": ids, "labels": ids})
    engine.flush()
    return engine


def padded(elements: int, itemsize: int) -> int:
    """Bytes of a tensor in a flat buffer, where each begins at a multiple of 256."""
    return math.ceil(elements * itemsize / 256) * 256


def tiny_layer(itemsize: int) -> int:
    """One layer by hand: query and output, key and value, gate, up and down, two norms."""
    head = HIDDEN // HEADS
    matrices = [HIDDEN * HIDDEN] * 2 + [HIDDEN * KV_HEADS * head] * 2 + [HIDDEN * INTERMEDIATE] * 3
    return sum(padded(n, itemsize) for n in [*matrices, HIDDEN, HIDDEN])


def tiny_shell(itemsize: int) -> int:
    """Embedding, head and final norm."""
    return sum(padded(n, itemsize) for n in (VOCAB * HIDDEN, VOCAB * HIDDEN, HIDDEN))


# ---- by hand: large models ----


def test_gpt_oss_120b_by_hand() -> None:
    hidden, experts, vocab, layers = 2880, 128, 201_088, 36
    attention = hidden * 64 * 64 * 2 + hidden * 8 * 64 * 2  # query and output, key and value
    attention += 64 * 64 + 2 * 8 * 64 + hidden + 64  # their biases and the sinks
    router = experts * hidden + experts
    expert = hidden * 2 * hidden + 2 * hidden + hidden * hidden + hidden  # gate and up, down, biases
    layer = attention + router + experts * expert + 2 * hidden
    shell = 2 * vocab * hidden + hidden
    parameters = layers * layer + shell

    planned = plan(
        gpt_oss_120b(),
        EngineConfig(micro_batch_size=1),
        AdamWConfig(),
        batch=4,
        sequence=1024,
        machine=replace(H200_1_5TB, host_available_bytes=2 * 10**12),
    )

    assert planned.parameters == parameters == 116_829_156_672
    assert planned.active_parameters == pytest.approx(5.13e9, rel=0.01)  # as its makers count
    about = {name: pytest.approx(n, rel=1e-4) for name, n in _by_role(parameters).items()}  # 256 bytes a tensor more
    assert planned.host == about | {needs.OFFLOADED: 0}
    assert planned.host_bytes == pytest.approx(14 * parameters, rel=1e-4)
    saved_inputs = (layers + 1) * 4 * 1024 * hidden * 2 + 1024 * hidden * 2
    assert _held(planned) == {
        "shell weights": pytest.approx(2 * shell, rel=1e-4),
        "shell gradients": pytest.approx((2 + 4) * shell, rel=1e-4),  # with a float32 sum over loss chunks
        "weight slots": pytest.approx(2 * 2 * layer, rel=1e-4),
        "gradient buffers": pytest.approx(2 * 2 * layer, rel=1e-4),
        "gradient sums": pytest.approx(4 * layer, rel=1e-4),  # float32, over micro-batches
        "saved inputs": saved_inputs,
        "kept graphs": 0,
        "kept attention": 0,
    }
    assert planned.fits


def _by_role(parameters: int) -> dict[str, int]:
    bytes_each = {"weights": 2, "master low halves": 2, "first moments": 4, "second moments": 4, "gradients": 2}
    return {role: n * parameters for role, n in bytes_each.items()}


def _held(planned: Plan) -> dict[str, int]:
    return {name: n for name, n in planned.device.items() if name != needs.WORKSPACE}


def test_dense_120b_by_hand() -> None:
    hidden, intermediate, layers, vocab = 10_240, 35_840, 88, 128_256
    layer = 2 * hidden**2 + 2 * hidden * 8 * 128 + 3 * hidden * intermediate + 2 * hidden
    shell = 2 * vocab * hidden + hidden
    parameters = layers * layer + shell

    planned = plan(dense_120b(), EngineConfig(dtype="float32"), AdamWConfig(), batch=1, sequence=512)

    assert planned.parameters == parameters
    assert layer == pytest.approx(1.33e9, rel=0.01)
    assert planned.host_bytes == 16 * parameters  # weights, two moments and the gradient, all float32
    assert _held(planned) == {
        "shell weights": 4 * shell,
        "shell gradients": 4 * shell,
        "weight slots": 2 * 4 * layer,
        "gradient buffers": 2 * 4 * layer,
        "gradient sums": 0,
        "saved inputs": (layers + 1 + 1) * 512 * hidden * 4,
        "kept graphs": 0,
        "kept attention": 0,
    }


@pytest.mark.parametrize(
    ("config", "overlap", "per_parameter"),
    [
        (EngineConfig(), AdamWConfig(), 2 + 2 + 4 + 4 + 2),
        (EngineConfig(moments_dtype="bfloat16"), AdamWConfig(), 2 + 2 + 2 + 2 + 2),
        (EngineConfig(dtype="float32"), AdamWConfig(), 4 + 4 + 4 + 4),
    ],
)
def test_host_bytes_per_parameter(config: EngineConfig, overlap: AdamWConfig, per_parameter: int) -> None:
    planned = plan(llama_8b(), config, overlap, batch=1, sequence=512)
    assert planned.host_bytes == pytest.approx(per_parameter * planned.parameters, rel=1e-5)


def test_updates_in_backward_keep_no_gradients() -> None:
    planned = plan(llama_8b(), EngineConfig(optimizer_overlap="backward"), NO_CLIPPING, batch=1, sequence=512)
    layer = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14_336 + 2 * 4096
    shell = 2 * 128_256 * 4096 + 4096
    assert planned.host["gradients"] == 2 * shell + 3 * 2 * layer  # the shell's own, and three slabs


def test_twenty_billion_fit_a_small_workstation() -> None:
    machine = describe("workstation", host_bytes=384 * 10**9, gpu="a card", device_bytes=24 * 10**9)
    config = EngineConfig(micro_batch_size=1, grad_buffers=1)
    planned = plan(gpt_oss_20b(), config, AdamWConfig(), batch=4, sequence=1024, machine=machine)
    planned.require()
    assert planned.parameters == pytest.approx(20.9e9, rel=0.01)


# ---- against the engine ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("micro_batch_size", [None, 2, 1])
@pytest.mark.parametrize(("depth", "grad_buffers"), [(0, 1), (1, 2), (7, 3)])
def test_device_peak_is_as_planned(dtype: Any, micro_batch_size: int | None, depth: int, grad_buffers: int) -> None:
    config = EngineConfig(
        device="cpu",
        dtype=dtype,
        micro_batch_size=micro_batch_size,
        prefetch_depth=depth,
        grad_buffers=grad_buffers,
        offload_activations=False,
    )
    layers, itemsize = 4, 4 if dtype == "float32" else 2
    planned = tiny_plan(config, layers=layers)

    with trained_engine(tiny_model(layers), config) as engine:
        assert engine.device_peak_bytes == planned.held_bytes

    token = HIDDEN * itemsize
    largest = micro_batch_size or ROWS  # the last micro-batch of 2 has one row, but the first sets the peak
    narrow = dtype == "bfloat16"
    assert _held(planned) == {
        "shell weights": tiny_shell(itemsize),
        "shell gradients": tiny_shell(itemsize) + (2 * tiny_shell(itemsize) if narrow else 0),
        "weight slots": min(depth + 1, layers) * tiny_layer(itemsize),
        "gradient buffers": grad_buffers * tiny_layer(itemsize),
        "gradient sums": 2 * tiny_layer(itemsize) if narrow and micro_batch_size else 0,
        "saved inputs": (layers + 1) * ROWS * TOKENS * token + largest * TOKENS * token,
        "kept graphs": 0,
        "kept attention": 0,
    }


@pytest.mark.parametrize("micro_batch_size", [None, 2])
@pytest.mark.parametrize(("depth", "boundaries"), [(0, 2), (1, 3), (2, 3)])
def test_device_peak_with_offloaded_inputs(micro_batch_size: int | None, depth: int, boundaries: int) -> None:
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        micro_batch_size=micro_batch_size,
        prefetch_depth=depth,
        offload_activations=True,
    )
    planned = tiny_plan(config)
    with trained_engine(tiny_model(), config) as engine:
        assert engine.device_peak_bytes <= planned.held_bytes
        assert engine.device_peak_bytes == pytest.approx(planned.held_bytes, rel=0.02)  # if a fetch comes late
        assert engine._offloaded is not None
        assert engine._offloaded._arena.nbytes == planned.host[needs.OFFLOADED]
    token = HIDDEN * 4
    assert planned.device["saved inputs"] == (boundaries * ROWS + (micro_batch_size or ROWS)) * TOKENS * token
    assert planned.host[needs.OFFLOADED] >= 4 * ROWS * TOKENS * token


def test_device_peak_does_not_grow_with_layers_once_inputs_are_offloaded() -> None:
    config = EngineConfig(device="cpu", dtype="float32", micro_batch_size=1, offload_activations=True)
    planned = {layers: tiny_plan(config, layers=layers) for layers in (4, 64)}
    assert planned[4].device == planned[64].device
    assert planned[64].host["weights"] == 64 * tiny_layer(4) + tiny_shell(4)
    for layers in (4, 64):
        with trained_engine(tiny_model(layers), config) as engine:
            assert engine.device_peak_bytes <= planned[4].held_bytes
            assert engine.device_peak_bytes == pytest.approx(planned[4].held_bytes, rel=0.02)


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("depth", "grad_buffers"), [(0, 1), (1, 2), (7, 3)])
def test_an_optimizer_on_the_device_is_as_planned(dtype: Any, moments: Any, depth: int, grad_buffers: int) -> None:
    """State of so many layers as there are buffers, one gradient, and none of the layers' on the host."""
    config = EngineConfig(
        device="cpu",
        dtype=dtype,
        moments_dtype=moments,
        prefetch_depth=depth,
        grad_buffers=grad_buffers,
        offload_activations=False,
        optimizer_overlap="backward",
        optimizer_device="device",
    )
    planned, itemsize, moment = tiny_plan(config), 4 if dtype == "float32" else 2, 4 if moments == "float32" else 2
    elements = tiny_layer(itemsize) // itemsize
    state = sum(padded(elements, each) for each in ([moment] * 2 if dtype == "float32" else [moment] * 2 + [2]))
    assert planned.device["gradient buffers"] == tiny_layer(itemsize)
    assert planned.device["optimizer buffers"] == grad_buffers * state
    assert planned.host["gradients"] == tiny_shell(itemsize)
    with trained_engine(tiny_model(), config) as engine:
        arenas = {role: arena.nbytes for role, arena in engine._host.arenas.items()}
        assert engine.device_peak_bytes == planned.held_bytes == engine.planned_bytes
    assert planned.host == arenas | {needs.OFFLOADED: 0}


def test_advice_where_optimizer_state_does_not_fit_the_device() -> None:
    config = EngineConfig(optimizer_overlap="backward", optimizer_device="device", micro_batch_size=1)
    small = replace(H200_1_5TB, device_free_bytes=10 * 10**9)
    planned = plan(llama_8b(), config, NO_CLIPPING, batch=1, sequence=512, machine=small)
    layer = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14_336 + 2 * 4096
    assert planned.device["optimizer buffers"] == 2 * 10 * layer
    assert 'optimizer_device="host" saves' in planned.problems[0]
    assert "AdamW's temporaries" in str(planned)


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe", "gemma3_text", "gpt2"])
def test_plan_of_other_families_is_what_the_engine_allocates(family: str) -> None:
    config = EngineConfig(device="cpu", micro_batch_size=2, offload_activations=False)
    model = families.build(family)
    from_config = plan(model.config, config, AdamWConfig(), batch=4, sequence=TOKENS, machine=LAPTOP)
    from_model = plan(model, config, AdamWConfig(), batch=4, sequence=TOKENS, machine=LAPTOP)
    with trained_engine(model, config, rows=4) as engine:
        arenas = {role: arena.nbytes for role, arena in engine._host.arenas.items()}
        assert engine.device_peak_bytes == from_config.held_bytes
    assert arenas | {needs.OFFLOADED: 0} == from_config.host == from_model.host
    assert from_config.device == from_model.device


@pytest.mark.parametrize("overlap", ["forward", "backward"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_host_arenas_are_as_planned(dtype: Any, overlap: Any) -> None:
    config = EngineConfig(device="cpu", dtype=dtype, optimizer_overlap=overlap, offload_activations=False)
    with trained_engine(tiny_model(), config) as engine:
        arenas = {role: arena.nbytes for role, arena in engine._host.arenas.items()}
    assert tiny_plan(config).host == arenas | {needs.OFFLOADED: 0}


def test_tied_weights_count_once() -> None:
    config = EngineConfig(device="cpu", dtype="float32", offload_activations=False)
    tied = plan(tiny_config(tie_word_embeddings=True), config, AdamWConfig(), batch=ROWS, sequence=TOKENS)
    untied = tiny_plan(config)
    assert untied.parameters - tied.parameters == VOCAB * HIDDEN
    assert untied.host["weights"] - tied.host["weights"] == VOCAB * HIDDEN * 4
    with trained_engine(tiny_model(tie_word_embeddings=True), config) as engine:
        assert engine.device_peak_bytes == tied.held_bytes


@pytest.mark.parametrize("offload", [False, True])
def test_frozen_parameters_need_no_moments_and_their_layers_no_saved_inputs(offload: bool) -> None:
    model = tiny_model(layers=6)
    model.requires_grad_(False)
    model.model.layers[3:].requires_grad_(True)
    config = EngineConfig(device="cpu", dtype="float32", offload_activations=offload)
    planned = plan(model, config, AdamWConfig(), batch=ROWS, sequence=TOKENS, machine=LAPTOP)
    assert planned.host["first moments"] == 3 * tiny_layer(4)
    assert planned.host["weights"] == 6 * tiny_layer(4) + tiny_shell(4)
    assert planned.device["shell gradients"] == 0
    with trained_engine(model, config) as engine:
        assert engine.device_peak_bytes == pytest.approx(planned.held_bytes, rel=0.02)


@pytest.mark.parametrize("free_layers", [0, 1, 3])
def test_auto_is_settled_as_the_engine_settles_it(free_layers: int) -> None:
    """Room for everything with kept inputs and some further layers; then one byte less than kept inputs take."""
    fixed = EngineConfig(device="cpu", dtype="float32", prefetch_depth=0, offload_activations=False)
    held = tiny_plan(fixed).held_bytes
    for room, offload in ((held + free_layers * tiny_layer(4), False), (held - 1, True)):
        config = replace(fixed, resident_layers="auto", offload_activations="auto", device_memory_bytes=room)
        planned = tiny_plan(config)
        assert planned.needs.offload is offload
        with trained_engine(tiny_model(), config) as engine:
            assert planned.needs.knobs == engine.control.knobs
            assert (engine._offloaded is not None) is offload
            assert engine.device_peak_bytes <= room
    assert tiny_plan(replace(config, device_memory_bytes=held + tiny_layer(4) * 2)).needs.knobs.resident_layers == 2


def test_resident_layers_stay_out_of_host_memory() -> None:
    """Without a GPU and without a limit the arena is RAM, where a second copy of a layer would only cost."""
    assert tiny_plan(EngineConfig(device="cpu", resident_layers="auto")).needs.knobs.resident_layers == 0


def test_auto_leaves_room_for_kernels_on_a_gpu() -> None:
    base = EngineConfig(micro_batch_size=1, offload_activations=False)
    needed = plan(llama_8b(), base, AdamWConfig(), batch=4, sequence=2048, machine=None)
    layer = needed.device["weight slots"] // 2
    for free, offload, resident in (
        (needed.device_bytes - 1, True, None),
        (needed.device_bytes, False, 0),
        (needed.device_bytes + 5 * layer, False, 5),
    ):
        machine = replace(H200_1_5TB, device_free_bytes=free)
        auto = replace(base, offload_activations="auto", resident_layers="auto")
        planned = plan(llama_8b(), auto, AdamWConfig(), batch=4, sequence=2048, machine=machine)
        assert planned.needs.offload is offload
        assert resident is None or planned.needs.knobs.resident_layers == resident
        assert planned.device_bytes <= free


# ---- the estimate ----


def _scaled(family: str) -> Any:
    """Proportions of a real model, so that what matters there matters here."""
    sizes: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    sizes |= {"intermediate_size": 256 if family == "gpt_oss" else 896, "vocab_size": 512}
    if family == "qwen3_moe":
        sizes |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 192, "mlp_only_layers": []}
    return families.build(family, layers=2, **sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "tokens", "attention"),
    [
        ("llama", 128, "torch"),
        ("qwen3", 128, "torch"),
        ("gemma3_text", 128, "torch"),
        ("gpt_oss", 64, "torch"),
        ("gpt_oss", 512, "torch"),
        ("qwen3_moe", 128, "torch"),
        ("llama", 512, "math"),
        ("llama", 1024, "math"),
        ("gemma3_text", 512, "math"),
    ],
)
def test_workspace_of_a_layer_is_near_what_its_backward_takes(
    family: str, tokens: int, attention: Any, dtype: torch.dtype
) -> None:
    """gpt_oss is taken short, where an expert's gradient is most of it, and long, where attention scores are."""
    rows, config = 2, replace(_engine_config(dtype), attention=attention)
    model = _scaled(family).to(dtype)
    anatomy = parts.Anatomy(model)
    parts.check(anatomy)
    subject = needs.Subject.of(model, config, batch=rows, sequence=tokens)
    estimate = needs.needs_of(subject, config, None).workspace.layer
    unit = anatomy.units[1]
    tensors = unit.with_aliases({name: t.detach() for name, t in (unit.parameters | unit.buffers).items()})
    with anatomy.hollow():
        tape = anatomy.record({"input_ids": torch.zeros(rows, tokens, dtype=torch.int64)})
        hidden = torch.randn_like(tape.hidden)
        with LiveBytes() as count, attention_by(attention):
            names = frozenset(unit.parameters)
            calls.Graph(anatomy.layers[1], tensors, names, tape, 1, hidden).backward(
                hidden, lambda name, gradient: None
            )
    assert 0.85 < estimate / count.peak_bytes < 1.35


def _engine_config(dtype: torch.dtype) -> EngineConfig:
    return EngineConfig(device="cpu", dtype="float32" if dtype == torch.float32 else "bfloat16")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_workspace_of_the_head_is_what_a_loss_chunk_takes(dtype: torch.dtype) -> None:
    tokens, vocab = 256, 4096
    model = families.build("llama", vocab_size=vocab).to(dtype)
    anatomy = parts.Anatomy(model)
    parts.check(anatomy)
    subject = needs.Subject.of(model, _engine_config(dtype), batch=1, sequence=tokens)
    estimate = needs.needs_of(subject, _engine_config(dtype), None).workspace.head
    with anatomy.hollow():
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        tape = anatomy.record({"input_ids": ids})
        leaf = torch.randn_like(tape.hidden).requires_grad_()
        with LiveBytes() as count:
            loss = anatomy.loss(tape, leaf, parts.chunks(1, tokens, tokens)[0], ids, tokens)
            torch.autograd.grad(loss, [leaf, *anatomy.shell.parameters.values()], allow_unused=True)
    assert estimate == 12 * tokens * vocab  # three float32 numbers for each logit
    assert estimate == pytest.approx(count.peak_bytes, rel=0.05)


def test_workspace_by_hand() -> None:
    config = EngineConfig(device="cpu", dtype="float32", loss_chunk_tokens=16, micro_batch_size=2)
    model = meta_model(tiny_config(attn_implementation="eager"))
    subject = needs.Subject.of(model, config, batch=ROWS, sequence=TOKENS)
    size = needs.needs_of(subject, config, None).size
    found = workspace(subject.widths, subject.layouts, subject.shell, size, itemsize=4, chunk_tokens=16, offload=True)
    head = HIDDEN // HEADS
    products = 2 * (HIDDEN + HIDDEN) + 2 * (HIDDEN + KV_HEADS * head) + 3 * (HIDDEN + INTERMEDIATE)
    assert found.recompute == (int(1.2 * products * 4) + 8 * 2 * HIDDEN) * 2 * TOKENS
    assert found.scores == 3 * 2 * HEADS * TOKENS**2 * 4
    assert found.masks == ROWS * TOKENS**2 * 4
    assert found.first_input == ROWS * TOKENS * HIDDEN * 4
    assert found.layer_gradient == HIDDEN * INTERMEDIATE * 4
    assert found.loss_chunk == 12 * 16 * VOCAB
    assert found.head_gradient == 4 * 16 * VOCAB + 4 * VOCAB * HIDDEN
    assert found.layer == found.recompute + max(found.scores, found.scores * 2 // 3 + found.layer_gradient)
    assert found.total == found.masks + found.first_input + max(found.layer, found.head)


def test_experts_count_by_the_share_that_a_token_meets() -> None:
    """A token meets 2 of 4 experts, whatever their number; a fused matrix for all of them is one parameter."""
    few = families.build("gpt_oss", layers=2, num_local_experts=4, num_experts_per_tok=2)
    many = families.build("gpt_oss", layers=2, num_local_experts=8, num_experts_per_tok=2)
    widths = [parts.widths(model, parts.Anatomy(model).units) for model in (few, many)]
    assert widths[0].products == pytest.approx(widths[1].products, rel=0.05)
    assert widths[0].fused is False


# ---- what does not fit ----


def test_a_run_that_cannot_fit_is_refused_with_figures_and_ways_out() -> None:
    planned = plan(gpt_oss_120b(), EngineConfig(), AdamWConfig(), batch=8, sequence=2048, machine=RTX_4090)
    assert not planned.fits
    assert [problem.split(":")[0] for problem in planned.problems] == ["RAM", "device memory"]
    with pytest.raises(ValueError, match=r"RAM: 1,6\d\d\.\d GB needed, 137\.4 GB free; .*more RAM"):
        planned.require()
    with pytest.raises(ValueError, match=r"device memory: .* 24\.\d GB free; .*prefetch_depth=0 saves .*device memory"):
        planned.require()


def test_advice_holds_what_it_promises() -> None:
    config = EngineConfig(prefetch_depth=3, grad_buffers=3)
    planned = plan(llama_8b(), config, AdamWConfig(), batch=16, sequence=4096, machine=RTX_4090)
    found = fit.advice(planned.subject, config, RTX_4090, planned.needs, lambda n: n.device_bytes)
    assert found.savings["grad_buffers=1"] == 2 * planned.device["gradient buffers"] // 3
    changed = EngineConfig(prefetch_depth=0, grad_buffers=1, micro_batch_size=1, offload_activations=True)
    assert set(found.savings) >= {"prefetch_depth=0", "grad_buffers=1", "micro_batch_size=1"}
    after = plan(llama_8b(), changed, AdamWConfig(), batch=16, sequence=4096, machine=RTX_4090)
    assert after.device_bytes == pytest.approx(found.least_bytes, rel=0.02)
    assert "device memory" not in " ".join(problem.split(":")[0] for problem in after.problems)


def test_a_host_that_is_a_little_too_small_hears_what_helps() -> None:
    planned = plan(gpt_oss_120b(), EngineConfig(micro_batch_size=1), AdamWConfig(), batch=4, sequence=1024)
    machine = replace(H200_1_5TB, host_available_bytes=planned.host_bytes - 1)
    short = plan(
        gpt_oss_120b(), EngineConfig(micro_batch_size=1), AdamWConfig(), batch=4, sequence=1024, machine=machine
    )
    [problem] = short.problems
    assert 'moments_dtype="bfloat16" saves 467.3 GB' in problem
    assert 'optimizer_overlap="backward" (and max_grad_norm=None) saves' in problem
    assert "take" not in problem  # settings are enough
    smaller = EngineConfig(micro_batch_size=1, moments_dtype="bfloat16")
    plan(gpt_oss_120b(), smaller, AdamWConfig(), batch=4, sequence=1024, machine=machine).require()


@pytest.mark.parametrize("spare", [0, -1])
def test_without_a_gpu_the_arena_counts_as_ram(spare: int) -> None:
    config = EngineConfig(device="auto", dtype="float32", offload_activations=False)
    planned = tiny_plan(config)
    machine = resized(LAPTOP, host_bytes=planned.host_bytes + planned.device_bytes + spare)
    assert tiny_plan(config, machine=machine).fits is (spare == 0)


@pytest.mark.parametrize("spare", [0, -1])
def test_a_bounded_arena_is_a_limit_as_in_the_engine(spare: int) -> None:
    held = tiny_plan(EngineConfig(device="cpu", dtype="float32", offload_activations=False)).held_bytes
    config = EngineConfig(device="cpu", dtype="float32", offload_activations=False, device_memory_bytes=held + spare)
    planned = tiny_plan(config)
    assert planned.fits is (spare == 0)
    if spare:
        assert planned.problems[0].startswith("device_memory_bytes: ")
        with pytest.raises(ValueError, match=r"need .* on the device"):
            trained_engine(tiny_model(), config)
    else:
        trained_engine(tiny_model(), config).close()


def test_nothing_to_change_is_said_too() -> None:
    config = EngineConfig(
        dtype="float32", prefetch_depth=0, grad_buffers=1, offload_activations=True, device_memory_bytes=1
    )
    planned = tiny_plan(config, machine=None, batch=1)
    assert planned.problems == [
        f"device_memory_bytes: {planned.device_bytes / 1e6:.1f} MB needed, 0.0 MB free; take a smaller model, a "
        "smaller or shorter batch, or a larger device_memory_bytes"
    ]


def test_cuda_on_a_machine_without_a_gpu_is_a_problem() -> None:
    [problem] = tiny_plan(EngineConfig(device="cuda")).problems
    assert problem == 'device="cuda", but a laptop has no GPU that torch can use; choose "auto" or "cpu"'


@pytest.mark.parametrize(("batch", "sequence", "name"), [(0, 8, "batch"), (4, 0, "sequence")])
def test_a_batch_without_tokens_is_refused(batch: int, sequence: int, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a whole number ≥ 1; got 0"):
        plan(tiny_config(), EngineConfig(), AdamWConfig(), batch=batch, sequence=sequence)


def test_choices_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="before the global norm is known"):
        plan(tiny_config(), EngineConfig(optimizer_overlap="backward"), AdamWConfig(), batch=1, sequence=8)


def test_a_model_that_cannot_be_streamed_is_refused_by_name() -> None:
    config = tiny_config()
    config.is_encoder_decoder = True
    with pytest.raises(ValueError, match="encoder-decoder"):
        plan(config, EngineConfig(), AdamWConfig(), batch=1, sequence=8)


# ---- without memory ----


@pytest.mark.parametrize(
    ("family", "choice", "reason"),
    [
        ("opt", {"tile_tokens": 4}, "has no token-wise part by a known name"),
        (
            "gpt_oss",
            {"attention": "flash"},
            "attention='flash' chooses among .* attn_implementation='eager'",
        ),
    ],
)
def test_what_the_engine_refuses_of_a_model_is_refused_before(family: str, choice: Any, reason: str) -> None:
    config = EngineConfig(device="cpu", **choice)
    with pytest.raises(ValueError, match=reason):
        plan(families.build(family).config, config, AdamWConfig(), batch=ROWS, sequence=TOKENS, machine=LAPTOP)


def test_where_both_tiers_are_one_memory_they_share_it() -> None:
    config, model = EngineConfig(resident_layers="auto"), tiny_config()
    apart = plan(model, EngineConfig(), AdamWConfig(), batch=ROWS, sequence=TOKENS, machine=H200_1_5TB)
    enough = resized(DGX_SPARK, host_bytes=apart.host_bytes + apart.device_bytes)
    assert plan(model, EngineConfig(), AdamWConfig(), batch=ROWS, sequence=TOKENS, machine=enough).fits
    short = resized(DGX_SPARK, host_bytes=enough.host_bytes - 1)
    found = plan(model, EngineConfig(), AdamWConfig(), batch=ROWS, sequence=TOKENS, machine=short)
    assert len(found.problems) == 1
    assert found.problems[0].startswith("RAM: ")
    assert plan(
        model, config, AdamWConfig(), batch=ROWS, sequence=TOKENS, machine=enough
    ).fits  # auto takes what is left


def test_planning_allocates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an arena was allocated")

    monkeypatch.setattr(host.Arena, "__init__", refuse)
    for config in (gpt_oss_120b(), dense_120b()):
        with LiveBytes() as count:
            plan(config, EngineConfig(), AdamWConfig(), batch=8, sequence=4096, machine=H200_1_5TB)
        model = meta_model(config)
        assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
        assert count.peak_bytes < 1 << 20


def test_planning_leaves_a_model_as_it_was() -> None:
    model = tiny_model()
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    ids = torch.arange(8).view(1, 8)
    expected = model(input_ids=ids).logits
    plan(model, EngineConfig(), AdamWConfig(), batch=2, sequence=8)
    assert {name: id(p) for name, p in model.named_parameters()} == {name: i for name, (i, _) in before.items()}
    assert torch.equal(model(input_ids=ids).logits, expected)


@pytest.mark.parametrize(("family", "streams"), [("llama", 1), ("gpt_oss", 1), ("gemma3n_text", 4), ("bloom", 1)])
def test_width_between_layers_is_seen_without_values(family: str, streams: int) -> None:
    """gemma3n keeps four streams of the hidden size; bloom cannot be called without values."""
    model = meta_model(families.tiny_config(family))
    first = parts.Anatomy(model).layers[0]
    assert token_elements(model, first) == streams * 64
    assert not first._forward_pre_hooks


# ---- names and words ----


def test_every_preset_has_the_size_in_its_name() -> None:
    sizes = {"gpt-oss-120b": 116.8, "gpt-oss-20b": 20.9, "llama-8b": 8.03, "dense-120b": 119.8}
    assert PRESETS.keys() == sizes.keys()
    for name, billions in sizes.items():
        model = meta_model(named_config(name))
        assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.001)


def test_a_folder_with_a_config_is_a_name(tmp_path: Any) -> None:
    config = gpt_oss_20b()
    config.quantization_config = {"quant_method": "mxfp4"}  # how its weights are stored, not how they are trained
    config.save_pretrained(tmp_path)
    found = named_config(str(tmp_path))
    assert (found.hidden_size, found.num_local_experts) == (2880, 32)
    assert not hasattr(found, "quantization_config")


@pytest.mark.parametrize("text", ['{"model_type": "nonesuch"}', "{", "{}"])
def test_a_name_that_leads_nowhere_is_refused_in_one_line(tmp_path: Any, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"^no configuration found for .*gpt-oss-120b.*a folder with a config.json.*$"):
        named_config(str(tmp_path))


def test_table_names_every_term() -> None:
    planned = plan(llama_8b(), EngineConfig(), AdamWConfig(), batch=4, sequence=2048, machine=H200_1_5TB)
    text = str(planned)
    for term in [*planned.host, *planned.device]:
        assert term in text
    for words in (
        "8.03 B parameters, 8.03 B trained, 7.50 B active",
        "4 × 2,048 = 8,192 tokens a step",
        "14.0 bytes a parameter",
        "it fits",
        "smallest machine: 112.4 GB of RAM",
        "estimate",
    ):
        assert words in text


def test_table_of_what_does_not_fit_says_so() -> None:
    text = str(plan(dense_120b(), EngineConfig(), AdamWConfig(), batch=4, sequence=2048, machine=RTX_4090))
    assert "it does not fit:\n- RAM: 1,6" in text
    assert "it fits" not in text


def test_table_of_a_small_model_is_in_megabytes() -> None:
    lines = str(tiny_plan(EngineConfig(), machine=None)).splitlines()
    assert [line.split()[-1] for line in lines if line.startswith(("host", "device"))] == ["MB", "MB"]
    assert "machine: none given" in lines

"""Adapters of peft on a streamed base: as plain PyTorch trains them, at two bytes a frozen parameter."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build, tiny_config
from pairs import LR, MICRO_ROWS, Pair, batches_for, differing, engine_config, gap
from peft import LoraConfig, PeftModel, get_peft_model
from reference import make_batch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from megatrain import AdamWConfig, StreamingEngine
from megatrain.anatomy import Anatomy, UnsupportedModelError, without_adapters
from megatrain.anatomy.adapters import add_lora, base_of, float32_adapters, merged
from megatrain.anatomy.meta import meta_model
from megatrain.batch import shifted
from megatrain.checkpoint import CheckpointError, Checkpoints, CheckpointWriter, restore
from megatrain.checkpoint.parts import file_of
from megatrain.checkpoint.shards import read_shard
from megatrain.plan import plan
from megatrain.run import TrainingRun
from megatrain.settings import LoraSettings

ADAMW = AdamWConfig(lr=LR, weight_decay=0.1, max_grad_norm=0.05)
BF16 = torch.bfloat16
EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
PADDING_SAID = "ignore:Model has .tie_word_embeddings=True.:UserWarning"


def adapted(family: str, dtype: torch.dtype = torch.float32, *, seed: int = 0, layers: int = 3, **options: Any) -> Any:
    """A tiny model with an adapter whose every parameter has a gradient: peft begins with B = 0."""
    model = add_lora(build(family, layers=layers).to(dtype), {"r": 4, "lora_alpha": 8, **options}, seed=seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "lora_" in name and parameter.requires_grad:
                parameter.data.add_(torch.randn_like(parameter), alpha=0.02)
    return model


def pair_of(family: str, dtype: torch.dtype = torch.float32, *, options: Any = None, **config: Any) -> Pair:
    options = {"target_modules": "all-linear", **(options or {})}
    return Pair.of(adapted(family, dtype, **options), ADAMW, dtype=str(dtype).removeprefix("torch."), **config)


def trained_names(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


# ---- as plain PyTorch ----


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("family", ["llama", "qwen3_next", "gpt_oss", "gemma3_text", "gpt2"])
def test_one_micro_batch_gives_the_same_bits(family: str, padding: Any) -> None:
    pair = pair_of(family)
    with pair.engine:
        pair.require_equal_bits(batches_for(pair.plain, steps=2, padding=padding))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("rows", [None, MICRO_ROWS])
def test_adapters_of_experts_that_are_stacked_in_one_parameter(family: str, rows: int | None) -> None:
    pair = pair_of(family, options=EXPERTS, micro_batch_size=rows)
    with pair.engine:
        assert any("experts" in name for name in trained_names(pair.plain))
        pair.require_close(batches_for(pair.plain, steps=2))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "qwen3_moe"])
def test_several_micro_batches_give_the_same_up_to_rounding(family: str) -> None:
    pair = pair_of(family, micro_batch_size=MICRO_ROWS)
    with pair.engine:
        pair.require_close(batches_for(pair.plain, steps=2))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mixtral"])
def test_float32_adapters_on_a_bfloat16_base_give_the_same_bits(family: str) -> None:
    """peft keeps adapters in float32 and computes with them so; they need no split master."""
    pair = pair_of(family, BF16)
    with pair.engine:
        assert {pair.plain.get_parameter(name).dtype for name in trained_names(pair.plain)} == {torch.float32}
        for batch in batches_for(pair.plain):
            result, expected = pair.step(batch)
            assert (result.loss, result.grad_norm) == expected
            found, wanted = pair.engine.state_dict(), pair.plain.state_dict()
            assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def test_a_float32_base_is_rounded_and_its_adapters_are_not() -> None:
    model = adapted("llama")
    with StreamingEngine(model, engine_config(dtype="bfloat16"), ADAMW):
        pass
    assert {str(p.dtype) for name, p in model.named_parameters() if "lora_" in name} == {"torch.float32"}
    assert {str(p.dtype) for name, p in model.named_parameters() if "lora_" not in name} == {"torch.bfloat16"}


def test_bfloat16_adapters_have_a_split_master() -> None:
    model = get_peft_model(build("llama").to(BF16), LoraConfig(target_modules=["q_proj"]), autocast_adapter_dtype=False)
    trained = trained_names(model)
    for name in trained:
        torch.nn.init.normal_(model.get_parameter(name))
    with StreamingEngine(model.train(), engine_config(dtype="bfloat16"), AdamWConfig(lr=1e-6)) as engine:
        before = engine.state_dict()
        engine.step(make_batch(model))
        after = engine.state_dict()
        changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == trained
    assert all(after[name].dtype == torch.float32 for name in changed)
    assert any(torch.equal(before[name].bfloat16(), after[name].bfloat16()) for name in changed)  # only `low` moved


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_dropout_drops_the_same_when_a_layer_is_recomputed(dtype: torch.dtype) -> None:
    pair = pair_of("llama", dtype, options={"lora_dropout": 0.3})
    with pair.engine:
        for batch in batches_for(pair.plain):
            start = torch.get_rng_state()
            result = pair.engine.step(batch)
            pair.engine.flush()
            state = pair.engine.state_dict()
            torch.set_rng_state(start)
            expected = Pair.step(_Plain(pair), batch)[1]  # type: ignore[arg-type]
            assert (result.loss, result.grad_norm) == expected
            assert differing(state, pair.plain.state_dict()) == []


class _Plain:
    """A pair of which only the plain half steps."""

    def __init__(self, pair: Pair) -> None:
        self.__dict__ |= vars(pair) | {"engine": self, "config": pair.engine.config}

    def step(self, batch: Any) -> None:
        return None


VARIATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "DoRA": ("llama", {"use_dora": True}),
    "rsLoRA, ranks by pattern": (
        "llama",
        {"use_rslora": True, "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"q": 3}},
    ),
    "embeddings and head": ("llama", {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    "tied embeddings": ("gemma3_text", {"target_modules": ["q_proj", "embed_tokens"]}),
    "a tied head": ("gemma3_text", {"target_modules": ["q_proj", "lm_head"]}),
    "whole modules besides": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}),
    "single tokens": ("llama", {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]}),
    "biases": ("gpt2", {"target_modules": ["c_attn"], "bias": "all"}),
    "another start": ("llama", {"target_modules": ["q_proj"], "init_lora_weights": "pissa"}),
}


@pytest.mark.filterwarnings(PADDING_SAID)
@pytest.mark.parametrize("kind", VARIATIONS)
def test_every_kind_of_adapter_gives_the_same_bits(kind: str) -> None:
    family, options = VARIATIONS[kind]
    pair = pair_of(family, options=options)
    with pair.engine:
        pair.require_equal_bits(batches_for(pair.plain, steps=2))


KNOBS: list[dict[str, Any]] = [
    *({"prefetch_depth": depth, "grad_buffers": 1 + depth % 2} for depth in range(4)),
    {"resident_layers": 2, "prefetch_depth": 0},
    {"resident_layers": 9, "prefetch_depth": 3},
    {"offload_activations": True},
    {"offload_activations": True, "prefetch_depth": 3, "resident_layers": 1},
    {"optimizer_overlap": "none"},
]


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_no_knob_changes_a_bit(knobs: dict[str, Any]) -> None:
    pair = Pair.of(adapted("llama", BF16, layers=5), ADAMW, dtype="bfloat16", **knobs)
    with pair.engine:
        pair.require_equal_bits(batches_for(pair.plain, steps=2))


def test_slots_that_come_and_go_never_leave_old_frozen_weights_behind() -> None:
    pair = Pair.of(adapted("llama", layers=6), ADAMW, resident_layers=6)
    with pair.engine:
        for number, batch in enumerate(batches_for(pair.plain, steps=6)):
            pair.engine.control.set_resident_layers([6, 0, 3, 1, 6, 2][number])
            pair.engine.set_prefetch_depth([1, 3, 0, 2, 1, 0][number])
            pair.require_equal_bits([batch])


# ---- what runs, and what does not ----


def ops_of(engine: StreamingEngine, step: int, op: str) -> list[Any]:
    return [span for span in engine.recorder.spans() if (span.step, span.op) == (step, op) and span.layer is not None]


@pytest.mark.parametrize(("trained", "reached"), [(0, {0, 1, 2, 3}), (2, {2, 3}), (3, {3})])
def test_backward_passes_through_frozen_layers_down_to_the_lowest_trained(trained: int, reached: set[int]) -> None:
    options = {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [trained]}
    pair = Pair.of(adapted("llama", layers=4, **options), ADAMW, micro_batch_size=MICRO_ROWS)
    with pair.engine as engine:
        pair.require_close(batches_for(pair.plain, steps=2))
        assert {span.layer for span in ops_of(engine, 1, "backward")} == reached
        assert {span.layer for span in ops_of(engine, 1, "unload")} == {trained}


def test_with_room_for_all_layers_only_adapters_are_loaded_again() -> None:
    with StreamingEngine(adapted("llama", layers=4), engine_config(resident_layers=4), ADAMW) as engine:
        for batch in batches_for(engine.model, steps=3):
            engine.step(batch)
        engine.flush()
        layouts = [host.layout for layer, host in engine.parts() if layer is not None]
        assert [span.nbytes for span in ops_of(engine, 0, "load")] == [layout.nbytes for layout in layouts]
        for step in (1, 2):
            assert [span.nbytes for span in ops_of(engine, step, "load")] == [each.trained_nbytes for each in layouts]


def test_a_frozen_shell_is_loaded_once() -> None:
    with StreamingEngine(adapted("llama"), engine_config(), ADAMW) as engine:
        for batch in batches_for(engine.model):
            engine.step(batch)
        engine.flush()
        assert sum(span.op == "load" and span.layer is None for span in engine.recorder.spans()) == 1


# ---- bytes ----


def test_a_frozen_parameter_takes_two_bytes_on_the_host() -> None:
    """bfloat16 and no moments, gradient or master. Alignment: each tensor begins at a multiple of 256 bytes."""
    model = adapted("llama", BF16, layers=4)
    frozen = [p.numel() for p in model.parameters() if not p.requires_grad]
    trained = [p.numel() for p in model.parameters() if p.requires_grad]
    aligned = [-(-4 * count // 256) * 256 // 4 for count in trained]
    with StreamingEngine(model, engine_config(dtype="bfloat16"), ADAMW) as engine:
        arenas = engine.sizes.host_arenas
    assert arenas["weights"] == sum(-(-2 * count // 256) * 256 for count in frozen) + 4 * sum(aligned)
    assert arenas["first moments"] == arenas["second moments"] == arenas["gradients"] == 4 * sum(aligned)
    assert arenas["master low halves"] == 2 * sum(aligned)  # not used by float32 adapters; one arena for every dtype


def test_a_plan_is_what_the_engine_takes() -> None:
    model = adapted("llama", BF16, layers=4)
    config = engine_config(dtype="bfloat16", resident_layers=1, micro_batch_size=2, offload_activations=False)
    planned = plan(model, config, ADAMW, batch=6, sequence=24)
    with StreamingEngine(model, config, ADAMW) as engine:
        assert engine.sizes.host_arenas == {
            name: n for name, n in planned.host.items() if name != "offloaded layer inputs"
        }
        engine.step(make_batch(model))
        engine.flush()
        assert engine.device_peak_bytes == planned.held_bytes
    assert "LlamaForCausalLM with adapters" in str(planned)


def test_a_plan_of_a_model_without_memory() -> None:
    model = add_lora(meta_model(tiny_config("llama")), LoraSettings(r=4).options)
    real = add_lora(build("llama"), LoraSettings(r=4).options)
    plans = [plan(each, engine_config(dtype="bfloat16"), ADAMW, batch=2, sequence=8) for each in (model, real)]
    assert plans[0].host == plans[1].host
    assert plans[0].device == plans[1].device


def test_a_frozen_parameter_costs_a_third_less_arithmetic() -> None:
    full, lora = build("llama"), adapted("llama", layers=4, target_modules="all-linear")
    frozen = sum(p.numel() for name, p in full.named_parameters() if p.ndim == 2 and "embed" not in name)
    extra = sum(p.numel() for p in lora.parameters() if p.requires_grad)
    batch = make_batch(full)
    flops = []
    for model in (full, lora):
        with StreamingEngine(model, engine_config(), ADAMW) as engine:
            engine.step(batch)
            flops.append(engine.recorder.steps()[0].flops)
    assert flops[1] - flops[0] == int(batch["attention_mask"].sum()) * (6 * extra - 2 * frozen)


# ---- saved and loaded ----


@pytest.mark.filterwarnings(PADDING_SAID, "ignore:Setting .save_embedding_layers. to:UserWarning")
@pytest.mark.parametrize(
    ("family", "dtype", "options"),
    [
        ("llama", BF16, {"target_modules": "all-linear"}),
        ("gpt2", torch.float32, {"target_modules": ["c_attn"]}),
        ("gemma3_text", torch.float32, {"target_modules": ["q_proj", "embed_tokens"]}),
        ("mixtral", BF16, EXPERTS),
        ("llama", BF16, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    ],
)
def test_peft_loads_what_is_saved(tmp_path: Path, family: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    model = adapted(family, dtype, **options)
    batch = make_batch(model)
    with StreamingEngine(model, engine_config(dtype=str(dtype)[6:]), AdamWConfig(lr=1e-2)) as engine:
        engine.step(batch)
        engine.save_pretrained(tmp_path / "out")
        engine.step(batch)
        engine.save_pretrained(tmp_path / "out")  # in place of the first
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    again = PeftModel.from_pretrained(build(family, layers=3).to(dtype), tmp_path / "out")
    assert torch.equal(logits(again, batch), logits(model, batch))


def logits(model: Any, batch: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return found


def test_an_adapter_of_another_name_is_saved_in_its_own_folder(tmp_path: Path) -> None:
    model = get_peft_model(build("llama"), LoraConfig(target_modules=["q_proj"]), adapter_name="mine").train()
    with StreamingEngine(model, engine_config(), ADAMW) as engine:
        for _ in range(2):
            engine.step(make_batch(model))
            engine.save_pretrained(tmp_path)
    assert (tmp_path / "mine" / "adapter_model.safetensors").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_merged_model_is_an_ordinary_one_with_the_same_logits(tmp_path: Path) -> None:
    model = adapted("llama")
    batch = make_batch(model)
    with StreamingEngine(model, engine_config(), AdamWConfig(lr=1e-2)) as engine:
        engine.step(batch)
    expected = logits(model, batch)
    merged(model).save_pretrained(tmp_path)
    assert gap({"logits": logits(AutoModelForCausalLM.from_pretrained(tmp_path), batch)}, {"logits": expected}) < 1e-5


# ---- checkpoints ----


def engine_to_resume(dtype: str = "bfloat16", *, base: int = 0, **config: Any) -> StreamingEngine:
    model = add_lora(build("llama", layers=3, seed=base).to(getattr(torch, dtype)), LoraSettings(dropout=0.1).options)
    return StreamingEngine(model, engine_config(dtype=dtype, **config), ADAMW)


def write(engine: StreamingEngine, checkpoints: Checkpoints, step: int) -> None:
    writer = CheckpointWriter(engine, checkpoints)
    writer.write(step, {})
    writer.wait()
    assert writer.error is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path: Path, dtype: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    torch.manual_seed(1)
    with engine_to_resume(dtype) as engine:
        batches = batches_for(engine.model, steps=4)
        losses = [engine.step(batch).loss for batch in batches[:2]]
        write(engine, checkpoints, 2)
        losses += [engine.step(batch).loss for batch in batches[2:]]
        expected = engine.state_dict()
    torch.manual_seed(2)
    with engine_to_resume(dtype, resident_layers=3) as engine:
        engine.step(batches[0])  # frozen weights are on the device already; the trained ones must be read anew
        restore(engine, checkpoints)
        assert [engine.step(batch).loss for batch in batches[2:]] == losses[2:]
        assert differing(engine.state_dict(), expected) == []


def test_a_checkpoint_holds_what_is_trained_and_nothing_else(tmp_path: Path) -> None:
    engine = engine_to_resume()
    with engine:
        engine.step(make_batch(engine.model))
        write(engine, Checkpoints(tmp_path), 1)
        parts = [read_shard(Checkpoints(tmp_path).path(1) / file_of(layer))[0] for layer, _ in engine.parts()]
    assert all("lora_" in key for part in parts for key in part)
    trained = len(trained_names(engine.model))
    for role in ("weight", "low", "exp_avg", "exp_avg_sq"):
        assert sum(key.split("/")[0] == role for part in parts for key in part) == trained


def test_a_checkpoint_on_another_base_is_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    with engine_to_resume() as engine:
        write(engine, checkpoints, 1)
    with (
        engine_to_resume(base=1) as engine,
        pytest.raises(CheckpointError, match=r"on other frozen weights .*same model"),
    ):
        restore(engine, checkpoints)


def test_a_run_trains_adapters_and_leaves_them(tmp_path: Path) -> None:
    engine = engine_to_resume()
    batches = batches_for(engine.model, steps=2)
    run = TrainingRun(engine, batches, steps=2, run_dir=tmp_path / "run", save=True, checkpoint_every=1).start()
    run.wait()
    assert run.error is None
    assert len(list((tmp_path / "run").rglob("adapter_model.safetensors"))) == 1


# ---- without its adapters ----


@pytest.mark.filterwarnings(PADDING_SAID)
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"target_modules": "all-linear"}),
        ("qwen3_moe", EXPERTS),
        ("gemma3_text", {"target_modules": ["q_proj", "embed_tokens"]}),
        ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    ],
)
def test_the_reference_of_adapters_is_their_base(family: str, options: dict[str, Any]) -> None:
    """Training goes on as if nobody had asked for it."""
    pair = Pair.of(adapted(family, layers=3, **options), AdamWConfig(lr=0.05), resident_layers=3)
    batch = make_batch(pair.plain)
    base = copy.deepcopy(pair.plain).unload()
    with pair.engine as engine:
        for _ in range(2):
            pair.require_close([batch])
            with engine.reference():
                found = engine.evaluate(batch).loss
            assert found == pytest.approx(nll(base, batch), rel=1e-6)
            assert engine.evaluate(batch).loss == pytest.approx(nll(pair.plain, batch), rel=1e-6)
            assert found != pytest.approx(nll(pair.plain, batch), rel=1e-4)


def test_the_reference_of_layers_that_are_partly_frozen_is_where_they_began() -> None:
    """Without peft: the frozen weights on the device serve both, the trained ones are loaded from where each lie."""
    model = build("llama", layers=3)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("v_proj" in name)
    first = copy.deepcopy(model)
    pair = Pair.of(model, AdamWConfig(lr=0.05), resident_layers=3, keep_reference=True)
    with pair.engine as engine:
        for batch in batches_for(pair.plain):
            pair.require_equal_bits([batch])
            with engine.reference():
                assert engine.evaluate(batch).loss == pytest.approx(nll(first, batch), rel=1e-6)
            assert engine.evaluate(batch).loss == pytest.approx(nll(pair.plain, batch), rel=1e-6)
        whole = max(host.layout.nbytes for _, host in engine.parts()[1:])
        later = [span.nbytes for span in engine.recorder.spans() if span.op == "load" and span.layer is not None][3:]
        assert later
        assert max(later) < whole / 10


@pytest.mark.parametrize(("family", "options"), [("llama", {"target_modules": "all-linear"}), ("mixtral", EXPERTS)])
def test_it_generates_with_its_adapters_and_without(family: str, options: dict[str, Any]) -> None:
    pair = Pair.of(adapted(family, **options), AdamWConfig(lr=0.05))
    batch = make_batch(pair.plain, padding=False)
    inputs = {name: batch[name][:, :6] for name in ("input_ids", "attention_mask")}
    base = copy.deepcopy(pair.plain).unload()

    def generated(model: Any) -> Tensor:
        found: Tensor = model.eval().generate(**inputs, max_new_tokens=6, do_sample=False, pad_token_id=0)
        return found

    with pair.engine as engine:
        for each in batches_for(pair.plain):
            pair.require_close([each])
        with engine.inference() as streamed:
            assert torch.equal(generated(streamed), generated(pair.plain))
        with engine.reference(), engine.inference() as streamed:
            assert torch.equal(generated(streamed), generated(base))
        assert not torch.equal(generated(base), generated(pair.plain))


def nll(model: Any, batch: dict[str, Tensor]) -> float:
    """Mean negative log-likelihood, without a router's balancing loss."""
    targets = shifted(batch["labels"])
    found = nn.functional.cross_entropy(logits(model, batch).flatten(0, 1), targets.flatten())
    model.train()
    return float(found)


def test_an_adapter_that_the_user_froze_stays_frozen() -> None:
    model = adapted("llama", target_modules=["q_proj", "v_proj"])
    for name in trained_names(model):
        model.get_parameter(name).requires_grad_("v_proj" in name)  # peft would train them again
    trained = trained_names(model)
    with StreamingEngine(model, engine_config(), ADAMW) as engine:
        before = engine.state_dict()
        engine.step(make_batch(model))
        with engine.reference():
            engine.evaluate(make_batch(model))
        engine.step(make_batch(model))
        assert set(differing(engine.state_dict(), before)) == trained
    assert trained_names(model) == trained


def test_a_model_without_adapters_has_none_to_switch_off() -> None:
    with pytest.raises(ValueError, match="LlamaForCausalLM has no adapters"), without_adapters(Anatomy(build("llama"))):
        pass


# ---- names and errors ----


def test_which_adapters_are_kept_in_float32() -> None:
    model = adapted(
        "llama", BF16, target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head"], use_dora=True
    )
    names = float32_adapters(model)
    assert names == {name for name in trained_names(model) if "lm_head" not in name}
    assert any("lora_magnitude_vector" in name for name in names)
    assert any("lora_embedding_A" in name for name in names)
    assert float32_adapters(build("llama")) == frozenset()


def test_the_seed_decides_how_adapters_begin() -> None:
    first, same, other = (
        add_lora(build("llama"), LoraSettings().options, seed=seed).state_dict() for seed in (1, 1, 2)
    )
    assert differing(first, same) == []
    assert all("lora_A" in name for name in differing(first, other))
    assert differing(first, other)


def test_the_base_of_a_model() -> None:
    base = build("llama")
    assert base_of(base) is base
    assert base_of(add_lora(base, LoraSettings().options)) is base


def test_what_peft_refuses_is_told() -> None:
    with pytest.raises(ValueError, match=r"peft refuses this LoRA configuration: .*no_such_module"):
        add_lora(build("llama"), LoraSettings(target_modules=["no_such_module"]).options)
    with pytest.raises(ValueError, match=r"peft refuses .*lora_dropout"):
        add_lora(build("mixtral"), {**EXPERTS, "lora_dropout": 0.1})


def test_without_peft_the_way_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"pip install megatrain\[lora\]"):
        add_lora(build("llama"), LoraSettings().options)


def test_adapters_that_are_all_frozen_are_refused() -> None:
    model = adapted("llama")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter requires a gradient"):
        StreamingEngine(model, engine_config(), ADAMW)


def test_layers_that_share_a_frozen_weight_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="shared between"):
        StreamingEngine(
            adapted("llama", target_modules=["q_proj"], layer_replication=[[0, 2], [1, 3]]), engine_config()
        )


@pytest.fixture(autouse=True)
def _same_random_numbers_for_everybody() -> Iterator[None]:
    state = torch.get_rng_state()
    torch.manual_seed(0)
    yield
    torch.set_rng_state(state)


def test_the_model_is_whole_again_after_the_engine() -> None:
    model = adapted("llama")
    plain = copy.deepcopy(model)
    with StreamingEngine(model, engine_config(), AdamWConfig(lr=0.0)) as engine:
        engine.step(make_batch(model))
    assert torch.equal(logits(model, make_batch(model)), logits(plain, make_batch(model)))
    assert trained_names(model) == trained_names(plain)

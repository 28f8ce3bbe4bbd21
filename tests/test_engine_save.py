"""What is saved loads again, a failing save leaves no trace, and closing gives the trained model back."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build
from pairs import LR, Pair, batches_for, differing, engine_config, outcome, require_same
from reference import make_batch
from safetensors import SafetensorError
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatrain import AdamWConfig, StreamingEngine

FAMILIES = ["llama", "gpt2", "gemma3_text", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next"]
ADAMW = AdamWConfig(lr=LR)


def trained(family: str, **config: Any) -> StreamingEngine:
    model = build(family)
    engine = StreamingEngine(model, engine_config(**config), ADAMW)
    for batch in batches_for(model, steps=2):
        engine.step(batch)
    return engine


def load(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
    return model.train()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_float32_model_loads_with_the_same_weights(family: str, tmp_path: Path) -> None:
    with trained(family) as engine:
        engine.save_pretrained(tmp_path)
        state = engine.state_dict()
    loaded = load(tmp_path)
    assert differing(loaded.state_dict(), state) == []
    batch = make_batch(loaded)
    assert torch.equal(loaded(**batch).loss, engine.model(**batch).loss)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_bfloat16_model_loads_with_the_streamed_weights(family: str, tmp_path: Path) -> None:
    """The streamed weight is the master, rounded; ties go away from zero."""
    with trained(family, dtype="bfloat16") as engine:
        engine.save_pretrained(tmp_path)
        state = engine.state_dict()
    loaded = dict(load(tmp_path).named_parameters(remove_duplicate=False))
    kept = dict(engine.model.named_parameters(remove_duplicate=False))
    assert loaded.keys() == kept.keys()
    for name, parameter in loaded.items():
        assert torch.equal(parameter.bfloat16(), kept[name].bfloat16()), name
        assert ((parameter.float() - state[name]).abs() <= state[name].abs() / 256).all(), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_state_has_the_names_shapes_and_ties_of_the_model(family: str, dtype: str) -> None:
    plain = build(family).state_dict()
    with trained(family, dtype=dtype) as engine:
        state = engine.state_dict()
    assert list(state) == list(plain)
    assert {name: t.shape for name, t in state.items()} == {name: t.shape for name, t in plain.items()}


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    with trained("gpt2") as engine:
        state = engine.state_dict()
        engine.save_pretrained(tmp_path)
    assert torch.equal(state["lm_head.weight"], state["transformer.wte.weight"])
    for model in (load(tmp_path), engine.model):
        assert model.lm_head.weight is model.transformer.wte.weight


def test_the_state_is_a_copy() -> None:
    with trained("llama") as engine:
        for tensor in engine.state_dict().values():
            tensor.zero_()
        assert all(tensor.any() for tensor in engine.state_dict().values())


def test_saving_and_reading_between_steps_changes_nothing(tmp_path: Path) -> None:
    batches = batches_for(build("llama"))

    def look(engine: StreamingEngine, number: int) -> None:
        engine.save_pretrained(tmp_path / str(number))
        engine.state_dict()
        engine.flush()

    require_same(outcome(build("llama"), batches, before_step=look), outcome(build("llama"), batches))


def test_training_goes_on_from_a_saved_model(tmp_path: Path) -> None:
    with trained("llama") as engine:
        engine.save_pretrained(tmp_path)
    pair = Pair.of(load(tmp_path), ADAMW)
    with pair.engine:
        pair.require_equal_bits(batches_for(pair.plain))


# ---- a save that fails ----


def fail_after_one_file(folder: Path, *_: Any, **__: Any) -> None:
    (Path(folder) / "model.safetensors").write_bytes(b"half")
    raise OSError(28, "No space left on device")


def test_a_full_disk_is_an_error_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_folder: Path) -> None:
        raise SafetensorError("No space left on device")

    with trained("llama") as engine:
        monkeypatch.setattr(engine.model, "save_pretrained", fail)
        with pytest.raises(OSError, match=rf"the model cannot be written into {tmp_path}: No space left on device"):
            engine.save_pretrained(tmp_path)


def test_a_failing_save_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with trained("llama") as engine:
        monkeypatch.setattr(engine.model, "save_pretrained", fail_after_one_file)
        with pytest.raises(OSError, match="No space left"):
            engine.save_pretrained(tmp_path / "new")
        assert list((tmp_path / "new").iterdir()) == []


def test_a_failing_save_leaves_the_one_before_and_the_engine_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch(build("llama"))
    with trained("llama") as engine:
        engine.save_pretrained(tmp_path)
        before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
        engine.step(batch)
        with monkeypatch.context() as patch:
            patch.setattr(engine.model, "save_pretrained", fail_after_one_file)
            with pytest.raises(OSError, match="No space left"):
                engine.save_pretrained(tmp_path)
        assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
        engine.step(batch)
        engine.save_pretrained(tmp_path)
        state = engine.state_dict()
    assert differing(load(tmp_path).state_dict(), state) == []


# ---- closing ----


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "deepseek_v3"])
def test_closing_gives_the_trained_model_back(family: str) -> None:
    model = build(family)
    pair = Pair.of(model, ADAMW)
    pair.require_equal_bits(batches_for(pair.plain, steps=2))
    pair.engine.close()
    assert differing(model.state_dict(), pair.plain.state_dict()) == []
    batch = make_batch(model)
    loss, expected = model(**batch).loss, pair.plain(**batch).loss
    assert torch.equal(loss, expected)
    loss.backward()
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert [type(m) for m in model.modules()] == [type(m) for m in pair.plain.modules()]


def test_a_closed_model_can_be_trained_plainly_and_by_another_engine() -> None:
    model = build("llama")
    pair = Pair.of(model, ADAMW)
    pair.require_equal_bits(batches_for(pair.plain, steps=1))
    pair.engine.close()
    again = Pair.of(model, ADAMW)
    with again.engine:
        again.require_equal_bits(batches_for(again.plain))


def test_closing_applies_what_is_pending() -> None:
    """Nothing waits for the updates of the last step but close itself."""
    model = build("llama")
    pair = Pair.of(model, ADAMW)
    pair.step(make_batch(pair.plain))
    pair.engine.close()
    assert differing(model.state_dict(), pair.plain.state_dict()) == []


def test_a_bfloat16_model_comes_back_in_bfloat16() -> None:
    with trained("llama", dtype="bfloat16") as engine:
        engine.flush()
    assert {parameter.dtype for parameter in engine.model.parameters()} == {torch.bfloat16}
    assert engine.model(**make_batch(engine.model)).loss.isfinite()


def with_checkpointing(model: PreTrainedModel) -> PreTrainedModel:
    model._set_gradient_checkpointing(True, partial(checkpoint, use_reentrant=False))
    return model


def checkpointed(model: PreTrainedModel) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def test_activation_checkpointing_of_the_users_model_is_off_meanwhile() -> None:
    model = build("llama")
    pair = Pair.of(with_checkpointing(model), ADAMW)
    with pair.engine:
        assert not checkpointed(model)
        pair.require_equal_bits(batches_for(pair.plain, steps=2))
    assert checkpointed(model)


def test_activation_checkpointing_of_a_refused_model_stays_on() -> None:
    model = with_checkpointing(build("gemma4_text"))
    with pytest.raises(ValueError, match="outside any layer"):
        StreamingEngine(model, engine_config())
    assert checkpointed(model)

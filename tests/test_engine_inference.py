"""The model's own forward and generate, with layers that stream, beside the whole model in plain PyTorch."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from families import build
from pairs import engine_config
from reference import Batch, make_batch
from transformers import PreTrainedModel

from megatrain import AdamWConfig, StreamingEngine
from megatrain.lanes import LaneError

LR = 1e-3
FAMILIES = ["llama", "qwen3_moe", "gemma3_text", "gpt2", "gpt_oss", "mixtral", "phi3", "qwen3_next"]


def engine_for(model: PreTrainedModel, **changes: Any) -> StreamingEngine:
    return StreamingEngine(model, engine_config(**changes), AdamWConfig(lr=LR))


def prompts(model: PreTrainedModel) -> Batch:
    """Three prompts of different length, padded on the left, as generation wants them."""
    batch = make_batch(model, batch=3, seq=9, padding="left")
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


def generated(model: PreTrainedModel, inputs: Batch, **options: Any) -> torch.Tensor:
    torch.manual_seed(1)
    found: torch.Tensor = model.generate(**inputs, max_new_tokens=7, pad_token_id=0, **options)
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sample", [False, True])
def test_it_generates_what_the_whole_model_does(family: str, sample: bool) -> None:
    model, whole = build(family), build(family).eval()
    inputs = prompts(whole)
    options = {"do_sample": sample} | ({"temperature": 0.8, "top_p": 0.9} if sample else {})
    with engine_for(model) as engine, engine.inference() as streamed:
        assert not streamed.training
        found = generated(streamed, inputs, **options)
    assert torch.equal(found, generated(whole, inputs, **options))
    assert model.training


@pytest.mark.parametrize("knobs", [{"prefetch_depth": 0}, {"prefetch_depth": 3}, {"resident_layers": 2}])
def test_no_knob_changes_a_bit(knobs: dict[str, int]) -> None:
    model, whole = build("llama"), build("llama").eval()
    inputs = make_batch(whole)
    with engine_for(model, **knobs) as engine, engine.inference() as streamed:
        assert torch.equal(streamed(**inputs).logits, whole(**inputs).logits)
        assert torch.equal(generated(streamed, prompts(whole)), generated(whole, prompts(whole)))


def test_beams_and_many_sequences_of_one_prompt() -> None:
    model, whole = build("llama"), build("llama").eval()
    for options in ({"num_beams": 3}, {"do_sample": True, "num_return_sequences": 4}):
        with engine_for(model) as engine, engine.inference() as streamed:
            found = generated(streamed, prompts(whole), **options)
        assert torch.equal(found, generated(whole, prompts(whole), **options))


def test_the_router_losses_of_a_mixture_are_the_models_own() -> None:
    model, whole = build("qwen3_moe", output_router_logits=True), build("qwen3_moe", output_router_logits=True).eval()
    batch = make_batch(whole)
    with engine_for(model) as engine, engine.inference() as streamed:
        found = streamed(**batch)
    expected = whole(**batch)
    assert torch.equal(found.loss, expected.loss)
    assert torch.equal(found.aux_loss, expected.aux_loss)


def test_it_sees_the_weights_of_the_last_step() -> None:
    model = build("llama")
    batch = make_batch(model)
    with engine_for(model) as engine:
        engine.step(batch)
        with engine.inference() as streamed:
            found = streamed(**batch).logits
        whole = build("llama").eval()
        whole.load_state_dict(engine.state_dict())
    assert torch.equal(found, whole(**batch).logits)


def test_training_goes_on_as_if_nothing_had_been_generated() -> None:
    outcomes = []
    for generate in (False, True):
        model = build("llama")
        with engine_for(model, prefetch_depth=2, micro_batch_size=2) as engine:
            losses = []
            for seed in range(3):
                losses.append(engine.step(make_batch(model, seed=seed)).loss)
                if generate:
                    with engine.inference() as streamed:
                        streamed.generate(**prompts(model), max_new_tokens=3, do_sample=False, pad_token_id=0)
            outcomes.append((losses, engine.state_dict()))
    assert outcomes[0][0] == outcomes[1][0]
    for name, tensor in outcomes[0][1].items():
        assert torch.equal(tensor, outcomes[1][1][name]), name


def test_the_reference_generates_too() -> None:
    model, whole = build("gpt2"), build("gpt2").eval()
    batch = make_batch(whole)
    with engine_for(model, keep_reference=True) as engine:
        engine.step(batch)
        with engine.reference(), engine.inference() as streamed:
            found = streamed(**batch).logits
    assert torch.equal(found, whole(**batch).logits)


def test_what_the_caller_does_wrong_leaves_the_engine_usable() -> None:
    model, untouched = build("llama"), build("llama")
    batch = make_batch(model)
    with engine_for(model) as engine, engine_for(untouched) as other:
        with pytest.raises(ValueError, match="temperature"), engine.inference() as streamed:
            streamed.generate(**prompts(model), max_new_tokens=2, temperature=-1.0, do_sample=True)
        with pytest.raises(RuntimeError, match="another thread"), engine.inference():
            engine.step(batch)
        assert engine.step(batch).loss == other.step(batch).loss
    with pytest.raises(RuntimeError, match="closed"), engine.inference():
        pass


def test_a_layer_that_fails_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")

    def fails(*_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError("no")

    with engine_for(model) as engine:
        monkeypatch.setattr("megatrain.executor.parts.call", fails)
        with pytest.raises(LaneError, match="forward of layer 0"), engine.inference() as streamed:
            streamed(**make_batch(model))
        with pytest.raises(RuntimeError, match="failed earlier"):
            engine.scores(make_batch(model))


def test_generation_can_be_paused_and_stepped() -> None:
    model, whole = build("llama"), build("llama").eval()
    found: list[torch.Tensor] = []
    with engine_for(model) as engine:

        def generate() -> None:
            with engine.inference() as streamed:
                found.append(generated(streamed, prompts(whole)))

        assert engine.control.pause()
        thread = threading.Thread(target=generate)
        thread.start()
        layers = []
        for _ in range(4):
            wish = engine.control.step_layer()
            assert wish.wait(20)
            layers.append(wish.effect.layer if wish.effect else None)
        engine.control.set_prefetch_depth(3)
        engine.control.resume()
        thread.join(60)
        assert not thread.is_alive()
    assert layers[:3] == [0, 1, 2]
    assert torch.equal(found[0], generated(whole, prompts(whole)))


def test_stop_lets_an_evaluation_end() -> None:
    model = build("llama")
    with engine_for(model) as engine:
        batch = make_batch(model)
        engine.control.pause()
        found: list[float] = []
        thread = threading.Thread(target=lambda: found.append(engine.evaluate(batch).loss))
        thread.start()
        while not engine.control.position:
            pass
        assert engine.control.stop().wait(60)
        thread.join(60)
        assert found
        assert engine.evaluate(batch).loss == found[0]  # also after stop: a run evaluates at its end

"""A loss of the user's own, scores without training, and the frozen reference, each beside plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import build
from pairs import engine_config
from reference import Batch, make_batch, plain_adamw
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedModel

from megatrain import AdamWConfig, StreamingEngine
from megatrain.engine import NonFiniteError, ObjectiveError

FAMILIES = ["llama", "qwen3_moe", "gemma2", "gpt2", "qwen3_next"]
LR = 1e-3


def plain_scores(model: PreTrainedModel, batch: Batch, temperature: float = 1.0) -> Tensor:
    """What `StreamingEngine.scores` promises, in plain words."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
    log_probs = (logits.float() / temperature).log_softmax(-1)[:, :-1]
    labels = batch["labels"][:, 1:]
    found = log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * (labels != -100)
    return torch.cat([torch.zeros(len(labels), 1), found], dim=1)


def preference(scores: Tensor) -> Tensor:
    """Rows of the first half are to be likelier than those of the second: mixes rows of all micro-batches."""
    chosen, rejected = scores.sum(1).chunk(2)
    return -logsigmoid(0.3 * (chosen - rejected)).mean()


def engine_for(model: PreTrainedModel, **changes: Any) -> StreamingEngine:
    return StreamingEngine(model, engine_config(**changes), AdamWConfig(lr=LR))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_are_the_models_own(family: str, temperature: float) -> None:
    model = build(family).eval()
    batch = make_batch(model)
    with torch.no_grad():
        expected = plain_scores(model, batch, temperature)
    with engine_for(model, micro_batch_size=2, loss_chunk_tokens=13) as engine:
        found = engine.scores(batch, temperature=temperature)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


def objective_step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: Batch) -> tuple[float, float]:
    optimizer.zero_grad()
    loss = preference(plain_scores(model, batch))
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach()), float(norm)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize("rows", [None, 2])
def test_an_objective_trains_as_in_plain_pytorch(family: str, rows: int | None) -> None:
    model, plain = build(family), build(family)
    batches = [make_batch(model, seed=seed) for seed in range(3)]
    optimizer = plain_adamw(plain, LR)
    with engine_for(model, micro_batch_size=rows, loss_chunk_tokens=17) as engine:
        for batch in batches:
            expected_loss, expected_norm = objective_step(plain, optimizer, batch)
            result = engine.step(batch, preference)
            assert result.loss == pytest.approx(expected_loss, rel=1e-5)
            assert result.grad_norm == pytest.approx(expected_norm, rel=1e-4)
        weights = engine.state_dict()
    for name, expected in plain.state_dict().items():
        torch.testing.assert_close(weights[name], expected, rtol=1e-4, atol=2e-5, msg=name)


def test_the_models_own_loss_as_an_objective_is_the_models_own_loss() -> None:
    batch = make_batch(build("llama"))
    tokens = int((batch["labels"][:, 1:] != -100).sum())
    results, weights = [], []
    for objective in (None, lambda scores: -scores.sum() / tokens):
        with engine_for(build("llama"), micro_batch_size=2) as engine:
            results.append(engine.step(batch, objective))
            weights.append(engine.state_dict())
    assert results[0].loss == pytest.approx(results[1].loss, rel=1e-6)
    assert results[0].grad_norm == pytest.approx(results[1].grad_norm, rel=1e-6)
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("depth", [0, 2])
def test_evaluating_between_steps_changes_no_bit(depth: int) -> None:
    outcomes = []
    for evaluate in (False, True):
        model = build("llama", attention_dropout=0.1)
        batches = [make_batch(model, seed=seed) for seed in range(3)]
        torch.manual_seed(0)
        with engine_for(model, prefetch_depth=depth, micro_batch_size=2) as engine:
            losses = []
            for batch in batches:
                losses.append(engine.step(batch).loss)
                if evaluate:
                    assert engine.evaluate(batches[0]).loss > 0
            outcomes.append((losses, engine.state_dict()))
    assert outcomes[0][0] == outcomes[1][0]
    for name, tensor in outcomes[0][1].items():
        assert torch.equal(tensor, outcomes[1][1][name]), name


def test_evaluate_is_the_loss_and_reads_updated_weights() -> None:
    model = build("llama")
    batch = make_batch(model)
    with engine_for(model, micro_batch_size=4) as engine:
        before = engine.evaluate(batch)
        step = engine.step(batch)
        after = engine.evaluate(batch)
        assert before.loss == pytest.approx(step.loss, rel=1e-6)
        assert before.tokens == step.tokens
        assert after.loss < before.loss
        trained = engine.state_dict()
    plain = build("llama").eval()
    plain.load_state_dict(trained)
    assert after.loss == pytest.approx(plain(**batch).loss.item(), rel=1e-6)
    assert after.perplexity == pytest.approx(2.718281828**after.loss, rel=1e-6)


@pytest.mark.parametrize("depth", [0, 3])
def test_the_reference_stays_what_it_was(depth: int) -> None:
    model = build("llama")
    batch = make_batch(model)
    with engine_for(model, keep_reference=True, prefetch_depth=depth) as engine:
        first = engine.scores(batch)
        for _ in range(2):
            engine.step(batch)
            with engine.reference():
                assert torch.equal(engine.scores(batch), first)
            assert not torch.equal(engine.scores(batch), first)


def test_a_step_beside_a_reference_changes_no_bit() -> None:
    weights = []
    for keep in (False, True):
        model = build("gpt2")
        batches = [make_batch(model, seed=seed) for seed in range(3)]
        with engine_for(model, keep_reference=keep) as engine:
            for batch in batches:
                if keep:
                    with engine.reference():
                        engine.scores(batch)
                engine.step(batch)
            weights.append(engine.state_dict())
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]), name


def test_training_on_the_reference_is_refused() -> None:
    model = build("llama")
    with engine_for(model, keep_reference=True) as engine, engine.reference():
        with pytest.raises(RuntimeError, match=r"train outside of it"):
            engine.step(make_batch(model))
        with pytest.raises(RuntimeError, match=r"in effect already"), engine.reference():
            pass


def test_a_reference_that_was_not_kept_is_refused() -> None:
    with (
        engine_for(build("llama")) as engine,
        pytest.raises(ValueError, match=r"keep_reference=True"),
        engine.reference(),
    ):
        pass


@pytest.mark.parametrize(
    ("objective", "said"),
    [
        (lambda scores: scores, "scalar"),
        (lambda scores: torch.zeros(()), "depends on them"),
        (lambda scores: 1 / 0, "ZeroDivisionError"),
        (lambda scores: 3.0, "scalar"),
    ],
)
def test_an_objective_that_fails_leaves_the_engine_usable(objective: Any, said: str) -> None:
    model, untouched = build("llama"), build("llama")
    batch = make_batch(model)
    with engine_for(model, prefetch_depth=2) as engine, engine_for(untouched, prefetch_depth=2) as other:
        for _ in range(2):
            with pytest.raises(ObjectiveError, match=said):
                engine.step(batch, objective)
            assert engine.step(batch).loss == other.step(batch).loss
        for name, tensor in engine.state_dict().items():
            assert torch.equal(tensor, other.state_dict()[name])


def test_an_objective_that_is_not_finite_is_not_applied() -> None:
    model = build("llama")
    batch = make_batch(model)
    with engine_for(model) as engine:
        before = engine.state_dict()
        with pytest.raises(NonFiniteError, match="loss of step 0 is nan"):
            engine.step(batch, lambda scores: scores.sum() * float("nan"))
        for name, tensor in engine.state_dict().items():
            assert torch.equal(tensor, before[name])


def classifier() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_labels=1,
        pad_token_id=0,
    )
    return LlamaForSequenceClassification(config)


def reward_loss(rewards: Tensor) -> Tensor:
    chosen, rejected = rewards[:, 0].chunk(2)
    return -logsigmoid(chosen - rejected).mean()


@pytest.mark.parametrize("rows", [None, 1, 4])
def test_a_classifier_trains_as_in_plain_pytorch(rows: int | None) -> None:
    model, plain = classifier(), classifier()
    batch = make_batch(model)
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    optimizer = plain_adamw(plain, LR)
    with engine_for(model, micro_batch_size=rows, loss_chunk_tokens=5) as engine:
        for _ in range(3):
            optimizer.zero_grad()
            logits = plain(**inputs).logits
            torch.testing.assert_close(engine.scores(inputs), logits.detach(), rtol=1e-5, atol=1e-6)
            loss = reward_loss(logits)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            optimizer.step()
            result = engine.step(inputs, reward_loss)
            assert result.loss == pytest.approx(float(loss.detach()), rel=1e-5)
            assert result.grad_norm == pytest.approx(float(norm), rel=1e-4)
        with pytest.raises(ValueError, match=r"step\(batch, objective\)"):
            engine.step(inputs)
        with pytest.raises(ValueError, match=r"use scores"):
            engine.evaluate(inputs)

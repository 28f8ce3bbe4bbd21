"""A run that looks at other data and answers prompts: what it tells, and that training does not notice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build
from pairs import engine_config
from reference import Batch, make_batch
from transformers import PreTrainedTokenizerBase

from megatrain import AdamWConfig, StreamingEngine, TrainingRun
from megatrain.data import PromptBatch, records_from_rows, tokenize_prompts, train_tokenizer
from megatrain.engine import Evaluation
from megatrain.run import Evaluating
from megatrain.run.evaluating import mean_of, scalars_of

STEPS, VOCAB = 5, 300
HELD_OUT = [make_batch(build("llama"), batch=2, seed=seed) for seed in (10, 11)]
TRAINED = [make_batch(build("llama"), seed=seed) for seed in range(3)]
TIMEOUT_S = 120


def make_engine() -> StreamingEngine:
    torch.manual_seed(0)
    return StreamingEngine(
        build("llama", vocab_size=VOCAB, attention_dropout=0.1), engine_config(), AdamWConfig(lr=1e-3)
    )


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer(["the cat sat on the mat"] * 4, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def prompts(tokenizer: PreTrainedTokenizerBase) -> PromptBatch:
    rows = [{"prompt": "the cat"}, {"prompt": "on the mat the"}]
    tokenized = tokenize_prompts(records_from_rows(rows, format="prompt"), tokenizer, 32)
    return tokenized.batch([0, 1])


def trained(folder: Path, evaluating: Evaluating | None, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    with make_engine() as engine:
        run = TrainingRun(engine, TRAINED, steps=STEPS, run_dir=folder, evaluating=evaluating, **options)
        run.start().wait(TIMEOUT_S)
        return [result.loss for result in run.results], engine.state_dict()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_training_does_not_notice(tmp_path: Path, prompts: PromptBatch) -> None:
    """Losses with dropout and weights are the same bits as without; sampling draws are taken back."""
    looks = Evaluating(every=2, batches=HELD_OUT, prompts=prompts, max_new_tokens=4, temperature=1.0)
    losses, weights = trained(tmp_path / "looks", looks)
    expected_losses, expected = trained(tmp_path / "plain", None)
    assert losses == expected_losses
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor), name
    evaluations = lines(tmp_path / "looks" / "evaluations.jsonl")
    assert [line["step"] for line in evaluations] == [0, 2, 4, 5]
    assert evaluations[-1]["loss"] < evaluations[0]["loss"]
    samples = lines(tmp_path / "looks" / "samples.jsonl")
    assert [line["step"] for line in samples] == [0, 0, 2, 2, 4, 4, 5, 5]
    assert {line["prompt"] for line in samples} == {"the cat", "on the mat the"}
    assert not (tmp_path / "plain" / "evaluations.jsonl").exists()


def test_it_is_the_loss_of_all_held_out_tokens(tmp_path: Path) -> None:
    with make_engine() as engine:
        parts = [engine.evaluate(batch) for batch in HELD_OUT]
    trained(tmp_path, Evaluating(every=STEPS, batches=HELD_OUT))
    first = lines(tmp_path / "evaluations.jsonl")[0]
    tokens = sum(part.tokens for part in parts)
    assert first["tokens"] == tokens
    assert first["loss"] == pytest.approx(sum(part.loss * part.tokens for part in parts) / tokens, rel=1e-12)


def test_greedy_answers_are_the_models_own(tmp_path: Path, prompts: PromptBatch) -> None:
    trained(tmp_path, Evaluating(every=STEPS, prompts=prompts, max_new_tokens=5))
    model = build("llama", vocab_size=VOCAB, attention_dropout=0.1).eval()
    inputs = {"input_ids": prompts.input_ids, "attention_mask": prompts.attention_mask}
    end = prompts.tokenizer.eos_token_id
    drawn = model.generate(**inputs, max_new_tokens=5, do_sample=False, eos_token_id=end, pad_token_id=0)
    said = prompts.tokenizer.batch_decode(drawn[:, prompts.input_ids.shape[1] :], skip_special_tokens=True)
    assert [line["text"] for line in lines(tmp_path / "samples.jsonl")[:2]] == said


def test_a_process_of_its_own_looks_too(tmp_path: Path) -> None:
    evaluating = Evaluating(every=2, batches=lambda: HELD_OUT)
    run = TrainingRun(make_engine, lambda: TRAINED, steps=STEPS, run_dir=tmp_path, evaluating=evaluating)
    run.start().wait(TIMEOUT_S)
    assert [line["step"] for line in lines(tmp_path / "evaluations.jsonl")] == [0, 2, 4, 5]


def test_a_resumed_run_looks_where_the_whole_one_does(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    evaluating = Evaluating(every=2, batches=HELD_OUT)
    losses, weights = trained(whole, evaluating)
    with make_engine() as engine:
        TrainingRun(engine, TRAINED, steps=3, run_dir=parts, evaluating=evaluating, checkpoint_every=3).start().wait(
            TIMEOUT_S
        )
    resumed, end = trained(parts, evaluating, checkpoint_every=3, resume=True)
    assert resumed == losses[3:]
    for name, tensor in weights.items():
        assert torch.equal(end[name], tensor), name
    found = lines(parts / "evaluations.jsonl")
    assert [line["step"] for line in found] == [4, 5]
    expected = {line["step"]: line["loss"] for line in lines(whole / "evaluations.jsonl")}
    assert {line["step"]: line["loss"] for line in found} == {step: expected[step] for step in (4, 5)}


def test_a_run_that_is_stopped_does_not_finish_looking(tmp_path: Path) -> None:
    with make_engine() as engine:

        def evaluate(engine: StreamingEngine, batch: Batch) -> Evaluation:
            engine.control.stop()
            return engine.evaluate(batch)

        evaluating = Evaluating(every=1, batches=HELD_OUT, evaluate=evaluate)
        run = TrainingRun(engine, TRAINED, steps=STEPS, run_dir=tmp_path, evaluating=evaluating)
        run.start().wait(TIMEOUT_S)
        assert run.steps_done == 0
    assert not (tmp_path / "evaluations.jsonl").exists()


def test_a_failure_while_looking_ends_the_run_and_is_told(tmp_path: Path) -> None:
    def evaluate(engine: StreamingEngine, batch: Batch) -> Evaluation:
        raise ValueError("no such thing")

    with make_engine() as engine:
        evaluating = Evaluating(every=1, batches=HELD_OUT, evaluate=evaluate)
        run = TrainingRun(engine, TRAINED, steps=STEPS, run_dir=tmp_path, evaluating=evaluating)
        with pytest.raises(ValueError, match="no such thing"):
            run.start().wait(TIMEOUT_S)


def test_tensorboard_gets_the_held_out_loss(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trained(tmp_path, Evaluating(every=2, batches=HELD_OUT), sinks=["tensorboard"])
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    expected = {line["step"]: line["loss"] for line in lines(tmp_path / "evaluations.jsonl")}
    found = {point.step: point.value for point in events.Scalars("eval/loss")}
    assert found == pytest.approx(expected)
    assert "eval/perplexity" in events.Tags()["scalars"]


def test_batches_count_by_their_tokens() -> None:
    whole = mean_of([Evaluation(1.0, 30, {"a": 1.0}), Evaluation(3.0, 10, {"a": 0.0})])
    assert (whole.loss, whole.tokens, whole.metrics) == (1.5, 40, {"a": 0.75})


def test_a_perplexity_beyond_all_numbers_is_infinite_and_no_curve() -> None:
    assert Evaluation(1e6, 1).perplexity == float("inf")
    assert scalars_of(Evaluation(1e6, 1)) == {"eval/loss": 1e6}
    assert scalars_of(Evaluation(float("nan"), 1, {"reward/mean": 0.5})) == {"eval/reward/mean": 0.5}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every": 0}, r"every must be a whole number ≥ 1"),
        ({"every": True}, r"every must be"),
        ({"every": 1, "max_new_tokens": 0}, r"max_new_tokens must be ≥ 1"),
        ({"every": 1, "temperature": -1.0}, r"temperature must be ≥ 0"),
    ],
)
def test_what_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Evaluating(**options)

"""Answers drawn from the model in training, and whole steps of GRPO on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from beside_trl import save_models, sentence
from pairs import engine_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatrain import AdamWConfig, StreamingEngine
from megatrain.data import PromptBatch, records_from_rows, tokenize_prompts
from megatrain.recipes import GRPO
from megatrain.recipes.rollouts import Answer, generate, rollouts_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rollouts")
    save_models(folder)
    return folder


def prompt_batch(place: Path, prompts: list[Any]) -> PromptBatch:
    rows = [{"prompt": prompt, "target": number} for number, prompt in enumerate(prompts)]
    data = tokenize_prompts(records_from_rows(rows), AutoTokenizer.from_pretrained(place), 64)
    return data.batch(range(len(rows)))


def make_engine(place: Path, lr: float = 1e-3, **config: Any) -> StreamingEngine:
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).train()
    return StreamingEngine(model, engine_config(**config), AdamWConfig(lr=lr))


def test_answers_are_drawn_from_the_model_and_end_where_they_end(folder: Path) -> None:
    batch = prompt_batch(folder / "llama", [sentence(0, 4), sentence(1, 1)])
    with make_engine(folder / "llama") as engine:
        drawn = generate(engine, batch, per_prompt=40, max_tokens=30, temperature=1.0, seed=3)
        again = generate(engine, batch, per_prompt=40, max_tokens=30, temperature=1.0, seed=3)
        other = generate(engine, batch, per_prompt=40, max_tokens=30, temperature=1.0, seed=4)
    end = batch.tokenizer.eos_token_id
    assert drawn == again
    assert drawn != other
    assert {len(answer.ids) for answer in drawn.answers if not answer.ended} == {30}
    assert all((answer.ids.count(end), answer.ids[-1]) == (1, end) for answer in drawn.answers if answer.ended)
    assert 0 < sum(answer.ended for answer in drawn.answers) < 80  # about 30 of 320 ids drawn, 80 times
    assert drawn.prompts[0] == batch.tokenizer(sentence(0, 4))["input_ids"]
    assert drawn.prompts[79] == batch.tokenizer(sentence(1, 1))["input_ids"]


def test_drawing_leaves_the_random_numbers_of_training_alone(folder: Path) -> None:
    batch = prompt_batch(folder / "llama", ["one"])
    with make_engine(folder / "llama") as engine:
        torch.manual_seed(7)
        before = torch.rand(3)
        torch.manual_seed(7)
        generate(engine, batch, per_prompt=2, max_tokens=3, temperature=1.0, seed=0)
        assert torch.equal(torch.rand(3), before)


def test_what_was_drawn_becomes_rows_without_padding_on_the_left(folder: Path) -> None:
    batch = prompt_batch(folder / "llama", [sentence(0, 4), "one"])
    drawn = [Answer([30, 31], ended=False), Answer([32, 1], ended=True)]
    rollouts = rollouts_of(batch, drawn, 1)
    rows = rollouts.batch()
    for row, (prompt, answer) in enumerate(zip(rollouts.prompts, drawn, strict=True)):
        length = len(prompt) + 2
        assert rows["input_ids"][row, :length].tolist() == prompt + answer.ids
        assert rows["labels"][row, :length].tolist() == [-100] * len(prompt) + answer.ids
        assert rows["attention_mask"][row].sum() == length
    assert (rollouts.batch(with_truncated=False)["labels"] != -100).sum(1).tolist() == [0, 2]
    assert rollouts.metrics() == {"completions/mean_length": 2.0, "completions/truncated": 0.5}


def test_scores_from_when_an_answer_was_drawn_take_their_places(folder: Path) -> None:
    batch = prompt_batch(folder / "llama", ["one", "two"])
    rollouts = rollouts_of(batch, [Answer([30, 31], False, [-1.0, -2.0]), Answer([32], True)], 1)
    scores = torch.zeros(rollouts.batch()["labels"].shape)
    start = len(rollouts.prompts[0])
    old = rollouts.old_scores(scores)
    assert old[0, start : start + 2].tolist() == [-1.0, -2.0]
    assert (old != 0).sum() == 2


def test_a_chat_is_answered_by_the_assistant(folder: Path) -> None:
    batch = prompt_batch(folder / "llama", [[{"role": "user", "content": "one"}]])
    ids = batch.tokenizer("two", add_special_tokens=False)["input_ids"]
    rollouts = rollouts_of(batch, [Answer([*ids, batch.tokenizer.eos_token_id], True)], 1)
    assert rollouts.completions == [[{"role": "assistant", "content": "two"}]]


REWARD_FILE = """
def many(completions, completion_ids, target, **_):
    return [sum(100 <= token < 200 for token in ids) / len(ids) for ids in completion_ids]
"""


def test_the_model_learns_what_is_rewarded(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REWARD_FILE)
    recipe = GRPO(rewards=[f"{tmp_path}/mine.py:many"], num_generations=12, max_completion_length=8)
    batch = prompt_batch(folder / "llama", [sentence(n, 3) for n in range(3)])
    with make_engine(folder / "llama", lr=1e-2, micro_batch_size=18) as engine:
        results = [recipe.step(engine, batch) for _ in range(20)]
        recorded = engine.recorder.steps()
    rewards = [result.metrics["reward/mean"] for result in results]
    assert rewards[0] < 0.5
    assert rewards[-1] > 0.8
    assert [step.metrics for step in recorded] == [result.metrics for result in results]
    assert results[0].metrics.keys() == {
        "reward/mean", "reward/std", "completions/mean_length", "completions/truncated"
    }  # fmt: skip

"""lm-evaluation-harness reads what MegaTrain saved, and finds the losses that the engine found."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from families import build

from megatrain import AdamWConfig, EngineConfig, StreamingEngine
from megatrain.batch import IGNORED
from megatrain.data import train_tokenizer

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # lm_eval's own, and of what it imports
    pytest.mark.timeout(240),
]

TEXTS = ["The cat sat on the mat.", "A dog saw the cat, and the cat saw a dog!", "Mats; cats & dogs — and größer."]
QUESTIONS = [("The cat sat on the", " mat", " dog"), ("A dog saw the", " sun and the moon", " cat")]
TOLERANCE = 1e-4

ROLLING = {
    "task": "megatrain_rolling",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "byte_perplexity"}],
}
CHOICE = {
    "task": "megatrain_choice",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": 0,
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
}


class Saved:
    """A trained model on the disk, and what its engine says of token sequences."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = train_tokenizer(TEXTS * 4, vocab_size=300)
        model = build("llama", vocab_size=len(self.tokenizer))
        config = EngineConfig(device="cpu", dtype="float32", micro_batch_size=2)
        self.engine = StreamingEngine(model, config, AdamWConfig(lr=1e-2))
        for text in TEXTS:
            self.engine.step(self.batch(self.tokenizer.encode(text), first=1))
        self.engine.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def batch(self, ids: list[int], *, first: int) -> dict[str, torch.Tensor]:
        """first: of the tokens that are predicted."""
        input_ids = torch.tensor([ids])
        labels = input_ids.clone()
        labels[:, :first] = IGNORED
        return {"input_ids": input_ids, "labels": labels, "attention_mask": torch.ones_like(input_ids)}

    def log_likelihood(self, context: list[int], rest: list[int]) -> float:
        found = self.engine.evaluate(self.batch(context + rest, first=len(context)))
        assert found.tokens == len(rest)
        return -found.loss * found.tokens


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    found = Saved(tmp_path_factory.mktemp("saved"))
    with found.engine:
        yield found


def harness(model: Path, task: dict[str, Any], rows: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """What lm_eval says of a model in a folder about a task of one's own in a local file."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    (folder / "task.yaml").write_text(yaml.safe_dump(task | files))
    results: dict[str, Any] = simple_evaluate(
        model="hf",
        model_args=f"pretrained={model},dtype=float32",
        tasks=[task["task"]],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        device="cpu",
        batch_size=1,
        bootstrap_iters=0,
    )
    return results


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


def test_the_perplexity_of_texts_is_that_of_the_held_out_loss(saved: Saved, tmp_path: Path) -> None:
    results = harness(saved.folder, ROLLING, [{"text": text} for text in TEXTS], tmp_path)
    found = results["results"]["megatrain_rolling"]["byte_perplexity,none"]
    encode, prefix = saved.tokenizer.encode, [saved.tokenizer.bos_token_id]  # lm_eval has it predict the first token
    said = sum(saved.log_likelihood(prefix, encode(text)) for text in TEXTS)
    assert math.log(found) == pytest.approx(-said / sum(len(text.encode()) for text in TEXTS), abs=TOLERANCE)


def test_answers_have_the_likelihood_that_the_engine_gives_them(saved: Saved, tmp_path: Path) -> None:
    rows = [{"question": question, "choices": choices} for question, *choices in QUESTIONS]
    results = harness(saved.folder, CHOICE, rows, tmp_path)
    samples = results["samples"]["megatrain_choice"]
    assert [sample["doc"]["question"] for sample in samples] == [question for question, *_ in QUESTIONS]
    right, encode = [], saved.tokenizer.encode
    for sample, (question, *choices) in zip(samples, QUESTIONS, strict=True):
        context = encode(question)
        expected = [saved.log_likelihood(context, encode(choice, add_special_tokens=False)) for choice in choices]
        assert [float(said[0]) for said in sample["filtered_resps"]] == pytest.approx(expected, abs=TOLERANCE)
        right.append(expected[0] > expected[1])
    assert results["results"]["megatrain_choice"]["acc,none"] == sum(right) / len(right)

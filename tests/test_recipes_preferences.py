"""DPO and reward models beside TRL's trainers: the same losses, gradients and weights."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from beside_trl import Outcome, require_same, run_engine, run_trl, save_models, sentence, write_rows
from transformers import AutoModelForSequenceClassification
from trl_runs import Case

from megatrain.anatomy.load import load_tokenizer
from megatrain.data import Batches, load_records, tokenize_pairs
from megatrain.recipes import DPO, Reward

PAIRS, BATCH, MICRO_BATCH, SEQUENCE = 40, 4, 3, 64


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def answers(number: int) -> tuple[str, str]:
    return sentence(number + 1, 2 + number % 5), sentence(number + 2, 1 + number % 4)


def text(number: int) -> dict[str, Any]:
    chosen, rejected = answers(number)
    return {"prompt": sentence(number, 3), "chosen": f" {chosen}", "rejected": f" {rejected}"}


def chat(number: int) -> dict[str, Any]:
    asked, (chosen, rejected) = user(sentence(number, 3)), answers(number)
    return {"chosen": [asked, assistant(chosen)], "rejected": [asked, assistant(rejected)]}


RECORDS = {"texts": [text(n) for n in range(PAIRS)], "chats": [chat(n) for n in range(PAIRS)]}

Cases = dict[str, tuple[str, str, dict[str, Any], Any]]  # model, records, TRL's options, our recipe
DPO_CASES: Cases = {
    "sigmoid, texts": ("llama", "texts", {"beta": 0.5}, DPO(beta=0.5)),
    "sigmoid, chats": ("qwen3", "chats", {"beta": 0.1}, DPO()),
    "hinge": ("llama", "chats", {"beta": 0.5, "loss_type": ["hinge"]}, DPO(beta=0.5, loss_type="hinge")),
    "ipo": ("qwen3", "texts", {"beta": 0.2, "loss_type": ["ipo"]}, DPO(beta=0.2, loss_type="ipo")),
    "robust": (
        "llama",
        "texts",
        {"beta": 0.5, "loss_type": ["robust"], "label_smoothing": 0.2},
        DPO(beta=0.5, loss_type="robust", label_smoothing=0.2),
    ),
}
REWARD_CASES: Cases = {
    "texts": ("llama", "texts", {}, Reward()),
    "chats": ("qwen3", "chats", {}, Reward()),
    "chats, centred": (
        "llama",
        "chats",
        {"center_rewards_coefficient": 0.01},
        Reward(center_rewards_coefficient=0.01),
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preferences")
    save_models(folder / "language")
    save_models(folder / "reward", AutoModelForSequenceClassification)
    for name, rows in RECORDS.items():
        write_rows(folder / f"{name}.jsonl", rows)
    return folder


@pytest.fixture(scope="module")
def trl(folder: Path) -> dict[str, Outcome]:
    options = {"per_device_train_batch_size": BATCH, "max_length": SEQUENCE}
    return run_trl(
        folder,
        [
            Case(name, trainer, str(folder / kind / model), str(folder / f"{records}.jsonl"), options | theirs)
            for trainer, kind, cases in (("DPO", "language", DPO_CASES), ("Reward", "reward", REWARD_CASES))
            for name, (model, records, theirs, _) in cases.items()
        ],
    )


def batches(folder: Path, model: Path, records: str) -> Any:
    data = load_records(folder / f"{records}.jsonl", cache_dir=folder)
    return cycle(Batches(tokenize_pairs(data, load_tokenizer(model), SEQUENCE), BATCH, shuffle=False))


@pytest.mark.parametrize("name", DPO_CASES)
def test_dpo_is_the_same_as_trl(name: str, folder: Path, trl: dict[str, Outcome]) -> None:
    model, records, _, recipe = DPO_CASES[name]
    place = folder / "language" / model
    pairs = batches(folder, place, records)
    ours = run_engine(
        place, lambda engine: recipe.step(engine, next(pairs)), micro_batch_size=MICRO_BATCH, keep_reference=True
    )
    require_same(f"DPO, {model}: {name}", ours, trl[name])


@pytest.mark.parametrize("name", REWARD_CASES)
def test_reward_is_the_same_as_trl(name: str, folder: Path, trl: dict[str, Outcome]) -> None:
    model, records, _, recipe = REWARD_CASES[name]
    place = folder / "reward" / model
    pairs = batches(folder, place, records)
    ours = run_engine(
        place,
        lambda engine: recipe.step(engine, next(pairs)),
        kind=AutoModelForSequenceClassification,
        micro_batch_size=MICRO_BATCH,
    )
    require_same(f"Reward, {model}: {name}", ours, trl[name])

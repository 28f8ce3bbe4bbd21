"""Supervised fine-tuning and continued pre-training beside TRL's SFTTrainer: the same losses, gradients and weights.

TRL reads, renders, tokenises and packs the same records itself, so the data are compared, too.
"""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from beside_trl import Outcome, require_same, run_engine, run_trl, save_models, sentence, write_rows
from trl_runs import Case

from megatrain.anatomy.load import load_tokenizer
from megatrain.data import Batches, load_records, tokenize
from megatrain.recipes import SFT, Pretrain

ROWS, BATCH, MICRO_BATCH, SEQUENCE = 40, 4, 2, 64


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def chat(number: int) -> list[dict[str, str]]:
    first, second = sentence(number, 1 + number % 4), sentence(number + 1, 2 + number % 3)
    return [user(first), assistant(second), user(second), assistant(first)]


RECORDS = {
    "text": [{"text": sentence(n, 4 + n % 9)} for n in range(ROWS)],
    "messages": [{"messages": chat(n)} for n in range(ROWS)],
    "texts": [{"prompt": sentence(n, 3), "completion": " " + sentence(n + 1, 1 + n % 5)} for n in range(ROWS)],
    "chats": [{"prompt": chat(n)[:3], "completion": chat(n)[3:]} for n in range(ROWS)],
}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # records, TRL's options, ours
    "raw text": ("text", {}, {}),
    "chats, full": ("messages", {}, {"loss_on": "all"}),
    "chats, assistant only": ("messages", {"assistant_only_loss": True}, {}),
    "texts, completion only": ("texts", {}, {}),
    "chats, completion only": ("chats", {}, {}),
    "texts, full": ("texts", {"completion_only_loss": False}, {"loss_on": "all"}),
    # All documents in every batch: the two pack them into other rows, which changes nothing that documents see.
    "raw text, packed": ("text", {"packing": True, "per_device_train_batch_size": 99}, {"pack": True, "batch": 99}),
    "chats, packed": (
        "messages",
        {"packing": True, "per_device_train_batch_size": 99, "assistant_only_loss": True},
        {"pack": True, "batch": 99},
    ),
}


RUNS = [("llama", name) for name in CASES]
RUNS += [("qwen3", name) for name in ("raw text", "chats, assistant only", "texts, completion only", "chats, packed")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    save_models(folder)
    for name, rows in RECORDS.items():
        write_rows(folder / f"{name}.jsonl", rows)
    return folder


@pytest.fixture(scope="module")
def trl(folder: Path) -> dict[str, Outcome]:
    options = {"per_device_train_batch_size": BATCH, "max_length": SEQUENCE}
    return run_trl(
        folder,
        [
            Case(f"{model}, {name}", "SFT", str(folder / model), str(folder / f"{records}.jsonl"), options | theirs)
            for model, name in RUNS
            for records, theirs, _ in [CASES[name]]
        ],
    )


@pytest.mark.parametrize(("model", "name"), RUNS)
def test_the_same_as_trl(model: str, name: str, folder: Path, trl: dict[str, Outcome]) -> None:
    records, _, options = CASES[name]
    data = load_records(folder / f"{records}.jsonl", cache_dir=folder)
    packed, loss_on = options.get("pack", False), options.get("loss_on")
    dataset = tokenize(data, load_tokenizer(folder / model), SEQUENCE, pack=packed, loss_on=loss_on)
    batches = cycle(Batches(dataset, options.get("batch", BATCH), shuffle=False))
    recipe = Pretrain() if records == "text" else SFT()
    ours = run_engine(folder / model, lambda engine: recipe.step(engine, next(batches)), micro_batch_size=MICRO_BATCH)
    require_same(f"SFT, {model}: {name}", ours, trl[f"{model}, {name}"])

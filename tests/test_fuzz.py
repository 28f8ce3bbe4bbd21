"""Broken configurations and data files by the thousand: nothing escapes but the errors that are meant for users.

MEGATRAIN_FUZZ=10000 makes so many of each; every input is made from its number alone.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from megatrain.data import PLAIN_CHAT_TEMPLATE, Batches, RecordError, load_records, tokenize, train_tokenizer
from megatrain.settings import Settings, SettingsError, dump_settings, load_settings

COUNT = int(os.environ.get("MEGATRAIN_FUZZ", "400"))
pytestmark = pytest.mark.timeout(60 + COUNT // 5)

STRINGS = ["", "a", "true", "null", "1e5", "~", "../x", "\x00", "\ud800", "\ufeff", "é", "🙂", "𝒳" * 50, "'", '"', "{"]
SPECIAL = ["<|end|>", "<|bos|>", "<|user|>", "<|assistant|>", "{{ messages }}", "{% raw %}", "2020-01-01", "a b " * 40]
NUMBERS = [
    0,
    -1,
    1,
    3,
    2**31,
    2**63,
    2**64,
    -(2**70),
    10**400,
    0.1,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    True,
    None,
]
KEYS = ["text", "messages", "conversations", "instruction", "input", "output", "role", "content", "from", "value"]


def scalar(rng: random.Random) -> Any:
    return rng.choice([*STRINGS, *SPECIAL, *NUMBERS])


def anything(rng: random.Random, depth: int = 3) -> Any:
    kind = rng.random()
    if depth == 0 or kind < 0.6:
        return scalar(rng)
    if kind < 0.8:
        return [anything(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {rng.choice([*KEYS, *STRINGS]): anything(rng, depth - 1) for _ in range(rng.randrange(4))}


def damaged(rng: random.Random, data: bytes, most: int) -> bytes:
    """With up to `most` wounds: bytes changed, lost, doubled or put in."""
    for _ in range(rng.randrange(most + 1)):
        at, length = rng.randrange(len(data) + 1), rng.choice([1, 1, 1, 5, 40])
        new = rng.choice([b"", data[at : at + length] * 2, rng.randbytes(length), rng.choice(BYTES)])
        data = data[:at] + new + data[at + rng.choice([0, length]) :]
    return data


BYTES = [
    b"\x00",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\n",
    b"\r",
    b"\t",
    b": ",
    b"- ",
    b"&a [*a]",
    b"<<: *a",
    b"!!python/none x",
]
BYTES += [
    b"{",
    b"}",
    b"[",
    b"]" * 50,
    b"[" * 5000,
    b'"',
    b",",
    b"\\ud800",
    b"\\u0000",
    b"NaN",
    b"\x1f\x8b",
    b"%YAML 9.9\n---",
]

# ---- configurations ----

LEAST = {"model": {"name": "m"}, "data": {"source": "d.jsonl"}, "run": {"folder": "runs/x", "steps": 10}}
KINDS = {name: (*get_args(hint), hint)[0] for name, hint in get_type_hints(Settings).items()}  # those of X | None, too
PLACES = [f"{part}.{each.name}" for part, kind in KINDS.items() if is_dataclass(kind) for each in fields(kind)]
PLACES += [part for part, kind in KINDS.items() if not is_dataclass(kind)]
TEXTS = [
    "2",
    "x",
    "",
    "null",
    "[a, b]",
    "{a: 1}",
    "&a [*a]",
    "*b",
    "!!python/object:os.system x",
    "1_000",
    "0x1F",
    "1:30",
]
TEXTS += [
    "2020-01-01",
    "'",
    '"',
    "{",
    "- 1",
    "a: b: c",
    "@",
    "`",
    "%",
    "? x",
    "|",
    "\t",
    "!!binary x",
    "!!set {a}",
    "\x00",
    "\ud800",
]


def configuration(rng: random.Random) -> tuple[bytes, list[str]]:
    values: dict[str, Any] = json.loads(json.dumps(LEAST))
    for _ in range(rng.randrange(4)):
        part, _, name = rng.choice(PLACES).partition(".")
        if name:
            values.setdefault(part, {})[rng.choice([name, name, name + "s", scalar(rng)])] = anything(rng)
        else:
            values[part] = anything(rng)
    if rng.random() < 0.1:
        values[rng.choice([*values, "other"])] = anything(rng)
    text = json.dumps(values, skipkeys=True, indent=rng.choice([None, 1])).encode()  # which is YAML, too
    return damaged(rng, text, rng.choice([0, 0, 3])), [change(rng) for _ in range(rng.choice([0, 0, 1, 3]))]


def change(rng: random.Random) -> str:
    key = rng.choice(
        [rng.choice(PLACES), rng.choice(PLACES) + "x", "run", "engine.throttle.link_bytes_per_s", ".", "a..b"]
    )
    return f"{key}{rng.choice(['=', '=', '=', ''])}{rng.choice([*TEXTS, json.dumps(anything(rng))])}"


def test_configurations(tmp_path: Path) -> None:
    came_to: Counter[str] = Counter()
    for number in range(COUNT):
        text, changes = configuration(random.Random(number))
        path = tmp_path / "run.yaml"
        path.write_bytes(text)
        try:
            settings = load_settings(path, changes)
        except SettingsError as error:
            require_sentence(error)
            came_to["refused"] += 1
        else:
            path.write_bytes(dump_settings(settings).encode())
            assert load_settings(path) == settings, f"input {number} is not what is read back"
            came_to["accepted"] += 1
    print(f"configurations: {dict(came_to)}")
    assert min(came_to["accepted"], came_to["refused"]) > COUNT / 20  # both ways are walked


def require_sentence(error: Exception) -> None:
    said = str(error)
    assert len(said) > 10
    assert "\n" not in said
    said.encode()  # can be printed


# ---- data ----

TOKENIZER = train_tokenizer(["a b c d e f g", "true null 1e5"], vocab_size=300)
CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ROLES = ["user", "assistant", "system", "tool", "gpt", "human", "narrator", 3]


def row(rng: random.Random, kind: str) -> Any:
    if rng.random() < 0.1:
        return anything(rng)
    if kind == "text":
        return {"text": words(rng)}
    if kind == "alpaca":
        return {"instruction": words(rng), "input": words(rng), "output": words(rng)}
    turns = [turn(rng, kind) for _ in range(rng.randrange(5))]
    return {"messages" if kind == "messages" else "conversations": turns}


def turn(rng: random.Random, kind: str) -> Any:
    role, content = ("role", "content") if kind == "messages" else ("from", "value")
    extra = {"tool_calls": anything(rng)} if rng.random() < 0.1 else {}
    return {role: rng.choice(["user", "assistant", rng.choice(ROLES)]), content: words(rng), **extra}


def words(rng: random.Random) -> Any:
    return (
        anything(rng, 1) if rng.random() < 0.05 else " ".join(rng.choices([*STRINGS[:8], *SPECIAL], k=rng.randrange(6)))
    )


def data_file(rng: random.Random) -> tuple[str, bytes]:
    kind = rng.choice(["text", "alpaca", "messages", "sharegpt"])
    rows = [row(rng, kind) for _ in range(rng.randrange(1, 6))]
    suffix = rng.choice([".jsonl", ".jsonl", ".json", ".txt"])
    whole = rng.random() < 0.5 and suffix == ".json"
    text = json.dumps(rows) if whole else "\n".join(map(json.dumps, rows))
    return suffix, damaged(rng, text.encode(), rng.choice([0, 0, 4]))


def test_data(tmp_path: Path) -> None:
    came_to: Counter[str] = Counter()
    for number in range(COUNT):
        rng = random.Random(number)
        suffix, data = data_file(rng)
        path = tmp_path / f"data{suffix}"
        path.write_bytes(data)
        try:
            train_on(path, rng)
            came_to["trained on"] += 1
        except ValueError as error:
            if type(error) not in (ValueError, RecordError):
                raise
            require_sentence(error)
            came_to[type(error).__name__] += 1
    print(f"data: {dict(came_to)}")
    assert min(came_to["trained on"], came_to["ValueError"], came_to["RecordError"]) > COUNT / 100


def train_on(path: Path, rng: random.Random) -> None:
    """As a run does; what is accepted is whole."""
    skipping = rng.choice(["error", "skip"])
    format = rng.choice([None, None, None, "text", "messages", "sharegpt", "alpaca"])
    records = load_records(path, on_bad_record=skipping, format=format)
    dataset = tokenize(
        records,
        TOKENIZER,
        rng.choice([2, 16, 256]),
        pack=rng.random() < 0.5,
        too_long=rng.choice([None, "split", "reject"]),
        chat_template=rng.choice([None, PLAIN_CHAT_TEMPLATE, CHATML]),
        on_bad_record=skipping,
    )
    counts = dataset.counts
    assert counts.records + counts.skipped == len(records) + records.skipped
    assert counts.trained_tokens == sum(int((batch["labels"] != -100).sum()) for batch in Batches(dataset, 2))

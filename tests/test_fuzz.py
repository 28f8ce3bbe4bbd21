"""Thousands of broken configurations and data files: nothing escapes but the errors that are meant for users.

MEGATRAIN_FUZZ=10000 makes so many of each.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatrain.data import RecordError, load_records, tokenize, train_tokenizer
from megatrain.settings import Settings, SettingsError, dump_settings, load_settings

COUNT = int(os.environ.get("MEGATRAIN_FUZZ", "300"))

# ---- values that hurt ----

STRINGS = ["", "a", "true", "null", "1e5", "~", "../x", "\x00", "\ud800", "\ufeff", "é", "🙂", "𝒳" * 50, "'", '"', "{", "%"]
NUMBERS = [0, -1, 1, 2**31, 2**63, 2**64, -(2**70), 10**400, 0.1, -0.0, 1e308, float("nan"), float("inf"), True, None]
ROLES = ["user", "assistant", "system", "tool", "gpt", "human", "narrator", "", 3, None]
KEYS = ["text", "messages", "conversations", "instruction", "input", "output", "role", "content", "from", "value"]
SPECIAL = ["<|end|>", "<|bos|>", "<|user|>", "<|assistant|>", "{{ messages }}", "{% raw %}"]


def scalar(rng: random.Random) -> Any:
    return rng.choice([*STRINGS, *SPECIAL, *NUMBERS])


def value(rng: random.Random, depth: int = 3) -> Any:
    kind = rng.random()
    if depth == 0 or kind < 0.6:
        return scalar(rng)
    if kind < 0.8:
        return [value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {rng.choice([*KEYS, *STRINGS]): value(rng, depth - 1) for _ in range(rng.randrange(4))}


# ---- configurations ----

LEAST: dict[str, Any] = {
    "model": {"name": "m"},
    "data": {"source": "d.jsonl"},
    "run": {"folder": "runs/x", "steps": 10},
}
PLACES = [
    f"{part}.{name}"
    for part, values in yaml.safe_load(
        dump_settings(
            Settings(
                **{  # every setting there is
                    part: Settings.__annotations__ and kind(**LEAST[part])
                    for part, kind in (
                        ("model", __import__("megatrain.settings", fromlist=["x"]).ModelSettings),
                        ("data", __import__("megatrain.settings", fromlist=["x"]).DataSettings),
                        ("run", __import__("megatrain.settings", fromlist=["x"]).RunSettings),
                    )
                }
            )
        )
    ).items()
    for name in values
]

"""What answers are worth: functions as TRL has them, f(prompts, completions, **columns) → one number per answer."""

from __future__ import annotations

from typing import Any


def is_right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 where an answer begins with what the column `answer` of the data says, 0.1 where it is a number at all."""
    words = [(said.split() or [""])[0] for said in completions]
    return [1.0 if word == right else 0.1 * word.isdigit() for word, right in zip(words, answer, strict=True)]


def is_short(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Less for every token."""
    return [-0.01 * len(ids) for ids in completion_ids]

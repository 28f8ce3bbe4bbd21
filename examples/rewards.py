"""What answers are worth: functions as TRL has them, f(prompts, completions, **columns) → one number per answer."""

from __future__ import annotations

from typing import Any


def is_right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 where an answer begins with what the column `answer` of the data says, 0.1 where it is a number at all."""
    words = [(said.split() or [""])[0] for said in completions]
    return [1.0 if word == right else 0.1 * word.isdigit() for word, right in zip(words, answer, strict=True)]


def no_letters(completions: list[str], **_: Any) -> list[float]:
    """The share of an answer that is no letter: so that even a model without words has something to learn."""
    return [1 - sum(letter.isalpha() for letter in said) / max(1, len(said)) for said in completions]

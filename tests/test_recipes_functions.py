"""Reward functions: found, called as TRL calls them, and summed up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.data import PromptBatch, records_from_rows, tokenize_prompts, train_tokenizer
from megatrain.recipes.functions import load_function, total_rewards
from megatrain.recipes.rollouts import Answer, Rollouts, rollouts_of

TOKENIZER = train_tokenizer(["one two three"], vocab_size=300)


def asked(per_prompt: int = 2) -> tuple[PromptBatch, Rollouts]:
    rows = [{"prompt": "one", "answer": "2"}, {"prompt": "two", "answer": "3"}]
    batch = tokenize_prompts(records_from_rows(rows), TOKENIZER, 16).batch([0, 1])
    return batch, rollouts_of(batch, [Answer([40 + n, 1], True) for n in range(2 * per_prompt)], per_prompt)


def test_a_function_gets_what_trl_gives_it() -> None:
    got: dict[str, Any] = {}

    def note(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        got.update(prompts=prompts, completions=completions, **columns)
        return [0.0, 1.0, 2.0, 3.0]

    batch, rollouts = asked()
    assert total_rewards([note], None, batch, rollouts).tolist() == [0, 1, 2, 3]
    assert got == {
        "prompts": ["one", "one", "two", "two"],
        "completions": rollouts.completions,
        "completion_ids": [[40, 1], [41, 1], [42, 1], [43, 1]],
        "answer": ["2", "2", "3", "3"],
    }


def saying(*values: float | None) -> Any:
    def function(**_: Any) -> Sequence[float | None]:
        return values

    return function


def test_rewards_are_weighted_and_none_counts_nothing() -> None:
    functions = [saying(1, 2, 3, None), saying(10, None, 30, 40)]
    assert total_rewards(functions, [1.0, 0.5], *asked()).tolist() == [6, 2, 18, 20]
    torch.testing.assert_close(total_rewards(functions, None, *asked()), torch.tensor([11.0, 2, 33, 40]))


@pytest.mark.parametrize(
    ("functions", "rule"),
    [
        ([], "nothing says what an answer is worth; give at least one of rewards"),
        ([saying(1, 2)], "the reward function function must say .* number per answer; 4 answers got 2"),
        ([saying(1, None, 2, 3), saying(1, None, 2, 3)], "every reward function said None of the answer '"),
        ([saying(1, math.inf, 2, 3)], "rewards must be finite, or None"),
    ],
)
def test_what_is_no_reward_is_refused(functions: list[Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        total_rewards(functions, None, *asked())


def test_a_function_is_found_in_a_module_or_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def good(**_):\n    return [1.0]\nword = 3\n")
    assert load_function("math:sqrt") is math.sqrt
    assert load_function(f"{tmp_path}/mine.py:good")() == [1.0]


@pytest.mark.parametrize(
    ("where", "rule"),
    [
        ("good", 'a reward function is written "module:name" or "file.py:name"; got \'good\''),
        ("math:none", "math has no function 'none'"),
        ("math:pi", "math has no function 'pi'"),
        ("no_such_module:good", "names a module that cannot be imported: No module named 'no_such_module'"),
        ("no_such.py:good", r"names a file that is not there: /.*no_such\.py"),
    ],
)
def test_a_function_that_is_not_there_is_refused(where: str, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        load_function(where)


def test_a_file_whose_code_fails_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("{}['oops']\n")
    with pytest.raises(ValueError, match=r"the code of the reward '.*mine\.py:good' fails: KeyError: 'oops'"):
        load_function(f"{tmp_path}/mine.py:good")
    (tmp_path / "mine.py").write_text("import no_such_module\n")
    with pytest.raises(ValueError, match=r"mine\.py:good' names a module that cannot be imported: No module named"):
        load_function(f"{tmp_path}/mine.py:good")


def test_a_function_that_fails_is_named_with_the_place_where_it_did() -> None:
    def broken(**_: Any) -> list[float]:
        raise KeyError("oops")

    with pytest.raises(
        RuntimeError, match=r"the reward function broken failed: KeyError: 'oops' \(.*functions.py, line \d+\)"
    ):
        total_rewards([broken], None, *asked())

"""Reward functions: found by name, called as TRL calls them, and what they say summed up."""

from __future__ import annotations

import importlib
import importlib.util
import math
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from megatrain.data import PromptBatch
from megatrain.recipes.rollouts import Rollouts

RewardFunction = Callable[..., Sequence[float | None]]


@cache
def load_function(where: str) -> RewardFunction:
    """Return the function at "module:name" or "file.py:name", whose code is run; ValueError if there is none."""
    place, colon, name = where.rpartition(":")
    if not colon:
        raise ValueError(f'a reward function is written "module:name" or "file.py:name"; got {where!r}')
    function = getattr(_module(place, where), name, None)
    if not callable(function):
        raise ValueError(f"{place} has no function {name!r}, which the reward {where!r} names")
    found: RewardFunction = function
    return found


def _module(place: str, where: str) -> ModuleType:
    path = Path(place).expanduser()
    is_file = place.endswith(".py")
    if is_file and not path.is_file():
        raise ValueError(f"the reward {where!r} names a file that is not there: {path.absolute()}")
    try:
        return _module_of_file(path) if is_file else importlib.import_module(place)
    except ModuleNotFoundError as error:
        raise ValueError(f"the reward {where!r} names a module that cannot be imported: {error}") from error
    except Exception as error:  # whatever the user's own code raises
        raise ValueError(f"the code of the reward {where!r} fails: {type(error).__name__}: {error}") from error


def _module_of_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def total_rewards(
    functions: Sequence[RewardFunction], weights: Sequence[float] | None, batch: PromptBatch, rollouts: Rollouts
) -> torch.Tensor:
    """Return the weighted sum of what the functions say of each answer, (answers,) float32.

    A function may say None of an answer that it cannot judge; one that none can judge is refused.
    """
    if not functions:
        raise ValueError("nothing says what an answer is worth; give at least one of rewards")
    said = torch.tensor([_called(function, batch, rollouts) for function in functions])  # (functions, answers)
    if said.isnan().all(0).any():
        number = int(said.isnan().all(0).nonzero()[0])
        raise ValueError(f"every reward function said None of the answer {rollouts.completions[number]!r}")
    return (said.nan_to_num(0.0) * torch.tensor(weights or [1.0] * len(said))[:, None]).sum(0)


def _called(function: RewardFunction, batch: PromptBatch, rollouts: Rollouts) -> list[float]:
    times = rollouts.per_prompt
    columns = {name: repeated(values, times) for name, values in batch.columns.items()}
    ids = [answer.ids for answer in rollouts.answers]
    name = getattr(function, "__name__", repr(function))
    try:
        said = function(
            prompts=repeated(batch.prompts, times), completions=rollouts.completions, completion_ids=ids, **columns
        )
    except Exception as error:  # whatever the user's own code raises
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename}, line {last.lineno}"
        raise RuntimeError(f"the reward function {name} failed: {type(error).__name__}: {error} ({where})") from error
    if len(said) != len(ids):
        raise ValueError(
            f"the reward function {name} must say one number per answer; {len(ids)} answers got {len(said)}"
        )
    numbers = [math.nan if value is None else float(value) for value in said]
    if any(math.isinf(number) for number in numbers):
        raise ValueError(f"the reward function {name} said {numbers}; rewards must be finite, or None")
    return numbers


def repeated(values: Sequence[Any], times: int) -> list[Any]:
    """Return each value so many times in a row."""
    return [value for value in values for _ in range(times)]

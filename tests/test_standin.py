"""The parts of the stand-in for CUDA that need no torch for CUDA: what it lets pass, and what it says without one."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pairs import Outcome, require_same
from standin.plugin import by_numbers

from megatrain.executor import NonFiniteError
from megatrain.lanes import LaneError

STANDIN = Path(__file__).parent / "standin"
ROOT = Path(__file__).parents[1]


def other_bits() -> None:
    require_same(Outcome([1.0], [1.0], {}), Outcome([2.0], [1.0], {}))


def tensors_apart() -> None:
    torch.testing.assert_close(torch.zeros(2), torch.ones(2))


def another_loss() -> None:
    loss = math.pi
    assert loss == pytest.approx(3)


def a_refused_loss() -> None:
    raise LaneError("the host lane failed") from NonFiniteError("the loss is not finite")


def nothing_counted() -> None:
    assert 1 / 0


def too_many_bytes() -> None:
    held, most = 2, 1
    assert held <= most


def a_refused_copy() -> None:
    raise RuntimeError("CUDA error: invalid argument")


@pytest.mark.parametrize("failing", [other_bits, tensors_apart, another_loss, a_refused_loss, nothing_counted])
def test_what_only_numbers_failed_is_not_looked_at(failing: Callable[[], None]) -> None:
    assert by_numbers(raised(failing))


@pytest.mark.parametrize("failing", [too_many_bytes, a_refused_copy])
def test_everything_else_fails(failing: Callable[[], None]) -> None:
    assert not by_numbers(raised(failing))


def raised(failing: Callable[[], None]) -> pytest.ExceptionInfo[Exception]:
    with pytest.raises(Exception) as found:  # noqa: PT011  # whichever it is
        failing()
    return found


@pytest.mark.skipif(torch.version.cuda is not None, reason="says what a torch for CPUs lacks")
@pytest.mark.skipif(shutil.which("c++") is None, reason="asks for a compiler first")
def test_a_torch_for_cpus_is_refused_with_the_way_out() -> None:
    command = [sys.executable, str(STANDIN), "--", "true"]
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, capture_output=True, text=True, env=surroundings)
    assert result.returncode == 1
    assert "is built for CPUs" in result.stderr
    assert "in an environment of its own" in result.stderr

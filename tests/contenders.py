"""Contenders that do no work and fail in every way, for processes of the benchmark to build by name."""

from __future__ import annotations

import os
import time

from benchmarks.peers.contender import Contender, Task


class Idle(Contender):
    """Loses a tenth every step, and says which process it is."""

    gives_up = "all work"

    def __init__(self) -> None:
        self._steps = 0

    def step(self) -> tuple[float, float]:
        self._steps += 1
        return 0.9**self._steps, 1.0

    def settle(self) -> None:
        """Nothing is pending."""

    def figures(self, timed: list[int]) -> dict[str, object]:
        return {"process": os.getpid(), "timed": timed, "openmp": os.environ["OMP_NUM_THREADS"]}


class Raises(Idle):
    def step(self) -> tuple[float, float]:
        loss, norm = super().step()
        if self._steps == 3:
            raise RuntimeError("the third step is too much")
        return loss, norm


class Dies(Idle):
    def step(self) -> tuple[float, float]:
        os.write(2, b"out of memory")
        os._exit(9)


class Hangs(Idle):
    def step(self) -> tuple[float, float]:
        os.write(2, b"waiting for Godot")
        time.sleep(600)
        raise AssertionError


def idle(_: Task) -> Idle:
    return Idle()


def raises(_: Task) -> Idle:
    return Raises()


def dies(_: Task) -> Idle:
    return Dies()


def hangs(_: Task) -> Idle:
    return Hangs()


def cannot_be_built(task: Task) -> Idle:
    raise ImportError(f"no {task.dtype} today")

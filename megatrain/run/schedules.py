"""Learning rates over steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

LearningRate = Callable[[int], float]
"""Step, counted from 0 → learning rate."""


@dataclass(frozen=True)
class _Cosine:
    peak: float
    steps: int
    warmup: int
    floor: float

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - 1 - self.warmup)
        return self.floor + (self.peak - self.floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def cosine_schedule(peak: float, steps: int, *, warmup: int = 0, floor: float = 0.0) -> LearningRate:
    """Linear warm-up to `peak`, then a cosine down to `floor` at the last step (Loshchilov & Hutter 2017)."""
    return _Cosine(peak, steps, warmup, floor)

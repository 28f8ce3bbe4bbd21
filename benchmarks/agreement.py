"""Whether contenders did the same work: their loss curves beside plain training's."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.peers import OURS, OURS_KEPT
from benchmarks.turns import Timing, worst_difference
from megatrain.config import Dtype

# The engine and plain training do the same arithmetic. Others reduce, clip and round in an order of their own; with
# bfloat16 one rounding of a gradient differs by one unit in 256.
OURS_ALLOWED: dict[Dtype, float] = {"float32": 1e-5, "bfloat16": 5e-3}
PEERS_ALLOWED: dict[Dtype, float] = {"float32": 1e-3, "bfloat16": 5e-3}


@dataclass(frozen=True)
class Agreement:
    """worst: the largest relative difference of a loss, NaN if one is."""

    worst: float
    allowed: float

    @property
    def same_work(self) -> bool:
        return self.worst <= self.allowed


def agreement(name: str, timing: Timing, plain: Timing, dtype: Dtype) -> Agreement:
    allowed = OURS_ALLOWED if name in (OURS, OURS_KEPT) else PEERS_ALLOWED
    return Agreement(worst_difference(timing, plain), allowed[dtype])

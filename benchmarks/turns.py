"""Contenders timed in turn, A B A B, so that a hot CPU or a busy neighbour meets all alike.

Note: what is timed
    The engine returns from a step while its optimizer still works: under the next step's forward. So every turn
    begins with one step that is not timed; each timed step then contains exactly one update, its predecessor's, and
    the last one's runs out, untimed, before the other contender begins.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from benchmarks.peers.contender import Contender


@dataclass
class Timing:
    """One contender's run. turns: seconds of each timed step, per turn. timed: indices of those steps in `losses`."""

    turns: list[list[float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    timed: list[int] = field(default_factory=list)

    @property
    def steps_s(self) -> list[float]:
        return [second for turn in self.turns for second in turn]

    @property
    def median_s(self) -> float:
        return statistics.median(self.steps_s)


def warm_up(contender: Contender, steps: int) -> Timing:
    """Run untimed steps, of which only losses are kept."""
    timing = Timing()
    for _ in range(steps):
        _step(contender, timing)
    contender.settle()
    return timing


def take_turns(
    contenders: Mapping[str, Contender],
    timings: dict[str, Timing],
    *,
    rounds: int,
    steps: int,
    on_turn: Callable[[str], None] = lambda _: None,
    may_go_on: Callable[[], bool] = lambda: True,
) -> None:
    """Give every contender `rounds` turns of `steps` timed steps; results go to `timings`, also if interrupted."""
    for _ in range(rounds):
        for name, contender in contenders.items():
            if not may_go_on():
                return
            _turn(contender, timings.setdefault(name, Timing()), steps)
            on_turn(name)


def _turn(contender: Contender, timing: Timing, steps: int) -> None:
    _step(contender, timing)  # see the Note
    seconds: list[float] = []
    for _ in range(steps):
        start = time.perf_counter()
        _step(contender, timing)
        seconds.append(time.perf_counter() - start)
        timing.timed.append(len(timing.losses) - 1)
    timing.turns.append(seconds)
    contender.settle()


def _step(contender: Contender, timing: Timing) -> None:
    loss, norm = contender.step()
    timing.losses.append(loss)
    timing.norms.append(norm)


def ratios(ours: Timing, plain: Timing) -> list[float]:
    """Per round: the median step of ours ÷ plain's. Their spread is what the machine's noise makes of the ratio."""
    pairs = zip(ours.turns, plain.turns, strict=True)
    return [statistics.median(mine) / statistics.median(theirs) for mine, theirs in pairs]


def worst_difference(ours: Timing, plain: Timing) -> float:
    """The largest relative difference between two loss curves; NaN if a loss is."""
    pairs = zip(ours.losses, plain.losses, strict=True)
    return largest(abs(a - b) / abs(b) for a, b in pairs)


def largest(values: Iterable[float]) -> float:
    """As max(), which would pass over a NaN that is not the first."""
    found = list(values)
    return next((value for value in found if math.isnan(value)), max(found))

"""The fastest candidate that fits, by the engine's own schedule on a clock.

Note: what need not be simulated
    More layers ahead, gradient buffers, kept attention, kept graphs or resident layers never make a step longer. So of
    all candidates with one micro-batch size and one place for saved inputs, the richest is simulated first, whether it
    fits or not: no other can be faster. The same holds among those of them that agree in one more knob. What is
    slow in its richest form is skipped.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatrain.plan.fit import limits
from megatrain.simulate import Rates
from megatrain.simulate.play import play
from megatrain.tune.candidates import ONLY_HELP, Candidate, richest

TIE = 0.01  # of a step: within it, the candidate that costs least is taken
DOUBT = 0.01  # of a step: by so much a richer candidate may turn out slower than a poorer one


class NothingFitsError(ValueError):
    """No combination of settings fits the machine; the message says what the nearest one lacks."""


@dataclass
class Clocked:
    """Seconds of candidates' steps, simulated once each."""

    rates: Rates
    known: dict[tuple[object, ...], float] = field(default_factory=dict)

    def step_s(self, candidate: Candidate) -> float:
        key = tuple(candidate.settled.values())
        if key not in self.known:
            self.known[key] = play(candidate.plan, self.rates).step_s
        return self.known[key]


def choose(every: Sequence[Candidate], clocked: Clocked) -> Candidate:
    """The fastest that fits; of those within TIE of it, the one that moves least, then that needs the least memory.

    Raises NothingFitsError, with what the nearest lacks, where none fits.
    """
    fitting = sorted((each for each in every if each.plan.fits), key=lambda each: each.cost)
    if not fitting:
        raise NothingFitsError(_nothing_fits(every))
    bounds = _Bounds(fitting, clocked)
    as_fast = (1 + TIE) * bounds.least_s
    near = (each for each in fitting if bounds.of(each) <= as_fast and clocked.step_s(each) <= as_fast)
    return next(near, None) or _least_of_the_fastest(fitting, bounds, clocked)


def _least_of_the_fastest(fitting: Sequence[Candidate], bounds: _Bounds, clocked: Clocked) -> Candidate:
    """Where memory keeps all of them from what would be possible."""
    fastest_s, reach = math.inf, []
    for each in sorted(fitting, key=lambda each: (bounds.of(each), -each.nbytes)):
        if bounds.of(each) > (1 + TIE + DOUBT) * fastest_s:
            break
        reach.append(each)
        fastest_s = min(fastest_s, clocked.step_s(each))
    return min(
        (each for each in reach if clocked.step_s(each) <= (1 + TIE) * fastest_s),
        key=lambda each: (each.cost, clocked.step_s(each)),
    )


class _Bounds:
    """Seconds below which no candidate's step can come: those of richer ones."""

    def __init__(self, every: Sequence[Candidate], clocked: Clocked) -> None:
        self._clocked = clocked
        self._richest: dict[tuple[object, ...], Candidate] = {}
        alike: dict[tuple[object, ...], list[Candidate]] = defaultdict(list)
        for each in every:
            for key in _likenesses(each):
                alike[key].append(each)
        self._alike = alike
        self.least_s = min(self._seconds(key) for key in alike if len(key) == len(_group(every[0])))

    def of(self, candidate: Candidate) -> float:
        """The largest that is known; one of a whole group may do, before any of its parts is looked at."""
        group_s = self._seconds(_group(candidate))
        if group_s > (1 + TIE + DOUBT) * self.least_s:
            return group_s
        return max(self._seconds(key) for key in _likenesses(candidate))

    def _seconds(self, key: tuple[object, ...]) -> float:
        if key not in self._richest:
            self._richest[key] = richest(self._alike[key])
        return self._clocked.step_s(self._richest[key])


def _group(candidate: Candidate) -> tuple[object, ...]:
    return tuple(value for knob, value in candidate.settled.items() if knob not in ONLY_HELP)


def _likenesses(candidate: Candidate) -> list[tuple[object, ...]]:
    """Its group, and the parts of it that agree with it in one knob more."""
    group = _group(candidate)
    return [group, *((*group, knob, candidate.settled[knob]) for knob in ONLY_HELP)]


def _nothing_fits(every: Sequence[Candidate]) -> str:
    least = min(every, key=lambda each: (_missing_bytes(each), each.nbytes))
    settings = ", ".join(f"{knob}={value}" for knob, value in least.settled.items())
    return f"no setting fits; the nearest is {settings}: " + "; ".join(least.plan.problems)


def _missing_bytes(candidate: Candidate) -> int:
    plan = candidate.plan
    found = limits(plan.config, plan.machine)
    return sum(max(0, limit.of(plan.needs) - limit.free_bytes) for limit in found)

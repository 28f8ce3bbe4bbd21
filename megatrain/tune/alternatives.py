"""What else could have been chosen: each knob turned by itself, what it would cost, and why."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatrain.plan import Plan, planned
from megatrain.simulate import Rates, simulate
from megatrain.tune.candidates import KNOBS, Candidate
from megatrain.tune.choice import Clocked

WORTH_EXPLAINING = 0.01  # of a step


@dataclass(frozen=True)
class Alternative:
    """One knob at one value, the others as chosen; or the choice itself (knob None).

    problem: why it does not fit, or None. causes: where it is slower, what of its step grows by how many seconds:
    "compute", or what compute waits for.
    """

    knob: str | None
    value: Any
    step_s: float
    nbytes: int
    problem: str | None
    causes: dict[str, float]

    @property
    def name(self) -> str:
        return "chosen" if self.knob is None else f"{self.knob}={self.value}"


def alternatives(chosen: Candidate, clocked: Clocked, knobs: Collection[str]) -> list[Alternative]:
    """The choice first; then, knob by knob, every other value that comes to something else."""
    settled = chosen.settled
    first = Alternative(None, None, clocked.step_s(chosen), chosen.nbytes, None, {})
    seen = {tuple(settled.values())}
    found = [first]
    for knob, value in _turns(chosen, knobs):
        other = _with(chosen, settled | {knob: value})
        key = tuple(other.settled.values())
        if key not in seen:
            seen.add(key)
            found.append(_alternative(knob, other, chosen, clocked))
    return found


def _turns(chosen: Candidate, knobs: Collection[str]) -> Iterator[tuple[str, Any]]:
    for knob in knobs:
        for value in KNOBS[knob](chosen.plan.subject, chosen.config):
            yield knob, False if (knob, value) == ("offload_activations", "auto") else value


def _with(chosen: Candidate, settings: dict[str, Any]) -> Candidate:
    config = replace(chosen.config, **settings)
    return Candidate(config, planned(chosen.plan.subject, config, chosen.plan.machine))


def _alternative(knob: str, other: Candidate, chosen: Candidate, clocked: Clocked) -> Alternative:
    step_s, problems = clocked.step_s(other), other.plan.problems
    slower = not problems and step_s > (1 + WORTH_EXPLAINING) * clocked.step_s(chosen)
    causes = _causes(other.plan, chosen.plan, clocked.rates) if slower else {}
    problem = problems[0].split(";")[0] if problems else None
    return Alternative(knob, other.settled[knob], step_s, other.nbytes, problem, causes)


def _causes(slow: Plan, fast: Plan, rates: Rates) -> dict[str, float]:
    """Seconds of a step by which each part of compute's time is longer in the slow one, the most first."""
    parts, before = _parts(slow, rates), _parts(fast, rates)
    grown = {name: seconds - before[name] for name, seconds in parts.items() if seconds > before[name]}
    return dict(sorted(grown.items(), key=lambda item: -item[1]))


def _parts(plan: Plan, rates: Rates) -> dict[str, float]:
    metrics = simulate(plan, rates).metrics
    return {"compute": metrics.busy_s["compute"]} | {str(cause): seconds for cause, seconds in metrics.waits_s.items()}

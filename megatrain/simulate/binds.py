"""What binds: each resource is made twice as fast in turn, and the one that shortens a step most is it.

Note: why not what compute waited for. A wait says what was late last, not what to make faster: a load may have been
late because of an update, an update because of the one before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megatrain.plan import planned
from megatrain.simulate.play import play
from megatrain.simulate.rates import RESOURCES
from megatrain.simulate.run import Simulated

WORTH_MENTIONING = 0.01  # of a step


@dataclass(frozen=True)
class Bounds:
    """step_s: as planned. faster_s: with a resource twice as fast. twice_tokens_per_s: with twice the sequences."""

    step_s: float
    tokens_per_s: float
    faster_s: dict[str, float]
    twice_tokens_per_s: float

    @property
    def resource(self) -> str | None:
        """What binds; None where nothing that is made twice as fast alone shortens a step."""
        best = min(self.faster_s, key=lambda name: self.faster_s[name])
        return best if self.faster_s[best] < (1 - WORTH_MENTIONING) * self.step_s else None


def bounds(simulated: Simulated) -> Bounds:
    """Simulate a plan with each resource twice as fast, and with twice the micro-batches of the same size."""
    plan, rates = simulated.plan, simulated.rates
    rows = plan.needs.size.micro_batch_tokens // plan.needs.size.sequence
    needs = plan.needs
    as_planned: dict[str, Any] = {
        "micro_batch_size": rows,
        "resident_layers": needs.knobs.resident_layers,
        "keep_attention": needs.keeps_attention,
        "kept_graphs": needs.kept_graphs,
    }
    config = replace(plan.config, **as_planned)
    twice = planned(replace(plan.subject, batch=2 * plan.subject.batch), config, plan.machine)
    return Bounds(
        simulated.step_s,
        simulated.tokens_per_s,
        {name: play(plan, rates.faster(name, 2)).step_s for name in RESOURCES},
        twice.needs.size.tokens / play(twice, rates).step_s,
    )

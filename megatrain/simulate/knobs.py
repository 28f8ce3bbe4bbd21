"""How the step time moves when one knob is turned: each setting is simulated, and told with what it needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatrain.config import EngineConfig
from megatrain.plan import Plan, planned
from megatrain.simulate.play import play
from megatrain.simulate.rates import Rates

STEPS = 2  # the second step already has the first one's updates under it

NAMES = {
    "prefetch_depth": "prefetch depth",
    "grad_buffers": "gradient buffers",
    "resident_layers": "resident layers",
    "micro_batch_size": "micro-batch size",
}


@dataclass(frozen=True)
class Setting:
    """One knob at one value, the others as planned. chosen: it is what was planned."""

    knob: str
    value: int
    chosen: bool
    step_s: float
    tokens_per_s: float
    device_bytes: int
    fits: bool

    @property
    def words(self) -> str:
        return f"{NAMES[self.knob]} {self.value}"


def knob_table(plan: Plan, rates: Rates) -> list[Setting]:
    """Turn each knob by itself. What is turned must fit the plan's machine to be marked so, RAM included."""
    settled = settled_values(plan)
    config = replace(plan.config, **settled, offload_activations=plan.needs.offload)
    found: dict[EngineConfig, Setting] = {}
    rows = []
    for knob, value in _settings(plan, settled):
        turned = replace(config, **{knob: value})
        found[turned] = found.get(turned) or _try(plan, rates, turned, knob, value)
        rows.append(replace(found[turned], knob=knob, value=value, chosen=settled[knob] == value))
    return rows


def settled_values(plan: Plan) -> dict[str, int]:
    """The knobs as they were planned, with "auto" settled."""
    knobs, size = plan.needs.knobs, plan.needs.size
    return {
        "prefetch_depth": knobs.prefetch_depth,
        "grad_buffers": knobs.grad_buffers,
        "resident_layers": knobs.resident_layers,
        "micro_batch_size": size.micro_batch_tokens // size.sequence,
    }


def _settings(plan: Plan, settled: dict[str, int]) -> Iterator[tuple[str, int]]:
    layers = len(plan.subject.layouts)
    most = planned(plan.subject, replace(plan.config, resident_layers="auto"), plan.machine).needs.knobs.resident_layers
    rows = settled["micro_batch_size"]
    values: dict[str, set[int]] = {
        "prefetch_depth": {depth for depth in (0, 1, 2, 4) if depth < layers},
        "grad_buffers": {1, 2, 3},
        "resident_layers": {0, most // 2, most},
        "micro_batch_size": {rows // 2, 2 * rows, 4 * rows},
    }
    for knob, tried in values.items():
        for value in sorted(tried | {settled[knob]}):
            if knob != "micro_batch_size" or 1 <= value <= plan.subject.batch:
                yield knob, value


def _try(plan: Plan, rates: Rates, config: EngineConfig, knob: str, value: Any) -> Setting:
    turned = planned(plan.subject, config, plan.machine)
    step_s = play(turned, rates, STEPS).step_s
    return Setting(knob, value, False, step_s, turned.needs.size.tokens / step_s, turned.device_bytes, turned.fits)

"""How the step time moves when one knob is turned: each setting is simulated, and told with what it needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatrain.config import EngineConfig
from megatrain.plan import Needs, Plan, planned
from megatrain.plan.needs import can_keep_attention
from megatrain.simulate.play import STEPS, play
from megatrain.simulate.run import Simulated

NAMES = {
    "prefetch_depth": "prefetch depth",
    "grad_buffers": "gradient buffers",
    "resident_layers": "resident layers",
    "keep_attention": "kept attention",
    "kept_graphs": "kept graphs",
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
        value = ("no", "yes")[self.value] if self.knob == "keep_attention" else self.value
        return f"{NAMES[self.knob]} {value}"


def knob_table(simulated: Simulated) -> list[Setting]:
    """Turn each knob by itself; a setting fits if the plan's machine has the RAM and the device memory for it."""
    plan = simulated.plan
    settled = _settled(plan)
    config = replace(plan.config, **settled, offload_activations=plan.needs.offload)
    return [
        _as_planned(simulated, knob, value) if value == settled[knob] else _turned(simulated, config, knob, value)
        for knob, value in _values(plan, settled)
    ]


def _settled(plan: Plan) -> dict[str, Any]:
    """The knobs as they were planned, with "auto" settled."""
    knobs, size = plan.needs.knobs, plan.needs.size
    return {
        "prefetch_depth": knobs.prefetch_depth,
        "grad_buffers": knobs.grad_buffers,
        "resident_layers": knobs.resident_layers,
        "keep_attention": plan.needs.keeps_attention,
        "kept_graphs": plan.needs.kept_graphs,
        "micro_batch_size": size.micro_batch_tokens // size.sequence,
    }


def _values(plan: Plan, settled: dict[str, Any]) -> Iterator[tuple[str, int]]:
    rows = settled["micro_batch_size"]
    tried: dict[str, set[int]] = {
        "prefetch_depth": {0, 1, 2},
        "grad_buffers": {1, 2, 3},
        "resident_layers": {0, _filled(plan, settled, "resident_layers").knobs.resident_layers},
        "keep_attention": {False, True} if can_keep_attention(plan.subject, plan.config) else {False},
        "kept_graphs": {0, _filled(plan, settled, "kept_graphs").kept_graphs},
        "micro_batch_size": {rows // 2, 2 * rows, 4 * rows},
    }
    for knob, values in tried.items():
        for value in sorted(values | {settled[knob]}):
            if knob != "micro_batch_size" or 1 <= value <= plan.subject.batch:
                yield knob, value


def _filled(plan: Plan, settled: dict[str, Any], name: str) -> Needs:
    """With as many of a kind as fit, the other knobs as planned."""
    config = replace(plan.config, **{**settled, name: "auto"})
    return planned(plan.subject, config, plan.machine).needs


def _as_planned(simulated: Simulated, knob: str, value: int) -> Setting:
    plan = simulated.plan
    return Setting(knob, value, True, simulated.step_s, simulated.tokens_per_s, plan.device_bytes, plan.fits)


def _turned(simulated: Simulated, config: EngineConfig, knob: str, value: int) -> Setting:
    change: dict[str, Any] = {knob: value}
    plan = planned(simulated.plan.subject, replace(config, **change), simulated.plan.machine)
    step_s = play(plan, simulated.rates, STEPS).step_s
    return Setting(knob, value, False, step_s, plan.needs.size.tokens / step_s, plan.device_bytes, plan.fits)

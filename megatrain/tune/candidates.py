"""What may be chosen: knobs of `EngineConfig` with the values that are tried, as data.

None of them changes what is computed, but for the micro-batch size, which sums in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from megatrain.config import EngineConfig
from megatrain.machine import Machine
from megatrain.plan import Plan, planned
from megatrain.plan.needs import Subject, can_keep_attention

Values = Callable[[Subject, EngineConfig], tuple[Any, ...]]


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(rows for rows in range(1, number + 1) if not number % rows)


# "auto" is settled by the plan as the engine settles it.
KNOBS: dict[str, Values] = {
    "micro_batch_size": lambda subject, config: _divisors(subject.batch),
    "offload_activations": lambda subject, config: (True, "auto"),
    "prefetch_depth": lambda subject, config: tuple(range(min(5, len(subject.layouts)))),
    "grad_buffers": lambda subject, config: (1, 2, 3),
    "keep_attention": lambda subject, config: (False, "auto") if can_keep_attention(subject, config) else (False,),
    "kept_graphs": lambda subject, config: (0, "auto"),
    "resident_layers": lambda subject, config: (0, "auto"),
}
# More of these never makes a step longer, so that a step with the most of each bounds all that have less.
ONLY_HELP = ("prefetch_depth", "grad_buffers", "keep_attention", "kept_graphs", "resident_layers")


@dataclass(frozen=True)
class Candidate:
    """A configuration, and a plan in which "auto" is settled."""

    config: EngineConfig
    plan: Plan

    @property
    def nbytes(self) -> int:
        """Of host and device together."""
        return self.plan.host_bytes + self.plan.device_bytes

    @property
    def cost(self) -> tuple[bool, int, bool, int]:
        """What to save where time is the same, the dearest first.

        Inputs sent to the host, and layers loaded twice a step: what crosses the link takes bandwidth of the host's
        memory, also where it is hidden. Then that nothing is loaded ahead, as rates are never quite known. Then memory.
        """
        needs, layers = self.plan.needs, len(self.plan.subject.layouts)
        depth = needs.knobs.prefetch_depth
        return needs.offload, max(0, layers - (depth + 1 + needs.knobs.resident_layers)), depth == 0, self.nbytes

    @property
    def settled(self) -> dict[str, Any]:
        """By knob, what it comes to. Another candidate with the same does the same."""
        needs = self.plan.needs
        return {
            "micro_batch_size": needs.size.micro_batch_tokens // needs.size.sequence,
            "offload_activations": needs.offload,
            "prefetch_depth": needs.knobs.prefetch_depth,
            "grad_buffers": needs.knobs.grad_buffers,
            "keep_attention": needs.keeps_attention,
            "kept_graphs": needs.kept_graphs,
            "resident_layers": needs.knobs.resident_layers,
        }


def candidates(
    subject: Subject, config: EngineConfig, machine: Machine, knobs: Collection[str] = tuple(KNOBS)
) -> list[Candidate]:
    """Every combination of the values of `knobs`, once; the others stay as `config` says. They need not fit."""
    found: dict[tuple[Any, ...], Candidate] = {}
    for choice in _choices(subject, config, knobs):
        candidate = Candidate(changed := replace(config, **choice), planned(subject, changed, machine))
        settled = candidate.settled
        plain = {knob: settled[knob] for knob in choice if choice[knob] == "auto" and not _gives_way(knob, settled)}
        found.setdefault(tuple(settled.values()), replace(candidate, config=replace(changed, **plain)))
    return list(found.values())


def _choices(subject: Subject, config: EngineConfig, knobs: Collection[str]) -> Iterator[dict[str, Any]]:
    require_knobs(knobs)
    for values in product(*(KNOBS[knob](subject, config) for knob in knobs)):
        yield dict(zip(knobs, values, strict=True))


def require_knobs(knobs: Collection[str]) -> None:
    """Raise ValueError for what is no knob that can be chosen."""
    unknown = [knob for knob in knobs if knob not in KNOBS]
    if unknown or not knobs:
        raise ValueError(f"what can be chosen is any of {', '.join(KNOBS)}; got {', '.join(unknown) or 'none of them'}")


def _gives_way(knob: str, settled: dict[str, Any]) -> bool:
    """Whether "auto" stands for something that the engine may lower where the device runs out of memory after all."""
    return not settled[knob] if knob == "offload_activations" else bool(settled[knob])


def richest(group: list[Candidate]) -> Candidate:
    """Of candidates that differ in what only helps, one with the most of each of these, whether or not it fits."""
    most: dict[str, Any] = {knob: max(each.settled[knob] for each in group) for knob in ONLY_HELP}
    config = replace(group[0].config, offload_activations=group[0].settled["offload_activations"], **most)
    return Candidate(config, planned(group[0].plan.subject, config, group[0].plan.machine))

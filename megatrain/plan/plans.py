"""A plan: what a run needs, what speaks against it, and both in words.

The functions that the engine allocates by are asked about a model without memory, so that a model of 120 B
parameters is planned on a laptop in seconds. What kernels and autograd take on top is an estimate, and named so.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from megatrain.anatomy.meta import meta_model
from megatrain.config import AdamWConfig, EngineConfig
from megatrain.machine import Machine
from megatrain.plan.fit import advice, fits, gb, problems, tiers
from megatrain.plan.needs import Needs, Subject, needs_of
from megatrain.shapes import require_agreement

COLUMN = 26


@dataclass(frozen=True)
class Plan:
    """What a run needs, and what speaks against it.

    host, device: bytes by name; a device term whose name ends in "(estimate)" comes on top of what the engine
    holds. active_parameters: of matrix products that one token meets.
    """

    subject: Subject
    config: EngineConfig
    machine: Machine | None
    needs: Needs

    @cached_property
    def fits(self) -> bool:
        return fits(self.config, self.machine, self.needs)

    @cached_property
    def problems(self) -> list[str]:
        """What runs out and what to change, in sentences; none if the run fits."""
        return problems(self.subject, self.config, self.machine, self.needs)

    @property
    def host(self) -> dict[str, int]:
        return self.needs.host

    @property
    def device(self) -> dict[str, int]:
        return self.needs.device

    @property
    def host_bytes(self) -> int:
        return self.needs.host_bytes

    @property
    def device_bytes(self) -> int:
        return self.needs.device_bytes

    @property
    def held_bytes(self) -> int:
        """Of `device_bytes`, what the engine itself holds at its peak."""
        return self.needs.held_bytes

    @property
    def parameters(self) -> int:
        return self.subject.parameters

    @property
    def active_parameters(self) -> int:
        return self.subject.active_parameters

    def require(self) -> None:
        """Raise ValueError, with the numbers and what to change, if the run cannot fit."""
        if self.problems:
            raise ValueError("this run does not fit\n" + "\n".join(f"- {problem}" for problem in self.problems))

    def __str__(self) -> str:
        """A table for a terminal; GB are 10⁹ bytes."""
        return "\n".join(
            [
                *_heading(self),
                "",
                *_tier("host", self.host, f"{self.host_bytes / self.parameters:.1f} bytes a parameter"),
                "",
                *_tier("device", self.device, _workspace(self.needs)),
                "",
                *_verdict(self),
                *_smallest(self),
            ]
        )


def plan(
    model_or_config: Any,
    engine_config: EngineConfig,
    optimizer: AdamWConfig,
    *,
    batch: int,
    sequence: int,
    machine: Machine | None = None,
) -> Plan:
    """Plan training of a model, or of a configuration's model, on batches of (batch, sequence) tokens.

    Allocates nothing. machine: what it must fit; None = any, so only the needs are worked out. Raises ValueError
    for a model that cannot be streamed or a batch without tokens; what merely does not fit is in `problems`.
    """
    require_tokens(batch, sequence)
    require_agreement(engine_config, optimizer)
    model = model_or_config if isinstance(model_or_config, nn.Module) else meta_model(model_or_config)
    return planned(Subject.of(model, engine_config, batch=batch, sequence=sequence), engine_config, machine)


def require_tokens(batch: int, sequence: int) -> None:
    """Raise ValueError for a batch without tokens."""
    for name, value in (("batch", batch), ("sequence", sequence)):
        if value < 1:
            raise ValueError(f"{name} must be a whole number ≥ 1; got {value!r}")


def planned(subject: Subject, config: EngineConfig, machine: Machine | None) -> Plan:
    """The same, of a model that was read already; with another configuration of the same dtype, too."""
    return Plan(subject, config, machine, needs_of(subject, config, machine))


# ---- in words ----


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:,.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:,.2f} M"


def _heading(plan: Plan) -> list[str]:
    subject, needs = plan.subject, plan.needs
    return [
        f"{subject.name}: {_count(subject.parameters)} parameters, {_count(subject.trained_parameters)} "
        f"trained, {_count(subject.active_parameters)} active for a token; {len(subject.layouts)} layers",
        f"{plan.config.dtype}, {subject.batch} × {subject.sequence:,} = {needs.size.tokens:,} tokens a step, "
        f"micro-batches: {needs.size.micro_batches}, prefetch depth: {needs.knobs.prefetch_depth}, resident layers: "
        f"{needs.knobs.resident_layers}, kept graphs: {needs.kept_graphs}, "
        f"saved inputs: {'offloaded' if needs.offload else 'kept on the device'}",
        f"machine: {plan.machine}" if plan.machine else "machine: none given",
    ]


def _tier(name: str, terms: dict[str, int], note: str) -> list[str]:
    total = sum(terms.values())
    unit, unit_bytes = ("GB", 1e9) if total >= 1e9 else ("MB", 1e6)
    rows = [(f"  {term}", f"{nbytes / unit_bytes:,.2f}") for term, nbytes in (terms | {"total": total}).items()]
    return [*(f"{left:<{COLUMN}}{right:>12}" for left, right in [(name, unit), *rows]), f"  {note}"]


def _workspace(needs: Needs) -> str:
    work = needs.workspace
    parts = {
        "a layer's recompute": work.recompute,
        "attention scores": work.scores,
        "one gradient on its way": work.layer_gradient,
        "or in the head a loss chunk": work.loss_chunk,
        "or the head's gradient": work.head_gradient,
        "or AdamW's temporaries": work.update,
        "and masks": work.masks,
    }
    return "workspace: " + ", ".join(f"{name} {gb(nbytes)}" for name, nbytes in parts.items() if nbytes)


def _verdict(plan: Plan) -> list[str]:
    if plan.fits:
        return ["it fits"] if plan.machine else []
    return ["it does not fit:", *(f"- {problem}" for problem in plan.problems)]


def _smallest(plan: Plan) -> list[str]:
    """What a machine must have free, with these settings and with the thriftiest."""
    every = tiers(plan.config, plan.machine)
    lines = ["smallest machine: " + ", ".join(f"{gb(of(plan.needs))} of {tier}" for tier, of in every.items())]
    for tier, of in every.items():
        found = advice(plan.subject, plan.config, plan.machine, plan.needs, of)
        if found.savings:
            lines.append(f"least {tier}: {gb(found.least_bytes)} with {', '.join(found.savings)}")
    return lines

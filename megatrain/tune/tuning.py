"""Settings chosen for one model on one machine: rates measured, candidates that fit simulated, the choice explained."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import nn

from megatrain.anatomy.meta import meta_model
from megatrain.config import EngineConfig
from megatrain.machine import Machine, detect
from megatrain.plan import Plan
from megatrain.plan.needs import Subject
from megatrain.plan.plans import require_tokens
from megatrain.simulate import Rates
from megatrain.tune.alternatives import Alternative, alternatives
from megatrain.tune.calibration import Calibration, calibrate
from megatrain.tune.candidates import KNOBS, Candidate, candidates, require_knobs
from megatrain.tune.choice import Clocked, choose
from megatrain.tune.words import summary, verdict


@dataclass(frozen=True)
class Tuned:
    """config: with what was chosen. plan: of it, where "auto" is settled. step_s: predicted, not measured.

    candidates: the chosen one and each that differs in one knob. summary: what was measured, chosen, and binds.
    """

    config: EngineConfig
    plan: Plan
    rates: Rates
    step_s: float
    candidates: list[Alternative]
    summary: list[str]

    @property
    def tokens_per_s(self) -> float:
        return self.plan.needs.size.tokens / self.step_s

    @property
    def reasons(self) -> list[str]:
        """Sentences for a log: the summary, and what each candidate would have cost."""
        chosen, *others = self.candidates
        return [*self.summary, *(f"{other.name}: {verdict(other, chosen)}" for other in others)]


def tune(
    model_or_config: Any,
    config: EngineConfig,
    *,
    batch: int,
    sequence: int,
    knobs: Collection[str] = tuple(KNOBS),
    machine: Machine | None = None,
    rates: Rates | None = None,
) -> Tuned:
    """Choose `knobs` for steps of (batch, sequence) tokens; what else `config` says is kept.

    model_or_config: stays as it is; a model may lie on the meta device. machine: what it must fit; None = this one.
    rates: None = measured here in seconds, on two of the model's layers. What is computed stays the same, but for the
    micro-batch size, which sums gradients in another order. Raises ValueError where nothing fits.
    """
    require_knobs(knobs)
    require_tokens(batch, sequence)
    model = model_or_config if isinstance(model_or_config, nn.Module) else meta_model(model_or_config)
    machine = machine or detect()
    subject = Subject.of(model, config, batch=batch, sequence=sequence)
    every = candidates(subject, config, machine, knobs)
    measured = None
    if rates is None:
        measured = calibrate(model, config, batch=batch, sequence=sequence)
        rates = measured.rates
    if config.throttle is not None:
        rates = rates.throttled(config.throttle)
    return _tuned(every, Clocked(rates), knobs, measured)


def _tuned(every: list[Candidate], clocked: Clocked, knobs: Collection[str], measured: Calibration | None) -> Tuned:
    chosen = choose(every, clocked)
    step_s, rates = clocked.step_s(chosen), clocked.rates
    told = summary(chosen, step_s, rates, measured)
    return Tuned(chosen.config, chosen.plan, rates, step_s, alternatives(chosen, clocked, knobs), told)

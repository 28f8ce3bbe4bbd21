"""Layers as wide as those of a model of 120 B parameters, at its full depth: measured, beside what is simulated.

The host of a usual workstation holds such a model only at virtual depth (see `virtual`), so that is how it is run, and
what its figures are called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

from benchmarks.bounds import Rates
from benchmarks.deep import Deep, plan_of
from benchmarks.parity import FAMILIES
from benchmarks.peers.ours import Ours
from benchmarks.streaming import Effort
from benchmarks.turns import Timing, warm_up
from megatrain.anatomy.presets import PRESETS
from megatrain.machine import detect
from megatrain.plan import Plan
from megatrain.simulate import Rates as SimulatedRates
from megatrain.simulate import learned
from megatrain.simulate.play import play

ADAMW_BYTES = 26  # of host memory per parameter: bfloat16 weight and gradient, low half, two float32 moments


def _tiny(family: str) -> Any:
    name, sizes = FAMILIES[family]
    return getattr(transformers, f"{name}Config")(**sizes)


CONFIGS: dict[str, Callable[[], Any]] = {
    "dense-120b": PRESETS["dense-120b"],
    "gpt-oss-120b": PRESETS["gpt-oss-120b"],
    "tiny-dense": lambda: _tiny("llama"),
    "tiny-gpt-oss": lambda: _tiny("gpt_oss"),
}


def measure(case: Deep, effort: Effort, rates: Rates | None, save: Callable[[dict[str, Any]], None]) -> None:
    """Train it; `save` gets the figures after each turn. rates: of this machine's parts, each measured alone."""
    subject = case.subject()
    plan = plan_of(subject, case.engine, case.stored, detect()).plan
    if case.engine.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    with case.open() as engine:
        ours = Ours(engine, case.data())
        timings = {str(case): warm_up(ours, 1)}

        def on_turn(name: str) -> None:
            save(_figures(case, plan, ours, timings[name], rates) | ours.lanes(timings[name].timed))

        effort.spend({str(case): ours}, timings, on_turn)


def _figures(case: Deep, plan: Plan, ours: Ours, timing: Timing, rates: Rates | None) -> dict[str, Any]:
    timed = {ours.records[index].step for index in timing.timed}
    own = learned(plan, (span for span in ours.engine.recorder.spans() if span.step in timed))
    return {
        "depth": str(case),
        "stored_layers": case.stored,
        "parameters": plan.parameters,
        "layer_bytes": ours.engine.sizes.layer_bytes,
        "tokens": case.tokens,
        "step_s": timing.median_s,
        "turns_s": timing.turns,
        "tokens_per_s": case.tokens / timing.median_s,
        "flops_per_s": ours.records[0].flops / timing.median_s,
        "predicted_s": None if rates is None else play(plan, simulated(rates)).step_s,
        "by_own_rates_s": play(plan, own).step_s,
        "peak_bytes": ours.engine.device_peak_bytes,
        "planned_bytes": plan.device_bytes,
    }


def simulated(rates: Rates) -> SimulatedRates:
    """What was measured of each part alone, as the simulator wants it."""
    return SimulatedRates(
        h2d_bytes_per_s=rates.h2d_bytes_per_s,
        d2h_bytes_per_s=rates.d2h_bytes_per_s,
        adamw_bytes_per_s=ADAMW_BYTES * rates.adamw_parameters_per_s,
        flops_per_s=dict.fromkeys(("forward", "backward", "head"), rates.flops_per_s),
    )

"""A simulated run: what a plan's steps would take, as something that a dashboard can show.

What is left out: the data's time, launching kernels, and whatever else runs on the machine.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

from megatrain.memory import gradient_buffer_bytes, slot_bytes
from megatrain.plan import Plan
from megatrain.remote import RunUnreachableError
from megatrain.report import RunInfo, RunState, Status
from megatrain.simulate.play import play
from megatrain.simulate.rates import Rates
from megatrain.simulate.records import recorded
from megatrain.trace import Recorder, StepMetrics, StepRecord, step_metrics

STEPS = 3  # one to begin, one like all later ones, and one to see it end


@dataclass(frozen=True)
class Simulated:
    """What a run is predicted to do. To a dashboard it is a run in this process that is over."""

    plan: Plan
    rates: Rates
    recorder: Recorder
    folder: None = None

    @cached_property
    def record(self) -> StepRecord:
        """Of the last step."""
        return self.recorder.steps()[-1]

    @cached_property
    def metrics(self) -> StepMetrics:
        """Of the last step."""
        return step_metrics(self.recorder.spans(), self.record, self.info.peak_flops_per_s)

    @property
    def step_s(self) -> float:
        return self.metrics.duration_s

    @property
    def tokens_per_s(self) -> float:
        return self.metrics.tokens_per_s

    # ---- as a run ----

    @cached_property
    def info(self) -> RunInfo:
        plan, machine = self.plan, self.plan.machine
        return RunInfo(
            model=plan.subject.name,
            layers=len(plan.subject.layouts),
            steps=len(self.recorder.steps()),
            process_id=os.getpid(),
            began_unix_s=time.time(),
            device=f"simulated {(machine and machine.gpu) or 'device'}",
            layer_bytes=slot_bytes(plan.subject.layouts),
            gradient_bytes=gradient_buffer_bytes(plan.subject.layouts),
            shell_bytes=plan.subject.shell.nbytes,
            host_arenas=plan.host,
            host_total_bytes=machine.host_bytes if machine else plan.host_bytes,
            device_limit_bytes=machine.device_bytes if machine else plan.device_bytes,
            h2d_bytes_per_s=self.rates.h2d_bytes_per_s,
            d2h_bytes_per_s=self.rates.d2h_bytes_per_s,
            peak_flops_per_s=machine.peak_flops_per_s if machine else None,
        )

    @property
    def control(self) -> NoReturn:
        raise RunUnreachableError("a simulated run is over before it is seen; simulate it again with other settings")

    def status(self) -> Status:
        return Status(
            RunState.FINISHED,
            steps_done=len(self.recorder.steps()),
            knobs=self.plan.needs.knobs,
            micro_batch_size=self.plan.config.micro_batch_size,
            planned_bytes=self.plan.held_bytes,
        )


def simulate(plan: Plan, rates: Rates | None = None, *, steps: int = STEPS) -> Simulated:
    """Run the schedule of a plan on a clock. rates: None = those of the plan's machine.

    Raises ValueError where the machine's rates are not known, or `steps` is less than one.
    """
    if steps < 1:
        raise ValueError(f"steps must be a whole number ≥ 1; got {steps!r}")
    rates = rates or rates_of(plan)
    return Simulated(plan, rates, recorded(plan, play(plan, rates, steps)))


def rates_of(plan: Plan) -> Rates:
    """Those of the machine that a plan is for."""
    if plan.machine is None:
        raise ValueError("a plan without a machine has no rates; plan it for one, or give rates")
    return Rates.of(plan.machine)

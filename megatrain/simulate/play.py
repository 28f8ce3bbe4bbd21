"""Plays a planned run on a virtual clock: the engine's own schedule and conductor, with time in place of work."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from megatrain.conductor import Conductor
from megatrain.control import Control
from megatrain.executor import Executor, StepState
from megatrain.memory import backward_from
from megatrain.plan import Plan
from megatrain.schedule import Op, StepShape
from megatrain.shapes import schedule_of
from megatrain.simulate.clock import Clock, Timed
from megatrain.simulate.rates import Rates
from megatrain.simulate.work import Work, Works
from megatrain.trace import Recorder

STEPS = 2  # updates run under the next step's forward, so the second is what all later ones are like


@dataclass(frozen=True)
class Pass:
    """What the conductor has to know of a step."""

    number: int
    shape: StepShape


@dataclass(frozen=True)
class Issued:
    """An operation: in which step, what it has to do, and when the engine issued it."""

    op: Op
    step: Pass
    work: Work
    at_s: float


@dataclass
class VirtualExecutor:
    """In the place of `executor.Executor`: an operation takes its time and does nothing else."""

    works: Works
    rates: Rates
    clock: Clock
    issued: list[Issued] = field(default_factory=list)  # by the operations' numbers
    inspecting: bool = False

    def issue(self, state: Pass, op: Op, numbers: None = None, work: None = None) -> None:
        todo = self.works.of(op)
        if op.lane == "engine":
            for number in op.waits:
                self.clock.wait(number)
        else:
            self.clock.issue(op, self.rates.seconds(op, todo))
        self.issued.append(Issued(op, state, todo, self.clock.now_s))

    def wait(self, number: int) -> None:
        self.clock.wait(number)


@dataclass(frozen=True)
class Played:
    """issued: every operation, in order. timed: when those that take time ran. ends_s: of the steps, for the caller."""

    issued: list[Issued]
    timed: list[Timed]
    ends_s: list[float]

    @property
    def step_s(self) -> float:
        """Of the last step."""
        before_s = self.ends_s[-2] if len(self.ends_s) > 1 else 0.0
        return self.ends_s[-1] - before_s


def play(plan: Plan, rates: Rates, steps: int = STEPS) -> Played:
    """As `StreamingEngine.step`, several times: a pass, its norm, the updates."""
    executor = VirtualExecutor(Works(plan), rates, Clock(rates.speeds))
    clock, shape, knobs = executor.clock, _shape(plan), plan.needs.knobs
    schedule = schedule_of(plan.subject.layouts, plan.subject.shell, plan.config)
    conductor = Conductor(schedule, cast(Executor, executor), Control(knobs), Recorder(1), knobs)
    ends_s = []
    for number in range(steps):
        state = Pass(number, shape)
        conductor.run(cast(StepState, state))
        assert conductor.computed is not None
        clock.wait(conductor.computed)  # the norm
        for op in schedule.updates():
            executor.issue(state, op)
        if plan.config.optimizer_overlap == "none":
            clock.finish()
        ends_s.append(clock.now_s)
    clock.finish()
    return Played(executor.issued, clock.timed, ends_s)


def _shape(plan: Plan) -> StepShape:
    layouts, shell = plan.subject.layouts, plan.subject.shell
    return StepShape(
        micro_batches=plan.needs.size.micro_batches,
        offload=plan.needs.offload,
        backward_from=backward_from(layouts, shell),
        kept_graphs=plan.needs.kept_graphs,
        shell_backward=bool(shell.trained),
    )

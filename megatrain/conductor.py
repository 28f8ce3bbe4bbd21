"""Conducts passes through the model: issues the operations of the schedule, and meets the user between two layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from megatrain.control import Control
from megatrain.executor import Executor, StepState
from megatrain.report import Inspection
from megatrain.schedule import Kind, Op, Schedule, Visit
from megatrain.steering import Knobs, Position
from megatrain.trace import HELD, Marker, Recorder
from megatrain.update import Hyperparameters

VISITS_IN_FLIGHT = 2  # layer visits issued ahead of the one that runs; bounds how late a pause can take effect


class Conductor:
    """Issues the operations of one pass after another; between two layers it meets the wishes of `control`.

    schedule: what lies where on the device; a new one where nothing does. knobs: as they were at the last layer.
    held: while held, what a viewer may want to know.
    """

    def __init__(
        self, schedule: Schedule, executor: Executor, control: Control, recorder: Recorder, knobs: Knobs
    ) -> None:
        self.knobs = knobs
        self.held: Inspection | None = None
        self.schedule = schedule
        self._executor = executor
        self._control = control
        self._recorder = recorder
        self._paused = False  # as the record has it
        self._held_from_s: float | None = None
        self.computed: int | None = None  # the last compute operation that was issued in this pass
        self._visited: list[int] = []  # the last compute operation of the latest layer visits of this pass

    # ---- a pass ----

    def run(
        self,
        state: StepState,
        numbers: Hyperparameters | None = None,
        *,
        before: Callable[[Op], None] = lambda op: None,
    ) -> None:
        """Issue a whole pass. numbers: for updates inside backward. before: called before each operation is issued."""
        self.begin()
        for op in self.schedule.step(state.shape, lambda visit: self._knobs_at(state, visit)):
            before(op)
            self._executor.issue(state, op, numbers)
            if op.lane == "compute":
                self.computed = op.number

    def begin(self) -> None:
        """A pass begins."""
        self.computed, self._visited = None, []

    def _knobs_at(self, state: StepState, visit: Visit) -> Knobs:
        """Between two layers: let the device catch up, then let the user have a say."""
        if self.computed is not None:
            self._visited = [*self._visited[1 - VISITS_IN_FLIGHT :], self.computed]
        if len(self._visited) == VISITS_IN_FLIGHT:
            self._executor.wait(self._visited[0])
        return self._gate(state, visit, self._visited[-1:])

    # ---- layers that a model's own forward calls ----

    def load_shell(self, state: StepState) -> None:
        """Before the model's forward is called: its shell has to lie on the device as it is on the host."""
        for op in self.schedule.load_shell():
            self._executor.issue(state, op)
            self._executor.wait(op.number)

    def call(self, state: StepState, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one layer forward with these arguments; those that the next call will need are loaded meanwhile."""
        visits = self.schedule.visits(state.shape) * 2  # after the last layer comes the first, for the next token
        if layer == 0:
            self._executor.forget_complete()
        answer: list[Any] = []
        for op in self.schedule.visit(visits, layer, self._knobs_at(state, visits[layer]), state.shape):
            work = self._executor.calling(op, args, kwargs, answer) if op.kind is Kind.FORWARD else None
            self._executor.issue(state, op, work=work)
            if work is not None:
                self.computed = op.number
        assert self.computed is not None
        self._executor.wait_issued(self.computed)
        return answer[0]

    # ---- the user ----

    def _gate(self, state: StepState, visit: Visit, running: list[int]) -> Knobs:
        """Meet the user's wishes before a visit; `running`: what has to be over before a held engine is at rest."""
        on_hold = partial(self._on_hold, state, visit, running)
        knobs = self._control.at_layer(Position(state.number, visit.phase, visit.layer), on_hold)
        self.held = None
        if self._held_from_s is not None:
            now_s, since_s = self._recorder.now(), self._held_from_s
            self._held_from_s = None
            self._recorder.add(Marker(now_s, HELD, since_s, now_s, state.number, visit.layer))
        if self._paused and not self._control.stepping:
            self.tell("paused", True, False, state.number, visit.layer)
            self._paused = self._executor.inspecting = False
        for name in ("prefetch_depth", "grad_buffers", "resident_layers"):
            self.tell(name, getattr(self.knobs, name), getattr(knobs, name), state.number, visit.layer)
        self.knobs = knobs
        return knobs

    def _on_hold(self, state: StepState, visit: Visit, running: list[int], knobs: Knobs) -> None:
        for number in running:
            self._executor.wait(number)
        self.tell("paused", self._paused, True, state.number, visit.layer)
        self._paused = self._executor.inspecting = True
        self._held_from_s = self._held_from_s or self._recorder.now()
        coming = self.schedule.preview(state.shape, visit, knobs)
        self.held = replace(self._executor.inspected, next=[op.words for op in coming])

    def tell(self, name: str, old: object, new: object, step: int, layer: int | None) -> None:
        """Mark in the record where a change took effect."""
        if old != new:
            self._recorder.add(Marker(self._recorder.now(), name, old, new, step, layer))

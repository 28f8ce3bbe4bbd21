"""Steering a run from any thread: pause, step one layer, resume, stop, and the knobs of the pipeline.

The control object only holds wishes. The engine reads them at each layer boundary (`at_layer`) and tells
what took effect. No torch here, so a dashboard can import it alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from megatrain.config import check_grad_buffers, check_prefetch_depth


class StoppedError(RuntimeError):
    """A step was asked for after `stop`."""


class State(StrEnum):
    """What the engine is doing, as a viewer should show it."""

    IDLE = "idle"  # between steps
    RUNNING = "running"  # inside a step
    PAUSED = "paused"  # inside a step, waiting at a layer boundary
    STOPPED = "stopped"  # no further step will begin


@dataclass(frozen=True)
class Knobs:
    """Buffer counts that may change while training runs. None of them changes a single bit of the result."""

    prefetch_depth: int
    grad_buffers: int
    resident_layers: int

    @property
    def weight_slots(self) -> int:
        """Device buffers for weights: the layer in use, those ahead of it, and those kept."""
        return self.prefetch_depth + 1 + self.resident_layers


@dataclass(frozen=True)
class Position:
    """Where a step is: its number, the pass ("forward" | "backward") and the layer about to run."""

    step: int
    phase: str
    layer: int


class Control:
    """Thread-safe wishes of a user and the gate at which the engine meets them.

    check: called with the wanted knobs before they are accepted; raises ValueError with the reason to refuse.
    """

    def __init__(self, knobs: Knobs, check: Callable[[Knobs], None] = lambda _: None) -> None:
        self._changed = threading.Condition()
        self._knobs = knobs
        self._check = check
        self._paused = False
        self._stopped = False
        self._allowed_layers = 0
        self._inside_step = False
        self._waiting = False
        self.position: Position | None = None

    @property
    def state(self) -> State:
        with self._changed:
            if self._waiting:
                return State.PAUSED
            if self._inside_step:
                return State.RUNNING
            return State.STOPPED if self._stopped else State.IDLE

    @property
    def paused(self) -> bool:
        """True while the engine is held, or will be before its next layer."""
        return self._paused

    @property
    def stopping(self) -> bool:
        """True once `stop` was called: the step in progress completes, no further one begins."""
        return self._stopped

    @property
    def knobs(self) -> Knobs:
        return self._knobs

    def set_prefetch_depth(self, depth: int) -> None:
        """Load `depth` layers ahead from the next layer on; ValueError if the device cannot hold it."""
        check_prefetch_depth(depth)
        self._turn(prefetch_depth=depth)

    def set_grad_buffers(self, count: int) -> None:
        """Use `count` device gradient buffers from the next layer on; ValueError if they do not fit."""
        check_grad_buffers(count)
        self._turn(grad_buffers=count)

    def set_resident_layers(self, count: int) -> None:
        """Keep `count` further layers on the device from the next layer on; ValueError if they do not fit."""
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ValueError(f"resident_layers must be a whole number ≥ 0; got {count!r}")
        self._turn(resident_layers=count)

    def _turn(self, **change: int) -> None:
        with self._changed:
            wanted = replace(self._knobs, **change)
            self._check(wanted)
            self._knobs = wanted

    def pause(self) -> None:
        """Hold the engine before its next layer; what is already running on the device finishes."""
        with self._changed:
            self._paused = True
            self._allowed_layers = 0

    def resume(self) -> None:
        """Run on from wherever the engine was held."""
        with self._changed:
            self._paused = False
            self._allowed_layers = 0
            self._changed.notify_all()

    def step_layer(self) -> None:
        """Let exactly one more layer run (forward or backward alike), then hold again."""
        with self._changed:
            self._paused = True
            self._allowed_layers += 1
            self._changed.notify_all()

    def stop(self) -> None:
        """Let the step in progress complete, also when held, and begin no further one."""
        with self._changed:
            self._stopped = True
            self._paused = False
            self._changed.notify_all()

    def begin_step(self) -> None:
        """Called by the engine. Raises StoppedError after `stop`."""
        with self._changed:
            if self._stopped:
                raise StoppedError("the run was stopped (control.stop()); make a new engine to train further")
            self._inside_step = True

    def end_step(self) -> None:
        """Called by the engine, also when a step failed."""
        with self._changed:
            self._inside_step = self._waiting = False  # an interrupt may have ended the wait
            self.position = None

    def at_layer(self, position: Position) -> Knobs:
        """Called by the engine before each layer: waits while held, returns the knobs that now apply."""
        with self._changed:
            self.position = position
            self._waiting = self._paused and self._allowed_layers == 0
            while self._paused and self._allowed_layers == 0:
                self._changed.wait()
            self._waiting = False
            if self._paused:
                self._allowed_layers -= 1
            return self._knobs

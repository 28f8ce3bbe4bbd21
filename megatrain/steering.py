"""What may be asked of a run while it trains, and what becomes of each wish. No torch, no sockets.

`control.Control` meets wishes in the process that trains; `remote.RemoteControl` carries them there from another.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Literal, Protocol

Phase = Literal["forward", "backward"]


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

    def __str__(self) -> str:
        return f"step {self.step}, {self.phase} of layer {self.layer}"


class Wish:
    """Something that was asked for and not refused. It takes effect later, at a layer or between two steps.

    effect: the position at which it took effect; None before, between two steps, and if it was overtaken or failed.
    failed: why it could not be met after all.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.effect: Position | None = None
        self.overtaken = False
        self.failed: str | None = None
        self._over = threading.Event()

    @property
    def pending(self) -> bool:
        return not self._over.is_set()

    def fulfil(self, effect: Position | None) -> None:
        """It took effect here, or between two steps (None)."""
        self.effect = effect
        self._over.set()

    def overtake(self) -> None:
        """A later wish, or the end of the run, made it void."""
        self.overtaken = True
        self._over.set()

    def fail(self, reason: str) -> None:
        """It was tried, and did not succeed."""
        self.failed = reason
        self._over.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until it took effect, failed or was overtaken; returns whether that happened in time."""
        return self._over.wait(timeout_s)

    def __str__(self) -> str:
        if self.pending:
            return f"{self.text}: takes effect at the next layer"
        if self.failed is not None:
            return f"{self.text}: failed: {self.failed}"
        if self.overtaken:
            return f"{self.text}: overtaken"
        return f"{self.text}: done, between two steps" if self.effect is None else f"{self.text}: since {self.effect}"


class Steering(Protocol):
    """The wishes. Each raises ValueError with the reason if it is refused; else it returns at once."""

    def pause(self) -> Wish:
        """Hold before the next layer; what already runs on the device finishes."""

    def resume(self) -> Wish:
        """Run on."""

    def step_layer(self) -> Wish:
        """Let one more layer run, forward or backward alike, then hold."""

    def finish_step(self) -> Wish:
        """Run to the first layer of the next step, then hold."""

    def run_to_layer(self, layer: int, phase: Phase | None = None) -> Wish:
        """Run until `layer` is about to run (in this pass; None = whichever comes first), then hold."""

    def set_prefetch_depth(self, depth: int) -> Wish: ...

    def set_grad_buffers(self, count: int) -> Wish: ...

    def set_resident_layers(self, count: int) -> Wish: ...

    def set_micro_batch_size(self, rows: int) -> Wish:
        """Sequences per layer visit, from the next step on. Equal to rounding, as sums are in another order."""

    def checkpoint(self) -> Wish:
        """Write a checkpoint after the step in progress; training goes on meanwhile. Over when it is on the disk."""

    def stop(self, *, save: bool = False) -> Wish:
        """End after the step in progress; `save`: leave the model in the run's folder."""

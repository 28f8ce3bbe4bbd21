"""The gate between layers, where a user's wishes meet the engine: pause, step, stop, and the knobs of the pipeline.

Wishes come from any thread. The engine reads them before each layer (`at_layer`) and tells what took effect. No
torch here, so a dashboard can import it alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import replace
from enum import StrEnum
from typing import NamedTuple

from megatrain.config import check_grad_buffers, check_micro_batch_size, check_prefetch_depth, check_resident_layers
from megatrain.steering import Knobs, Phase, Position, Wish


class StoppedError(RuntimeError):
    """A step was asked for after `stop`."""


class State(StrEnum):
    """What the engine is doing, as a viewer should show it."""

    IDLE = "idle"  # between steps
    RUNNING = "running"  # inside a step
    PAUSED = "paused"  # inside a step, waiting at a layer boundary
    STOPPED = "stopped"  # no further step will begin


class Checks(NamedTuple):
    """What the engine has to say to a wish before it is accepted; each raises ValueError with the reason to refuse.

    visits: every (phase, layer) that a step comes by; empty = not known.
    """

    knobs: Callable[[Knobs], None] = lambda _: None
    micro_batch_size: Callable[[int], None] = lambda _: None
    visits: Collection[tuple[str, int]] = ()


class Control:
    """Thread-safe `Steering`, and the gate at which the engine meets it."""

    def __init__(self, knobs: Knobs, checks: Checks | None = None, *, micro_batch_size: int | None = None) -> None:
        self._changed = threading.Condition()
        self._knobs = knobs
        self._micro_batch_size = micro_batch_size
        self._checks = checks or Checks()
        self._paused = False
        self._until: Callable[[Position], bool] | None = None  # while paused: where to hold again
        self._allowed_layers = 0
        self._stopped = False
        self._save = False
        self._inside_step = False
        self._over = False  # no step will follow, as far as is known
        self._waiting = False
        self._next_step = 0
        self._to_hold: list[Wish] = []  # fulfilled when the engine is held
        self._to_pass: list[Wish] = []  # ... when it passes the gate
        self._to_begin: list[Wish] = []  # ... when a step begins
        self._to_save: list[Wish] = []  # ... when a checkpoint was taken
        self._to_end: list[Wish] = []  # ... when no further step will
        self.saves = False  # whoever runs the engine writes checkpoints
        self.position: Position | None = None

    # ---- what is so ----

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
        return self._paused and self._until is None

    @property
    def stepping(self) -> bool:
        """True while the user goes from hold to hold, or will be held at the next layer."""
        return self._paused

    @property
    def stopping(self) -> bool:
        """True once `stop` was called: the step in progress completes, no further one begins."""
        return self._stopped

    @property
    def save_wanted(self) -> bool:
        """True once `stop(save=True)` was called."""
        return self._save

    @property
    def knobs(self) -> Knobs:
        return self._knobs

    @property
    def micro_batch_size(self) -> int | None:
        """Sequences per layer visit of the next step; None = the whole batch."""
        return self._micro_batch_size

    # ---- knobs ----

    def set_prefetch_depth(self, depth: int) -> Wish:
        """Load `depth` layers ahead from the next layer on; ValueError if the device cannot hold it."""
        check_prefetch_depth(depth)
        return self._turn(f"prefetch depth {depth}", prefetch_depth=depth)

    def set_grad_buffers(self, count: int) -> Wish:
        """Use `count` device gradient buffers from the next layer on; ValueError if they do not fit."""
        check_grad_buffers(count)
        return self._turn(f"gradient buffers {count}", grad_buffers=count)

    def set_resident_layers(self, count: int) -> Wish:
        """Keep `count` further layers on the device from the next layer on; ValueError if they do not fit."""
        check_resident_layers(count)
        return self._turn(f"resident layers {count}", resident_layers=count)

    def _turn(self, text: str, **change: int) -> Wish:
        with self._changed:
            self._require_running(text)
            wanted = replace(self._knobs, **change)
            self._checks.knobs(wanted)
            self._knobs = wanted
            self._changed.notify_all()
            return self._kept(Wish(text), self._to_pass)

    def set_micro_batch_size(self, rows: int) -> Wish:
        """Take `rows` sequences per layer visit from the next step on; ValueError if they do not fit."""
        check_micro_batch_size(rows)
        text = f"micro-batch size {rows}"
        with self._changed:
            self._require_running(text)
            self._checks.micro_batch_size(rows)
            self._micro_batch_size = rows
            return self._kept(Wish(text), self._to_begin)

    # ---- holding ----

    def pause(self) -> Wish:
        """Hold the engine before its next layer; what is already running on the device finishes."""
        return self._hold("pause", None)

    def step_layer(self) -> Wish:
        """Let exactly one more layer run (forward or backward alike), then hold again."""
        with self._changed:
            self._require_running("step one layer")
            if self._until is not None:
                self._overtake(self._to_hold)
            self._paused, self._until = True, None
            self._allowed_layers += 1
            self._changed.notify_all()
            return self._kept(Wish("step one layer"), self._to_pass)

    def finish_step(self) -> Wish:
        """Run on to the first layer of the next step, then hold."""
        with self._changed:
            now = self.position.step if self.position else self._next_step
            return self._hold("finish this step", lambda position: position.step > now)

    def run_to_layer(self, layer: int, phase: Phase | None = None) -> Wish:
        """Run on until `layer` is next, then hold; ValueError for one that no step comes by."""
        wanted = f"run to {f'the {phase} of ' if phase else ''}layer {layer}"
        visits = self._checks.visits
        if visits and not any(layer == at and phase in (None, through) for through, at in visits):
            first, last = min(at for _, at in visits), max(at for _, at in visits)
            raise ValueError(f"{wanted}: no step comes by there; layers are {first} to {last}")
        with self._changed:
            here = self.position

            def reached(position: Position) -> bool:
                return position != here and position.layer == layer and phase in (None, position.phase)

            return self._hold(wanted, reached)

    def _hold(self, text: str, until: Callable[[Position], bool] | None) -> Wish:
        with self._changed:
            self._require_running(text)
            self._paused, self._until = True, until
            self._allowed_layers = 0
            self._overtake(self._to_hold)
            self._changed.notify_all()
            return self._kept(Wish(text), self._to_hold)

    def resume(self) -> Wish:
        """Run on from wherever the engine was held."""
        with self._changed:
            self._let_go()
            return self._kept(Wish("resume"), self._to_pass)

    def stop(self, *, save: bool = False) -> Wish:
        """Let the step in progress complete, also when held, and begin no further one."""
        with self._changed:
            self._stopped = True
            self._save = self._save or save
            self._let_go()
            wish = self._kept(Wish("stop and save" if save else "stop"), self._to_end)
            if not self._inside_step:
                self._close()
            return wish

    def checkpoint(self) -> Wish:
        """Write a checkpoint after the step in progress; ValueError where the run writes none."""
        with self._changed:
            self._require_running("checkpoint")
            if not self.saves:
                raise ValueError("checkpoint: this run has no folder to leave one in; give it a run_dir")
            if self._over:
                raise ValueError("checkpoint: the run is over, and what it left is what there is; start another run")
            return self._kept(Wish("checkpoint"), self._to_save)

    def _let_go(self) -> None:
        self._paused, self._until = False, None
        self._allowed_layers = 0
        self._overtake(self._to_hold)
        self._changed.notify_all()

    def _require_running(self, text: str) -> None:
        if self._stopped:
            raise ValueError(f"{text}: the run is stopped, or finishing its last step; start another run")

    # ---- the engine's side ----

    def begin_step(self) -> int | None:
        """Called by the engine: the micro-batch size of the step that begins. Raises StoppedError after `stop`."""
        with self._changed:
            if self._stopped:
                raise StoppedError("the run was stopped (control.stop()); make a new engine to train further")
            self._inside_step, self._over = True, False
            self._fulfil(self._to_begin, None)
            return self._micro_batch_size

    def choose_resident_layers(self, count: int) -> None:
        """Called by the engine, which chooses anew when the size of a batch changes; no wish, so never refused."""
        with self._changed:
            self._knobs = replace(self._knobs, resident_layers=count)

    def end_step(self) -> None:
        """Called by the engine, also when a step failed."""
        with self._changed:
            if self.position is not None:
                self._next_step = self.position.step + 1
            self.end_pass()

    def begin_pass(self) -> None:
        """Called by the engine before it goes through the layers without training; also after `stop`."""
        with self._changed:
            self._inside_step = True

    def end_pass(self) -> None:
        """Called by the engine, also when a pass failed."""
        with self._changed:
            self._inside_step = self._waiting = False  # an interrupt may have ended the wait
            self.position = None
            if self._stopped:
                self._close()

    def take_checkpoint_wishes(self) -> list[Wish]:
        """Called between steps by whoever writes checkpoints: the wishes that one fulfils."""
        with self._changed:
            wishes, self._to_save = self._to_save, []
            return wishes

    def close(self) -> None:
        """Called when a run is over: whatever is still wished for is void. Later wishes wait for nothing."""
        with self._changed:
            self._close()

    def _close(self) -> None:
        self._over = True
        self._fulfil(self._to_end, None)
        for wishes in (self._to_hold, self._to_pass, self._to_begin, self._to_save):
            self._overtake(wishes)

    def at_layer(self, position: Position, on_hold: Callable[[Knobs], None] = lambda _: None) -> Knobs:
        """Called by the engine before each layer: waits while held, returns the knobs that now apply.

        on_hold: called in this thread before it waits, and again when knobs change meanwhile; it may take its time.
        """
        described: Knobs | None = None
        while True:
            with self._changed:
                self.position = position
                if described is not None:
                    self._wait(position, described)
                if not self._held_at(position):
                    return self._pass(position)
                described = self._knobs
            on_hold(described)

    def _wait(self, position: Position, described: Knobs) -> None:
        self._waiting = self._held_at(position)
        while self._held_at(position) and self._knobs == described:
            self._fulfil(self._to_hold, position)
            self._changed.wait()

    def _pass(self, position: Position) -> Knobs:
        self._waiting = False
        if self._paused and self._until is None:
            self._allowed_layers -= 1
        self._fulfil(self._to_pass, position)
        return self._knobs

    def _held_at(self, position: Position) -> bool:
        if self._until is not None and self._until(position):
            self._until = None
        return self._paused and self._until is None and self._allowed_layers == 0

    def _kept(self, wish: Wish, wishes: list[Wish]) -> Wish:
        if self._over:  # nobody comes by who would fulfil it
            wish.fulfil(None)
        else:
            wishes.append(wish)
        return wish

    @staticmethod
    def _fulfil(wishes: list[Wish], effect: Position | None) -> None:
        for wish in wishes:
            wish.fulfil(effect)
        wishes.clear()

    @staticmethod
    def _overtake(wishes: list[Wish]) -> None:
        for wish in wishes:
            wish.overtake()
        wishes.clear()

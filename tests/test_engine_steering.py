"""Steering a running step from other threads: it holds where it should, and not a bit of the result changes."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from leaks import require_no_leak
from pairs import LR, MICRO_ROWS, differing, engine_config, outcome
from reference import make_batch
from tiny_models import tiny

from megatrain import AdamWConfig, StreamingEngine
from megatrain.conductor import VISITS_IN_FLIGHT
from megatrain.config import Throttle
from megatrain.control import State, StoppedError
from megatrain.steering import Position
from megatrain.trace import HELD

TIMEOUT_S = 20.0
LAYERS = 3
BATCHES = [make_batch(tiny(), 4, 12, seed=seed) for seed in range(3)]
ADAMW = AdamWConfig(lr=LR)
# Every visit of a step with one micro-batch, in order.
VISITS = [("forward", 0), ("forward", 1), ("forward", 2), ("backward", 2), ("backward", 1), ("backward", 0)]


def engine_for(**config: Any) -> StreamingEngine:
    return StreamingEngine(tiny(layers=LAYERS), engine_config(**config), ADAMW)


def visits(engine: StreamingEngine) -> list[tuple[str, int | None]]:
    """Layer visits that the compute lane has completed so far."""
    return [(s.op, s.layer) for s in engine.recorder.spans() if s.op in ("forward", "backward") and s.layer is not None]


def until(condition: Callable[[], bool]) -> None:
    """Wait for another thread; a condition that never comes true is a failure, not a hang."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.0005)


class Running:
    """Steps in a thread of their own."""

    def __init__(self, engine: StreamingEngine, steps: int) -> None:
        self.losses: list[float] = []
        self.error: BaseException | None = None
        self._engine, self._steps = engine, steps
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for number in range(self._steps):
                self.losses.append(self._engine.step(BATCHES[number % len(BATCHES)]).loss)
        except BaseException as error:
            self.error = error

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        self._thread.join(TIMEOUT_S)
        assert self.over, "deadlock"


@contextmanager
def running(engine: StreamingEngine, steps: int = 1) -> Iterator[Running]:
    """Whatever happens within, the thread is let go and ends, then the engine closes."""
    run = Running(engine, steps)
    try:
        yield run
    finally:
        engine.control.resume()
        run.join()
        engine.close()


def settle(engine: StreamingEngine, expected: int) -> None:
    """Wait until so many visits are complete and the engine is held; then make sure that none follows."""
    until(lambda: len(visits(engine)) >= expected and engine.control.state is State.PAUSED)
    time.sleep(0.01)
    assert visits(engine) == VISITS[:expected]


def test_a_paused_engine_holds_before_its_first_layer() -> None:
    engine = engine_for()
    assert engine.control.state is State.IDLE
    engine.control.pause()
    with running(engine) as run:
        settle(engine, 0)
        assert engine.control.position == Position(0, "forward", 0)
        assert not run.over
        engine.control.resume()
        run.join()
        assert visits(engine) == VISITS
        assert engine.control.state is State.IDLE
        assert engine.control.position is None


def test_layers_are_let_through_one_by_one() -> None:
    engine = engine_for()
    engine.control.pause()
    with running(engine) as run:
        for count, (phase, layer) in enumerate(VISITS):
            settle(engine, count)
            assert engine.control.position == Position(0, phase, layer)
            engine.control.step_layer()
        run.join()
        assert visits(engine) == VISITS
    assert run.losses == outcome(tiny(layers=LAYERS), BATCHES[:1], ADAMW).losses


def test_several_granted_layers_run_without_a_hold() -> None:
    engine = engine_for()
    engine.control.pause()
    with running(engine):
        settle(engine, 0)
        for _ in range(4):
            engine.control.step_layer()
        settle(engine, 4)


def test_a_granted_layer_counts_across_the_end_of_a_step() -> None:
    engine = engine_for()
    engine.control.pause()
    with running(engine, steps=2) as run:
        settle(engine, 0)
        for _ in range(len(VISITS)):
            engine.control.step_layer()
        until(lambda: len(run.losses) == 1 and engine.control.state is State.PAUSED)
        assert engine.control.position == Position(1, "forward", 0)


def slow_layers(engine: StreamingEngine, seconds: float) -> None:
    for layer in engine._anatomy.layers:
        layer.register_forward_pre_hook(lambda *_: time.sleep(seconds))


@pytest.mark.parametrize("depth", [0, 1, 4])
@pytest.mark.parametrize("after", range(5))
def test_a_pause_takes_effect_within_the_layers_in_flight(depth: int, after: int) -> None:
    """The layer that runs finishes; of those behind it, no more begin than are issued ahead of it."""
    engine = engine_for(prefetch_depth=depth)
    slow_layers(engine, 0.003)
    with running(engine):
        until(lambda: len(visits(engine)) >= after)
        done = len(visits(engine))
        engine.control.pause()
        until(lambda: engine.control.state is State.PAUSED or engine.control.position is None)
        time.sleep(0.02)
        assert len(visits(engine)) <= min(done + 1 + VISITS_IN_FLIGHT, len(VISITS))


def test_stopping_lets_the_step_complete_and_begins_no_other() -> None:
    engine = engine_for()
    slow_layers(engine, 0.002)
    with running(engine, steps=5) as run:
        until(lambda: len(visits(engine)) >= 2)
        engine.control.stop()
        run.join()
        assert len(run.losses) == 1
        assert isinstance(run.error, StoppedError)
        assert engine.control.state is State.STOPPED
        with pytest.raises(StoppedError, match="make a new engine to train further"):
            engine.step(BATCHES[0])
        state = engine.state_dict()
    assert differing(state, outcome(tiny(layers=LAYERS), BATCHES[:1], ADAMW).state) == []


def test_stopping_lets_a_held_step_complete() -> None:
    engine = engine_for()
    engine.control.pause()
    with running(engine) as run:
        settle(engine, 0)
        engine.control.stop()
        run.join()
        assert len(run.losses) == 1
        assert run.error is None


def test_a_depth_takes_effect_at_the_next_layer() -> None:
    """Held before layer 1 of forward: from there on two more slots are filled, in the same step."""
    engine = engine_for(prefetch_depth=0)
    engine.control.pause()
    with running(engine) as run:
        settle(engine, 0)
        engine.control.step_layer()
        settle(engine, 1)
        assert len(engine._executor.weights) == 1
        engine.set_prefetch_depth(2)
        engine.control.step_layer()
        settle(engine, 2)
        assert len(engine._executor.weights) == 3
        engine.set_prefetch_depth(0)
        engine.control.resume()
        run.join()
        assert len(engine._executor.weights) == 1
        markers = [(m.name, m.old, m.new, m.step, m.layer) for m in engine.recorder.markers() if m.name != HELD]
        assert markers == [
            ("paused", False, True, 0, 0),
            ("prefetch_depth", 0, 2, 0, 1),
            ("paused", True, False, 0, 2),
            ("prefetch_depth", 2, 0, 0, 2),
        ]


# ---- at random ----

SEEDS = range(24)
CALLS, THREADS = 40, 3


def meddle(engine: StreamingEngine, seed: int) -> None:
    """Random control calls, with random breaks between them."""
    choose = random.Random(seed)
    control = engine.control
    calls: list[Callable[[], Any]] = [
        control.pause,
        control.resume,
        control.resume,
        control.step_layer,
        control.step_layer,
        lambda: engine.set_prefetch_depth(choose.randrange(6)),
        lambda: control.set_grad_buffers(choose.randrange(1, 5)),
        lambda: control.set_resident_layers(choose.randrange(5)),
        lambda: control.state,
        lambda: engine.recorder.spans(),
        lambda: engine.arena_bytes,
    ]
    for _ in range(CALLS):
        choose.choice(calls)()
        if choose.random() < 0.3:
            time.sleep(choose.random() * 0.002)


@pytest.fixture(scope="module")
def untouched() -> tuple[list[float], dict[str, torch.Tensor]]:
    found = outcome(tiny(layers=LAYERS), BATCHES, ADAMW, micro_batch_size=MICRO_ROWS)
    return found.losses, found.state


@pytest.mark.parametrize("seed", SEEDS)
def test_random_steering_changes_nothing(seed: int, untouched: tuple[list[float], dict[str, torch.Tensor]]) -> None:
    config = {"micro_batch_size": MICRO_ROWS, "offload_activations": seed % 2 == 1}
    engine = engine_for(**config)
    with running(engine, steps=len(BATCHES)) as run:
        threads = [threading.Thread(target=meddle, args=(engine, THREADS * seed + n)) for n in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive(), "a control call blocks"
        engine.control.resume()
        run.join()
        assert run.error is None
        assert run.losses == untouched[0]
        assert differing(engine.state_dict(), untouched[1]) == []
        engine.step(BATCHES[0])  # what the last wishes ask for
        engine.flush()
        require_no_leak(engine)


# ---- what a held engine tells, and what else may be changed ----


def test_a_held_engine_tells_what_ran_and_what_comes() -> None:
    engine = engine_for(prefetch_depth=1)
    engine.control.pause()
    with running(engine):
        settle(engine, 0)
        assert engine.held is not None
        assert engine.held.layer is None  # nothing has run yet
        assert engine.held.next[-1].startswith("load layer 2, weights slot")
        for _ in range(2):
            engine.control.step_layer()
        settle(engine, 2)
        held = engine.held
        assert (held.layer, held.phase) == (1, "forward")
        assert held.came is not None
        assert held.went is not None
        saved = engine._executor.saved.get(2, 0)
        assert held.went.rms == pytest.approx(float(saved.square().mean().sqrt()))
        assert held.next[0] == "forward layer 2, micro-batch 0, weights slot 0"
        for _ in range(2):
            engine.control.step_layer()
        settle(engine, 4)
        assert (engine.held.layer, engine.held.phase) == (2, "backward")
        engine.set_prefetch_depth(0)
        until(lambda: engine.held is not None and not any("load layer 0" in op for op in engine.held.next[:3]))
        assert all(work == [] for lane, work in engine.at_work().items() if lane != "host")
    assert engine.held is None


def test_the_micro_batch_size_may_change_between_steps() -> None:
    """Equal to rounding, since sums are taken in another order; never in the middle of a step."""
    with engine_for(micro_batch_size=1) as engine, engine_for(micro_batch_size=1) as other:
        for number, batch in enumerate(BATCHES):
            if number == 1:
                engine.control.set_micro_batch_size(3)
            assert engine.step(batch).loss == pytest.approx(other.step(batch).loss, rel=1e-6)
        assert [record.micro_batches for record in engine.recorder.steps()] == [4, 2, 2]
        markers = [(m.name, m.old, m.new, m.step, m.layer) for m in engine.recorder.markers()]
        assert markers == [("micro_batch_size", 1, 3, 1, None)]


def test_a_micro_batch_size_that_does_not_fit_is_refused() -> None:
    with engine_for(micro_batch_size=1, offload_activations=True) as engine:
        engine.step(BATCHES[0])
        engine._room.budget_bytes = engine.planned_bytes
        with pytest.raises(ValueError, match="lower them, or the batch"):
            engine.control.set_micro_batch_size(4)
        engine.control.set_micro_batch_size(1)


def test_a_throttled_engine_trains_the_same() -> None:
    throttle = Throttle(link_bytes_per_s=2e7, update_bytes_per_s=5e7)
    plain = outcome(tiny(layers=LAYERS), BATCHES, ADAMW)
    slow = outcome(tiny(layers=LAYERS), BATCHES, ADAMW, throttle=throttle)
    assert slow.losses == plain.losses
    assert differing(slow.state, plain.state) == []

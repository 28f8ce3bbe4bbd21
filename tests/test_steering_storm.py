"""A thousand wishes at random, from threads and another process: not a bit of the result changes, nothing hangs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import meddling
import pytest
from leaks import require_no_leak
from meddling import LAYERS, fates, meddle
from pairs import LR, MICRO_ROWS, differing, engine_config
from reference import make_batch
from test_engine_steering import VISITS, slow_layers, until, visits
from tiny_models import tiny
from torch import Tensor

from megatrain import AdamWConfig, StreamingEngine, TrainingRun
from megatrain.conductor import VISITS_IN_FLIGHT
from megatrain.config import Throttle
from megatrain.control import State
from megatrain.folder import RunFolder
from megatrain.report import RunState
from megatrain.steering import Position, Wish

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(sys.platform == "win32", reason="no Unix sockets"),
]

TIMEOUT_S = 60.0
SEEDS = range(20)
THREADS, THREAD_CALLS, REMOTE_CALLS = 3, 250, 250  # a thousand in all
ENDLESS = 1_000_000
PAUSES = 8
BATCHES = [make_batch(tiny(), 4, 12, seed=seed) for seed in range(3)]
VARIANTS: list[dict[str, Any]] = [
    {},
    {"offload_activations": True},
    {"throttle": Throttle(link_bytes_per_s=2e7, update_bytes_per_s=5e7)},
    {"optimizer_overlap": "backward"},
    {"optimizer_overlap": "backward", "offload_activations": True},
    {"optimizer_overlap": "backward", "optimizer_device": "device"},
]


def engine_for(variant: dict[str, Any]) -> StreamingEngine:
    """Updates in backward need clipping to be off."""
    clips = variant.get("optimizer_overlap") != "backward"
    config = engine_config(**{"micro_batch_size": MICRO_ROWS, **variant})
    return StreamingEngine(tiny(layers=LAYERS), config, AdamWConfig(lr=LR, max_grad_norm=1.0 if clips else None))


class Untouched:
    """The same training with nobody near it, as far as it was asked for."""

    def __init__(self, overlap: str) -> None:
        self._engine = engine_for({"optimizer_overlap": overlap})
        self._losses: list[float] = []
        self._states: list[dict[str, Tensor]] = []

    def after(self, steps: int) -> tuple[list[float], dict[str, Tensor]]:
        while len(self._losses) < steps:
            self._losses.append(self._engine.step(BATCHES[len(self._losses) % len(BATCHES)]).loss)
            self._states.append({name: tensor.clone() for name, tensor in self._engine.state_dict().items()})
        return self._losses[:steps], self._states[steps - 1]


@cache
def untouched(overlap: str) -> Untouched:
    return Untouched(overlap)


class Visitor:
    """The other process: see `meddling`."""

    def __init__(self) -> None:
        program = [sys.executable, str(Path(meddling.__file__))]
        self._process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._asking = ThreadPoolExecutor(1)

    def ask(self, folder: Path, **request: Any) -> Future[Any]:
        return self._asking.submit(self._ask, json.dumps({"folder": str(folder), **request}))

    def _ask(self, line: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> int:
        """Let it end by itself; returns its exit code."""
        try:
            self._process.communicate(timeout=TIMEOUT_S)
        finally:
            self._process.kill()
            self._asking.shutdown()
        return self._process.wait()


@pytest.fixture(scope="module")
def visitor() -> Iterator[Visitor]:
    opened = Visitor()
    yield opened
    assert opened.close() == 0  # it never loaded torch


def begun(engine: StreamingEngine, folder: Path) -> TrainingRun:
    """A run that goes on until it is stopped, once it hears other processes."""
    run = TrainingRun(engine, BATCHES, steps=ENDLESS, run_dir=folder).start()
    until(RunFolder(folder).socket.exists)
    return run


def storm(run: TrainingRun, folder: Path, visitor: Visitor, seed: int) -> list[Wish]:
    """All calls at once; returns the wishes of the threads when the last one was made."""
    remote = visitor.ask(folder, seed=seed, calls=REMOTE_CALLS)
    with ThreadPoolExecutor(THREADS) as threads:
        seeds = [THREADS * seed + number for number in range(THREADS)]
        futures = [threads.submit(meddle, run.control, run.status, each, THREAD_CALLS) for each in seeds]
        wishes = [wish for future in futures for wish in future.result(TIMEOUT_S)]
    assert remote.result(TIMEOUT_S) > 0
    return wishes


def finish(run: TrainingRun) -> None:
    """Let it go, see that it does go on, and end it after whole steps."""
    run.resume()
    done = run.steps_done
    until(lambda: run.steps_done >= done + 2)
    run.stop()
    run.wait(TIMEOUT_S)
    assert run.state is RunState.STOPPED


@pytest.mark.parametrize("seed", SEEDS)
def test_a_storm_of_wishes_changes_nothing(seed: int, visitor: Visitor, tmp_path: Path) -> None:
    variant = VARIANTS[seed % len(VARIANTS)]
    with engine_for(variant) as engine:
        run = begun(engine, tmp_path)
        try:
            wishes = storm(run, tmp_path, visitor, seed)
        finally:
            finish(run)
        losses, state = untouched(variant.get("optimizer_overlap", "forward")).after(run.steps_done)
        assert [result.loss for result in run.results] == losses
        assert differing(engine.state_dict(), state) == []
        require_no_leak(engine)
    for ends in (fates(wishes), visitor.ask(tmp_path, end=True).result(TIMEOUT_S)):
        assert ends.keys() == {"took effect", "overtaken"}


@pytest.mark.parametrize("depth", [0, 3])
def test_a_pause_from_another_process_takes_effect_within_a_layer(
    depth: int, visitor: Visitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds before the next layer that is issued: the one that runs and the one behind it complete, and no more."""
    with engine_for({"prefetch_depth": depth, "micro_batch_size": None}) as engine:
        slow_layers(engine, 0.002)
        arrived: list[tuple[int, Position | None]] = []
        pause = engine.control.pause

        def noting_pause() -> Wish:
            with engine.control._changed:  # no layer passes in between
                arrived.append((len(visits(engine)), engine.control.position))
                return pause()

        monkeypatch.setattr(engine.control, "pause", noting_pause)
        run = begun(engine, tmp_path)
        try:
            for number in range(PAUSES):
                assert visitor.ask(tmp_path, pause=True).result(TIMEOUT_S)
                require_held_at_once(engine, *arrived[-1])
                run.resume()
                held = len(visits(engine))
                until(lambda enough=held + number: len(visits(engine)) > enough)  # type: ignore[misc]
        finally:
            finish(run)
        assert len(arrived) == PAUSES


def require_held_at_once(engine: StreamingEngine, done: int, issuing: Position | None) -> None:
    """`issuing` was the newest layer let through, `done` as many visits were complete, when a pause arrived."""
    here = engine.control.position
    assert engine.control.state is State.PAUSED
    assert here is not None
    held = len(visits(engine))
    assert held <= done + 1 + VISITS_IN_FLIGHT
    if issuing is None:
        assert (here.phase, here.layer) == VISITS[0]
    else:
        assert order(here) <= order(issuing) + 1
    time.sleep(0.01)
    assert len(visits(engine)) == held == order(here)


def order(position: Position) -> int:
    """How many visits come before it."""
    return position.step * len(VISITS) + VISITS.index((position.phase, position.layer))


# ---- wishes at bad moments ----


@pytest.mark.parametrize("stops", [True, False])
def test_a_wish_after_the_end_of_a_run_does_not_wait_for_ever(stops: bool) -> None:
    with engine_for({}) as engine:
        run = TrainingRun(engine, BATCHES, steps=ENDLESS if stops else 1).start()
        if stops:
            run.stop()
        run.wait(TIMEOUT_S)
        assert not run.resume().pending
        assert not run.stop().pending
    with engine_for({}) as engine:
        run = TrainingRun(engine, BATCHES, steps=1).start().wait(TIMEOUT_S)
        control = engine.control
        for wish in (control.pause(), control.set_prefetch_depth(3), control.step_layer(), control.resume()):
            assert not wish.pending
        assert control.set_prefetch_depth(2).effect is None
        engine.step(BATCHES[1])  # and what was set then is so
        assert len(engine._executor.weights) == LAYERS


def test_a_stop_ends_what_was_wished_for_between_two_steps() -> None:
    with engine_for({}) as engine:
        wishes = [engine.control.set_prefetch_depth(2), engine.control.pause(), engine.control.set_micro_batch_size(1)]
        assert all(wish.pending for wish in wishes)
        engine.control.stop()
        assert all(wish.overtaken for wish in wishes)


def test_a_wish_while_a_step_makes_room_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_for({}) as engine:
        settle = engine._room.settle

        def settle_and_wish(*args: Any) -> Any:
            settled = settle(*args)
            engine.control.set_resident_layers(2)
            return settled

        monkeypatch.setattr(engine._room, "settle", settle_and_wish)
        engine.step(BATCHES[0])
        assert engine.control.knobs.resident_layers == 2


def test_a_stop_while_a_step_makes_room_lets_it_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_for({"resident_layers": "auto", "device_memory_bytes": 10**9}) as engine:
        settle = engine._room.settle

        def stop_and_settle(*args: Any) -> Any:
            engine.control.stop()
            return settle(*args)

        monkeypatch.setattr(engine._room, "settle", stop_and_settle)
        assert engine.step(BATCHES[0]).loss == untouched("forward").after(1)[0][0]
        assert engine.control.knobs.resident_layers > 0

"""Each stream held up on purpose, and a run steered without mercy: not a bit of the result changes."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from card import DEVICE, config_for, every_bit_repeats, needs_card
from families import build
from meddling import meddle
from pairs import LR, MICRO_ROWS, Outcome, batches_for, differing, require_same
from reference import make_batch

from megatrain import AdamWConfig, StreamingEngine, TrainingRun
from megatrain.executor import NonFiniteError
from megatrain.lanes import LANES, Done, Lanes, Stream

NAP_S = 2e-3  # at most, before each operation of the lane that is held up
CLOCK_HZ = 1.7e9  # about a card's; the length of a nap does not matter
STEPS, BURST, TIMEOUT_S = 200, 20, 240.0

IN_BACKWARD: dict[str, Any] = {"optimizer_overlap": "backward"}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"prefetch_depth": 0},
    {"prefetch_depth": 3, "grad_buffers": 1},
    {"grad_buffers": 3, "micro_batch_size": None},
    {"offload_activations": True},
    {"resident_layers": 2},
    {"kept_graphs": 2},
    {"dtype": "bfloat16", "offload_activations": True},
    {"optimizer_overlap": "none"},
    IN_BACKWARD,
    {**IN_BACKWARD, "optimizer_device": "device"},
]


@pytest.fixture(autouse=True)
def bits() -> Iterator[None]:
    with every_bit_repeats():
        yield


class Late:
    """A stream that begins each piece of its work late."""

    def __init__(self, stream: Stream, nap: Callable[[float], None]) -> None:
        self._stream = stream
        self._nap = nap
        self._choose = random.Random(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def active(self) -> Iterator[None]:
        with self._stream.active():
            self._nap(self._choose.random() * NAP_S)
            yield


class Careless(Late):
    """... and that meets no event of another stream."""

    def wait_for(self, done: Done) -> None:
        done.wait_issued()


def sleep_on_the_device(seconds: float) -> None:
    torch.cuda._sleep(int(seconds * CLOCK_HZ))


def hold_up(monkeypatch: pytest.MonkeyPatch, kinds: dict[str, type[Late]]) -> None:
    """From now on these lanes of every engine are late."""
    whole = Lanes.on.__func__  # type: ignore[attr-defined]

    def on(cls: type[Lanes], *args: Any, **options: Any) -> Lanes:
        lanes: Lanes = whole(cls, *args, **options)
        for name, kind in kinds.items():
            nap = sleep_on_the_device if DEVICE == "cuda" and name != "host" else time.sleep
            lanes[name].stream = kind(lanes[name].stream, nap)  # type: ignore[assignment]
        return lanes

    monkeypatch.setattr(Lanes, "on", classmethod(on))


def trained(setting: dict[str, Any]) -> Outcome:
    config = config_for(**{"micro_batch_size": MICRO_ROWS, "attention": "math", **setting})
    clips = None if config.optimizer_overlap == "backward" else 1.0
    with StreamingEngine(build("llama"), config, AdamWConfig(lr=LR, max_grad_norm=clips)) as engine:
        results = [engine.step(batch) for batch in batches_for(build("llama"))]
        return Outcome([r.loss for r in results], [r.grad_norm for r in results], engine.state_dict())


@cache
def in_time(number: int) -> Outcome:
    return trained(SETTINGS[number])


@pytest.mark.parametrize("number", range(len(SETTINGS)), ids=lambda number: str(SETTINGS[number]))
def test_the_same_run_has_the_same_bits(number: int) -> None:
    """Without this the tests below would say nothing."""
    require_same(trained(SETTINGS[number]), in_time(number))


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("number", range(len(SETTINGS)), ids=lambda number: str(SETTINGS[number]))
def test_a_late_stream_changes_no_bit(number: int, lane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = in_time(number)
    hold_up(monkeypatch, {lane: Late})
    require_same(trained(SETTINGS[number]), expected)


@needs_card
@pytest.mark.parametrize(("late", "careless"), [("h2d", "compute"), ("compute", "d2h")])
def test_a_wait_that_is_left_out_shows(late: str, careless: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = in_time(0)
    hold_up(monkeypatch, {late: Late, careless: Careless})
    try:
        found = trained(SETTINGS[0])
    except NonFiniteError:  # what was read in place of weights need not be a number
        return
    assert differing(found.state, expected.state)


def test_two_hundred_steps_steered_from_other_threads(tmp_path: Path) -> None:
    """Depths, buffers, residents, pauses and single layers at random, beside the same training left alone."""

    def engine() -> StreamingEngine:
        config = config_for(micro_batch_size=MICRO_ROWS, attention="math")
        return StreamingEngine(build("llama", layers=3), config, AdamWConfig(lr=LR))

    data = [make_batch(build("llama"), 4, 12, seed=seed) for seed in range(3)]
    with engine() as alone:
        expected = [alone.step(data[number % len(data)]).loss for number in range(STEPS)]
        weights = {name: tensor.clone() for name, tensor in alone.state_dict().items()}
    with engine() as steered:
        run = TrainingRun(steered, data, steps=STEPS, run_dir=tmp_path).start()
        threads = [threading.Thread(target=keep_meddling, args=(run, seed)) for seed in range(3)]
        for thread in threads:
            thread.start()
        run.wait(TIMEOUT_S)
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert [result.loss for result in run.results] == expected
        assert differing(steered.state_dict(), weights) == []
        assert len({record.prefetch_depth for record in steered.recorder.steps()}) > 1


def keep_meddling(run: TrainingRun, seed: int) -> None:
    """In bursts; after each the run goes on for a moment, or it would not end."""
    while run.steps_done < STEPS and not run.state.over:
        meddle(run.control, run.status, seed, BURST)
        run.resume()
        time.sleep(0.005)
        seed += 3

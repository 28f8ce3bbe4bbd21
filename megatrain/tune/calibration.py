"""Rates of this machine for one model, measured in seconds: an engine of two of its layers, step by step.

Each lane first works alone, at two sizes of a micro-batch, as small ones compute at another rate than large ones; then
lanes work beside each other.
"""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatrain.anatomy import base_of
from megatrain.anatomy.excerpt import excerpt
from megatrain.config import EngineConfig
from megatrain.engine import DeviceMemoryError, StreamingEngine
from megatrain.machine import Machine, detect
from megatrain.plan import Plan, planned
from megatrain.plan.needs import Subject
from megatrain.simulate import Rates, learned
from megatrain.tune.lines import through
from megatrain.tune.together import Sharing, sharing

FEWEST_ROUNDS, MOST_ROUNDS = 3, 10  # of one step of each size
ROUNDS_S = 2.0  # that all rounds may take, where that is more than the fewest
SLOWEST_S = 1.5  # of a step of the larger size


@dataclass(frozen=True)
class Calibration:
    """rates: what was found. rows: the micro-batch sizes that were timed. seconds: that it took, all told."""

    rates: Rates
    rows: tuple[int, ...]
    seconds: float


def calibrate(model: Any, config: EngineConfig, *, batch: int, sequence: int) -> Calibration:
    """Time two layers of a model, which stays as it is and may lie on the meta device, on the device of `config`.

    batch, sequence: of the steps to come. Takes the host memory of two layers and the shell for the time; ValueError
    where there is not enough, or where no layer is trained.
    """
    begun_s = time.monotonic()
    alone = _alone(config)
    part = excerpt(model, getattr(torch, config.dtype))
    subject = Subject.of(part, alone, batch=batch, sequence=sequence)
    machine = detect()
    _require_layers(subject)
    _require_room(_plan(subject, alone, min(2, batch), 1, machine))
    with torch.random.fork_rng(), StreamingEngine(part, alone) as engine:  # dropout draws, and nobody is to notice
        timed = _Timed(engine, subject, alone, machine)
        rates, rows = _at_two_sizes(timed, batch)
        shared = sharing(engine)
    return Calibration(_beside_each_other(rates, shared), rows, time.monotonic() - begun_s)


def _alone(config: EngineConfig) -> EngineConfig:
    """No lane beside another, and nothing that is not needed for timing."""
    return replace(
        config,
        micro_batch_size=1,
        prefetch_depth=0,
        grad_buffers=1,
        resident_layers=0,
        kept_graphs=0,
        keep_attention=False,
        offload_activations=False,
        optimizer_overlap="none",
        optimizer_device="host",
        keep_reference=False,
        throttle=None,
    )


def _plan(subject: Subject, config: EngineConfig, batch: int, rows: int, machine: Machine) -> Plan:
    return planned(replace(subject, batch=batch), replace(config, micro_batch_size=rows), machine)


def _require_layers(subject: Subject) -> None:
    if not any(layout.trained for layout in subject.layouts):
        raise ValueError("no layer is trained, so no gradient leaves that could be timed; choose the settings by hand")


def _require_room(plan: Plan) -> None:
    if not plan.fits:
        raise ValueError(
            "two layers of this model do not fit here, so nothing can be measured; choose the settings by hand, or "
            "free memory: " + "; ".join(plan.problems)
        )


def _at_two_sizes(timed: _Timed, batch: int) -> tuple[Rates, tuple[int, ...]]:
    """One sequence at a time, two of them if there are two, since sums of gradients take time; then many at once.

    In turn, so that a busy neighbour meets both alike.
    """
    small = _Size(min(2, batch), 1)
    seconds = {small: _warm(timed, small)}
    seconds |= _large(timed, batch, seconds[small] / small.batch)
    for _ in range(min(MOST_ROUNDS, max(FEWEST_ROUNDS, int(ROUNDS_S / sum(seconds.values()))))):
        for size in seconds:
            timed.step(size)
    (rates, plan), *others = [(timed.rates(size), timed.plan(size)) for size in seconds]
    for larger in others:
        rates = through(rates, plan, *larger)
    return rates, tuple(size.rows for size in seconds)


def _large(timed: _Timed, batch: int, row_s: float) -> dict[_Size, float]:
    """The largest micro-batch, of two sequences at least, that fits and takes no longer than is worth it."""
    for rows in range(batch, 1, -1):
        if not batch % rows and rows * row_s <= SLOWEST_S and timed.fits(rows):
            with suppress(DeviceMemoryError):  # what kernels take is an estimate
                return {_Size(rows, rows): _warm(timed, _Size(rows, rows))}
    return {}


def _warm(timed: _Timed, size: _Size) -> float:
    """Steps that do not count, as they allocate; seconds of the last."""
    timed.step(size)
    seconds = timed.step(size)
    timed.forget(size)
    return seconds


@dataclass(frozen=True)
class _Size:
    """Of a step: so many sequences, so many of them at a time."""

    batch: int
    rows: int


class _Timed:
    """An engine of two layers, whose steps are told apart by their size."""

    def __init__(self, engine: StreamingEngine, subject: Subject, config: EngineConfig, machine: Machine) -> None:
        self._engine, self._subject, self._config, self._machine = engine, subject, config, machine
        self._classifies = "SequenceClassification" in type(base_of(engine.model)).__name__
        self._steps: dict[_Size, set[int]] = defaultdict(set)

    def fits(self, rows: int) -> bool:
        return self.plan(_Size(rows, rows)).fits

    def plan(self, size: _Size) -> Plan:
        return _plan(self._subject, self._config, size.batch, size.rows, self._machine)

    def step(self, size: _Size) -> float:
        """One step; returns the seconds that it took, its updates included."""
        self._engine.control.set_micro_batch_size(size.rows)
        self._steps[size].add(self._engine.steps_applied)
        begun_s = time.monotonic()
        self._engine.step(*self._batch(size.batch))
        return time.monotonic() - begun_s

    def _batch(self, rows: int) -> tuple[Any, ...]:
        words = base_of(self._engine.model).config.get_text_config().vocab_size
        ids = torch.randint(words, (rows, self._subject.sequence), generator=torch.Generator().manual_seed(0))
        if self._classifies:
            return {"input_ids": ids}, lambda scores: scores.float().mean()
        return ({"input_ids": ids, "labels": ids},)

    def forget(self, size: _Size) -> None:
        self._steps[size].clear()

    def rates(self, size: _Size) -> Rates:
        self._engine.flush()
        steps = self._steps[size]
        return learned(self.plan(size), (span for span in self._engine.recorder.spans() if span.step in steps))


def _beside_each_other(rates: Rates, shared: Sharing) -> Rates:
    link = shared.both_ways * (rates.h2d_bytes_per_s + rates.d2h_bytes_per_s)
    memory = None if shared.beside_adamw == 1 else shared.beside_adamw * (link + rates.adamw_bytes_per_s)
    return replace(rates, both_ways=shared.both_ways, host_memory_bytes_per_s=memory)

"""Settings chosen by `megatrain.tune` beside settings chosen by hand, on CPU lanes as slow as they are told to be.

    python -m benchmarks.auto --out auto.json

Eight Llama layers in three regimes: weights, compute or the optimizer bind. The device has room for a few layers more
than double buffering takes. First every hand setting and the tuned one take turns; then the tuned one and the fastest
few of the others do so once more, and that alone is compared: the best of many noisy figures is better than it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from benchmarks.peers.contender import Contender
from benchmarks.report import Report
from benchmarks.simulated import ROWS, SEQUENCE, llama, throttled
from benchmarks.table import table
from benchmarks.turns import Timing, take_turns
from megatrain import AdamWConfig, EngineConfig, StreamingEngine
from megatrain.anatomy.load import from_config
from megatrain.anatomy.meta import meta_model
from megatrain.config import Throttle
from megatrain.plan import Plan, plan
from megatrain.simulate import Rates
from megatrain.tune import Tuned, calibrate, tune

TUNED = "tuned"
FINALISTS = 3
SPARE_SLOTS = 3
REGIMES: Mapping[str, Mapping[str, float]] = {  # a load, an update: so many times a layer's forward
    "compute binds": {"load": 0.5},
    "transfers bind": {"load": 6},
    "the optimizer binds": {"load": 0.5, "update": 12},
}


@dataclass(frozen=True)
class Timed:
    """A setting in one regime: median seconds of a step in the sweep, and in the final, where it was in it."""

    name: str
    sweep_s: float
    final_s: float | None


@dataclass(frozen=True)
class Regime:
    """settings: all that ran, the fastest of the sweep first. predicted_s: of the tuned one's step."""

    name: str
    chosen: dict[str, Any]
    predicted_s: float
    settings: list[Timed]
    reasons: list[str]

    @property
    def tuned(self) -> Timed:
        return next(each for each in self.settings if each.name == TUNED)

    @property
    def best(self) -> Timed:
        """Of the hand settings, by the final."""
        finalists = [each for each in self.settings if each.name != TUNED and each.final_s is not None]
        return min(finalists, key=lambda each: each.final_s or 0.0)

    @property
    def ratio(self) -> float:
        assert self.tuned.final_s is not None
        assert self.best.final_s is not None
        return self.tuned.final_s / self.best.final_s


class Trained(Contender):
    """An engine that trains on one batch, as a contender."""

    gives_up = ""

    def __init__(self, config: LlamaConfig, engine: EngineConfig) -> None:
        self.engine = StreamingEngine(from_config(config, dtype=torch.float32), engine, AdamWConfig())
        self._ids = torch.randint(config.vocab_size, (ROWS, SEQUENCE), generator=torch.Generator().manual_seed(0))

    def step(self) -> tuple[float, float]:
        result = self.engine.step({"input_ids": self._ids, "labels": self._ids})
        return result.loss, result.grad_norm

    def settle(self) -> None:
        self.engine.flush()

    def close(self) -> None:
        self.engine.close()


def by_hand(base: EngineConfig, model: LlamaConfig) -> Iterator[tuple[str, EngineConfig]]:
    """The settings that people would try, as far as they fit."""
    for depth, buffers, rows, resident in product((0, 1, 2), (1, 2), (1, ROWS), (0, 2)):
        choice = {"prefetch_depth": depth, "grad_buffers": buffers, "resident_layers": resident}
        config = with_choices(base, choice | {"micro_batch_size": rows})
        if plan_of(model, config).held_bytes <= (base.device_memory_bytes or 0):
            yield f"depth {depth}, {buffers} buffers, rows {rows}, resident {resident}", config


def with_choices(base: EngineConfig, choices: dict[str, Any]) -> EngineConfig:
    known = {name: getattr(base, name) for name in ("device", "dtype", "device_memory_bytes", "throttle")}
    return EngineConfig(**known | choices)


def plan_of(model: LlamaConfig, config: EngineConfig) -> Plan:
    return plan(model, config, AdamWConfig(), batch=ROWS, sequence=SEQUENCE)


def base_of(model: LlamaConfig, throttle: Throttle) -> EngineConfig:
    """Room for double buffering of the whole batch and a few layers more."""
    whole = plan_of(model, EngineConfig(device="cpu", dtype="float32", offload_activations=False))
    slot = whole.device["weight slots"] // 2
    room = whole.held_bytes + SPARE_SLOTS * slot
    return EngineConfig(device="cpu", dtype="float32", device_memory_bytes=room, throttle=throttle)


def regime(name: str, model: LlamaConfig, rates: Rates, rounds: int, steps: int, stride: int) -> Regime:
    unthrottled = base_of(model, Throttle())
    base = base_of(model, throttled(plan_of(model, unthrottled), rates, **REGIMES[name]))
    tuned = tune(model, base, batch=ROWS, sequence=SEQUENCE)
    configs = {TUNED: tuned.config, **dict(islice(by_hand(base, model), 0, None, stride))}
    sweep = in_turn(model, configs, rounds, steps)
    fastest = sorted((each for each in configs if each != TUNED), key=lambda each: sweep[each].median_s)[:FINALISTS]
    final = in_turn(model, {each: configs[each] for each in (TUNED, *fastest)}, 2 * rounds, steps)
    return _regime(name, tuned, sweep, final)


def in_turn(model: LlamaConfig, configs: Mapping[str, EngineConfig], rounds: int, steps: int) -> dict[str, Timing]:
    with ExitStack() as stack:
        engines = {name: Trained(model, config) for name, config in configs.items()}
        for each in engines.values():
            stack.callback(each.close)
            each.step()
        timings: dict[str, Timing] = {}
        take_turns(engines, timings, rounds=rounds, steps=steps)
        return timings


def _regime(name: str, tuned: Tuned, sweep: dict[str, Timing], final: dict[str, Timing]) -> Regime:
    timed = [
        Timed(each, timing.median_s, final[each].median_s if each in final else None) for each, timing in sweep.items()
    ]
    chosen = tuned.plan.needs.knobs
    size = tuned.plan.needs.size
    settings = asdict(chosen) | {
        "micro_batch_size": size.micro_batch_tokens // size.sequence,
        "offload_activations": tuned.plan.needs.offload,
        "keep_attention": tuned.plan.needs.keeps_attention,
        "kept_graphs": tuned.plan.needs.kept_graphs,
    }
    return Regime(name, settings, tuned.step_s, sorted(timed, key=lambda each: each.sweep_s), tuned.reasons)


def table_of(found: Regime) -> str:
    header = [f"{found.name}, ms a step", "sweep", "final"]
    rows = [[each.name, 1e3 * each.sweep_s, each.final_s and 1e3 * each.final_s] for each in found.settings]
    chosen = ", ".join(f"{knob}={value}" for knob, value in found.chosen.items())
    told = f"tuned: {chosen}; predicted {1e3 * found.predicted_s:.0f} ms; {found.ratio:.3f} of the best by hand"
    return f"{table(header, rows)}\n{told}\n"


def run(layers: int, hidden: int, rounds: int, steps: int, report: Report, *, stride: int = 1) -> list[Regime]:
    """All regimes. stride: of the hand settings only every so many."""
    torch.set_num_threads(1)  # the other cores are for the copying
    model, found = llama(layers, hidden), []
    measured = calibrate(meta_model(model), base_of(model, Throttle()), batch=ROWS, sequence=SEQUENCE)
    for name in REGIMES:
        found.append(regime(name, model, measured.rates, rounds, steps, stride))
        report.put(name, asdict(found[-1]) | {"tuned ÷ best by hand": found[-1].ratio})
        print(table_of(found[-1]))
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 8), ("hidden", 256), ("rounds", 3), ("steps", 2)):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--tiny", action="store_true", help="a model of toy size, to see that everything runs")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if options.tiny:
        run(2, 32, 1, 1, Report(options.out), stride=6)
    else:
        run(options.layers, options.hidden, options.rounds, options.steps, Report(options.out))


if __name__ == "__main__":
    main()

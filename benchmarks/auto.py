"""Settings chosen by `megatrain.tune` beside settings chosen by hand, on CPU lanes as slow as they are told to be.

    python -m benchmarks.auto --out auto.json

Eight Llama layers in three regimes: weights, compute or the optimizer bind. The device has room for a few layers more
than double buffering takes. First every hand setting and the tuned one take turns; then the tuned one and the fastest
few of the others do so once more, and that alone is compared: the best of many noisy figures is better than it is.
Each round begins with another. The tuned one is there twice in the end: what equal settings differ by is noise.
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

TUNED, AGAIN = "tuned", "tuned, once more"
FINALISTS, FINAL_ROUNDS = 3, 4  # rounds of the final for each of the sweep
SPARE_SLOTS = 3
REGIMES: Mapping[str, Mapping[str, float]] = {  # a load, an update: so many times a layer's forward
    "compute binds": {"load": 0.5},
    "transfers bind": {"load": 6},
    "the optimizer binds": {"load": 0.5, "update": 12},
}


@dataclass(frozen=True)
class Timed:
    """A setting in one regime: median seconds of a step in the sweep, and in the final, where it was in it.

    fastest_s: of the final's steps, which other work on the machine disturbs least.
    """

    name: str
    sweep_s: float | None
    final_s: float | None
    fastest_s: float | None


@dataclass(frozen=True)
class Regime:
    """settings: all that ran, the fastest of the sweep first. predicted_s: of the tuned one's step."""

    name: str
    chosen: dict[str, Any]
    predicted_s: float
    settings: list[Timed]
    reasons: list[str]

    @property
    def ratios(self) -> dict[str, float]:
        """In the final: tuned ÷ best by hand, by medians and by the fastest steps; and ÷ itself, which is noise."""
        median = {each.name: each.final_s for each in self.settings if each.final_s is not None}
        fastest = {each.name: each.fastest_s for each in self.settings if each.fastest_s is not None}
        return {
            "medians": median[TUNED] / _best_by_hand(median),
            "fastest": fastest[TUNED] / _best_by_hand(fastest),
            "noise": median[TUNED] / median[AGAIN],
        }


def _best_by_hand(seconds: Mapping[str, float]) -> float:
    return min(value for name, value in seconds.items() if name not in (TUNED, AGAIN))


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
    finalists = {TUNED: tuned.config, AGAIN: tuned.config} | {each: configs[each] for each in fastest}
    final = in_turn(model, finalists, FINAL_ROUNDS * rounds, steps)
    return _regime(name, tuned, sweep, final)


def in_turn(model: LlamaConfig, configs: Mapping[str, EngineConfig], rounds: int, steps: int) -> dict[str, Timing]:
    with ExitStack() as stack:
        engines = {name: Trained(model, config) for name, config in configs.items()}
        for each in engines.values():
            stack.callback(each.close)
            each.step()
        timings: dict[str, Timing] = {}
        names = [*engines]
        for first in range(rounds):
            order = [names[(first + turn) % len(names)] for turn in range(len(names))]
            take_turns({name: engines[name] for name in order}, timings, rounds=1, steps=steps)
        return timings


def _regime(name: str, tuned: Tuned, sweep: dict[str, Timing], final: dict[str, Timing]) -> Regime:
    timed = [_timed(each, sweep.get(each), final.get(each)) for each in {**sweep, **final}]
    chosen = tuned.plan.needs.knobs
    size = tuned.plan.needs.size
    settings = asdict(chosen) | {
        "micro_batch_size": size.micro_batch_tokens // size.sequence,
        "offload_activations": tuned.plan.needs.offload,
        "keep_attention": tuned.plan.needs.keeps_attention,
        "kept_graphs": tuned.plan.needs.kept_graphs,
    }
    return Regime(name, settings, tuned.step_s, sorted(timed, key=_in_order), tuned.reasons)


def _timed(name: str, sweep: Timing | None, final: Timing | None) -> Timed:
    ended = (None, None) if final is None else (final.median_s, min(final.steps_s))
    return Timed(name, sweep and sweep.median_s, *ended)


def _in_order(timed: Timed) -> float:
    return timed.sweep_s or timed.final_s or 0.0


def table_of(found: Regime) -> str:
    header = [f"{found.name}, ms a step", "sweep", "final", "fastest"]
    rows = [[each.name, *map(_ms, (each.sweep_s, each.final_s, each.fastest_s))] for each in found.settings]
    chosen = ", ".join(f"{knob}={value}" for knob, value in found.chosen.items())
    ratios = ", ".join(f"{name} {ratio:.3f}" for name, ratio in found.ratios.items())
    told = f"tuned: {chosen}; predicted {1e3 * found.predicted_s:.0f} ms; tuned ÷ best by hand: {ratios}"
    return f"{table(header, rows)}\n{told}\n"


def _ms(seconds: float | None) -> float | None:
    return seconds and 1e3 * seconds


def run(layers: int, hidden: int, rounds: int, steps: int, report: Report, *, stride: int = 1) -> list[Regime]:
    """All regimes. stride: of the hand settings only every so many."""
    torch.set_num_threads(1)  # the other cores are for the copying
    model, found = llama(layers, hidden), []
    measured = calibrate(meta_model(model), base_of(model, Throttle()), batch=ROWS, sequence=SEQUENCE)
    for name in REGIMES:
        found.append(regime(name, model, measured.rates, rounds, steps, stride))
        report.put(name, asdict(found[-1]) | {"tuned ÷ best by hand": found[-1].ratios})
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

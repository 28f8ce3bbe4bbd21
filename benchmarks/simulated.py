"""Simulated against measured step times: eight Llama layers on CPU lanes as slow as they are told to be.

    python -m benchmarks.simulated --out simulated.json

Rates are measured once, on two layers with no lane beside another. Every setting is then predicted by them, trained,
and predicted once more by the rates that its own record shows: what is left between those two is the model's error, the
rest is lanes that slow each other, or a machine that is not quiet.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from transformers import LlamaConfig

from benchmarks.report import Report
from benchmarks.table import Cell, table
from megatrain import AdamWConfig, EngineConfig, StreamingEngine
from megatrain.anatomy.load import from_config
from megatrain.config import Throttle
from megatrain.plan import Plan, plan
from megatrain.schedule import Kind, Op
from megatrain.simulate import Rates, learned, measure
from megatrain.simulate.play import play
from megatrain.simulate.work import Works

ROWS, SEQUENCE = 4, 128
WARM_UP = 2


@dataclass(frozen=True)
class Row:
    """predicted: by rates measured before; by_own_rates: by those of the run itself. Seconds a step."""

    name: str
    predicted_s: float
    measured_s: float
    quartiles_s: tuple[float, float]
    by_own_rates_s: float

    @property
    def ratio(self) -> float:
        return self.predicted_s / self.measured_s

    @property
    def own_ratio(self) -> float:
        return self.by_own_rates_s / self.measured_s


def llama(layers: int, hidden: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=512,
    )


def plan_of(config: LlamaConfig, **choices: Any) -> Plan:
    engine = EngineConfig(device="cpu", dtype="float32", offload_activations=False, **choices)
    return plan(config, engine, AdamWConfig(), batch=ROWS, sequence=SEQUENCE)


def throttled(pace: Plan, rates: Rates, load: float | None = None, update: float | None = None) -> Throttle:
    """Lanes on which a load, or an update, takes so many times as long as a layer's forward."""
    works = Works(pace)
    forward_s = rates.seconds(forward := Op(0, Kind.FORWARD, 0, 0), works.of(forward))
    loaded, updated = (works.of(Op(0, kind, 0, slot=0)).nbytes for kind in (Kind.LOAD, Kind.UPDATE))
    return Throttle(
        link_bytes_per_s=None if load is None else loaded / (load * forward_s),
        update_bytes_per_s=None if update is None else updated / (update * forward_s),
    )


def settings(pace: Plan, rates: Rates) -> dict[str, dict[str, Any]]:
    """Slow lanes, and what is done about them."""
    throttle = partial(throttled, pace, rates)
    return {
        "as fast as it is": {},
        "load ½ forward": {"throttle": throttle(0.5)},
        "load ½ forward, depth 0": {"throttle": throttle(0.5), "prefetch_depth": 0},
        "load 2 forward": {"throttle": throttle(2)},
        "load 2 forward, depth 2": {"throttle": throttle(2), "prefetch_depth": 2},
        "load 2 forward, depth 0": {"throttle": throttle(2), "prefetch_depth": 0},
        "load 4 forward, 1 gradient buffer": {"throttle": throttle(4), "grad_buffers": 1},
        "load 4 forward, 4 resident layers": {"throttle": throttle(4), "resident_layers": 4},
        "update 3 forward": {"throttle": throttle(0.5, 3)},
        "update 3 forward, not overlapped": {"throttle": throttle(0.5, 3), "optimizer_overlap": "none"},
        "load 2 forward, 2 micro-batches": {"throttle": throttle(2), "micro_batch_size": ROWS // 2},
    }


def compare(config: LlamaConfig, name: str, choices: dict[str, Any], rates: Rates, steps: int) -> Row:
    """Predict a setting, then train it."""
    wanted, throttle = plan_of(config, **choices), choices.get("throttle", Throttle())
    ids = torch.randint(512, (ROWS, SEQUENCE), generator=torch.Generator().manual_seed(0))
    with StreamingEngine(from_config(config, dtype=torch.float32).train(), wanted.config) as engine:
        for _ in range(WARM_UP + steps):
            engine.step({"input_ids": ids, "labels": ids})
        engine.flush()
        records = engine.recorder.snapshot()
    seconds = [record.end_s - record.start_s for record in records.steps[WARM_UP:]]
    own = learned(wanted, (span for span in records.spans if span.step >= WARM_UP))
    first, _, third = quantiles(seconds, n=4)
    return Row(
        name,
        play(wanted, rates.throttled(throttle)).step_s,
        median(seconds),
        (first, third),
        play(wanted, own).step_s,
    )


def table_of(rows: list[Row]) -> str:
    header = ["milliseconds a step", "predicted", "measured", "quartiles", "predicted ÷ measured", "by its own rates"]
    return table(header, [_cells(row) for row in rows])


def _cells(row: Row) -> list[Cell]:
    quartiles = "–".join(f"{1e3 * s:.0f}" for s in row.quartiles_s)
    return [row.name, 1e3 * row.predicted_s, 1e3 * row.measured_s, quartiles, row.ratio, row.own_ratio]


def run(layers: int, hidden: int, steps: int) -> list[Row]:
    torch.set_num_threads(1)  # the other cores are for the copying
    config = llama(layers, hidden)
    rates = measure(config, plan_of(config).config, batch=ROWS, sequence=SEQUENCE)
    every = settings(plan_of(config), rates)
    return [compare(config, name, choices, rates, steps) for name, choices in every.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = run(options.layers, options.hidden, options.steps)
    print(table_of(rows))
    Report(options.out).put("rows", [asdict(row) for row in rows])


if __name__ == "__main__":
    main()

"""What the engine's own record says of timed steps, and AdamW by itself."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from benchmarks import adamw
from benchmarks.contenders import Ours
from benchmarks.turns import Timing
from megatrain.trace import StepMetrics, step_metrics


def pipeline(ours: Ours, timing: Timing) -> dict[str, Any]:
    """Medians over the timed steps: seconds busy and waiting, shares hidden under compute, rates."""
    spans = ours.engine.recorder.spans()
    metrics = [step_metrics(spans, ours.records[index]) for index in timing.timed]
    names = ("h2d_hidden", "d2h_hidden", "update_hidden", "h2d_bytes_per_s", "d2h_bytes_per_s", "model_flops_per_s")
    figures = {name: _median(metrics, lambda m, name=name: getattr(m, name)) for name in names}  # type: ignore[misc]
    return {
        "busy_s": _medians(metrics, lambda m: m.busy_s),
        "waits_s": _medians(metrics, lambda m: m.waits_s),
        **figures,
    }


def _median(metrics: list[StepMetrics], value: Callable[[StepMetrics], float | None]) -> float | None:
    found = [x for x in map(value, metrics) if x is not None]
    return statistics.median(found) if found else None


def _medians(metrics: list[StepMetrics], values: Callable[[StepMetrics], Any]) -> dict[str, float]:
    """For each key of a metric that holds several."""
    keys = dict.fromkeys(key for m in metrics for key in values(m))
    return {str(key): statistics.median(values(m)[key] for m in metrics) for key in keys}


def optimizer_alone(params: int, rounds: int) -> list[dict[str, Any]]:
    """AdamW beside plain copies, for every sensible number of threads; see benchmarks.adamw."""
    before = torch.get_num_threads()
    try:
        cases = adamw.make_cases(params)
        rows = [row for threads in adamw.thread_counts() for row in adamw.measure(cases, threads, params, rounds)]
    finally:
        torch.set_num_threads(before)  # torch's own cases turn it
    return [asdict(row) for row in rows]

"""What the engine's own record says of timed steps, and AdamW by itself."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from benchmarks import adamw
from megatrain.trace import Span, StepMetrics, StepRecord, step_metrics


def pipeline(spans: list[Span], steps: list[StepRecord]) -> dict[str, Any]:
    """Medians over these steps: seconds busy and waiting, shares hidden under compute, rates."""
    metrics = [step_metrics(spans, step) for step in steps]
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


def optimizer_alone(params: int, rounds: int, *, deepspeed: bool = False) -> list[dict[str, Any]]:
    """AdamW beside plain copies, for every sensible number of threads; see benchmarks.adamw."""
    return [asdict(row) for row in adamw.measure_all(params, rounds, deepspeed=deepspeed)]

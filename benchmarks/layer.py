"""FLOP/s of one layer, forward and with its backward, by the number of sequences in a micro-batch.

It says from which micro-batch on a card is busy: below it more sequences cost nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.attention import catch_up, layer_of, layer_run
from benchmarks.models import step_flops
from benchmarks.shapes import Shape
from benchmarks.table import Cell, table


def measure(
    device: str, shape: Shape, rows: list[int], tokens: int, rounds: int, save: Callable[[dict[str, Any]], None]
) -> None:
    """bfloat16, causal, no padding, sequences of `tokens`; each number of rows in turn."""
    model = layer_of(shape, device)
    flops = step_flops(shape.with_layers(2), 1, tokens) - step_flops(shape.with_layers(1), 1, tokens)
    runs = {count: layer_run(model, count, tokens) for count in rows}
    times: dict[int, list[float]] = {}
    for number in range(rounds + 1):
        for count, run in list(runs.items()):
            try:
                seconds = _seconds(run, device)
            except torch.OutOfMemoryError:
                del runs[count]
                continue
            if number:  # the first chooses kernels
                times.setdefault(count, []).append(seconds)
        save({str(count): _figures(count, found, flops) for count, found in times.items()})


def _seconds(run: Callable[[], None], device: str) -> float:
    catch_up(device)
    start_s = time.perf_counter()
    run()
    catch_up(device)
    return time.perf_counter() - start_s


def _figures(rows: int, seconds: list[float], flops: int) -> dict[str, Any]:
    median = statistics.median(seconds)
    return {"seconds": median, "flops_per_s": rows * flops / median, "every_second": seconds}


def summary(found: dict[str, Any], tokens: int) -> str:
    rows: list[list[Cell]] = [
        [f"{count} × {tokens}", 1e3 * its["seconds"], its["flops_per_s"] / 1e12] for count, its in found.items()
    ]
    return table(["a layer, forward and backward", "ms", "TFLOP/s"], rows)

"""One layer forward and backward by every kernel of torch's attention, at several lengths of a sequence."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.models import make_model
from benchmarks.shapes import Shape
from benchmarks.table import Cell, table
from megatrain.anatomy.kernels import BACKENDS, TORCH, attention_by, rehearsed

KERNELS = (TORCH, *BACKENDS)
NO_MEMORY, DID_NOT_RUN, FAILED = "no memory", "did not run", "failed"

Run = Callable[[], None]


def measure(
    device: str, shape: Shape, lengths: list[int], tokens: int, rounds: int, save: Callable[[dict[str, Any]], None]
) -> None:
    """bfloat16, causal, no padding. tokens: of a micro-batch; one sequence where a length is more. In turn."""
    model = layer_of(shape, device)
    found: dict[str, Any] = {}
    for length in lengths:
        run = layer_run(model, max(1, tokens // length), length)
        why_not = {name: _why_not(name, run) for name in KERNELS}
        times: dict[str, list[float]] = {name: [] for name, reason in why_not.items() if reason is None}
        for _ in range(rounds):
            for name, seconds in times.items():
                seconds.append(_seconds(name, run, device))
        found[str(length)] = {
            "rows": max(1, tokens // length),
            "seconds": {name: statistics.median(seconds) for name, seconds in times.items()},
            "every_second": times,
            "without": {name: reason for name, reason in why_not.items() if reason is not None},
        }
        save(found)


def layer_of(shape: Shape, device: str) -> Any:
    """A bfloat16 model of one layer, on the device."""
    return make_model(replace(shape, layers=1, vocab=256), torch.bfloat16, made_on=device).to(device)


def layer_run(model: Any, rows: int, length: int) -> Run:
    """What runs the layer forward and backward on random input."""
    hidden = torch.randn(rows, length, model.config.hidden_size, dtype=torch.bfloat16, device=model.device)
    hidden.requires_grad_()
    positions = torch.arange(length, device=model.device)[None]
    embeddings = model.model.rotary_emb(hidden.detach(), positions)
    (layer,) = model.model.layers

    def run() -> None:
        output = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=embeddings)
        output = output[0] if isinstance(output, tuple) else output
        torch.autograd.grad(output, [hidden, *layer.parameters()], torch.ones_like(output))

    return run


def _why_not(name: str, run: Run) -> str | None:
    """Why a kernel is not timed; None if it is. What ran is warm by then."""
    try:
        seen = rehearsed(name, run, "a layer")
    except torch.OutOfMemoryError:
        return NO_MEMORY
    if seen is None:
        return FAILED
    fused = name in BACKENDS and name != "math"
    return DID_NOT_RUN if fused and name not in seen.kernels else None


def _seconds(name: str, run: Run, device: str) -> float:
    catch_up(device)
    start_s = time.perf_counter()
    with attention_by(name):
        run()
    catch_up(device)
    return time.perf_counter() - start_s


def catch_up(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def summary(found: dict[str, Any]) -> str:
    rows: list[list[Cell]] = [
        [f"{its['rows']} × {length}", *(_cell(its, name) for name in KERNELS)] for length, its in found.items()
    ]
    return table(["a layer, ms", *KERNELS], rows)


def _cell(its: dict[str, Any], name: str) -> Cell:
    return its["without"][name] if name in its["without"] else 1e3 * its["seconds"][name]

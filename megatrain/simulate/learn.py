"""Rates of this machine for one model: from a short run of two of its layers, or from the records of any run."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from megatrain.anatomy.load import from_config
from megatrain.config import EngineConfig
from megatrain.engine import StreamingEngine
from megatrain.plan import Plan
from megatrain.plan.needs import Subject
from megatrain.plan.plans import planned
from megatrain.schedule import SHELL, Kind, Op
from megatrain.simulate.rates import Rates
from megatrain.simulate.work import Works
from megatrain.trace import Span

LAYERS = 2  # of each kind that alternates there is one
STEPS = 4  # the first is left out: it allocates

BYTES = {"load": "h2d_bytes_per_s", "unload": "d2h_bytes_per_s", "update": "adamw_bytes_per_s"}
FLOPS = ("forward", "backward", "head")


def measure(model_config: Any, config: EngineConfig, *, batch: int, sequence: int) -> Rates:
    """Train two layers of a configuration's model for a moment on random tokens, with no lane beside another."""
    cut = _cut(model_config)
    alone = replace(
        config,
        prefetch_depth=0,
        resident_layers=0,
        kept_graphs=0,
        keep_attention=False,
        optimizer_overlap="none",
        optimizer_device="host",
        throttle=None,
    )
    model = from_config(cut, dtype=getattr(torch, config.dtype)).train()
    ids = torch.randint(cut.get_text_config().vocab_size, (batch, sequence), generator=torch.Generator().manual_seed(0))
    plan = planned(Subject.of(model, alone, batch=batch, sequence=sequence), alone, None)
    with StreamingEngine(model, alone) as engine:
        for _ in range(STEPS):
            engine.step({"input_ids": ids, "labels": ids})
        engine.flush()
        return learned(plan, (span for span in engine.recorder.spans() if span.step))


def learned(plan: Plan, spans: Iterable[Span]) -> Rates:
    """The rates that a run's own record shows, each the median; `plan` is of the same model, batch and settings."""
    works, bytes_per_s, flops_per_s, fixed_s = Works(plan), _Lists(), _Lists(), _Lists()
    for span in spans:
        seconds = span.end_s - span.start_s
        if span.op in FLOPS and (span.layer is not SHELL or span.op == "head"):
            op = Op(0, Kind(span.op), span.layer, span.micro_batch)
            flops_per_s[span.op].append(works.of(op).flops / seconds)
        elif span.lane == "compute":
            fixed_s[span.op].append(seconds)
        elif span.op in BYTES and span.layer is not SHELL:
            bytes_per_s[BYTES[span.op]].append(span.nbytes / seconds)
    lanes: dict[str, Any] = _medians(bytes_per_s)
    return Rates(**lanes, flops_per_s=_medians(flops_per_s), fixed_s=_medians(fixed_s))


class _Lists(defaultdict[str, list[float]]):
    def __init__(self) -> None:
        super().__init__(list)


def _medians(values: _Lists) -> dict[str, float]:
    return {name: median(found) for name, found in values.items()}


def _cut(model_config: Any) -> Any:
    cut = copy.deepcopy(model_config)
    inner = cut.get_text_config()
    inner.num_hidden_layers = LAYERS
    if getattr(inner, "layer_types", None):
        inner.layer_types = inner.layer_types[:LAYERS]
    return cut

"""A run slow enough to be watched and steered by hand: six small layers behind a slow link."""

from __future__ import annotations

from pathlib import Path

import psutil
from reference import make_batch
from tiny_models import tiny

from megatrain import AdamWConfig, EngineConfig, StreamingEngine, TrainingRun
from megatrain.config import Throttle
from megatrain.folder import RunFolder

LAYERS = 6
ENDLESS = 1_000_000
LAYER_S = 0.03  # about what a layer takes to arrive
MEMORY_BYTES = 82_000  # for prefetch depth 3, not for 4


def make_engine() -> StreamingEngine:
    model = tiny(layers=LAYERS)
    layer_bytes = 4 * sum(parameter.numel() for parameter in model.layers[0].parameters())
    throttle = Throttle(link_bytes_per_s=layer_bytes / LAYER_S, update_bytes_per_s=4 * layer_bytes / LAYER_S)
    config = EngineConfig(
        device="cpu", dtype="float32", micro_batch_size=2, throttle=throttle, device_memory_bytes=MEMORY_BYTES
    )
    return StreamingEngine(model, config, AdamWConfig(lr=1e-3))


def slow_run(folder: str | Path, steps: int = ENDLESS) -> TrainingRun:
    """A run in a process of its own, not started."""
    batches = [make_batch(tiny(), 6, 24, seed=seed) for seed in range(3)]
    return TrainingRun(make_engine, batches, steps=steps, run_dir=folder)


def end_run(path: Path) -> None:
    """Kill whatever still trains in a folder."""
    folder = RunFolder(path)
    if folder.run.exists() and not folder.status().state.over:
        psutil.Process(folder.info().process_id).kill()

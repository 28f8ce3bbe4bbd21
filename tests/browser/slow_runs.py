"""A run slow enough to be watched and steered by hand: six small layers behind a slow link."""

from __future__ import annotations

from pathlib import Path

import psutil
from families import build
from reference import make_batch
from tiny_models import tiny

from megatrain import AdamWConfig, EngineConfig, StreamingEngine, TrainingRun
from megatrain.config import Throttle
from megatrain.data import PromptBatch, records_from_rows, tokenize_prompts, train_tokenizer
from megatrain.folder import RunFolder
from megatrain.run import Evaluating

LAYERS = 6
ENDLESS = 1_000_000
LAYER_S = 0.03  # about what a layer takes to arrive
VOCAB = 300
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


# ---- one that looks at other data, too ----

PROMPT = "<script>document.title = 'taken over'</script>"


def make_llama() -> StreamingEngine:
    throttle = Throttle(link_bytes_per_s=8e6)
    config = EngineConfig(device="cpu", dtype="float32", micro_batch_size=2, throttle=throttle)
    return StreamingEngine(build("llama", vocab_size=VOCAB), config, AdamWConfig(lr=1e-3))


def prompts() -> PromptBatch:
    tokenizer = train_tokenizer(["the cat sat on the mat"] * 4, vocab_size=VOCAB)
    rows = [{"prompt": PROMPT}, {"prompt": "on the mat"}]
    return tokenize_prompts(records_from_rows(rows, format="prompt"), tokenizer, 96).batch([0, 1])


def looking_run(folder: str | Path, steps: int = ENDLESS) -> TrainingRun:
    """A run that evaluates and answers every second step, in a process of its own, not started."""
    batches = [make_batch(build("llama"), 4, 24, seed=seed) for seed in range(3)]
    looks = Evaluating(every=2, batches=lambda: batches[:1], prompts=prompts, max_new_tokens=6)
    return TrainingRun(make_llama, batches, steps=steps, run_dir=folder, evaluating=looks)


def end_run(path: Path) -> None:
    """Kill whatever still trains in a folder."""
    folder = RunFolder(path)
    if folder.run.exists() and not folder.status().state.over:
        psutil.Process(folder.info().process_id).kill()

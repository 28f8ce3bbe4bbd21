"""The main job in small: gpt-oss-120b's architecture at a size that trains on this machine in minutes.

The notebook and `megatrain demo` call the same functions. Nothing here needs a GPU, a hub or a data set.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from dashboard.page import write_page
from megatrain.anatomy.load import answer, from_config, load_model, load_tokenizer, local_weights
from megatrain.anatomy.presets import gpt_oss_120b
from megatrain.config import AdamWConfig, EngineConfig, Throttle
from megatrain.data import Batches, TokenBatch, docstring_records, tokenize, train_tokenizer
from megatrain.engine import StepResult, StreamingEngine
from megatrain.machine import Machine, detect, measure
from megatrain.plan import Plan, plan
from megatrain.run import TrainingRun, cosine_schedule

HUB_NAME = "openai/gpt-oss-120b"
SEQUENCE, BATCH, MICRO_BATCH, VOCABULARY = 128, 8, 4, 2048
QUESTION = "# posixpath\ndef join(a, *p):"  # in the form of the training records: module, then signature


@dataclass(frozen=True)
class Size:
    """A rung between a toy and gpt-oss-120b; everything else stays as the real model has it."""

    hidden: int
    layers: int
    experts: int
    heads: int

    def config(self) -> Any:
        """gpt-oss-120b's configuration at this size, for the demo's own vocabulary."""
        config = copy.deepcopy(gpt_oss_120b())
        config.hidden_size = config.intermediate_size = self.hidden
        config.num_hidden_layers = self.layers
        config.num_local_experts = self.experts
        config.num_attention_heads, config.num_key_value_heads = self.heads, max(1, self.heads // 8)
        config.layer_types = config.layer_types[: self.layers]
        config.vocab_size = VOCABULARY
        config.bos_token_id, config.eos_token_id, config.pad_token_id = 0, 1, 2  # as train_tokenizer numbers them
        return config


SIZES = (
    Size(hidden=128, layers=6, experts=8, heads=8),
    Size(hidden=192, layers=8, experts=8, heads=8),
    Size(hidden=256, layers=8, experts=8, heads=8),
    Size(hidden=384, layers=12, experts=16, heads=8),
    Size(hidden=512, layers=12, experts=16, heads=16),
    Size(hidden=768, layers=16, experts=32, heads=16),
    Size(hidden=1024, layers=16, experts=32, heads=32),
    Size(hidden=2048, layers=24, experts=32, heads=64),
    Size(hidden=2880, layers=24, experts=32, heads=64),
    Size(hidden=2880, layers=36, experts=128, heads=64),
)

CALIBRATION, CALIBRATIONS, CALIBRATION_S = SIZES[2], 3, 2.0  # the fastest counts: other work may slow some of them


@dataclass(frozen=True)
class Choice:
    """What the demo will train, and why. layer_forward_s: about what a layer's forward takes, where it was asked."""

    config: Any
    engine: EngineConfig
    plan: Plan
    folder: Path | None  # of the real weights, if they are here and fit
    reason: str
    layer_forward_s: float | None = None

    @property
    def lr(self) -> float:
        return 1e-5 if self.folder else 2e-3

    def model(self) -> Any:
        """Load or make the model."""
        dtype = getattr(torch, self.engine.dtype)
        return load_model(self.folder, dtype=dtype) if self.folder else from_config(self.config, dtype=dtype)


def achieved_flops_per_s(machine: Machine) -> float:
    """Model FLOP/s of a small size trained plainly here for a moment: cautious, since larger ones do better."""
    device = "cuda" if machine.gpu else "cpu"
    config = CALIBRATION.config()
    model = from_config(config, dtype=torch.float32).to(device)
    ids = torch.randint(3, VOCABULARY, (MICRO_BATCH, SEQUENCE), device=device)
    seconds: list[float] = []
    while len(seconds) < CALIBRATIONS or sum(seconds) < CALIBRATION_S:
        start = time.perf_counter()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    active = plan_of(config, EngineConfig(), machine).active_parameters
    return 6 * active * ids.numel() / min(seconds)


def plan_of(
    config: Any, engine: EngineConfig, machine: Machine, *, batch: int = BATCH, sequence: int = SEQUENCE
) -> Plan:
    """A configuration planned on a machine, by default with the demo's batch."""
    return plan(config, engine, AdamWConfig(), batch=batch, sequence=sequence, machine=machine)


def choose(machine: Machine, *, minutes: float, steps: int) -> Choice:
    """The real model if it fits and its weights are here; else the largest size that trains in `minutes`."""
    engine = EngineConfig(dtype="bfloat16" if machine.gpu else "float32", micro_batch_size=MICRO_BATCH)
    real = plan_of(gpt_oss_120b(), engine, machine)
    folder = local_weights(HUB_NAME) if real.fits else None
    if folder is not None:
        return Choice(gpt_oss_120b(), engine, real, folder, f"{HUB_NAME} fits and its weights are in {folder}")
    rate = achieved_flops_per_s(machine)
    best: Choice | None = None
    for size in SIZES:
        planned = plan_of(size.config(), engine, machine)
        total_s = steps * 8 * planned.active_parameters * BATCH * SEQUENCE / rate  # 8: with one recompute
        if best is not None and (not planned.fits or total_s > 60 * minutes):
            break
        planned.require()
        reason = (
            f"{size.layers} layers × {size.hidden} hidden × {size.experts} experts is the largest step of the ladder "
            f"that fits and trains {steps} steps in about {max(total_s / 60, 0.1):.1f} minutes here, "
            f"at {rate / 1e9:.0f} GFLOP/s as measured"
        )
        best = Choice(size.config(), engine, planned, None, reason, total_s / (steps * 4 * size.layers))
    assert best is not None
    return best


def with_visible_link(choice: Choice, load: float = 0.3) -> Choice:
    """Slow the link down until a layer takes about `load` times as long to load as its forward does.

    Without a GPU a load is a copy within host memory, too short to be seen. Most of what this adds is hidden.
    """
    if choice.layer_forward_s is None:
        return choice
    rate = choice.plan.subject.layouts[0].nbytes / (load * choice.layer_forward_s)
    reason = f"{choice.reason}; its link is slowed to {rate / 1e6:.0f} MB/s each way, to be seen at work"
    return replace(choice, engine=replace(choice.engine, throttle=Throttle(link_bytes_per_s=rate)), reason=reason)


def training_data(choice: Choice) -> tuple[Any, Batches[TokenBatch]]:
    """A tokenizer and batches of signature-and-docstring pairs from Python's own standard library."""
    records = docstring_records()
    if choice.folder is not None:
        tokenizer = load_tokenizer(choice.folder)
    else:
        texts = [message["content"] for row in records.rows for message in row["messages"]]
        tokenizer = train_tokenizer(texts, vocab_size=VOCABULARY)
    dataset = tokenize(records, tokenizer, SEQUENCE)
    return tokenizer, Batches(dataset, BATCH, seed=0)


def make_engine(choice: Choice) -> StreamingEngine:
    """An engine around the chosen model, in whichever process this is called."""
    return StreamingEngine(choice.model(), choice.engine, AdamWConfig(lr=choice.lr))


def training_run(
    choice: Choice,
    batches: Batches[TokenBatch],
    *,
    steps: int,
    run_dir: Path,
    on_step: Callable[[int, StepResult], None] | None = None,
    process: bool = False,
    machine: Machine | None = None,
) -> TrainingRun:
    """A run over the batches, ready to start; in a process of its own it leaves the model in its folder."""
    return TrainingRun(
        partial(make_engine, choice) if process else make_engine(choice),
        batches,
        steps=steps,
        lr_schedule=cosine_schedule(choice.lr, steps, warmup=max(1, steps // 10), floor=choice.lr / 10),
        run_dir=run_dir,
        on_step=on_step,
        save=process,
        machine=machine,
    )


def run_demo(run_dir: Path, *, steps: int, minutes: float) -> bool:
    """The whole job in a terminal, with a progress bar; returns whether the loss fell and the model came back."""
    machine = measure(detect())
    print(f"this machine: {machine}")
    choice = choose(machine, minutes=minutes, steps=steps)
    print(f"model: {choice.reason}\n\n{choice.plan}\n")
    tokenizer, batches = training_data(choice)
    print(f"data: {batches.dataset.counts}")
    with tqdm(total=steps, unit="step", desc="training") as bar:

        def on_step(done: int, result: StepResult) -> None:
            bar.set_postfix(loss=f"{result.loss:.3f}", grad_norm=f"{result.grad_norm:.2f}")
            bar.update()

        run = training_run(choice, batches, steps=steps, run_dir=run_dir, on_step=on_step, machine=machine)
        run.start().wait()
    return _finish(run, tokenizer, run_dir)


def _finish(run: TrainingRun, tokenizer: Any, run_dir: Path) -> bool:
    write_page(run_dir / "timeline.html", run.engine.recorder, "MegaTrain demo: what every lane did")
    save(run, tokenizer, run_dir / "model")
    run.engine.close()
    first, last = mean_loss(run.results[:5]), mean_loss(run.results[-5:])
    print(f"loss: {first:.3f} in the first five steps, {last:.3f} in the last five")
    print(f"timeline: {run_dir / 'timeline.html'}\nPerfetto trace: {run_dir / 'trace.json.gz'}")
    print(f"model: {run_dir / 'model'}, loaded back and asked for the docstring of\n{QUESTION}")
    print(f"→ {sample(run_dir / 'model')}")
    return last < first


def mean_loss(results: list[StepResult]) -> float:
    """Mean of the steps' losses, each by its own tokens."""
    return sum(r.loss * r.tokens for r in results) / sum(r.tokens for r in results)


def save(run: TrainingRun, tokenizer: Any, folder: Path) -> None:
    """Save model and tokenizer so that `from_pretrained` finds both."""
    run.engine.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def sample(folder: Path) -> str:
    """Load the saved model anew and let it write the docstring of a function."""
    return answer(load_model(folder, dtype=torch.float32), load_tokenizer(folder), QUESTION)

"""A folder of models and records, what TRL makes of them in another process, and what this engine does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from pairs import engine_config
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config
from trl_runs import STEPS, TRAINING, Case, write_cases

from megatrain import AdamWConfig, StreamingEngine
from megatrain.data import train_tokenizer
from megatrain.engine import StepResult

ADAMW = AdamWConfig(
    lr=TRAINING["learning_rate"],  # type: ignore[arg-type]
    weight_decay=TRAINING["weight_decay"],  # type: ignore[arg-type]
    max_grad_norm=TRAINING["max_grad_norm"],  # type: ignore[arg-type]
)
DIFFERENCES_FILE = "MEGATRAIN_TRL_DIFFERENCES"
WORDS = "one two three four five six seven eight nine ten so it goes on until the very end".split()  # noqa: SIM905


@dataclass(frozen=True)
class Outcome:
    """losses: of each step. gradients: of the first, clipped. weights: after the last."""

    losses: list[float]
    gradients: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]


def sentence(number: int, length: int) -> str:
    """Words that `number` determines."""
    return " ".join(WORDS[(number * 7 + i * (1 + number % 5)) % len(WORDS)] for i in range(length))


def save_models(folder: Path, kind: Any = AutoModelForCausalLM) -> None:
    """Leave a tiny llama and a tiny qwen3, each with a tokenizer, in folders of these names."""
    tokenizer = train_tokenizer([" ".join(WORDS)] * 3, vocab_size=320)
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "num_labels": 1,  # for classifiers
    }
    configs: list[PretrainedConfig] = [LlamaConfig(**shape), Qwen3Config(**shape, tie_word_embeddings=True)]
    for config in configs:
        torch.manual_seed(0)
        kind.from_config(config, dtype=torch.float32).save_pretrained(folder / config.model_type)
        tokenizer.save_pretrained(folder / config.model_type)


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run_trl(folder: Path, cases: list[Case]) -> dict[str, Outcome]:
    """Train all cases with TRL in one process; returns what came of each."""
    write_cases(folder, cases)
    runner = Path(__file__).with_name("trl_runs.py")
    done = subprocess.run([sys.executable, str(runner), str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return {case.name: _outcome(*case.paths(folder)) for case in cases}


def _outcome(losses: Path, gradients: Path, weights: Path) -> Outcome:
    return Outcome(json.loads(losses.read_text()), load_file(gradients), load_file(weights))


def run_engine(
    model: Path, step: Callable[[StreamingEngine], StepResult], kind: Any = AutoModelForCausalLM, **config: Any
) -> Outcome:
    """Take `step` as often as TRL did."""
    loaded = kind.from_pretrained(model, dtype=torch.float32).train()
    with StreamingEngine(loaded, engine_config(**config), ADAMW) as engine:
        losses = [step(engine).loss]
        gradients = first_gradients(engine)
        losses += [step(engine).loss for _ in range(STEPS - 1)]
        engine.flush()
        return Outcome(losses, gradients, engine.state_dict())


def first_gradients(engine: StreamingEngine) -> dict[str, Tensor]:
    """The clipped gradients of the first step, from the first moments that it left: (1 − beta1) × gradient."""
    engine.flush()
    found = {}
    for unit, host in engine._units():
        for entry in host.layout.trained:
            moment = host.exp_avg[entry.element : entry.element + entry.spec.numel].clone()
            found[unit.prefix + entry.name] = moment.view(entry.spec.shape) / (1 - ADAMW.betas[0])
    return found


@dataclass(frozen=True)
class Difference:
    """loss: the most in any step. gradients, weights: 2-norm of the difference ÷ 2-norm. loss_from, loss_to: TRL's."""

    case: str
    loss_from: float
    loss_to: float
    loss: float
    gradients: float
    weights: float


def require_same(case: str, ours: Outcome, theirs: Outcome) -> None:
    """Losses to 1e-4 in each step; the first gradients and the last weights to 1e-5 of their norm.

    With the variable DIFFERENCES_FILE, what was found goes into that file, too, a line of JSON each.
    """
    assert len(theirs.losses) == len(ours.losses) == STEPS
    assert ours.gradients.keys() == theirs.gradients.keys() <= theirs.weights.keys() & ours.weights.keys()
    found = Difference(
        case=case,
        loss_from=theirs.losses[0],
        loss_to=theirs.losses[-1],
        loss=max(abs(one - other) for one, other in zip(ours.losses, theirs.losses, strict=True)),
        gradients=_distance(ours.gradients, theirs.gradients),
        weights=_distance(ours.weights, theirs.weights),
    )
    if DIFFERENCES_FILE in os.environ:
        with open(os.environ[DIFFERENCES_FILE], "a") as file:
            file.write(json.dumps(asdict(found)) + "\n")
    assert (found.loss <= 1e-4, found.gradients <= 1e-5, found.weights <= 1e-5) == (True, True, True), found


def _distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    shared = one.keys() & other.keys()
    return _norm([one[name] - other[name] for name in shared]) / _norm([other[name] for name in shared])


def _norm(tensors: Iterable[Tensor]) -> float:
    return float(torch.cat([tensor.double().flatten() for tensor in tensors]).norm())

"""Tiny models of a handful of families, trained by the engine and plainly: the same losses, norms and weights?

In float32 beside plain training; in bfloat16 beside a float32 master kept by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from benchmarks.peers.ours import Ours, make_ours
from benchmarks.peers.plain import Plain
from benchmarks.shapes import Batch, batches
from benchmarks.turns import largest
from megatrain import EngineConfig
from megatrain.config import Dtype

STEPS, ROWS, TOKENS, VOCAB, LR = 4, 4, 24, 101, 1e-4
# Larger than by default: where a true gradient is zero (a key's bias), kernels of a card leave rounding noise, which
# AdamW would make as large as the learning rate.
EPS = 1e-4
# Losses and norms: relative. Weights: norm of the difference ÷ norm of what training changed; AdamW turns a gradient
# that is mere rounding noise into a full step, so this one is wider.
LIMITS: dict[Dtype, dict[str, float]] = {
    "float32": {"loss": 1e-5, "norm": 1e-4, "weights": 1e-3},
    "bfloat16": {"loss": 5e-3, "norm": 5e-2, "weights": 0.4},
}
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": VOCAB,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
GPT2 = {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": VOCAB, "use_cache": False}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZES),
    "qwen3": ("Qwen3", SIZES | {"tie_word_embeddings": True}),
    "gemma3": ("Gemma3Text", SIZES | SLIDING),
    "mixtral": ("Mixtral", SIZES | EXPERTS),
    "gpt_oss": ("GptOss", SIZES | EXPERTS | SLIDING),
    "gpt2": ("GPT2", GPT2 | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)),
}


@dataclass(frozen=True)
class Difference:
    """How far the engine's run lies from the plain one, by `LIMITS`' measures; error: why there is no figure."""

    family: str
    dtype: Dtype
    loss: float | None = None
    norm: float | None = None
    weights: float | None = None
    error: str | None = None

    @property
    def passed(self) -> bool:
        found = {"loss": self.loss, "norm": self.norm, "weights": self.weights}
        return all(x is not None and x <= LIMITS[self.dtype][name] for name, x in found.items())


def compare(family: str, dtype: Dtype, device: str) -> Difference:
    """Train one family both ways. What goes wrong is returned, so that the other families still run."""
    try:
        return _compare(family, dtype, device)
    except Exception as error:
        return Difference(family, dtype, error=f"{type(error).__name__}: {error}")


def _compare(family: str, dtype: Dtype, device: str) -> Difference:
    start = [p.detach().float().cpu() for p in make(family).parameters()]
    plain_figures, plain_weights = _plain(family, dtype, device)
    our_figures, our_weights = _ours(family, dtype, device)
    losses, norms = zip(*map(_relative_pair, our_figures, plain_figures), strict=True)
    changed = _distance(plain_weights, start)
    return Difference(family, dtype, largest(losses), largest(norms), _distance(our_weights, plain_weights) / changed)


def make(family: str) -> Any:
    """A tiny model of a family, the same at every call."""
    name, sizes = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes)
    suffix = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    return getattr(transformers, {"Gemma3Text": "Gemma3"}.get(name, name) + suffix)(config).train()


def _data() -> Iterator[Batch]:
    return batches(VOCAB, ROWS, TOKENS)


def _plain(family: str, dtype: Dtype, device: str) -> tuple[list[tuple[float, float]], list[torch.Tensor]]:
    plain = Plain(make(family), _data(), getattr(torch, dtype), LR, device, micro_batch_size=2, eps=EPS)
    figures = [plain.step() for _ in range(STEPS)]
    return figures, [master.detach().float().cpu() for master in plain.masters]


def _ours(family: str, dtype: Dtype, device: str) -> tuple[list[tuple[float, float]], list[torch.Tensor]]:
    config = EngineConfig(device="cuda" if device == "cuda" else "cpu", dtype=dtype, micro_batch_size=2)
    model = make(family)
    names = [name for name, _ in model.named_parameters()]
    ours: Ours = make_ours(model, _data(), config, LR, EPS)
    with ours.engine:
        figures = [ours.step() for _ in range(STEPS)]
        state = ours.engine.state_dict()
    return figures, [state[name].float() for name in names]


def _relative_pair(ours: tuple[float, float], plain: tuple[float, float]) -> tuple[float, float]:
    loss, norm = (abs(a - b) / abs(b) for a, b in zip(ours, plain, strict=True))
    return loss, norm


def _distance(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    squares = [(a.double() - b.double()).square().sum() for a, b in zip(some, others, strict=True)]
    return float(torch.stack(squares).sum().sqrt())


def all_cases() -> list[tuple[str, Dtype, Callable[[str], Difference]]]:
    """Every family in both dtypes: name, dtype, and what compares them on a device."""
    dtypes: tuple[Dtype, Dtype] = ("float32", "bfloat16")
    return [(f, d, lambda device, f=f, d=d: compare(f, d, device)) for f in FAMILIES for d in dtypes]  # type: ignore[misc]

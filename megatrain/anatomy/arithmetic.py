"""What a model's arithmetic amounts to per token, for throughput figures: read off its tensors and its config."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from megatrain.anatomy.structure import LayerStack
from megatrain.trace import causal_area, model_flops

EXPERTS = re.compile(r"(^|\.)experts\.")


@dataclass(frozen=True)
class Products:
    """Parameters of matrix products that one token meets; `frozen` of them are not trained."""

    active: int
    frozen: int

    @classmethod
    def of(cls, met: Iterable[tuple[float, bool]]) -> Products:
        """met: numbers of parameters, each with whether they are trained."""
        met = list(met)
        return cls(int(sum(number for number, _ in met)), int(sum(number for number, trained in met if not trained)))


@dataclass(frozen=True)
class Arithmetic:
    """active_parameters: of matrix products that one token meets; frozen_parameters: those of them not trained.

    windows: per attention layer, None = full. layers: the products of each layer; the rest is the head's.
    """

    active_parameters: int
    frozen_parameters: int
    heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    layers: tuple[Products, ...]

    def flops(self, sequence_lengths: Iterable[int]) -> int:
        """Model FLOPs of a training step over sequences of these lengths (padding not counted)."""
        lengths = list(sequence_lengths)
        return model_flops(
            tokens=sum(lengths),
            active_parameters=self.active_parameters,
            frozen_parameters=self.frozen_parameters,
            heads=self.heads,
            head_dim=self.head_dim,
            attention_area=sum(causal_area(length, window) for length in lengths for window in self.windows),
        )


def arithmetic(model: nn.Module, stack: LayerStack) -> Arithmetic:
    """Count a model. Linear-attention and state-space layers count with their projections only."""
    config: Any = model.config.get_text_config()  # type: ignore[union-attr,operator]
    heads, width = count(config, "num_attention_heads"), count(config, "hidden_size")
    head_dim = count(config, "head_dim") or (width // heads if heads else 0)
    share = active_expert_share(config)
    met = [_met(layer, share) for layer in stack.container.children()]
    whole = Products.of([each for layer in met for each in layer] + _head_parameters(model))
    windows = _windows(config, len(stack.container))
    return Arithmetic(whole.active, whole.frozen, heads, head_dim, windows, tuple(map(Products.of, met)))


def _met(layer: nn.Module, share: float) -> list[tuple[float, bool]]:
    """Of each matrix of a layer, the parameters that a token meets, and whether they are trained."""
    return [
        (p.numel() * (share if EXPERTS.search(name) else 1.0), p.requires_grad)
        for name, p in layer.named_parameters()
        if p.ndim >= 2
    ]


def active_expert_share(config: Any) -> float:
    """Experts that a token is sent to ÷ all experts; 1 for a dense model."""
    chosen = next((n for k in ("num_experts_per_tok", "top_k_experts", "moe_topk") if (n := count(config, k))), 0)
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    experts = next((n for k in names if (n := count(config, k))), 0)
    return chosen / experts if chosen and experts else 1.0


def count(config: Any, name: str) -> int:
    """A whole number of a configuration; 0 where it has none, or one for each layer (then it raises)."""
    try:
        value = getattr(config, name, None)
    except RuntimeError:
        return 0
    return value if isinstance(value, int) else 0


def _head_parameters(model: nn.Module) -> list[tuple[float, bool]]:
    """How many the head has, if there is one, and whether they are trained."""
    weight = getattr(model.get_output_embeddings(), "weight", None)  # type: ignore[operator]
    return [] if weight is None else [(weight.numel(), weight.requires_grad)]


def _windows(config: Any, layers: int) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * layers
    attention = [kind for kind in kinds if kind in ("full_attention", "sliding_attention")]
    return tuple(window if kind == "sliding_attention" else None for kind in attention)

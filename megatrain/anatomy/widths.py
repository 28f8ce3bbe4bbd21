"""How wide one token's way through a model is: what its activations take, read off its tensors and its config."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatrain.anatomy.adapters import float32_adapters
from megatrain.anatomy.arithmetic import EXPERTS, active_expert_share, count
from megatrain.anatomy.structure import Unit
from megatrain.anatomy.tiles import is_tileable


@dataclass(frozen=True)
class Widths:
    """Numbers of elements, from which `workspace` estimates bytes.

    products: inputs and outputs of all matrix products of a token in one layer, of the layer where they are most.
    tiled, untiled: likewise of those within the layer's token-wise part, and of the others.
    norms: elements that pass through norms likewise (norms of single heads count once).
    vocabulary: logits of one token. heads: attention heads.
    attention: what they give for a token. fused: attention scores are never whole in memory.
    mask_kinds: different masks that a padded or packed batch has (full, sliding).
    """

    products: int
    tiled: int
    untiled: int
    norms: int
    vocabulary: int
    heads: int
    attention: int
    fused: bool
    mask_kinds: int


def widths(model: nn.Module, units: Sequence[Unit]) -> Widths:
    """Measure a model; its parameters may be on the meta device."""
    config: Any = model.config.get_text_config()  # type: ignore[union-attr,operator]
    share = active_expert_share(config)
    wide = float32_adapters(model)  # of a base that computes in bfloat16, these keep inputs of their own
    found = [_products(unit, share, wide) for unit in units]
    kinds = {kind for kind in getattr(config, "layer_types", None) or () if "attention" in kind}
    return Widths(
        products=max(tiled + untiled for tiled, untiled in found),
        tiled=max(tiled for tiled, _ in found),
        untiled=max(untiled for _, untiled in found),
        norms=max(sum(p.numel() for name, p in unit.parameters.items() if _is_norm(name, p)) for unit in units),
        vocabulary=_vocabulary(model),
        heads=count(config, "num_attention_heads"),
        attention=_attention(config),
        fused=getattr(config, "_attn_implementation", None) != "eager",
        mask_kinds=max(1, len(kinds)),
    )


def _products(unit: Unit, share: float, wide: frozenset[str]) -> tuple[int, int]:
    """Of the token-wise part, and of the rest. A float32 element counts as two."""
    elements = {
        name: _product(name, p, share) * (2 if unit.prefix + name in wide else 1) for name, p in unit.parameters.items()
    }
    inside = int(sum(number for name, number in elements.items() if is_tileable(name)))
    return inside, int(sum(elements.values())) - inside


def _product(name: str, parameter: torch.Tensor, share: float) -> float:
    """Matrices may be stacked, one for each expert; a token meets the share of them that it is sent to."""
    if parameter.ndim < 2:
        return 0.0
    *stacked, rows, columns = parameter.shape
    return math.prod(stacked) * (rows + columns) * (share if EXPERTS.search(name) else 1.0)


def _is_norm(name: str, parameter: torch.Tensor) -> bool:
    return parameter.ndim == 1 and not name.endswith("bias")


def _attention(config: Any) -> int:
    heads = count(config, "num_attention_heads")
    head = count(config, "v_head_dim") or count(config, "head_dim") or count(config, "hidden_size") // max(1, heads)
    return heads * head


def _vocabulary(model: Any) -> int:
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    return int((model.get_input_embeddings().weight if weight is None else weight).shape[0])

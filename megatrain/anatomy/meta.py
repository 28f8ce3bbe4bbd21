"""Models without memory: built on torch's meta device, so that a configuration alone can be planned."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

PROBE_TOKENS = 4


def meta_model(config: Any, outputs: int | None = None) -> Any:
    """A causal LM in training mode with all shapes and no values; takes a second, whatever its size.

    outputs: a classifier instead, with so many numbers per sequence.
    """
    config, kind = copy.deepcopy(config), AutoModelForCausalLM
    if outputs is not None:
        config.num_labels, kind = outputs, AutoModelForSequenceClassification
    with torch.device("meta"):
        return kind.from_config(config, trust_remote_code=False).train()


class _Seen(Exception):  # noqa: N818 - not an error
    """Ends a call of a model at its first layer."""


def token_elements(model: Any, first_layer: nn.Module) -> int:
    """Elements of one token's hidden state between layers, seen at the first layer's door.

    The hidden size, or a multiple of it where a model keeps several streams. A model that cannot be called
    without values is taken to have the hidden size of its configuration.
    """
    seen: list[int] = []

    def look(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append((args[0] if args else kwargs["hidden_states"]).numel())
        raise _Seen

    handle = first_layer.register_forward_pre_hook(look, with_kwargs=True)
    try:
        with torch.no_grad():
            model(**_probe(model))
    except Exception:  # whatever a model's own code raises
        if not seen:
            return int(model.config.get_text_config().hidden_size)
    finally:
        handle.remove()
    return seen[0] // PROBE_TOKENS


def _probe(model: Any) -> dict[str, torch.Tensor]:
    """One row of tokens with a ready-made mask: making one would read values, which a meta tensor has not."""
    device = next(model.parameters()).device
    inputs = {
        "input_ids": torch.zeros(1, PROBE_TOKENS, dtype=torch.int64, device=device),
        "attention_mask": torch.zeros(1, 1, PROBE_TOKENS, PROBE_TOKENS, device=device),
        "position_ids": torch.zeros(1, PROBE_TOKENS, dtype=torch.int64, device=device),
    }
    parameters = inspect.signature(model.forward).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {name: tensor for name, tensor in inputs.items() if anything or name in parameters}

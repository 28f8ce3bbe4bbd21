"""A model's first layers as a model of their own, to be timed: the caller's model stays as it is."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from megatrain.anatomy.adapters import base_of
from megatrain.anatomy.structure import find_layers

LAYERS = 2  # of each kind that alternates there is one
SPREAD = 0.02  # of made-up weights
_TILE = 1 << 20  # elements that are drawn; the rest repeats them


def excerpt(model: Any, dtype: torch.dtype, layers: int = LAYERS) -> Any:
    """A copy with the first layers only, on the CPU; of a model on the meta device with made-up weights of `dtype`."""
    container = find_layers(model).container
    dropped = {id(layer): nn.Identity() for layer in list(container)[layers:]}
    part = copy.deepcopy(model, dropped)
    del find_layers(part).container[layers:]
    _shorten(base_of(part).config.get_text_config(), layers)
    if any(parameter.is_meta for parameter in part.parameters()):
        _make_up(part, dtype)
    return part.train(model.training)


def _shorten(config: Any, layers: int) -> None:
    config.num_hidden_layers = min(layers, config.num_hidden_layers)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]


def _make_up(model: Any, dtype: torch.dtype) -> None:
    """Values for what has none: any that stay finite will do, as only time is measured."""
    tile = torch.randn(_TILE, generator=torch.Generator().manual_seed(0)).mul_(SPREAD).to(dtype)
    made: dict[int, Any] = {}  # tied weights stay tied

    def parameter(of: nn.Parameter) -> nn.Parameter:
        if id(of) not in made:
            made[id(of)] = nn.Parameter(_repeated(tile, of.shape), requires_grad=of.requires_grad)
        return made[id(of)]  # type: ignore[no-any-return]

    for module in model.modules():
        for name, tensor in module.named_buffers(recurse=False):
            module._buffers[name] = torch.zeros_like(tensor, device="cpu")
        if module._buffers:  # rotary frequencies, and whatever else is computed rather than learned
            base_of(model)._init_weights(module)
        for name, of in module.named_parameters(recurse=False):
            module._parameters[name] = parameter(of)


def _repeated(tile: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    flat = torch.empty(shape.numel(), dtype=tile.dtype)
    for start in range(0, flat.numel(), tile.numel()):
        part = flat[start : start + tile.numel()]
        part.copy_(tile[: part.numel()])
    return flat.view(shape)

"""Virtual depth: a model of many layers in the host storage of a few, to time shapes that no host here could hold.

Note: what virtual depth is
    Layer i of L has the weights, master, moments and gradient of layer i mod K in host memory. All else is the
    engine as it is: the operations of L layers in their order, with their bytes, kernels and updates.
    It trains nothing: a gradient is overwritten by that of the layer K below before either is applied.

Note: why layers that share storage do not disturb each other
    Gradients arrive in the order of the d2h lane. The first of a step comes after the last layer's load, so after
    every update of the step before; and updates come after the norm, so after every gradient. What the schedule does
    not order is the load of a layer and the update of another one in the same storage. So the learning rate is zero:
    AdamW then reads and writes all that it otherwise would, and the weights it writes are those that are there.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from benchmarks.peers.contender import MAX_GRAD_NORM
from megatrain import AdamWConfig, EngineConfig, StreamingEngine
from megatrain.anatomy.load import from_config
from megatrain.anatomy.meta import meta_model
from megatrain.anatomy.structure import find_layers
from megatrain.layout import Layout


def label(layers: int, stored: int) -> str:
    """What is said wherever such a figure stands."""
    return f"virtual depth ({layers} layers in the storage of {stored})"


class VirtualEngine(StreamingEngine):
    """An engine whose layers share the host storage of the first `stored` ones; see the Notes.

    model: of `virtual_model`. Losses and norms it returns are those of a model that repeats its first layers for ever.
    """

    def __init__(self, model: Any, config: EngineConfig, stored: int) -> None:
        self.stored = stored
        super().__init__(model, config, AdamWConfig(lr=0.0, max_grad_norm=MAX_GRAD_NORM))

    def _take_over(self) -> None:
        """Storage for the first layers, as the engine makes it for all; every other layer looks into it."""
        units, layouts = self._anatomy.units, self._layouts
        _require_repetition(layouts, self.stored)
        self._anatomy.units, self._layouts = units[: self.stored], layouts[: self.stored]
        super()._take_over()
        self._anatomy.units, self._layouts = units, layouts
        layers = self._host.layers
        for unit in units[self.stored :]:
            layers.append(replace(layers[-self.stored], steps={}))
            unit.bind(layers[-1].layout.views(layers[-1].weights))

    @property
    def model_name(self) -> str:
        return f"{super().model_name}, {label(len(self._layouts), self.stored)}"

    def __repr__(self) -> str:
        return f"<VirtualEngine: {self.model_name}>"


def _require_repetition(layouts: Sequence[Layout], stored: int) -> None:
    if not 1 <= stored < len(layouts):
        raise ValueError(
            f"the stored layers of a virtual depth of {len(layouts)} must be 1 to {len(layouts) - 1}; got {stored}. "
            "Where every layer has storage of its own, use StreamingEngine"
        )
    for index, layout in enumerate(layouts):
        if layout != layouts[index % stored]:
            raise ValueError(
                f"layer {index} has other tensors than layer {index % stored}, whose storage it would share; choose as "
                "many stored layers as it takes until layers repeat"
            )


def with_layers(config: Any, layers: int) -> Any:
    """The configuration of a model with another number of layers; kinds of layers that alternate go on doing so."""
    config = copy.deepcopy(config)
    inner = config.get_text_config()
    inner.num_hidden_layers = layers
    if kinds := getattr(inner, "layer_types", None):
        inner.layer_types = [kinds[index % len(kinds)] for index in range(layers)]
    return config


def random_model(config: Any, dtype: torch.dtype, made_on: str = "cpu") -> Any:
    """A model in host memory. A card, where there is one, fills billions of weights faster."""
    with torch.device(made_on):
        model = from_config(config, dtype=dtype)
    model.to("cpu")
    torch.cuda.empty_cache()  # the engine is to find the card as free as it is
    return model


def virtual_model(config: Any, stored: int, dtype: torch.dtype, made_on: str = "cpu") -> Any:
    """A randomly initialised model of a configuration, whose layers have the memory of the first `stored` ones.

    Each layer has parameters of its own, as far as torch can tell. made_on: see `random_model`.
    """
    real = random_model(with_layers(config, stored), dtype, made_on)
    model = meta_model(config)  # every layer with the Python attributes that its index gives it
    path, tensors = find_layers(model).path + ".", _named(real)
    for name in _named(model):
        source = tensors[_stored_name(name, path, stored)]
        own = nn.Parameter(source.detach()) if isinstance(source, nn.Parameter) else source
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, own)
    model.tie_weights()
    return model


def _named(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_buffers(remove_duplicate=False)) | dict(model.named_parameters(remove_duplicate=False))


def _stored_name(name: str, path: str, stored: int) -> str:
    if not name.startswith(path):
        return name
    index, _, rest = name.removeprefix(path).partition(".")
    return f"{path}{int(index) % stored}.{rest}"

"""What a Hugging Face model consists of: its decoder layers, and the shell around them.

Nothing here knows a model class. The layers are the largest list of modules in the model, and what the engine
could not do exactly is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.trainer_pt_utils import get_parameter_names

from megatrain.layout import TensorSpec

# The names that the Hugging Face Trainer leaves out of weight decay (Trainer.get_decay_parameter_names).
_NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


class UnsupportedModelError(ValueError):
    """The engine cannot train this model exactly; the message names the module and the reason."""


@dataclass(frozen=True)
class LayerStack:
    """The decoder layers of a model: where they are and what they are."""

    path: str
    container: nn.ModuleList

    def name_of(self, index: int) -> str:
        return f"{self.path}.{index}"


def find_layers(model: nn.Module) -> LayerStack:
    """The list of modules that are the decoder layers; UnsupportedModelError if there is none.

    A list of the length that the configuration gives to the text model goes first (an audio or vision tower may
    be larger), then the one nearest to the root, then the one with most parameters.
    """
    stacks = [
        LayerStack(name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > 0
    ]
    if not stacks:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no list of decoder layers (torch.nn.ModuleList) that could be streamed"
        )
    configured = getattr(model.config.get_text_config(), "num_hidden_layers", None)  # type: ignore[union-attr,operator]

    def preference(stack: LayerStack) -> tuple[bool, int, int]:
        parameters = sum(p.numel() for p in stack.container.parameters())
        return len(stack.container) == configured, -stack.path.count("."), parameters

    return max(stacks, key=preference)


def refuse_what_is_not_exact(model: nn.Module, stack: LayerStack) -> None:
    """Raise UnsupportedModelError for what can be seen without running the model."""
    config: Any = getattr(model, "config", None)
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder; only decoder-only causal models can be streamed")
    if getattr(model, "is_quantized", False) or getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModelError(f"{name} is quantized; load it without quantization to train it exactly")
    if getattr(config, "layerdrop", 0):
        raise UnsupportedModelError(
            f"{name} skips layers at random (config.layerdrop={config.layerdrop}); set it to 0 to stream every layer"
        )
    for parameter_name, parameter in model.named_parameters():
        if not parameter.dtype.is_floating_point or parameter.dtype.itemsize < 2:
            raise UnsupportedModelError(
                f"{parameter_name} has dtype {parameter.dtype}: quantized weights cannot be trained exactly; "
                "load the model in bfloat16 or float32"
            )
    _refuse_shared_parameters(model, stack)


def _refuse_shared_parameters(model: nn.Module, stack: LayerStack) -> None:
    owner: dict[int, str] = {}
    inside = {id(p): stack.name_of(i) for i, layer in enumerate(stack.container) for p in layer.parameters()}
    for name, module in _units(model, stack):
        for parameter_name, parameter in module:
            first = owner.setdefault(id(parameter), name)
            if first != name and id(parameter) in inside:
                raise UnsupportedModelError(
                    f"{parameter_name} is shared between {first} and {name}: a layer that is streamed and updated "
                    "alone cannot share weights"
                )


def _units(model: nn.Module, stack: LayerStack) -> Iterator[tuple[str, list[tuple[str, nn.Parameter]]]]:
    """The shell and each layer with their named parameters, shared ones under every name."""
    prefix = stack.path + "."
    every = list(model.named_parameters(remove_duplicate=False))
    yield "the shell", [(name, p) for name, p in every if not name.startswith(prefix)]
    for index in range(len(stack.container)):
        own = stack.name_of(index) + "."
        yield stack.name_of(index), [(name, p) for name, p in every if name.startswith(own)]


def decayed_parameters(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that the Hugging Face Trainer would decay: no biases and no norms."""
    return frozenset(get_parameter_names(model, [nn.LayerNorm], _NO_DECAY))


def kept_in_float32(model: nn.Module) -> list[re.Pattern[str]]:
    """Parameters that the model's own code wants in float32 whatever the compute dtype."""
    names: set[str] = set()
    for module in model.modules():
        names |= set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    return [re.compile(rf"((^|\.){name}($|\.))") for name in sorted(names)]


@dataclass(frozen=True)
class Dtypes:
    """Which dtype a parameter is streamed in. Adapters that peft made in float32 stay so."""

    compute: torch.dtype
    float32_names: tuple[re.Pattern[str], ...]
    float32_adapters: frozenset[str] = frozenset()

    def of(self, name: str) -> torch.dtype:
        if name in self.float32_adapters or any(pattern.search(name) for pattern in self.float32_names):
            return torch.float32
        return self.compute


@dataclass(frozen=True)
class Unit:
    """A layer or the shell: its tensors by name, and the further names of tied ones.

    prefix: what makes a name of this unit one of the whole model. aliases: name → name of the same tensor.
    """

    prefix: str
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    aliases: dict[str, str]

    def specs(self, dtypes: Dtypes, decayed: frozenset[str]) -> list[TensorSpec]:
        """What the layout must place: parameters in their streamed dtype, buffers as they are."""
        trained = [
            TensorSpec(
                name, tuple(p.shape), dtypes.of(self.prefix + name), p.requires_grad, self.prefix + name in decayed
            )
            for name, p in self.parameters.items()
        ]
        return trained + [TensorSpec(name, tuple(b.shape), b.dtype) for name, b in self.buffers.items()]

    def bind(self, views: dict[str, torch.Tensor]) -> None:
        """Let the unit's own tensors look into `views`; the module then reads and saves what lies there."""
        with torch.no_grad():
            for name, tensor in (self.parameters | self.buffers).items():
                if name in views:
                    tensor.data = views[name]

    def with_aliases(self, views: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return views | {alias: views[name] for alias, name in self.aliases.items()}


def layer_unit(stack: LayerStack, index: int) -> Unit:
    """A layer's parameters and buffers; both are streamed."""
    return _unit(stack.container[index], stack.name_of(index) + ".", skip=None)


def shell_unit(model: nn.Module, stack: LayerStack) -> Unit:
    """What is not in a layer. Its parameters are streamed once a step; its buffers stay on the device."""
    unit = _unit(model, "", skip=stack.path + ".")
    return Unit(unit.prefix, unit.parameters, {}, unit.aliases)


def _unit(module: nn.Module, prefix: str, skip: str | None) -> Unit:
    def own(pairs: Iterator[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        return [(name, t) for name, t in pairs if skip is None or not name.startswith(skip)]

    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    named = own(module.named_parameters(remove_duplicate=False)) + own(module.named_buffers(remove_duplicate=False))
    kept: dict[str, torch.Tensor] = {}
    for name, tensor in named:
        if (known := first.setdefault(id(tensor), name)) == name:
            kept[name] = tensor
        else:
            aliases[name] = known
    parameters = {name: t for name, t in kept.items() if isinstance(t, nn.Parameter)}
    buffers = {name: t for name, t in kept.items() if not isinstance(t, nn.Parameter)}
    return Unit(prefix, parameters, buffers, aliases)

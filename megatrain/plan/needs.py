"""What a run needs of each tier, term by term, for a model's shapes, a batch and a configuration."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from megatrain import anatomy as parts
from megatrain.activations import offloaded_bytes
from megatrain.anatomy.meta import token_elements
from megatrain.config import EngineConfig
from megatrain.fitting import Choice, Fitting, fuses
from megatrain.host import role_bytes
from megatrain.layout import Layout
from megatrain.machine import Machine
from megatrain.memory import StepSize
from megatrain.shapes import host_shape, layouts_of
from megatrain.steering import Knobs
from megatrain.workspace import Workspace

OFFLOADED = "offloaded layer inputs"
WORKSPACE = "workspace (estimate)"
KEPT_ATTENTION = "kept attention"


@dataclass(frozen=True)
class Subject:
    """A model's shapes, read once, and the batch. Of the configuration only the dtype matters here.

    arithmetic: what the model computes for a token. token_elements: of a token's hidden state.
    """

    name: str
    layouts: list[Layout]
    shell: Layout
    widths: parts.Widths
    token_elements: int
    parameters: int
    arithmetic: parts.Arithmetic
    batch: int
    sequence: int

    @classmethod
    def of(cls, model: Any, config: EngineConfig, *, batch: int, sequence: int) -> Subject:
        """Read a model, which may lie on the meta device; UnsupportedModelError if it cannot be streamed so."""
        anatomy = parts.Anatomy(model)
        if config.tile_tokens is not None:
            parts.require_token_wise(anatomy)
        parts.require_choice(model, config.attention)
        layouts, shell = layouts_of(anatomy, getattr(torch, config.dtype))
        return cls(
            name=type(parts.base_of(model)).__name__ + (" with adapters" if parts.has_adapters(model) else ""),
            layouts=layouts,
            shell=shell,
            widths=parts.widths(model, anatomy.units),
            token_elements=token_elements(model, anatomy.layers[0]),
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            arithmetic=parts.arithmetic(model, anatomy.stack),
            batch=batch,
            sequence=sequence,
        )

    @property
    def active_parameters(self) -> int:
        """Of matrix products that one token meets."""
        return self.arithmetic.active_parameters

    @property
    def trained_parameters(self) -> int:
        return sum(layout.trained_parameters for layout in [self.shell, *self.layouts])


@dataclass(frozen=True)
class Needs:
    """Bytes by name and tier for one configuration, with "auto" settled."""

    choice: Choice
    size: StepSize
    host: dict[str, int]
    device: dict[str, int]
    workspace: Workspace

    @property
    def knobs(self) -> Knobs:
        return self.choice.knobs

    @property
    def offload(self) -> bool:
        return self.choice.offload

    @property
    def kept_graphs(self) -> int:
        return self.choice.kept_graphs

    @property
    def keeps_attention(self) -> bool:
        """Whether there is attention that is not computed again; with graphs of all layers there is none."""
        return self.device[KEPT_ATTENTION] > 0

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def held_bytes(self) -> int:
        """What the engine itself holds on the device: exact, unlike the workspace."""
        return self.device_bytes - self.device[WORKSPACE]


def needs_of(subject: Subject, config: EngineConfig, machine: Machine | None) -> Needs:
    """Add up a run. `machine` decides only what "auto" means, and whether the device is host memory."""
    size = _step_size(subject, config)
    host = role_bytes(subject.layouts, subject.shell, host_shape(config))
    fitting = Fitting(subject.layouts, subject.shell, subject.widths, config, on_cpu(config, machine))
    resident = 0 if config.resident_layers == "auto" else config.resident_layers
    knobs = Knobs(config.prefetch_depth, config.grad_buffers, resident)
    choice = fitting.choose(knobs, size, _budget(config, machine, host))
    held, extra = fitting.held(choice, size), fitting.kernels(size, offload=choice.offload)
    device = {term.name.replace("_", " "): getattr(held, term.name) for term in fields(held)}
    if not held.optimizer_buffers:
        del device["optimizer buffers"]
    inputs = offloaded_bytes(len(subject.layouts), size.micro_batches, size.micro_batch_bytes) if choice.offload else 0
    return Needs(choice, size, host | {OFFLOADED: inputs}, device | {WORKSPACE: extra.total}, extra)


def can_keep_attention(subject: Subject, config: EngineConfig) -> bool:
    """Whether `keep_attention` may be on, and would come to something: fused kernels, layers that are not compiled."""
    return fuses(subject.widths, config) and not config.compile


def on_cpu(config: EngineConfig, machine: Machine | None) -> bool:
    """Whether the device is an arena of the CPU lanes: then its bytes are host memory too."""
    return config.device == "cpu" or (machine is not None and machine.gpu is None)


def one_tier(config: EngineConfig, machine: Machine | None) -> bool:
    """Whether what lies on the device is host memory, too: of the CPU lanes, or of a GPU that works in it."""
    return on_cpu(config, machine) or (machine is not None and machine.one_memory)


def _itemsize(config: EngineConfig) -> int:
    return int(getattr(torch, config.dtype).itemsize)


def _step_size(subject: Subject, config: EngineConfig) -> StepSize:
    token_bytes = subject.token_elements * _itemsize(config)
    return StepSize.of(subject.batch, subject.sequence, config.micro_batch_size, token_bytes)


def _budget(config: EngineConfig, machine: Machine | None, host: dict[str, int]) -> int | None:
    """What the engine will take for free on the device; None = nobody says."""
    if config.device_memory_bytes is not None or machine is None:
        return config.device_memory_bytes
    if one_tier(config, machine):
        return machine.host_available_bytes - sum(host.values())
    return machine.device_free_bytes

"""What a run needs of each tier, term by term, for a model's shapes, a batch and a configuration."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from megatrain import anatomy as parts
from megatrain.activations import offloaded_bytes
from megatrain.anatomy.meta import token_elements
from megatrain.config import EngineConfig
from megatrain.host import role_bytes
from megatrain.layout import Layout
from megatrain.machine import Machine
from megatrain.memory import StepSize, device_bytes, must_offload, resident_layers_that_fit
from megatrain.shapes import host_shape, layouts_of
from megatrain.steering import Knobs
from megatrain.workspace import Workspace, workspace

OFFLOADED = "offloaded layer inputs"
WORKSPACE = "workspace (estimate)"


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
        """Read a model, which may lie on the meta device; UnsupportedModelError if it cannot be streamed."""
        anatomy = parts.Anatomy(model)
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

    knobs: Knobs
    offload: bool
    size: StepSize
    host: dict[str, int]
    device: dict[str, int]
    workspace: Workspace

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
    knobs, offload = _settled(subject, config, size, _budget(config, machine, host), machine)
    held = device_bytes(subject.layouts, subject.shell, knobs, size, offload=offload)
    device = {term.name.replace("_", " "): getattr(held, term.name) for term in fields(held)}
    extra = _workspace(subject, config, size, offload=offload)
    kept = offloaded_bytes(len(subject.layouts), size.micro_batches, size.micro_batch_bytes) if offload else 0
    return Needs(knobs, offload, size, host | {OFFLOADED: kept}, device | {WORKSPACE: extra.total}, extra)


def on_cpu(config: EngineConfig, machine: Machine | None) -> bool:
    """Whether the device is an arena of the CPU lanes: then its bytes are host memory too."""
    return config.device == "cpu" or (machine is not None and machine.gpu is None)


def _itemsize(config: EngineConfig) -> int:
    return int(getattr(torch, config.dtype).itemsize)


def _step_size(subject: Subject, config: EngineConfig) -> StepSize:
    token_bytes = subject.token_elements * _itemsize(config)
    return StepSize.of(subject.batch, subject.sequence, config.micro_batch_size, token_bytes)


def _workspace(subject: Subject, config: EngineConfig, size: StepSize, *, offload: bool) -> Workspace:
    return workspace(
        subject.widths,
        subject.layouts,
        subject.shell,
        size,
        itemsize=_itemsize(config),
        chunk_tokens=config.loss_chunk_tokens,
        offload=offload,
    )


def _budget(config: EngineConfig, machine: Machine | None, host: dict[str, int]) -> int | None:
    """What the engine will take for free on the device; None = nobody says."""
    if config.device_memory_bytes is not None or machine is None:
        return config.device_memory_bytes
    if on_cpu(config, machine):
        return machine.host_available_bytes - sum(host.values())
    return machine.device_free_bytes


def _settled(
    subject: Subject, config: EngineConfig, size: StepSize, budget: int | None, machine: Machine | None
) -> tuple[Knobs, bool]:
    """The knobs, and whether saved inputs are offloaded, as the engine settles them in its first step."""
    cpu = on_cpu(config, machine)

    def spare(offload: bool) -> int:
        """On a CPU kernels do not work in the arena."""
        assert budget is not None
        return budget if cpu else budget - _workspace(subject, config, size, offload=offload).total

    resident, offload = config.resident_layers, config.offload_activations
    knobs = Knobs(config.prefetch_depth, config.grad_buffers, 0 if resident == "auto" else resident)
    layouts, shell = subject.layouts, subject.shell
    if offload == "auto":
        offload = budget is not None and must_offload(layouts, shell, knobs, size, spare(False))
    fills = budget is not None and not (cpu and config.device_memory_bytes is None)
    if resident == "auto" and fills:
        count = resident_layers_that_fit(layouts, shell, knobs, size, spare(offload), offload=offload)
        knobs = replace(knobs, resident_layers=count)
    return knobs, offload

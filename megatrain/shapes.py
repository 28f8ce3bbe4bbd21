"""How a model and a configuration become bytes: the layouts, and what the host keeps of them.

The engine allocates by these functions and `plan` prints by them, so that the two cannot disagree.
"""

from __future__ import annotations

import torch

from megatrain import anatomy as parts
from megatrain.config import AdamWConfig, EngineConfig
from megatrain.host import HostShape
from megatrain.layout import Layout
from megatrain.schedule import Schedule

HOST_SLABS = 3  # host gradient slabs where updates follow each gradient: one landing, one updating, one between


def layouts_of(anatomy: parts.Anatomy, compute: torch.dtype) -> tuple[list[Layout], Layout]:
    """The layout of every layer and of the shell, for a streamed dtype."""
    dtypes = parts.Dtypes(compute, tuple(parts.kept_in_float32(anatomy.model)), parts.float32_adapters(anatomy.model))
    decayed = parts.decayed_parameters(anatomy.model)
    layouts = [Layout.of(unit.specs(dtypes, decayed)) for unit in anatomy.units]
    return layouts, Layout.of(anatomy.shell.specs(dtypes, decayed))


def host_shape(config: EngineConfig) -> HostShape:
    """What the host keeps per parameter with this configuration."""
    return HostShape(
        split=config.dtype == "bfloat16",
        moment_bytes=4 if config.moments_dtype == "float32" else 2,
        keep_gradients=config.optimizer_overlap != "backward",
        slabs=HOST_SLABS if config.optimizer_device == "host" else 0,
        keep_reference=config.keep_reference,
        stream_state=config.optimizer_device == "device",
    )


def schedule_of(layouts: list[Layout], shell: Layout, config: EngineConfig) -> Schedule:
    """The order of operations of a run, from its first step on."""
    return Schedule(
        layers=len(layouts),
        trained=frozenset(i for i, layout in enumerate(layouts) if layout.trained),
        shell_trained=bool(shell.trained),
        update_in_backward=config.optimizer_overlap == "backward",
        slabs=HOST_SLABS,
        partly_frozen=frozenset(i for i, layout in enumerate(layouts) if 0 < layout.trained_nbytes < layout.nbytes),
        update_on_device=config.optimizer_device == "device",
    )


def require_agreement(config: EngineConfig, optimizer: AdamWConfig) -> None:
    """Raise ValueError for two choices that exclude each other."""
    if config.optimizer_overlap == "backward" and optimizer.max_grad_norm is not None:
        raise ValueError(
            'optimizer_overlap="backward" applies a gradient before the global norm is known; set '
            'max_grad_norm=None, or optimizer_overlap="forward"'
        )

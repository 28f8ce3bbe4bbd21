"""What a step needs of the device's memory, and what "auto" makes of it: for the engine and for a plan alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from megatrain.anatomy import Widths
from megatrain.config import EngineConfig
from megatrain.layout import Layout
from megatrain.memory import (
    DeviceBytes,
    StepSize,
    backward_from,
    device_bytes,
    must_offload,
    optimizer_buffer_bytes,
    slot_bytes,
)
from megatrain.optim import DEVICE_CHUNK_BYTES
from megatrain.steering import Knobs
from megatrain.workspace import Workspace, workspace


def fuses(widths: Widths, config: EngineConfig) -> bool:
    """Whether kernels of attention are fused: scores are never whole, and what they give can be kept."""
    return widths.fused and config.attention != "math"


@dataclass(frozen=True)
class Choice:
    """How a step uses the device: knobs, whether saved inputs go to the host, what is not computed again."""

    knobs: Knobs
    offload: bool
    kept_graphs: int = 0
    keep_attention: bool = False


@dataclass(frozen=True)
class Most:
    """The most that "auto" may choose since the device ran out of memory; None = what fits. offload: it must."""

    resident_layers: int | None = None
    kept_graphs: int | None = None
    keep_attention: bool = True
    offload: bool = False


@dataclass(frozen=True)
class Fitting:
    """One model under one configuration. cpu: the device is an arena of host memory, kernels do not work in it."""

    layouts: Sequence[Layout]
    shell: Layout
    widths: Widths
    config: EngineConfig
    cpu: bool

    def held(self, choice: Choice, size: StepSize) -> DeviceBytes:
        """What the engine itself would hold. Of kept graphs it is an estimate, as of kernels."""
        graphs = choice.kept_graphs * self.graph_bytes(size)
        kept = {
            "kept_graphs": choice.kept_graphs,
            "graph_bytes": graphs,
            "attention_bytes": self.attention_bytes(size, choice.kept_graphs) if choice.keep_attention else 0,
            "optimizer_bytes": self._optimizer_bytes,
        }
        return device_bytes(self.layouts, self.shell, choice.knobs, size, offload=choice.offload, **kept)

    def kernels(self, size: StepSize, *, offload: bool) -> Workspace:
        """An estimate of what kernels need beside that."""
        return workspace(
            self.widths,
            self.layouts,
            self.shell,
            size,
            itemsize=self._itemsize,
            chunk_tokens=self.config.loss_chunk_tokens,
            offload=offload,
            tile_tokens=self.config.tile_tokens,
            compiled=self.config.compile,
            math=self.config.attention == "math",
            update_bytes=DEVICE_CHUNK_BYTES if self._optimizer_bytes and not self.cpu else 0,
        )

    def graph_bytes(self, size: StepSize) -> int:
        """Estimate of what autograd saves of one layer for the whole batch."""
        work = self.kernels(replace(size, micro_batch_tokens=size.tokens), offload=False)
        return work.kept_of_a_layer

    def attention_bytes(self, size: StepSize, kept_graphs: int) -> int:
        """Of what attention gives for the whole batch, with one float32 number per head, in layers without graphs."""
        if not fuses(self.widths, self.config):
            return 0
        token_bytes = self.widths.attention * self._itemsize + 4 * self.widths.heads
        return (self._reached - kept_graphs) * size.tokens * token_bytes

    @property
    def _reached(self) -> int:
        """Layers that backward reaches."""
        return len(self.layouts) - backward_from(self.layouts, self.shell)

    def offloads(self, knobs: Knobs, size: StepSize, budget_bytes: int | None, most: Most | None = None) -> bool:
        """Whether saved inputs go to the host. budget_bytes: what the device has; None = nobody says."""
        asked = self.config.offload_activations
        if asked != "auto":
            return asked
        if budget_bytes is None:
            return False
        spare = self._spare(size, budget_bytes, offload=False)
        forced, optimizer = (most or Most()).offload, self._optimizer_bytes
        return forced or must_offload(self.layouts, self.shell, knobs, size, spare, optimizer)

    def choose(self, knobs: Knobs, size: StepSize, budget_bytes: int | None, most: Most | None = None) -> Choice:
        """What "auto" means in a step of this size; what is not "auto" stays.

        Attention first, which is small for what it saves; graphs before resident layers: with few tokens graphs are
        small, with many compute binds, not the link.
        """
        most = most or Most()
        auto = self.config.resident_layers == "auto"
        bare = replace(knobs, resident_layers=0) if auto else knobs
        choice = Choice(bare, self.offloads(bare, size, budget_bytes, most))
        choice = self._with_attention(choice, size, budget_bytes, most)
        choice = replace(choice, kept_graphs=self._kept_graphs(choice, size, budget_bytes, most.kept_graphs))
        if not auto:
            return choice
        resident = self._count(choice, size, budget_bytes, slot_bytes(self.layouts), most.resident_layers)
        return replace(choice, knobs=replace(bare, resident_layers=min(resident, len(self.layouts))))

    def _with_attention(self, choice: Choice, size: StepSize, budget_bytes: int | None, most: Most) -> Choice:
        asked = self.config.keep_attention
        if asked == "auto":
            each = self.attention_bytes(size, kept_graphs=0)
            asked = most.keep_attention and self._count(choice, size, budget_bytes, each, None) > 0
        return replace(choice, keep_attention=asked)

    def _kept_graphs(self, choice: Choice, size: StepSize, budget_bytes: int | None, most: int | None) -> int:
        asked = self.config.kept_graphs
        if asked == "auto":
            asked = self._count(choice, size, budget_bytes, self.graph_bytes(size), most)
        return min(asked, self._reached)

    def _count(self, choice: Choice, size: StepSize, budget_bytes: int | None, each: int, most: int | None) -> int:
        """How many of `each` bytes fit beside a choice. A CPU's device is host memory: nothing is filled unasked."""
        if budget_bytes is None or (self.cpu and self.config.device_memory_bytes is None):
            return 0
        room = self._spare(size, budget_bytes, offload=choice.offload) - self.held(choice, size).total
        fitting = max(0, room // max(1, each))
        return fitting if most is None else min(fitting, most)

    def _spare(self, size: StepSize, budget_bytes: int, *, offload: bool) -> int:
        """What the engine may hold so that kernels find room too."""
        return budget_bytes if self.cpu else budget_bytes - self.kernels(size, offload=offload).total

    @property
    def _optimizer_bytes(self) -> int:
        return optimizer_buffer_bytes(self.layouts, self.config)

    @property
    def _itemsize(self) -> int:
        return int(getattr(torch, self.config.dtype).itemsize)

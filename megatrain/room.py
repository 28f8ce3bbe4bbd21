"""What fits on the device: the budget, what a step of some size needs of it, and what `auto` makes of the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import psutil
import torch

from megatrain.anatomy import Widths
from megatrain.config import EngineConfig
from megatrain.layout import Layout
from megatrain.memory import DeviceBytes, StepSize, device_bytes, must_offload, resident_layers_that_fit
from megatrain.steering import Knobs
from megatrain.workspace import workspace


@dataclass
class Room:
    """The device's memory as one engine sees it.

    size: of the last step that had room; what knobs are checked against.
    resident_limit, offloads: what "auto" may choose at most, and must, since the device ran out of memory.
    """

    layouts: Sequence[Layout]
    shell: Layout
    config: EngineConfig
    device: torch.device
    widths: Widths
    token_elements: int
    size: StepSize = field(default_factory=StepSize)
    resident_limit: int | None = None
    offloads: bool = False

    def __post_init__(self) -> None:
        self.look()

    def look(self) -> None:
        """Read the budget anew: what is free changes when an engine takes its host memory."""
        self.budget_bytes = self._free_bytes()

    def _free_bytes(self) -> int:
        if self.config.device_memory_bytes is not None:
            return self.config.device_memory_bytes
        if self.device.type == "cuda":
            return int(torch.cuda.mem_get_info(self.device)[0])
        return int(psutil.virtual_memory().available)  # the device arena is host memory here

    @property
    def _itemsize(self) -> int:
        return int(getattr(torch, self.config.dtype).itemsize)

    def needs(self, knobs: Knobs, size: StepSize, *, offload: bool) -> DeviceBytes:
        """What the engine would hold with these knobs."""
        return device_bytes(self.layouts, self.shell, knobs, size, offload=offload)

    def require(self, knobs: Knobs, size: StepSize | None = None) -> None:
        """ValueError if `knobs` do not fit beside a step of `size` (None = the last one's)."""
        size = size or self.size
        self._require(knobs, self.needs(knobs, size, offload=self.config.offload_activations is not False))

    def require_forward(self, knobs: Knobs, size: StepSize) -> None:
        """ValueError if a pass of `size` that does not go backward does not fit: it keeps no layer's input."""
        self._require(knobs, self.needs(knobs, size, offload=True))

    def _require(self, knobs: Knobs, needs: DeviceBytes) -> None:
        if needs.total > self.budget_bytes:
            raise ValueError(
                f"prefetch_depth={knobs.prefetch_depth}, grad_buffers={knobs.grad_buffers} and "
                f"resident_layers={knobs.resident_layers} need {needs.total / 1e6:,.1f} MB on the device "
                f"({needs.weight_slots / 1e6:,.1f} for weights, {needs.gradient_buffers / 1e6:,.1f} for gradients, "
                f"{needs.saved_inputs / 1e6:,.1f} for saved inputs), which has {self.budget_bytes / 1e6:,.1f} MB; "
                "lower them, or the batch"
            )

    def size_of(self, shape: tuple[int, int], rows: int | None) -> StepSize:
        """The size of a batch (B, T) cut into micro-batches of `rows`."""
        return StepSize.of(*shape, rows, self.token_elements * self._itemsize)

    def require_rows(self, knobs: Knobs, rows: int) -> None:
        """ValueError if the last step's batch did not fit when cut into micro-batches of `rows`."""
        if self.size.sequence:
            self.require(knobs, self.size_of((self.size.tokens // self.size.sequence, self.size.sequence), rows))

    def settle(self, size: StepSize, knobs: Knobs) -> tuple[bool, Knobs]:
        """Make room for a step: whether saved inputs go to the host, and the knobs, with "auto" ones chosen anew.

        ValueError if the step does not fit; then nothing has changed.
        """
        changed = size != self.size
        choose = changed and self.config.resident_layers == "auto"
        bare = replace(knobs, resident_layers=0) if choose else knobs
        offload = self.config.offload_activations
        if offload == "auto":
            spare = self._spare_bytes(size, offload=False)
            offload = self.offloads or must_offload(self.layouts, self.shell, bare, size, spare)
        if choose:
            knobs = replace(bare, resident_layers=self._resident_layers(bare, size, offload=offload))
        if changed:
            self.require(knobs, size)
        self.size = size
        return offload, knobs

    def _resident_layers(self, knobs: Knobs, size: StepSize, *, offload: bool) -> int:
        """On a CPU the device arena is host memory, where keeping a second copy would only cost."""
        if self.device.type == "cpu" and self.config.device_memory_bytes is None:
            return 0
        spare = self._spare_bytes(size, offload=offload)
        fitting = resident_layers_that_fit(self.layouts, self.shell, knobs, size, spare, offload=offload)
        return fitting if self.resident_limit is None else min(fitting, self.resident_limit)

    def tighten(self, knobs: Knobs, *, offload: bool) -> str | None:
        """After the device ran out of memory: what an "auto" setting leaves to the kernels now, in words.

        None if there is nothing left that the engine may choose.
        """
        lowered = None
        if self.config.resident_layers == "auto" and knobs.resident_layers:
            self.resident_limit = knobs.resident_layers // 2
            lowered = f"resident_layers lowered from {knobs.resident_layers} to {self.resident_limit}"
        elif self.config.offload_activations == "auto" and not offload:
            self.offloads = True
            lowered = "saved inputs of layers go to the host from now on"
        if lowered is not None:
            self.size = StepSize()  # the next step settles anew
        return lowered

    def advice(self, knobs: Knobs, size: StepSize, rows: int | None, *, offload: bool) -> str:
        """What to lower where the device ran out of memory, the largest part first."""
        held, kernels = self.needs(knobs, size, offload=offload), self._kernels(size, offload=offload)
        options = [
            (kernels, f"micro_batch_size ({rows or 'all'}) or loss_chunk_tokens ({self.config.loss_chunk_tokens})"),
            (0 if offload else held.saved_inputs, "offload_activations=True"),
            (held.saved_inputs if offload else 0, "the batch"),
            (
                held.weight_slots,
                f"prefetch_depth ({knobs.prefetch_depth}) or resident_layers ({knobs.resident_layers})",
            ),
            (held.gradient_buffers, f"grad_buffers ({knobs.grad_buffers})"),
        ]
        named = [f"{text}: {nbytes / 1e6:,.1f} MB" for nbytes, text in sorted(options, reverse=True) if nbytes]
        return "what can be lowered, and about how much lies there: " + "; ".join(named)

    def _spare_bytes(self, size: StepSize, *, offload: bool) -> int:
        """What the engine may hold so that kernels find room too; on a CPU they do not work in the arena."""
        if self.device.type == "cpu":
            return self.budget_bytes
        return self.budget_bytes - self._kernels(size, offload=offload)

    def _kernels(self, size: StepSize, *, offload: bool) -> int:
        """An estimate of what kernels need beside the engine's own buffers."""
        return workspace(
            self.widths,
            self.layouts,
            self.shell,
            size,
            itemsize=self._itemsize,
            chunk_tokens=self.config.loss_chunk_tokens,
            offload=offload,
        ).total

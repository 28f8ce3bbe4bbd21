"""What fits on the device: the budget, what a step of some size needs of it, and what `auto` makes of the rest."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import torch

from megatrain.fitting import Choice, Fitting, Most
from megatrain.machine import free_device_bytes
from megatrain.memory import DeviceBytes, StepSize
from megatrain.steering import Knobs


@dataclass
class Room:
    """The device's memory as one engine sees it.

    size: of the last step that had room; what knobs are checked against. kept_graphs, keep_attention: of that step.
    most: what "auto" may choose since the device ran out of memory.
    """

    fitting: Fitting
    device: torch.device
    token_elements: int
    size: StepSize = field(default_factory=StepSize)
    kept_graphs: int = 0
    keep_attention: bool = False
    most: Most = field(default_factory=Most)

    def __post_init__(self) -> None:
        self.look()

    def look(self) -> None:
        """Read the budget anew: what is free changes when an engine takes its host memory."""
        self.budget_bytes = self._free_bytes()

    def _free_bytes(self) -> int:
        config = self.fitting.config
        if config.device_memory_bytes is not None:
            return config.device_memory_bytes
        if self.device.type == "cuda":
            return free_device_bytes()
        return int(psutil.virtual_memory().available)  # the device arena is host memory here

    def needs_bytes(self, knobs: Knobs, size: StepSize | None = None, *, offload: bool) -> int:
        """What the engine would hold with these knobs in a step of `size` (None = the last one's)."""
        return self.fitting.held(Choice(knobs, offload, self.kept_graphs, self.keep_attention), size or self.size).total

    def require(self, knobs: Knobs, size: StepSize | None = None) -> None:
        """ValueError if `knobs` do not fit beside a step of `size` (None = the last one's)."""
        offload = self.fitting.config.offload_activations is not False
        self._require(Choice(knobs, offload, self.kept_graphs, self.keep_attention), size or self.size)

    def require_forward(self, knobs: Knobs, size: StepSize) -> None:
        """ValueError if a pass of `size` that does not go backward does not fit: it keeps no layer's input."""
        self._require(Choice(knobs, offload=True), size)

    def _require(self, choice: Choice, size: StepSize) -> None:
        knobs, needs = choice.knobs, self.fitting.held(choice, size)
        if needs.total > self.budget_bytes:
            raise ValueError(
                f"prefetch_depth={knobs.prefetch_depth}, grad_buffers={knobs.grad_buffers}, "
                f"resident_layers={knobs.resident_layers}, kept_graphs={choice.kept_graphs} and "
                f"keep_attention={choice.keep_attention} need "
                f"{needs.total / 1e6:,.1f} MB on the device "
                f"({needs.weight_slots / 1e6:,.1f} for weights, {needs.gradient_buffers / 1e6:,.1f} for gradients, "
                f"{_optimizer_words(needs)}"
                f"{needs.saved_inputs / 1e6:,.1f} for saved inputs, {needs.kept_graphs / 1e6:,.1f} for graphs, "
                f"{needs.kept_attention / 1e6:,.1f} for attention), "
                f"which has {self.budget_bytes / 1e6:,.1f} MB; lower them, or the batch"
            )

    def size_of(self, shape: tuple[int, int], rows: int | None) -> StepSize:
        """The size of a batch (B, T) cut into micro-batches of `rows`."""
        itemsize = int(getattr(torch, self.fitting.config.dtype).itemsize)
        return StepSize.of(*shape, rows, self.token_elements * itemsize)

    def require_rows(self, knobs: Knobs, rows: int) -> None:
        """ValueError if the last step's batch did not fit when cut into micro-batches of `rows`."""
        if self.size.sequence:
            self.require(knobs, self.size_of((self.size.tokens // self.size.sequence, self.size.sequence), rows))

    def settle(self, size: StepSize, knobs: Knobs) -> Choice:
        """Make room for a step; "auto" settings are chosen anew where its size is new.

        ValueError if the step does not fit; then nothing has changed.
        """
        if size == self.size:
            offload = self.fitting.offloads(knobs, size, self.budget_bytes, self.most)
            return Choice(knobs, offload, self.kept_graphs, self.keep_attention)
        choice = self.fitting.choose(knobs, size, self.budget_bytes, self.most)
        least = replace(choice, offload=self.fitting.config.offload_activations is not False)
        self._require(least, size)
        self.size, self.kept_graphs, self.keep_attention = size, choice.kept_graphs, choice.keep_attention
        return choice

    def tighten(self, choice: Choice) -> str | None:
        """After the device ran out of memory: what an "auto" setting leaves to the kernels now, in words.

        None if there is nothing left that the engine may choose.
        """
        config, lowered = self.fitting.config, None
        changes: dict[str, Any]
        for name, count in (("kept_graphs", choice.kept_graphs), ("resident_layers", choice.knobs.resident_layers)):
            if lowered is None and getattr(config, name) == "auto" and count:
                changes = {name: count // 2}
                self.most = replace(self.most, **changes)
                lowered = f"{name} lowered from {count} to {count // 2}"
        if lowered is None and config.keep_attention == "auto" and choice.keep_attention:
            self.most = replace(self.most, keep_attention=False)
            lowered = "attention is computed again from now on"
        if lowered is None and config.offload_activations == "auto" and not choice.offload:
            self.most = replace(self.most, offload=True)
            lowered = "saved inputs of layers go to the host from now on"
        if lowered is not None:
            self.size = StepSize()  # the next step settles anew
        return lowered

    def advice(self, choice: Choice, size: StepSize, rows: int | None) -> str:
        """What to lower where the device ran out of memory, the largest part first."""
        knobs, config, held = choice.knobs, self.fitting.config, self.fitting.held(choice, size)
        kernels = self.fitting.kernels(size, offload=choice.offload).total
        options = [
            (kernels, f"micro_batch_size ({rows or 'all'}) or loss_chunk_tokens ({config.loss_chunk_tokens})"),
            (0 if choice.offload else held.saved_inputs, "offload_activations=True"),
            (held.saved_inputs if choice.offload else 0, "the batch"),
            (
                held.weight_slots,
                f"prefetch_depth ({knobs.prefetch_depth}) or resident_layers ({knobs.resident_layers})",
            ),
            (held.optimizer_buffers or held.gradient_buffers, f"grad_buffers ({knobs.grad_buffers})"),
            (held.kept_graphs, f"kept_graphs ({choice.kept_graphs})"),
            (held.kept_attention, "keep_attention=False"),
        ]
        named = [f"{text}: {nbytes / 1e6:,.1f} MB" for nbytes, text in sorted(options, reverse=True) if nbytes]
        return "what can be lowered, and about how much lies there: " + "; ".join(named)


def _optimizer_words(needs: DeviceBytes) -> str:
    return f"{needs.optimizer_buffers / 1e6:,.1f} for optimizer state, " if needs.optimizer_buffers else ""

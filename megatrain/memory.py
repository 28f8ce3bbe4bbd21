"""Memory is arithmetic: the bytes that the engine holds on the device, term by term.

`plan` prints these numbers before anything is allocated, the engine refuses knobs by them, and tests compare
them with the measured peak.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from megatrain.control import Knobs
from megatrain.layout import Layout, align


@dataclass(frozen=True)
class StepSize:
    """What decides how many activations a step keeps.

    tokens: batch × sequence, padding included. token_bytes: of one token's hidden state between layers.
    """

    tokens: int
    micro_batches: int
    token_bytes: int

    @property
    def boundary_bytes(self) -> int:
        """The hidden state of the whole batch between two layers."""
        return self.tokens * self.token_bytes

    @property
    def micro_batch_bytes(self) -> int:
        return -(-self.boundary_bytes // self.micro_batches)


@dataclass(frozen=True)
class DeviceBytes:
    """Bytes held on the device by the engine itself; kernels' workspace comes on top."""

    shell_weights: int
    shell_gradients: int
    weight_slots: int
    gradient_buffers: int
    gradient_sums: int
    saved_inputs: int

    @property
    def total(self) -> int:
        return sum(getattr(self, term.name) for term in fields(self))


def slot_bytes(layouts: Sequence[Layout]) -> int:
    """One weights slot holds the largest layer."""
    return align(max(layout.nbytes for layout in layouts))


def gradient_buffer_bytes(layouts: Sequence[Layout]) -> int:
    """One gradient buffer holds the largest layer's gradient."""
    return align(max(layout.trained_nbytes for layout in layouts))


def sum_bytes(layout: Layout, parts: int) -> int:
    """float32 sums of gradients that come in several parts, where the gradient itself is narrower."""
    narrow = any(entry.spec.dtype.itemsize < 4 for entry in layout.trained)
    return 4 * layout.trained_elements if narrow and parts > 1 else 0


def saved_input_bytes(layers: int, size: StepSize, *, offload: bool) -> int:
    """Most bytes of hidden states and their gradients at one time.

    Kept: every layer's input, and one more boundary (the last output, later the gradient), with one micro-batch
    in both forms. Offloaded: two layers' inputs and the gradient, whatever the number of layers.
    """
    boundaries = min(layers + 1, 3) if offload else layers + 1
    return boundaries * size.boundary_bytes + size.micro_batch_bytes


def device_bytes(
    layouts: Sequence[Layout], shell: Layout, knobs: Knobs, size: StepSize, *, offload: bool
) -> DeviceBytes:
    """What a step of this size holds on the device with these knobs."""
    layers = len(layouts)
    return DeviceBytes(
        shell_weights=align(shell.nbytes),
        shell_gradients=align(shell.trained_nbytes) + sum_bytes(shell, parts=2),
        weight_slots=min(knobs.weight_slots, layers) * slot_bytes(layouts),
        gradient_buffers=knobs.grad_buffers * gradient_buffer_bytes(layouts),
        gradient_sums=max(sum_bytes(layout, size.micro_batches) for layout in layouts),
        saved_inputs=saved_input_bytes(layers, size, offload=offload),
    )

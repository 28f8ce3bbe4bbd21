"""Memory is arithmetic: the bytes that the engine holds on the device, term by term.

`plan` prints these numbers before anything is allocated, the engine refuses knobs by them, and tests compare
them with the measured peak.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from megatrain.config import EngineConfig
from megatrain.layout import Layout, align
from megatrain.steering import Knobs


@dataclass(frozen=True)
class StepSize:
    """What decides how many activations a step keeps.

    tokens: batch × sequence, padding included. sequence: of one row. micro_batch_tokens: of the largest
    micro-batch. token_bytes: of one token's hidden state between layers.
    """

    tokens: int = 0
    sequence: int = 0
    micro_batches: int = 1
    micro_batch_tokens: int = 0
    token_bytes: int = 0

    @classmethod
    def of(cls, batch: int, sequence: int, micro_batch_size: int | None, token_bytes: int) -> StepSize:
        """A batch of `batch` sequences, cut as the engine cuts it: only the last micro-batch may be smaller."""
        rows = min(micro_batch_size or batch, batch)
        return cls(batch * sequence, sequence, -(-batch // rows), rows * sequence, token_bytes)

    @property
    def boundary_bytes(self) -> int:
        """The hidden state of the whole batch between two layers."""
        return self.tokens * self.token_bytes

    @property
    def micro_batch_bytes(self) -> int:
        """The hidden state of the largest micro-batch between two layers."""
        return self.micro_batch_tokens * self.token_bytes


@dataclass(frozen=True)
class DeviceBytes:
    """Bytes held on the device by the engine itself; kernels' workspace comes on top."""

    shell_weights: int
    shell_gradients: int
    weight_slots: int
    gradient_buffers: int
    gradient_sums: int
    saved_inputs: int
    kept_graphs: int = 0
    kept_attention: int = 0
    optimizer_buffers: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, term.name) for term in fields(self))


def slot_bytes(layouts: Sequence[Layout]) -> int:
    """One weights slot holds the largest layer."""
    return align(max(layout.nbytes for layout in layouts))


def gradient_buffer_bytes(layouts: Sequence[Layout]) -> int:
    """One gradient buffer holds the largest layer's gradient."""
    return align(max(layout.trained_nbytes for layout in layouts))


def optimizer_buffer_bytes(layouts: Sequence[Layout], config: EngineConfig) -> int:
    """One optimizer buffer holds the largest layer's state; there is none where AdamW runs on the host."""
    if config.optimizer_device == "host":
        return 0
    return max(sum(align(nbytes) for nbytes in state_bytes(layout, config)) for layout in layouts)


def state_bytes(layout: Layout, config: EngineConfig) -> list[int]:
    """Of both moments and, where the master is split, of its low halves."""
    moment = 4 if config.moments_dtype == "float32" else 2
    items = (moment, moment, 2) if config.dtype == "bfloat16" else (moment, moment)
    return [nbytes * layout.trained_elements for nbytes in items]


def sum_bytes(layout: Layout, parts: int) -> int:
    """float32 sums of gradients that come in several parts, where the gradient itself is narrower."""
    narrow = any(entry.spec.dtype.itemsize < 4 for entry in layout.trained)
    return 4 * layout.trained_elements if narrow and parts > 1 else 0


def backward_from(layouts: Sequence[Layout], shell: Layout) -> int:
    """The lowest layer that backward must reach; a trained shell's embeddings lie below all of them."""
    return 0 if shell.trained else next((i for i, layout in enumerate(layouts) if layout.trained), len(layouts))


def saved_input_bytes(layers: int, size: StepSize, *, offload: bool, slots: int) -> int:
    """Most bytes of hidden states and their gradients at one time, for `layers` that backward reaches.

    Kept: every layer's input, and one more boundary (the last output, later the gradient), with one micro-batch
    in both forms. Offloaded: two layers' inputs and the gradient, whatever the number of layers. With a single
    slot an input comes only after the weights, which come only after the layer above is done: one less.
    """
    boundaries = min(layers, 2 if slots > 1 else 1) + 1 if offload else layers + 1
    return boundaries * size.boundary_bytes + size.micro_batch_bytes


def device_bytes(
    layouts: Sequence[Layout],
    shell: Layout,
    knobs: Knobs,
    size: StepSize,
    *,
    offload: bool,
    kept_graphs: int = 0,
    graph_bytes: int = 0,
    attention_bytes: int = 0,
    optimizer_bytes: int = 0,
) -> DeviceBytes:
    """What a step of this size holds on the device with these knobs.

    optimizer_bytes: of an optimizer buffer; where there are such, gradients do not leave, and one buffer holds them.
    kept_graphs: layers that keep their graphs, which take `graph_bytes` in all, and not their inputs.
    attention_bytes: what the others keep of attention.
    """
    saved = len(layouts) - backward_from(layouts, shell) - kept_graphs
    slots = min(knobs.weight_slots, len(layouts))
    return DeviceBytes(
        shell_weights=align(shell.nbytes),
        shell_gradients=align(shell.trained_nbytes) + sum_bytes(shell, parts=2),
        weight_slots=slots * slot_bytes(layouts),
        gradient_buffers=(1 if optimizer_bytes else knobs.grad_buffers) * gradient_buffer_bytes(layouts),
        gradient_sums=max(sum_bytes(layout, size.micro_batches) for layout in layouts),
        saved_inputs=saved_input_bytes(saved, size, offload=offload, slots=slots),
        kept_graphs=graph_bytes,
        kept_attention=attention_bytes,
        optimizer_buffers=knobs.grad_buffers * optimizer_bytes,
    )


def must_offload(
    layouts: Sequence[Layout],
    shell: Layout,
    knobs: Knobs,
    size: StepSize,
    spare_bytes: int,
    optimizer_bytes: int = 0,
) -> bool:
    """What `offload_activations="auto"` means, where the engine may hold `spare_bytes` on the device."""
    held = device_bytes(layouts, shell, knobs, size, offload=False, optimizer_bytes=optimizer_bytes)
    return held.total > spare_bytes

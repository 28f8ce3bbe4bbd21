"""Where each tensor of a layer lies in its flat buffer: the one place that knows offsets.

Weights, gradients and moments of a layer share one `Layout`, so packing and unpacking cannot disagree.
Trained parameters come first, grouped into segments of one dtype and one weight-decay rule; a gradient
buffer is the same prefix without the frozen parameters and buffers that follow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch

ALIGN_BYTES = 256  # kernels load whole vectors from it, and BLAS gives the same bits as on a fresh tensor


def align(nbytes: int) -> int:
    """Round up to the alignment at which every tensor of a flat buffer begins."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


@dataclass(frozen=True)
class TensorSpec:
    """A parameter or buffer before it has a place: name within the layer, shape, dtype and what happens to it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool = False
    decay: bool = False

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Entry:
    """A tensor with its place. `element` is its offset in arrays with one item per trained parameter."""

    spec: TensorSpec
    offset_bytes: int
    element: int

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def stop_bytes(self) -> int:
        return self.offset_bytes + self.spec.nbytes

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensor inside `flat` (1-D uint8): a view, never a copy."""
        raw = flat[self.offset_bytes : self.stop_bytes]
        return raw.view(self.spec.dtype).view(self.spec.shape)


def _placement_order(spec: TensorSpec) -> tuple[bool, bool, bool]:
    """Trained first; among them one dtype at a time, and the decayed before the others."""
    return (not spec.trained, spec.trained and spec.dtype == torch.float32, spec.trained and not spec.decay)


@dataclass(frozen=True)
class Layout:
    """The places of all tensors of one layer (or of the shell) in a flat buffer of `nbytes` bytes."""

    entries: tuple[Entry, ...]
    nbytes: int
    trained_nbytes: int  # length of the prefix that gradients share
    trained_elements: int  # items of a moments array, alignment gaps included

    @classmethod
    def of(cls, specs: Iterable[TensorSpec]) -> Layout:
        """Give every tensor a place; the order within a group is the order of `specs`."""
        entries: list[Entry] = []
        offset = element = trained_nbytes = 0
        for spec in sorted(specs, key=_placement_order):
            entries.append(Entry(spec, offset, element if spec.trained else -1))
            offset = align(offset + spec.nbytes)
            if spec.trained:
                element += align(spec.nbytes) // spec.dtype.itemsize
                trained_nbytes = offset
        return cls(tuple(entries), offset, trained_nbytes, element)

    @cached_property
    def trained(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.spec.trained)

    @cached_property
    def trained_gaps(self) -> tuple[slice, ...]:
        """Bytes of the trained prefix that belong to no tensor."""
        ends = [(entry.stop_bytes, align(entry.stop_bytes)) for entry in self.trained]
        return tuple(slice(stop, end) for stop, end in ends if stop < end)

    @cached_property
    def largest_trained_nbytes(self) -> int:
        """Of one trained tensor; plans of a model with many layers ask for it again and again."""
        return max((entry.spec.nbytes for entry in self.trained), default=0)

    @property
    def trained_parameters(self) -> int:
        """Trained parameters, alignment gaps not counted."""
        return sum(entry.spec.numel for entry in self.trained)

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Every tensor as a view into `flat` (1-D uint8, at least `nbytes` long)."""
        return {entry.name: entry.view(flat) for entry in self.entries}

    def gradient_views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The gradients of the trained parameters as views into `flat` (1-D uint8, `trained_nbytes` long)."""
        return {entry.name: entry.view(flat) for entry in self.trained}

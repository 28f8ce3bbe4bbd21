"""What autograd saves of a layer between forward and backward, where its weights do not stay where they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.autograd.graph import saved_tensors_hooks


@dataclass(frozen=True)
class _Place:
    """A view into a slot."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # in elements


class Saved:
    """Lets autograd remember weights by their place in a slot, so that they may lie in another one by backward.

    slot: uint8, where the weights lie now; changed to where they lie when backward runs. others: tensors that are kept
    anyway. nbytes: of what is saved besides weights and those.
    """

    def __init__(self, slot: torch.Tensor, others: Iterable[torch.Tensor]) -> None:
        self.slot: torch.Tensor | None = slot
        self.nbytes = 0
        self._weights = _storage(slot)
        self._known = {_storage(tensor) for tensor in others}

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Within, a layer runs forward; afterwards the slot may be used for something else."""
        with saved_tensors_hooks(self._pack, self._unpack):
            yield
        self._known.clear()
        self.slot = None

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Place:
        storage = _storage(tensor)
        if storage == self._weights:
            return _Place(tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
        if storage not in self._known:
            self._known.add(storage)
            self.nbytes += tensor.untyped_storage().nbytes()
        return tensor.detach()  # itself, an output would hold its own graph, which nobody could free without backward

    def _unpack(self, packed: torch.Tensor | _Place) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        assert self.slot is not None
        return self.slot.view(packed.dtype).as_strided(packed.size, packed.stride, packed.offset)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()

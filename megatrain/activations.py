"""Hidden states between layers: each micro-batch's input of each layer, kept until its last reader is done."""

from __future__ import annotations

import threading

import torch

from megatrain.host import Arena, Touch
from megatrain.layout import align
from megatrain.slots import Ledger


class SavedInputs:
    """Device tensors by (layer, micro-batch), each with the number of readers still to come."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lock = threading.Lock()
        self._held: dict[tuple[int, int], tuple[torch.Tensor, int]] = {}

    def put(self, layer: int, micro_batch: int, tensor: torch.Tensor, readers: int) -> None:
        """Keep the input of `layer` until `readers` have released it."""
        self._ledger.hold(tensor.nbytes)
        with self._lock:
            self._held[(layer, micro_batch)] = (tensor, readers)

    def get(self, layer: int, micro_batch: int) -> torch.Tensor:
        return self._held[(layer, micro_batch)][0]

    def release(self, layer: int, micro_batch: int) -> None:
        """A reader is done; after the last one the tensor is let go. Until then other lanes find it at any moment."""
        with self._lock:
            tensor, readers = self._held[(layer, micro_batch)]
            if readers > 1:
                self._held[(layer, micro_batch)] = (tensor, readers - 1)
                return
            del self._held[(layer, micro_batch)]
        self._ledger.release(tensor.nbytes)

    def clear(self) -> None:
        with self._lock:
            for tensor, _ in self._held.values():
                self._ledger.release(tensor.nbytes)
            self._held.clear()


def offloaded_bytes(layers: int, micro_batches: int, part_bytes: int) -> int:
    """Host bytes of all saved inputs; `part_bytes` is one layer's input for one micro-batch."""
    return layers * micro_batches * align(part_bytes)


class OffloadedInputs:
    """The host's copy of saved inputs: one place for each (layer, micro-batch), reused every step."""

    def __init__(
        self, layers: int, micro_batches: int, part_bytes: int, *, pin: bool, touch: Touch | None = None
    ) -> None:
        self._micro_batches = micro_batches
        self.part_bytes = part_bytes
        nbytes = offloaded_bytes(layers, micro_batches, part_bytes)
        self._arena = Arena("offloaded layer inputs", nbytes, pin=pin, touch=touch)
        self._places = [self._arena.take(part_bytes) for _ in range(layers * micro_batches)]

    @property
    def pinned_bytes(self) -> int:
        return self._arena.pinned_bytes

    def fits(self, micro_batches: int, part_bytes: int) -> bool:
        return micro_batches <= self._micro_batches and part_bytes <= self.part_bytes

    def place(self, layer: int, micro_batch: int, like: torch.Tensor) -> torch.Tensor:
        """The host tensor with the shape and dtype of `like` that belongs to (layer, micro-batch)."""
        flat = self._places[layer * self._micro_batches + micro_batch]
        return flat[: like.nbytes].view(like.dtype).view(like.shape)

    def close(self) -> None:
        self._arena.close()

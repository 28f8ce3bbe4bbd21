"""Counts live tensors of one width while code runs, by watching every torch operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """Most bytes that were alive at once in tensors that `counts` says yes to, of those made while it is active."""

    def __init__(self, counts: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.peak_bytes = 0
        self.made = 0
        self._counts = counts
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and self._counts(leaf):
                self._see(leaf)
        return result

    def _see(self, tensor: Tensor) -> None:
        reference = StorageWeakRef(tensor.untyped_storage())
        self.made += 1
        self._live = {key: (ref, n) for key, (ref, n) in self._live.items() if not ref.expired()}
        self._live[reference.cdata] = (reference, tensor.untyped_storage().nbytes())
        self.peak_bytes = max(self.peak_bytes, sum(nbytes for _, nbytes in self._live.values()))

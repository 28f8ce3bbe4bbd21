"""Counts the bytes of tensors that are alive while code runs: what an allocator would have had to provide."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within, every storage that an operation brings into being counts until it is freed.

    live_bytes: now. peak_bytes: the most so far. Tensors that existed before are not counted, nor
    those on the meta device.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in self._tensors((args, kwargs)):
            self._know(tensor, counted=False)
        result = function(*args, **(kwargs or {}))
        for tensor in self._tensors(result):
            self._know(tensor, counted=True)
        return result

    def _tensors(self, tree: Any) -> list[torch.Tensor]:
        return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and not leaf.is_meta]

    def _know(self, tensor: torch.Tensor, *, counted: bool) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes() if counted else 0
        if key in self._known:
            return

        def freed(_: Any) -> None:
            self.live_bytes -= nbytes
            del self._known[key]

        self._known[key] = weakref.ref(storage, freed)
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

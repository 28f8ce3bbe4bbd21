"""Counts the bytes of logits that are alive while code runs."""

from __future__ import annotations

from typing import Any

import torch
from live_bytes import LiveBytes


class LiveLogits(LiveBytes):  # type: ignore[no-untyped-call]
    """Of all tensors only those as wide as the vocabulary: logits and what is made of them.

    hidden: rows of the transposed head weight, which with its gradient is not meant. made: how many there were.
    """

    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self.made = 0
        self._vocabulary, self._hidden = vocabulary, hidden

    def _tensors(self, tree: Any) -> list[torch.Tensor]:
        found = [tensor for tensor in super()._tensors(tree) if self._is_meant(tensor)]
        self.made += len(found)
        return found

    def _is_meant(self, tensor: torch.Tensor) -> bool:
        return tensor.ndim > 1 and tensor.shape[-1] == self._vocabulary and tensor.shape[-2] != self._hidden

"""Random state of the generator that dropout draws from, saved and replayed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class RandomState:
    """The default generator of a device. Neither call waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def get(self) -> torch.Tensor:
        return torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else torch.get_rng_state()

    def set(self, state: torch.Tensor) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(state, self._device)
        else:
            torch.set_rng_state(state)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Within, draws are free; after it, the state is what it was."""
        state = self.get()
        try:
            yield
        finally:
            self.set(state)

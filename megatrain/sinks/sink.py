"""What a sink is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Sink(Protocol):
    """Takes curves, point by point. It may raise whatever it likes: see `guarded`."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """One point of each named curve. step: optimizer steps done, never fewer than in the call before."""

    def close(self) -> None:
        """Nothing more comes; what is buffered is written."""

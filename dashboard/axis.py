"""The time axis of a drawing: the run's time, less what it spent held by its user.

A run may be held for minutes between two layers of milliseconds; drawn to scale, nothing else would be seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Interval = tuple[float, float]


class Window(NamedTuple):
    """Seconds of the run that the timeline shows."""

    start_s: float
    end_s: float


class Axis:
    """Turns seconds of the run into seconds of the drawing, which begins with 0 where the window does.

    held: intervals in which the run was held, in order, not overlapping.
    """

    def __init__(self, window: Window, held: Sequence[Interval] = ()) -> None:
        cut = [(max(start, window.start_s), min(end, window.end_s)) for start, end in held]
        inside = np.array([pair for pair in cut if pair[1] > pair[0]], np.float64).reshape(-1, 2)
        self.window = window
        self._starts, self._lengths = inside[:, 0], inside[:, 1] - inside[:, 0]

    def seconds(self, times_s: Floats) -> Floats:
        """Where moments of the run lie; all of a held interval lies where it starts."""
        into = np.clip(times_s[:, None] - self._starts, 0.0, self._lengths)
        shown: Floats = times_s - self.window.start_s - into.sum(axis=1)
        return shown

    def ms(self, time_s: float) -> float:
        return float(self.seconds(np.array([time_s]))[0]) * 1e3

    @property
    def width_ms(self) -> float:
        return self.ms(self.window.end_s)

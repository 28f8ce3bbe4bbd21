"""A time limit for a whole run, so that what does not fit is skipped and said so, instead of cut off."""

from __future__ import annotations

import time
from collections.abc import Callable


class Budget:
    """Seconds left of a limit (None = no limit)."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.perf_counter) -> None:
        if seconds is not None and seconds <= 0:
            raise ValueError(f"--seconds must be positive, or left out for no limit; got {seconds}")
        self._clock = clock
        self._start_s = clock()
        self._seconds = seconds

    @property
    def spent_s(self) -> float:
        return self._clock() - self._start_s

    @property
    def left_s(self) -> float:
        return float("inf") if self._seconds is None else self._seconds - self.spent_s

    def refusal(self, needs_s: float) -> str | None:
        """Why something that takes so long is not begun, or None."""
        if self.left_s >= needs_s:
            return None
        return f"skipped: {max(self.left_s, 0):.0f} s of the time limit are left, it takes about {needs_s:.0f} s"

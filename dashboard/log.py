"""Records sorted by their start, with their numbers beside them, of which a stretch of time is found at once."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from dashboard.axis import Window
from dashboard.pieces import PIECE, Noted, Pieces, joined

R = TypeVar("R")


class Log(Generic[R]):
    """Takes records in any order; the oldest are dropped, a quarter at a time. note: their pieces."""

    def __init__(self, capacity: int, note: Callable[[Sequence[R]], Pieces]) -> None:
        self._capacity, self._note = capacity, note
        self.dropped = False
        self.items: list[R] = []
        self._room = np.empty(0, PIECE)  # of which the first len(items) are in use
        self._latest = np.empty(0)  # the latest end up to each

    def add(self, records: Sequence[R]) -> None:
        if not records:
            return
        new = self._note(records)
        at = bisect_right(self.starts_s, new["start_s"].min())
        tail = joined([self.pieces[at:], new])
        order = np.argsort(tail["start_s"], kind="stable")
        both = [*self.items[at:], *records]
        self.items[at:] = [both[index] for index in order.tolist()]
        self._write(at, tail[order])
        if len(self.items) > self._capacity:
            self._drop(len(self.items) - self._capacity * 3 // 4)

    @property
    def pieces(self) -> Pieces:
        return self._room[: len(self.items)]

    @property
    def starts_s(self) -> npt.NDArray[np.float64]:
        starts: npt.NDArray[np.float64] = self.pieces["start_s"]
        return starts

    @property
    def newest_s(self) -> float:
        """The latest end."""
        return float(self._latest[len(self.items) - 1]) if self.items else 0.0

    def between(self, start_s: float, end_s: float) -> Noted[R]:
        """Those that touch this time."""
        first = bisect_right(self._latest, start_s, hi=len(self.items))
        found = self._cut(first, bisect_left(self.starts_s, end_s))
        return found.where(found.pieces["end_s"] > start_s)

    def starting(self, start_s: float, end_s: float) -> Pieces:
        """Pieces of those that start in this time, without their records."""
        return self.pieces[bisect_left(self.starts_s, start_s) : bisect_left(self.starts_s, end_s)]

    def reaching(self, window: Window) -> Noted[R]:
        """Those that start in the window, and the last before it."""
        first = max(0, bisect_right(self.starts_s, window.start_s) - 1)
        return self._cut(first, bisect_left(self.starts_s, window.end_s))

    def _cut(self, first: int, last: int) -> Noted[R]:
        return Noted(self.items[first:last], self.pieces[first:last])

    def _write(self, at: int, tail: Pieces) -> None:
        end = at + len(tail)
        self._room, self._latest = _widened(self._room, end), _widened(self._latest, end)
        self._room[at:end] = tail
        self._latest[at:end] = np.maximum.accumulate(tail["end_s"])
        np.maximum(self._latest[at:end], self._latest[at - 1] if at else -math.inf, out=self._latest[at:end])

    def _drop(self, count: int) -> None:
        kept = len(self.items) - count
        for column in (self._room, self._latest):
            column[:kept] = column[count : count + kept].copy()
        del self.items[:count]
        self.dropped = True


def _widened(column: npt.NDArray[Any], length: int) -> npt.NDArray[Any]:
    """The column, or one with room for twice as much."""
    if length <= len(column):
        return column
    wider = np.empty(2 * length, column.dtype)
    wider[: len(column)] = column
    return wider

"""Curves that a run may append to for days: a bounded number of points, each standing for equally many values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dashboard.bars import Column

Floats = npt.NDArray[np.float64]
Reduce = Callable[[Floats], Floats]  # (groups, values in a group, columns) → (groups, columns)

POINTS = 400  # most points of a curve; a plot is a few hundred pixels wide


@dataclass(frozen=True, slots=True)
class Lines:
    """Curves over one x; NaN where there is no value."""

    x: Column
    y: dict[str, Column]


def largest(groups: Floats) -> Floats:
    """The largest value that exists, so that peaks stay; NaN where there is none."""
    maximum: Floats = np.fmax.reduce(groups, axis=1)
    return maximum


def mean(groups: Floats) -> Floats:
    """The mean of the values that exist; NaN where there is none."""
    known = ~np.isnan(groups)
    count = known.sum(axis=1)
    total = np.where(known, groups, 0.0).sum(axis=1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


class Curve:
    """Columns over a growing x. Where `capacity` points are full, each two neighbours become one.

    reduce: what a point is of the values that it stands for. A point lies at the x of its last value.
    """

    def __init__(self, names: Sequence[str], reduce: Reduce, capacity: int = POINTS) -> None:
        assert capacity % 2 == 0, "neighbours are joined two by two"
        self.names = tuple(names)
        self.stride = 1  # values that a point stands for
        self._reduce = reduce
        self._capacity = capacity
        self._points = np.empty((0, 1 + len(names)))
        self._pending = self._points  # values that do not fill a point yet

    def extend(self, rows: Sequence[Sequence[float]]) -> None:
        """Append rows of x and the values of each name, NaN for one that does not exist."""
        if not len(rows):
            return
        self._pending = np.concatenate([self._pending, np.asarray(rows, np.float64)])
        while True:
            room = min(self._capacity - len(self._points), len(self._pending) // self.stride)
            taken = room * self.stride
            self._points = np.concatenate([self._points, self._grouped(self._pending[:taken], self.stride)])
            self._pending = self._pending[taken:]
            if len(self._points) < self._capacity:
                return
            self._points = self._grouped(self._points, 2)
            self.stride *= 2

    def lines(self, further: Sequence[Sequence[float]] = ()) -> Lines:
        """Return the points, and after them those of `further` rows, which are not kept."""
        parts = [self._points]
        if len(self._pending):
            parts.append(self._grouped(self._pending, len(self._pending)))
        if len(further):
            parts.append(np.asarray(further, np.float64))
        columns = np.ascontiguousarray(np.concatenate(parts).T, np.float32)
        return Lines(columns[0], dict(zip(self.names, columns[1:], strict=True)))

    def _grouped(self, rows: Floats, size: int) -> Floats:
        if size == 1:
            return rows
        groups = rows.reshape(-1, size, rows.shape[1])
        points = self._reduce(groups)
        points[:, 0] = groups[:, -1, 0]
        return points

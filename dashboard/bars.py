"""Pieces of time to bars that a figure can draw: a bounded number, in float32 milliseconds after a window's start.

Milliseconds count from the window and not from the run because arrays are float32 (only one-dimensional float32
arrays travel to the browser as binary), and hours in float32 milliseconds are too coarse.

Note: what is merged
    A figure gets slow above some 1,000 bars. Beyond the limit, the time shown is cut into equal parts, as many as keep
    the bars within it, and bars of one kind that start in the same part of a row become one. It is as long as all
    together (but does not pass their last end), so coloured area stays busy time; where kinds alternate within a part,
    their bars stand side by side. Its hover text says how many it stands for. The bars of a layer that is followed are
    merged only with each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from dashboard.axis import Axis

Column = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
T = TypeVar("T")

LIMIT = 1000
NO_LAYER = -1  # of the shell, of free buffers, and of bars that stand for several layers


class Words(NamedTuple):
    """What stands in a bar, and what is shown when pointing at it."""

    label: str
    hover: str


@dataclass(frozen=True, slots=True)
class Pieces(Generic[T]):
    """What went on from start to end, one element each, in any order.

    kind: number of what is drawn alike (and merged, within one row). layer: NO_LAYER for what belongs to none.
    """

    start_s: Floats
    end_s: Floats
    row: Ints
    kind: Ints
    layer: Ints
    records: Sequence[T]

    @classmethod
    def of(cls, rows: Sequence[tuple[float, float, int, int, int, T]]) -> Pieces[T]:
        """rows: start, end, row, kind, layer and record of each."""
        starts, ends, places, kinds, layers, records = zip(*rows, strict=True) if rows else ((),) * 6
        return cls(
            np.array(starts, np.float64),
            np.array(ends, np.float64),
            np.array(places, np.int64),
            np.array(kinds, np.int64),
            np.array(layers, np.int64),
            records,
        )

    def on(self, axis: Axis) -> Pieces[T]:
        """The same in seconds of the drawing, without what went on only while no time passed there."""
        start_s, end_s = axis.seconds(self.start_s), axis.seconds(self.end_s)
        kept = np.flatnonzero((end_s > start_s) | (self.end_s == self.start_s))
        return self._chosen(kept, start_s, end_s)

    def ordered(self) -> Pieces[T]:
        """The same in order of time."""
        return self._chosen(np.argsort(self.start_s, kind="stable"), self.start_s, self.end_s)

    def _chosen(self, indices: npt.NDArray[np.intp], start_s: Floats, end_s: Floats) -> Pieces[T]:
        return Pieces(
            start_s[indices],
            end_s[indices],
            self.row[indices],
            self.kind[indices],
            self.layer[indices],
            [self.records[index] for index in indices.tolist()],
        )


@dataclass(frozen=True, slots=True)
class Bars:
    """Horizontal bars, one element each; `count` is how many records a bar stands for."""

    start_ms: Column
    duration_ms: Column
    row: Column
    kind: Column
    layer: Ints
    count: Ints
    label: list[str]
    hover: list[str]

    def __len__(self) -> int:
        return len(self.row)

    def where(self, mask: npt.NDArray[np.bool_]) -> Bars:
        """Only those for which the mask is true."""
        chosen = np.flatnonzero(mask).tolist()
        return Bars(
            self.start_ms[mask],
            self.duration_ms[mask],
            self.row[mask],
            self.kind[mask],
            self.layer[mask],
            self.count[mask],
            [self.label[index] for index in chosen],
            [self.hover[index] for index in chosen],
        )


def make_bars(
    pieces: Pieces[T],
    axis: Axis,
    names: Sequence[str],
    describe: Callable[[T], Words],
    limit: int = LIMIT,
    follow: int | None = None,
) -> Bars:
    """Return bars in order of time; no more than `limit` in all (or one per kind and row).

    axis: the time of the drawing. names: of the kinds. follow: a layer to keep apart from others.
    describe: called only for records that get a bar of their own, since text is what costs time.
    """
    pieces = pieces.on(axis).ordered()
    part, group = _places(pieces, limit, follow)
    _, first, cluster, count = np.unique(
        part * (group.max(initial=0) + 1) + group, return_index=True, return_inverse=True, return_counts=True
    )
    start_s, length_s = _extents(pieces, first, cluster)
    if len(first) < len(cluster):
        start_s = _side_by_side(start_s, length_s, pieces.row[first], part[first])
    words = [
        describe(pieces.records[index]) if records == 1 else _summary(records, names[kind], seconds)
        for index, records, kind, seconds in zip(
            first.tolist(), count.tolist(), pieces.kind[first].tolist(), length_s.tolist(), strict=True
        )
    ]
    return Bars(
        start_ms=(start_s * 1e3).astype(np.float32),
        duration_ms=(length_s * 1e3).astype(np.float32),
        row=pieces.row[first].astype(np.float32),
        kind=pieces.kind[first].astype(np.float32),
        layer=_common_layer(pieces, first, cluster),
        count=count,
        label=[word.label for word in words],
        hover=[word.hover for word in words],
    )


def _places(ordered: Pieces[T], limit: int, follow: int | None) -> tuple[Ints, Ints]:
    """Return the part of the time in which each piece starts, and the number of what it may be merged with there.

    Each piece has a part of its own where all may be drawn.
    """
    total = len(ordered.records)
    if total <= limit:
        return np.arange(total), np.zeros(total, np.int64)
    followed = ordered.layer == (NO_LAYER - 1 if follow is None else follow)
    rows, kinds = ordered.row.max() + 1, ordered.kind.max() + 1
    group = (followed * rows + ordered.row) * kinds + ordered.kind
    groups = int(group.max()) + 1
    halvings, parts = 0, 1 << (limit.bit_length() - 1)
    part = _cut(ordered.start_s, parts)
    used = np.unique(part * groups + group)
    while len(used) > limit and parts >> halvings > 1:
        halvings += 1
        used = np.unique((used // groups >> 1) * groups + used % groups)
    return part >> halvings, group


def _cut(starts_s: Floats, parts: int) -> Ints:
    """The part, of equal ones between the first start and the last, in which each lies; the last start, in the last."""
    share: Floats = (starts_s - starts_s[0]) / max(starts_s[-1] - starts_s[0], 1e-9)
    part: Ints = np.minimum((share * parts).astype(np.int64), parts - 1)
    return part


def _extents(ordered: Pieces[T], first: Ints, cluster: Ints) -> tuple[Floats, Floats]:
    start_s = ordered.start_s[first]
    together_s = np.bincount(cluster, ordered.end_s - ordered.start_s, minlength=len(first))
    last_end_s = np.full(len(first), -np.inf)
    np.maximum.at(last_end_s, cluster, ordered.end_s)
    return start_s, np.minimum(together_s, last_end_s - start_s)


def _side_by_side(start_s: Floats, length_s: Floats, row: Ints, part: Ints) -> Floats:
    """Move bars that begin in the same part of a row behind one another."""
    moved = start_s.copy()
    ends: dict[tuple[int, int], float] = {}
    lengths, places = length_s.tolist(), list(zip(row.tolist(), part.tolist(), strict=True))
    for index in np.argsort(start_s, kind="stable").tolist():
        moved[index] = max(moved[index], ends.get(places[index], -np.inf))
        ends[places[index]] = moved[index] + lengths[index]
    return moved


def _common_layer(ordered: Pieces[T], first: Ints, cluster: Ints) -> Ints:
    """The layer of each bar; NO_LAYER where it stands for several."""
    layer = ordered.layer[first]
    mixed = np.bincount(cluster, ordered.layer != layer[cluster], minlength=len(first)) > 0
    return np.where(mixed, NO_LAYER, layer)


def _summary(records: int, name: str, seconds: float) -> Words:
    return Words("", f"<b>{records} × {name}</b><br>{seconds * 1e3:,.3g} ms together")

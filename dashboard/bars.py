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
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dashboard.axis import Axis
from dashboard.pieces import NO_LAYER, Pieces

Column = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

LIMIT = 1000


class Words(NamedTuple):
    """What stands in a bar, and what is shown when pointing at it."""

    label: str
    hover: str


@dataclass(frozen=True, slots=True)
class _Placed:
    """Pieces in order of time, in seconds of the drawing; `number` is the place of each among those given."""

    number: npt.NDArray[np.intp]
    start_s: Floats
    end_s: Floats
    row: Ints
    kind: Ints
    layer: Ints

    @classmethod
    def on(cls, axis: Axis, pieces: Pieces) -> _Placed:
        """Without what went on only while no time passed on the axis."""
        start_s, end_s = axis.seconds(pieces["start_s"]), axis.seconds(pieces["end_s"])
        kept = np.flatnonzero((end_s > start_s) | (pieces["end_s"] == pieces["start_s"]))
        order = kept[np.argsort(start_s[kept], kind="stable")]
        row, kind, layer = (pieces[name][order] for name in ("row", "kind", "layer"))
        return cls(order, start_s[order], end_s[order], row, kind, layer)


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
    pieces: Pieces,
    axis: Axis,
    names: Sequence[str],
    describe: Callable[[int], Words],
    limit: int = LIMIT,
    follow: int | None = None,
) -> Bars:
    """Return bars in order of time; no more than `limit` in all (or one per kind and row).

    axis: the time of the drawing. names: of the kinds. follow: a layer to keep apart from others.
    describe: called with the numbers of those pieces that get a bar of their own, since text is what costs time.
    """
    placed = _Placed.on(axis, pieces)
    part, group = _places(placed, limit, follow)
    _, first, cluster, count = np.unique(
        part * (group.max(initial=0) + 1) + group, return_index=True, return_inverse=True, return_counts=True
    )
    start_s, length_s = _extents(placed, first, cluster)
    if len(first) < len(cluster):
        start_s = _side_by_side(start_s, length_s, placed.row[first], part[first])
    words = [
        describe(number) if records == 1 else _summary(records, names[kind], seconds)
        for number, records, kind, seconds in zip(
            placed.number[first].tolist(), count.tolist(), placed.kind[first].tolist(), length_s.tolist(), strict=True
        )
    ]
    return Bars(
        start_ms=(start_s * 1e3).astype(np.float32),
        duration_ms=(length_s * 1e3).astype(np.float32),
        row=placed.row[first].astype(np.float32),
        kind=placed.kind[first].astype(np.float32),
        layer=_common_layer(placed, first, cluster),
        count=count,
        label=[word.label for word in words],
        hover=[word.hover for word in words],
    )


def _places(placed: _Placed, limit: int, follow: int | None) -> tuple[Ints, Ints]:
    """Return the part of the time in which each piece starts, and the number of what it may be merged with there.

    Each piece has a part of its own where all may be drawn.
    """
    total = len(placed.number)
    if total <= limit:
        return np.arange(total), np.zeros(total, np.int64)
    followed = placed.layer == (NO_LAYER - 1 if follow is None else follow)
    rows, kinds = placed.row.max() + 1, placed.kind.max() + 1
    group = (followed * rows + placed.row) * kinds + placed.kind
    groups, parts = int(group.max()) + 1, 1 << (limit.bit_length() - 1)
    part = _cut(placed.start_s, parts)
    used: npt.NDArray[np.bool_] = np.zeros((parts, groups), np.bool_)
    used[part, group] = True
    while np.count_nonzero(used) > limit and len(used) > 1:
        used = np.logical_or(used[::2], used[1::2])
    return part * len(used) // parts, group


def _cut(starts_s: Floats, parts: int) -> Ints:
    """The part, of equal ones between the first start and the last, in which each lies; the last start, in the last."""
    share: Floats = (starts_s - starts_s[0]) / max(starts_s[-1] - starts_s[0], 1e-9)
    part: Ints = np.minimum((share * parts).astype(np.int64), parts - 1)
    return part


def _extents(placed: _Placed, first: Ints, cluster: Ints) -> tuple[Floats, Floats]:
    start_s = placed.start_s[first]
    together_s = np.bincount(cluster, placed.end_s - placed.start_s, minlength=len(first))
    last_end_s = np.full(len(first), -np.inf)
    np.maximum.at(last_end_s, cluster, placed.end_s)
    return start_s, np.minimum(together_s, last_end_s - start_s)


def _side_by_side(start_s: Floats, length_s: Floats, row: Ints, part: Ints) -> Floats:
    """Move bars that begin in the same part of a row behind one another."""
    order = np.lexsort((start_s, part, row))
    shared = (np.diff(row[order]) == 0) & (np.diff(part[order]) == 0)  # with the bar before
    starts, lengths = start_s[order].tolist(), length_s[order].tolist()
    for index in (np.flatnonzero(shared) + 1).tolist():
        starts[index] = max(starts[index], starts[index - 1] + lengths[index - 1])
    moved = np.empty_like(start_s)
    moved[order] = starts
    return moved


def _common_layer(placed: _Placed, first: Ints, cluster: Ints) -> Ints:
    """The layer of each bar; NO_LAYER where it stands for several."""
    layer = placed.layer[first]
    mixed = np.bincount(cluster, placed.layer != layer[cluster], minlength=len(first)) > 0
    return np.where(mixed, NO_LAYER, layer)


def _summary(records: int, name: str, seconds: float) -> Words:
    return Words("", f"<b>{records} × {name}</b><br>{seconds * 1e3:,.3g} ms together")

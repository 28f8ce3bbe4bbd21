"""Pieces of time to bars that a figure can draw: a bounded number, in float32 milliseconds after a window's start.

Milliseconds count from the window and not from the run because arrays are float32 (only one-dimensional float32
arrays travel to the browser as binary), and hours in float32 milliseconds are too coarse.

Note: what is merged. A figure gets slow above some 1,000 bars. Beyond the limit, the time shown is cut into equal
parts, as many as keep the bars within it (limit, limit/2, limit/4, …), and bars of one kind that start in the same
part become one. It starts where the first starts and is as long as all together (but does not pass the last end),
so coloured area stays busy time; its hover text says how many it stands for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.float32]
T = TypeVar("T")

LIMIT = 1000


@dataclass(frozen=True, slots=True)
class Piece(Generic[T]):
    """Something that went on from start to end. kind: what is drawn alike (and merged, within one row)."""

    kind: str
    row: int
    start_s: float
    end_s: float
    record: T


class Words(NamedTuple):
    """What stands in a bar, and what is shown when pointing at it."""

    label: str
    hover: str


@dataclass(frozen=True, slots=True)
class Bars:
    """Horizontal bars of one colour, one element each; `count` is how many records a bar stands for."""

    start_ms: Column
    duration_ms: Column
    row: Column
    count: Column
    label: list[str]
    hover: list[str]


def make_bars(
    pieces: Sequence[Piece[T]], origin_s: float, describe: Callable[[T], Words], limit: int = LIMIT
) -> dict[str, Bars]:
    """Return the bars of each kind, in order of time; no more than `limit` in all (or one per kind and row).

    pieces: in any order. origin_s: the second that becomes millisecond 0.
    describe: called only for records that get a bar of their own, since text is what costs time.
    """
    clusters: dict[tuple[str, int, int], list[Piece[T]]] = defaultdict(list)
    ordered = sorted(pieces, key=lambda piece: piece.start_s)
    for piece, part in zip(ordered, _parts(ordered, limit), strict=True):
        clusters[piece.kind, piece.row, part].append(piece)
    kinds: dict[str, list[list[Piece[T]]]] = defaultdict(list)
    for (kind, _, _), cluster in clusters.items():
        kinds[kind].append(cluster)
    return {kind: _bars(clusters, origin_s, describe) for kind, clusters in kinds.items()}


def no_bars() -> Bars:
    empty = np.empty(0, np.float32)
    return Bars(empty, empty, empty, empty, [], [])


def _parts(ordered: Sequence[Piece[T]], limit: int) -> list[int]:
    """Return the part of the time in which each piece starts; each piece its own where all may be drawn."""
    if len(ordered) <= limit:
        return list(range(len(ordered)))
    starts = np.array([piece.start_s for piece in ordered])
    share = (starts - starts[0]) / max(starts[-1] - starts[0], 1e-9)
    kinds = {key: number for number, key in enumerate({(piece.kind, piece.row) for piece in ordered})}
    kind = np.array([kinds[piece.kind, piece.row] for piece in ordered])
    count = limit
    while count > 1 and len(np.unique(_cut(share, count) * len(kinds) + kind)) > limit:
        count //= 2
    parts: list[int] = _cut(share, count).tolist()
    return parts


def _cut(share: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.int64]:
    """The part, of `count` equal ones, in which each share of the whole (0 to 1) lies; 1 belongs to the last."""
    return np.minimum((share * count).astype(np.int64), count - 1)


def _bars(clusters: list[list[Piece[T]]], origin_s: float, describe: Callable[[T], Words]) -> Bars:
    starts_s = np.array([cluster[0].start_s for cluster in clusters])
    words = [_words(cluster, describe) for cluster in clusters]
    return Bars(
        start_ms=((starts_s - origin_s) * 1e3).astype(np.float32),
        duration_ms=np.array([_length_s(cluster) * 1e3 for cluster in clusters], np.float32),
        row=np.array([cluster[0].row for cluster in clusters], np.float32),
        count=np.array([len(cluster) for cluster in clusters], np.float32),
        label=[word.label for word in words],
        hover=[word.hover for word in words],
    )


def _length_s(cluster: list[Piece[T]]) -> float:
    together = sum(piece.end_s - piece.start_s for piece in cluster)
    return min(together, max(piece.end_s for piece in cluster) - cluster[0].start_s)


def _words(cluster: list[Piece[T]], describe: Callable[[T], Words]) -> Words:
    if len(cluster) == 1:
        return describe(cluster[0].record)
    milliseconds = f"{_length_s(cluster) * 1e3:,.3g} ms together"
    return Words("", f"<b>{len(cluster)} × {cluster[0].kind}</b><br>{milliseconds}<br>show fewer steps to see each")

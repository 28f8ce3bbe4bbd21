"""Sets of seconds, as sorted lists of disjoint (start, end) pairs."""

from __future__ import annotations

from collections.abc import Iterable

from megatrain.trace.records import Span

Intervals = list[tuple[float, float]]


def union(pairs: Iterable[tuple[float, float]]) -> Intervals:
    """Join what overlaps or touches; pairs may come in any order, empty ones vanish."""
    joined: Intervals = []
    for start, end in sorted(pair for pair in pairs if pair[1] > pair[0]):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def intersection(left: Intervals, right: Intervals) -> Intervals:
    """Return the seconds that are in both."""
    both: Intervals = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if end > start:
            both.append((start, end))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return both


def gaps(busy: Intervals, start_s: float, end_s: float) -> Intervals:
    """Return the seconds of a window that are not in `busy`."""
    edges = [start_s, *(edge for pair in intersection(busy, [(start_s, end_s)]) for edge in pair), end_s]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]


def length(intervals: Intervals) -> float:
    return sum((end - start for start, end in intervals), 0.0)


def busy(spans: Iterable[Span], start_s: float, end_s: float) -> Intervals:
    """Return the seconds of a window in which at least one of the spans ran."""
    return union((max(span.start_s, start_s), min(span.end_s, end_s)) for span in spans)

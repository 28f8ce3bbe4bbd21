"""Why compute waited: every second without compute gets one cause.

Note: how a cause is found. A gap ends where a compute span starts. That span needed, in this order,
  1. the update of its layer, because a layer is loaded only after it: up to its end the cause is "optimizer";
  2. the load of its layer: up to its end "weights", whether it was in progress or had not begun; but "optimizer" where
     it began as soon as a longer update was over: then loads follow each other at the pace of updates, and a faster
     link would only wait longer;
  3. for a backward a free gradient buffer, and a saved input where those are kept on the host: up to the end of
     the last unload or fetch that ended in the gap, "gradient buffer" or "saved inputs".
AdamW on the device needs the state of its layer: up to the end of that load "optimizer state". A layer that is loaded
again after it waited for its store, which counts as its update.
Before all that, "paused" is what the run's user held.
What is left is "other": launching work, data, the user's own code. After the last compute span of a window come
the gradients that still leave and the updates that still run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from megatrain.trace.intervals import busy, gaps
from megatrain.trace.records import Lane, Op, Span

WaitCause = Literal["weights", "gradient buffer", "saved inputs", "optimizer", "optimizer state", "paused", "other"]

CLOCK_SLACK_S: Final = 20e-6  # a lane may read the clock this long after it let the next one go
ANY_LAYER: Final = -1

Key = tuple[Op | Lane, int | None]


@dataclass(frozen=True, slots=True)
class Wait:
    """Seconds in which compute waited for one cause, before it worked on `layer` (None = the shell, or nothing)."""

    start_s: float
    end_s: float
    cause: WaitCause
    layer: int | None


def compute_waits(
    spans: Iterable[Span], start_s: float, end_s: float, held: Sequence[tuple[float, float]] = ()
) -> list[Wait]:
    """Return the seconds of a window in which nothing was computed, in order, each with its cause.

    held: when the user held the run, in order.

    Their lengths and the busy seconds of compute add up to the window.
    """
    spans = [span for span in spans if span.end_s > start_s and span.start_s < end_s]
    compute = [span for span in spans if span.lane == "compute"]
    next_span = {span.start_s: span for span in compute if span.end_s > span.start_s}
    ends = _Ends(spans, end_s)
    return [
        wait
        for gap_start_s, gap_end_s in gaps(busy(compute, start_s, end_s), start_s, end_s)
        for wait in _explain(gap_start_s, gap_end_s, next_span.get(gap_end_s), ends, held)
    ]


def _explain(
    start_s: float, end_s: float, following: Span | None, ends: _Ends, held: Sequence[tuple[float, float]]
) -> Iterator[Wait]:
    """Cut what the user held out of a gap; the rest has causes of its own."""
    layer = following.layer if following else None
    for held_from_s, held_until_s in held:
        if held_until_s > start_s and held_from_s < end_s:
            yield from _split(start_s, held_from_s, following, ends)
            yield Wait(max(start_s, held_from_s), min(end_s, held_until_s), "paused", layer)
            start_s = held_until_s
    yield from _split(start_s, end_s, following, ends)


class _Ends:
    """When spans ended, per op and layer, and per lane; those that outlast the window end with it."""

    def __init__(self, spans: Iterable[Span], window_end_s: float) -> None:
        self._ends: dict[Key, list[float]] = defaultdict(list)
        self._spans: dict[Key, list[Span]] = defaultdict(list)
        for end_s, span in sorted(((min(s.end_s, window_end_s), s) for s in spans), key=lambda pair: pair[0]):
            for key in ((span.op, span.layer), (span.op, ANY_LAYER), (span.lane, ANY_LAYER)):
                self._ends[key].append(end_s)
                self._spans[key].append(span)

    def last(self, what: Op | Lane, layer: int | None, until_s: float) -> float:
        """Return the last end at `until_s` or before; minus infinity where there is none."""
        index = self._index((what, layer), until_s)
        return self._ends[what, layer][index] if index >= 0 else float("-inf")

    def last_span(self, what: Op, layer: int | None, until_s: float) -> Span | None:
        """Return the span that ended last at `until_s` or before."""
        index = self._index((what, layer), until_s)
        return self._spans[what, layer][index] if index >= 0 else None

    def _index(self, key: Key, until_s: float) -> int:
        return bisect_right(self._ends.get(key, []), until_s + CLOCK_SLACK_S) - 1


def _split(start_s: float, end_s: float, following: Span | None, ends: _Ends) -> Iterator[Wait]:
    layer = following.layer if following else None
    for cause, until_s in [*_blockers(following, end_s, ends), ("other", end_s)]:
        until_s = min(until_s, end_s)
        if until_s > start_s:
            yield Wait(start_s, until_s, cause, layer)
            start_s = until_s


def _blockers(following: Span | None, gap_end_s: float, ends: _Ends) -> list[tuple[WaitCause, float]]:
    """Return what could have held the gap open, and until when, in the order in which it has to happen."""
    if following is None:
        return [
            ("gradient buffer", ends.last("unload", ANY_LAYER, gap_end_s)),
            ("optimizer", ends.last("update", ANY_LAYER, gap_end_s)),
            ("optimizer state", ends.last("store", ANY_LAYER, gap_end_s)),
        ]
    if following.op == "adamw":
        return [("optimizer state", ends.last("load state", following.layer, gap_end_s))]
    load_end_s = ends.last("load", following.layer, gap_end_s)
    blockers: list[tuple[WaitCause, float]] = [
        ("optimizer", ends.last("update", following.layer, gap_end_s)),
        ("optimizer state", ends.last("store", following.layer, gap_end_s)),
        ("weights", load_end_s),
    ]
    if _at_the_pace_of_updates(following.layer, gap_end_s, ends):
        blockers = [("optimizer", load_end_s)]
    if following.op == "backward":
        blockers.append(("gradient buffer", ends.last("unload", ANY_LAYER, gap_end_s)))
        blockers.append(("saved inputs", ends.last("fetch", following.layer, gap_end_s)))
    return blockers


def _at_the_pace_of_updates(layer: int | None, until_s: float, ends: _Ends) -> bool:
    """Whether a layer's load had to wait for its update, and for nothing after that, and the update took longer."""
    load = ends.last_span("load", layer, until_s)
    update = None if load is None else ends.last_span("update", layer, load.start_s)
    if load is None or update is None or update.end_s - update.start_s <= load.end_s - load.start_s:
        return False
    lane_free_s = ends.last("h2d", ANY_LAYER, load.start_s)
    slot_free_s = ends.last("compute", ANY_LAYER, load.start_s)
    return update.end_s >= max(lane_free_s, slot_free_s)

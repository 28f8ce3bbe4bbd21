"""Spans, waits and states of buffers as rows of numbers: what went on from when to when, where, and of which kind.

A drawing counts with thousands of records several times a second. Their numbers are taken once, when they come, and
kept beside them; the records themselves are asked only for words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from dashboard.colours import OP_COLOURS, STATE_COLOURS, WAIT_COLOURS
from megatrain.trace import SlotChange, Span, Wait

R = TypeVar("R")

NO_LAYER = -1  # of the shell, of free buffers, and of bars that stand for several layers
ROWS = ("h2d", "compute", "d2h", "host")
COMPUTE = ROWS.index("compute")
OPS, CAUSES, STATES = tuple(OP_COLOURS), tuple(WAIT_COLOURS), tuple(STATE_COLOURS)
KINDS = (*OPS, *(f"wait: {cause}" for cause in CAUSES))  # of bars in the timeline, by number
PAUSED = len(KINDS)  # the kind of a wait that is not drawn, since no time passes meanwhile
REMOVED = len(STATES)  # the kind of a change after which there is no buffer

PIECE = np.dtype([("start_s", "f8"), ("end_s", "f8"), ("row", "i8"), ("kind", "i8"), ("layer", "i8")])
Pieces = npt.NDArray[np.void]  # of PIECE

_ROW = {lane: row for row, lane in enumerate(ROWS)}
_OP = {op: kind for kind, op in enumerate(OPS)}
_CAUSE = {cause: len(OPS) + kind for kind, cause in enumerate(CAUSES)} | {"paused": PAUSED}
_STATE = {state: kind for kind, state in enumerate(STATES)} | {"removed": REMOVED}


class Noted(NamedTuple, Generic[R]):
    """Records and their pieces, one of each."""

    records: Sequence[R]
    pieces: Pieces

    def where(self, mask: npt.NDArray[np.bool_]) -> Noted[R]:
        """Only those for which the mask is true."""
        kept = np.flatnonzero(mask)
        if len(kept) == len(mask):
            return self
        return Noted([self.records[index] for index in kept.tolist()], self.pieces[kept])


def pieces_of(rows: Iterable[tuple[float, float, int, int, int]]) -> Pieces:
    """rows: start, end, row, kind and layer of each."""
    return np.array(list(rows), PIECE)


def pieces_of_spans(spans: Iterable[Span]) -> Pieces:
    return pieces_of((s.start_s, s.end_s, _ROW[s.lane], _OP[s.op], _layer(s.layer)) for s in spans)


def pieces_of_waits(waits: Iterable[Wait]) -> Pieces:
    return pieces_of((w.start_s, w.end_s, COMPUTE, _CAUSE[w.cause], _layer(w.layer)) for w in waits)


def pieces_of_changes(changes: Iterable[SlotChange]) -> Pieces:
    """They last no time: a state ends with its buffer's next change, which may not be known yet. row: the slot."""
    return pieces_of((c.time_s, c.time_s, c.slot, _STATE[c.state], _layer(c.layer)) for c in changes)


def joined(parts: Iterable[Pieces]) -> Pieces:
    return np.concatenate([np.empty(0, PIECE), *parts], dtype=PIECE)  # dtype: finding it takes longer than joining


def _layer(layer: int | None) -> int:
    return NO_LAYER if layer is None else layer

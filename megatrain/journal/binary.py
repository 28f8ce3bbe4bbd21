"""Spans, slot changes and layer statistics as records of 32 bytes: cheap to append, and to find one's way in.

A file is a header of 32 bytes and records, all little-endian, so a file cut anywhere has only its last record torn.
The first byte of a record says what it is and how to read the other 31. Those bytes lie on disks: tables here only
ever grow at their end, and a change that an older reader would misread takes the next VERSION.

Lost on the way: a duration keeps 24 bits, and so does each scale of LayerStats (they are measured in float32).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from megatrain.trace import Lane, LayerStats, Op, Records, SlotChange, SlotKind, SlotState, Span

Event = Span | SlotChange | LayerStats

VERSION: Final = 1
MAGIC: Final = b"MTevents"
RECORD_BYTES: Final = 32

# Where each table's codes begin is part of the format, too.
OPS: Final[tuple[Op, ...]] = (
    *("load", "record", "forward", "head", "backward"),
    *("norm", "unload", "update", "offload", "fetch", "score"),
    *("load state", "adamw", "store"),
)
SLOTS: Final[tuple[tuple[SlotKind, SlotState], ...]] = (
    *(("weights", "free"), ("weights", "loading"), ("weights", "ready")),
    *(("weights", "in_use"), ("weights", "draining"), ("weights", "removed")),
    *(("gradients", "free"), ("gradients", "loading"), ("gradients", "ready")),
    *(("gradients", "in_use"), ("gradients", "draining"), ("gradients", "removed")),
    *(("optimizer", "free"), ("optimizer", "loading"), ("optimizer", "ready")),
    *(("optimizer", "in_use"), ("optimizer", "draining"), ("optimizer", "removed")),
)
LANES: Final[tuple[Lane, ...]] = ("h2d", "compute", "d2h", "host")
FIRST_SLOT: Final = 128
LAYER: Final = 240
LOST: Final = 255

EVENT = np.dtype(
    [
        ("code", "u1"),  # an op, a slot's kind and state, or LOST (then `nbytes` counts records)
        ("flags", "u1"),  # of a span: its lane
        ("layer", "<i2"),  # -1 = None, here and in the next two
        ("slot", "<i2"),
        ("micro_batch", "<i2"),
        ("step", "<u4"),
        ("duration", "<f4"),
        ("start", "<f8"),
        ("nbytes", "<u8"),
    ]
)
LAYER_EVENT = np.dtype(
    [
        ("code", "u1"),  # LAYER
        ("flags", "u1"),
        ("layer", "<i2"),
        ("step", "<u4"),
        ("grad_norm", "<f4"),
        ("weight_norm", "<f4"),
        ("output_rms", "<f4"),
        ("unused", "<u4"),
        ("time", "<f8"),
    ]
)
_SLOT_FIELDS = ["code", "layer", "slot", "step", "start"]
_LAYER_FIELDS = ["time", "step", "layer", "grad_norm", "weight_norm", "output_rms"]

# The same bytes once more: struct packs one record in a third of the time, and refuses what does not fit.
_pack_event = struct.Struct("<BBhhhIfdQ").pack
_pack_layer = struct.Struct("<BBhIfffId").pack
_HEADER = struct.Struct("<8sI4xQ8x")

_OP_CODES = {op: code for code, op in enumerate(OPS)}
_SLOT_CODES = {slot: code for code, slot in enumerate(SLOTS, start=FIRST_SLOT)}
_LANE_CODES = {lane: code for code, lane in enumerate(LANES)}
_LARGEST = float(np.finfo(np.float32).max)


class Header(NamedTuple):
    """What stands at the start of a segment. first: records that the run's journal held before this one."""

    version: int
    first: int


def encode(records: Iterable[Event]) -> bytes:
    """Return 32 bytes for each record; ValueError for one that does not fit into them."""
    return b"".join([_encode_one(record) for record in records])


def encode_lost(count: int) -> bytes:
    """Return a record that says: here `count` records were dropped before they could be written."""
    return _pack_event(LOST, 0, -1, -1, -1, 0, 0.0, 0.0, count)


def decode(data: bytes, version: int = VERSION) -> Records:
    """Return the spans, slot changes and layer statistics (and how many were lost) of whole records.

    version: of the file, for the ValueError about a record that only a newer MegaTrain can read.
    """
    rows = np.frombuffer(data, EVENT)
    codes = rows["code"]
    spans = (codes < len(OPS)) & (rows["flags"] < len(LANES))
    slots = (codes >= FIRST_SLOT) & (codes < FIRST_SLOT + len(SLOTS))
    layers, lost = codes == LAYER, codes == LOST
    _require_known(codes[~(spans | slots | layers | lost)], version)
    return Records(
        spans=[_span(*row) for row in rows[spans].tolist()],
        slots=[_slot(*row) for row in rows[slots][_SLOT_FIELDS].tolist()],
        layers=[LayerStats(*row) for row in rows.view(LAYER_EVENT)[layers][_LAYER_FIELDS].tolist()],
        lost=int(rows["nbytes"][lost].sum()),
    )


def encode_header(first: int) -> bytes:
    return _HEADER.pack(MAGIC, VERSION, first)


def decode_header(data: bytes, name: str) -> Header:
    """Return the header that `data` begins with; ValueError naming the file where it is none, or of a newer version."""
    magic, version, first = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise ValueError(f"{name} must begin with {MAGIC!r}, as a journal of MegaTrain does; it begins with {magic!r}")
    if version > VERSION:
        raise ValueError(
            f"{name} is a journal of file version {version}; this MegaTrain reads versions up to {VERSION}: "
            "open it with the version that wrote it, or a newer one"
        )
    return Header(version, first)


def _encode_one(record: Event) -> bytes:
    try:
        return _ENCODERS[type(record)](record)
    except (struct.error, OverflowError, KeyError):
        raise ValueError(
            "a journal takes spans, slot changes and layer statistics whose layer, slot and micro-batch are below "
            f"32,768 and whose step is below 2³²; got {record!r}"
        ) from None


def _encode_span(span: Span) -> bytes:
    return _pack_event(
        _OP_CODES[span.op],
        _LANE_CODES[span.lane],
        -1 if span.layer is None else span.layer,
        -1 if span.slot is None else span.slot,
        -1 if span.micro_batch is None else span.micro_batch,
        span.step,
        span.end_s - span.start_s,
        span.start_s,
        span.nbytes,
    )


def _encode_slot(change: SlotChange) -> bytes:
    code = _SLOT_CODES[change.kind, change.state]
    layer = -1 if change.layer is None else change.layer
    return _pack_event(code, 0, layer, change.slot, -1, change.step, 0.0, change.time_s, 0)


def _encode_layer(stats: LayerStats) -> bytes:
    scales = (_float32(stats.grad_norm), _float32(stats.weight_norm), _float32(stats.output_rms))
    return _pack_layer(LAYER, 0, stats.layer, stats.step, *scales, 0, stats.time_s)


def _float32(value: float) -> float:
    """What is too large for float32 is infinite there."""
    return math.copysign(math.inf, value) if abs(value) > _LARGEST else value


_ENCODERS: dict[type, Callable[[Any], bytes]] = {
    Span: _encode_span,
    SlotChange: _encode_slot,
    LayerStats: _encode_layer,
}


def _require_known(unknown: npt.NDArray[np.uint8], version: int) -> None:
    if len(unknown):
        raise ValueError(
            f"a record of code {unknown[0]} in a journal of file version {version} is unknown to this MegaTrain, "
            f"which writes version {VERSION}: open it with the version that wrote it, or a newer one"
        )


def _span(
    code: int,
    lane: int,
    layer: int,
    slot: int,
    micro_batch: int,
    step: int,
    duration_s: float,
    start_s: float,
    nbytes: int,
) -> Span:
    return Span(
        LANES[lane],
        OPS[code],
        step,
        None if layer < 0 else layer,
        None if micro_batch < 0 else micro_batch,
        None if slot < 0 else slot,
        start_s,
        start_s + duration_s,
        nbytes,
    )


def _slot(code: int, layer: int, slot: int, step: int, time_s: float) -> SlotChange:
    kind, state = SLOTS[code - FIRST_SLOT]
    return SlotChange(time_s, kind, slot, state, None if layer < 0 else layer, step)

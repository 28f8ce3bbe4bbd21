import math
import struct
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traced_run import TracedRun

from megatrain.journal import binary, decode, encode
from megatrain.journal.binary import decode_header, encode_header, encode_lost
from megatrain.trace import Lane, LayerStats, Op, Records, SlotChange, SlotKind, SlotState, Span

LAYERS = st.none() | st.integers(0, 2**15 - 1)
STEPS = st.integers(0, 2**32 - 1)
SECONDS = st.floats(0, 1e7)
FLOAT32 = st.floats(width=32)

SPANS = st.builds(
    lambda start_s, length_s, **rest: Span(start_s=start_s, end_s=start_s + length_s, **rest),
    start_s=SECONDS,
    length_s=st.floats(0, 1e5),
    lane=st.sampled_from(get_args(Lane)),
    op=st.sampled_from(get_args(Op)),
    step=STEPS,
    layer=LAYERS,
    micro_batch=LAYERS,
    slot=LAYERS,
    nbytes=st.integers(0, 2**64 - 1),
)
CHANGES = st.builds(
    SlotChange,
    time_s=SECONDS,
    kind=st.sampled_from(get_args(SlotKind)),
    slot=st.integers(0, 2**15 - 1),
    state=st.sampled_from(get_args(SlotState)),
    layer=LAYERS,
    step=STEPS,
)
STATS = st.builds(
    LayerStats,
    time_s=SECONDS,
    step=STEPS,
    layer=st.integers(0, 2**15 - 1),
    grad_norm=FLOAT32,
    weight_norm=FLOAT32,
    output_rms=FLOAT32,
)


def untimed(span: Span) -> Span:
    return replace(span, end_s=0.0)


@settings(deadline=None)
@given(st.lists(SPANS | CHANGES | STATS))
def test_what_is_encoded_comes_back(records: list[Any]) -> None:
    spans = [record for record in records if isinstance(record, Span)]
    data = encode(records)
    assert len(data) == 32 * len(records)
    decoded = decode(data)
    assert [untimed(span) for span in decoded.spans] == [untimed(span) for span in spans]
    assert decoded.slots == [record for record in records if isinstance(record, SlotChange)]
    assert repr(decoded.layers) == repr([record for record in records if isinstance(record, LayerStats)])  # NaN ≠ NaN
    for span, original in zip(decoded.spans, spans, strict=True):
        duration_s = original.end_s - original.start_s
        coarse_s = duration_s * 2.0**-24 + 1e-38  # float32
        fine_s = abs(original.end_s) * 2.0**-51  # the sum of start and duration
        assert abs(span.end_s - original.end_s) <= coarse_s + fine_s


def test_every_word_of_the_records_has_a_code() -> None:
    assert set(binary.OPS) == set(get_args(Op))
    assert set(binary.LANES) == set(get_args(Lane))
    assert set(binary.SLOTS) == {(kind, state) for kind in get_args(SlotKind) for state in get_args(SlotState)}
    assert len(binary.OPS) <= binary.FIRST_SLOT
    assert binary.FIRST_SLOT + len(binary.SLOTS) <= binary.LAYER < binary.LOST


def test_bytes_on_disk_stay_what_they_are() -> None:
    """Written once by hand: a change here makes every journal on disk unreadable."""
    span = Span("d2h", "unload", 7, 3, None, 1, 2.0, 2.5, 4096)
    change = SlotChange(1.0, "gradients", 2, "draining", None, 7)
    stats = LayerStats(3.0, 7, 5, 0.5, 0.25, math.inf)
    assert encode([span, change, stats]) == (
        struct.pack("<BBhhhIfdQ", 6, 2, 3, 1, -1, 7, 0.5, 2.0, 4096)
        + struct.pack("<BBhhhIfdQ", 138, 0, -1, 2, -1, 7, 0.0, 1.0, 0)
        + struct.pack("<BBhIfffId", 240, 0, 5, 7, 0.5, 0.25, math.inf, 0, 3.0)
    )
    assert binary.EVENT.itemsize == binary.LAYER_EVENT.itemsize == 32


def test_a_made_up_run_is_drawn_as_before() -> None:
    recorder = TracedRun().steps(2)
    decoded = decode(encode(recorder.spans()))
    assert [untimed(span) for span in decoded.spans] == [untimed(span) for span in recorder.spans()]
    ends = np.array([span.end_s for span in decoded.spans])
    assert np.allclose(ends, [span.end_s for span in recorder.spans()], rtol=0, atol=1e-8)


def test_scales_too_large_for_float32_are_infinite() -> None:
    (stats,) = decode(encode([LayerStats(0.0, 0, 0, 1e300, -1e300, math.nan)])).layers
    assert (stats.grad_norm, stats.weight_norm) == (math.inf, -math.inf)
    assert math.isnan(stats.output_rms)


def test_tells_what_was_lost() -> None:
    change = SlotChange(0.0, "weights", 0, "free", None, 0)
    assert decode(encode_lost(3) + encode([change]) + encode_lost(4)) == Records(slots=[change], lost=7)


@pytest.mark.parametrize(
    "change", [{"layer": 2**15}, {"step": 2**32}, {"step": -1}, {"nbytes": -1}, {"op": "dream"}, {"slot": 1.5}]
)
def test_refuses_what_does_not_fit(change: dict[str, Any]) -> None:
    span = Span("compute", "forward", 0, 0, None, None, 0.0, 1.0, 0)
    with pytest.raises(ValueError, match=r"a journal takes spans, .* are below 32,768 .*; got Span\("):
        encode([replace(span, **change)])
    with pytest.raises(ValueError, match="; got 'span'"):
        encode(["span"])  # type: ignore[list-item]


@pytest.mark.parametrize("row", [bytes([100]) + bytes(31), bytes([6, 9]) + bytes(30)])
def test_a_code_of_a_newer_version_is_named(row: bytes) -> None:
    with pytest.raises(ValueError, match=rf"a record of code {row[0]} in a journal of file version 4 is unknown"):
        decode(row, version=4)


def test_a_file_of_a_newer_version_is_named() -> None:
    header = encode_header(12)
    assert decode_header(header, "events.bin") == (binary.VERSION, 12)
    newer = header[:8] + struct.pack("<I", 9) + header[12:]
    with pytest.raises(ValueError, match=r"events.bin is a journal of file version 9; this MegaTrain reads"):
        decode_header(newer, "events.bin")
    with pytest.raises(ValueError, match=r"events.bin must begin with b'MTevents'"):
        decode_header(b"PK".ljust(32), "events.bin")

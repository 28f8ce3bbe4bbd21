import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dashboard.axis import Axis, Window
from dashboard.bars import Bars, Words, make_bars
from dashboard.pieces import NO_LAYER, Pieces, pieces_of

NAMES = ("a", "b", "c")
Part = tuple[float, float, int, int, int]  # start, length, row, kind, layer


def pieces(parts: list[Part]) -> Pieces:
    return pieces_of((start, start + length, row, kind, layer) for start, length, row, kind, layer in parts)


def bars(parts: list[Part], limit: int, follow: int | None = None, origin_s: float = 0.0) -> Bars:
    return make_bars(
        pieces(parts),
        Axis(Window(origin_s, origin_s + 100)),
        NAMES,
        lambda number: Words(str(number), f"piece {number}"),
        limit,
        follow,
    )


def test_nothing_to_draw() -> None:
    assert len(bars([], 5)) == 0


def test_a_piece_is_a_bar() -> None:
    one = bars([(10.25, 0.5, 2, 1, 7)], 5, origin_s=10.0)
    assert (one.start_ms, one.duration_ms, one.row, one.kind, one.layer, one.count) == (
        [250],
        [500],
        [2],
        [1],
        [7],
        [1],
    )
    assert (one.label, one.hover) == (["0"], ["piece 0"])


@settings(deadline=None)
@example([(float(start), 0.0, row, kind, 0) for kind in range(3) for row in range(3) for start in (0, 1)], 9, None)
@given(
    st.lists(
        st.tuples(st.floats(0, 9), st.floats(0, 1), st.integers(0, 2), st.integers(0, 2), st.integers(-1, 3)),
        max_size=60,
    ),
    st.integers(18, 40),
    st.none() | st.integers(0, 3),
)
def test_no_piece_is_lost_or_drawn_twice(parts: list[Part], limit: int, follow: int | None) -> None:
    drawn = bars(parts, limit, follow)
    assert drawn.count.sum() == len(parts)
    assert len(drawn) <= limit
    for kind, row in {(kind, row) for _, _, row, kind, _ in parts}:
        of_both = drawn.count[(drawn.kind == kind) & (drawn.row == row)]
        assert of_both.sum() == sum((other_kind, other_row) == (kind, row) for _, _, other_row, other_kind, _ in parts)
    alone = [int(label) for label in drawn.label if label]
    assert len(alone) == len(set(alone)) == (drawn.count == 1).sum()
    if len(parts) <= limit:
        assert sorted(alone) == list(range(len(parts)))
    if follow is not None:
        assert drawn.count[drawn.layer == follow].sum() == sum(layer == follow for *_, layer in parts)


def test_a_very_long_run_has_few_bars_of_the_same_busy_time() -> None:
    busy = [(n * 1e-3, 4e-4, 0, 0, n) for n in range(30_000)] + [(n * 1e-3, 7e-4, 1, 1, n) for n in range(30_000)]
    drawn = bars(busy, 1000)
    assert 400 < len(drawn) <= 1000
    assert drawn.count.sum() == 60_000
    assert drawn.duration_ms[drawn.kind == 0].sum() == pytest.approx(12_000, rel=1e-4)
    assert drawn.duration_ms[drawn.kind == 1].sum() == pytest.approx(21_000, rel=1e-4)
    first = drawn.row == 0
    ends = (drawn.start_ms + drawn.duration_ms)[first]
    assert (ends[:-1] <= drawn.start_ms[first][1:] + 0.01).all()
    assert "× a" in drawn.hover[0]
    assert set(drawn.layer.tolist()) == {NO_LAYER}


def test_kinds_that_alternate_in_one_row_stand_side_by_side_when_merged() -> None:
    drawn = bars([(float(n), 1.0, 0, n % 2, n) for n in range(64)], 8)
    assert len(drawn) <= 8
    order = np.argsort(drawn.start_ms)
    starts, ends = drawn.start_ms[order], (drawn.start_ms + drawn.duration_ms)[order]
    assert (ends[:-1] <= starts[1:]).all()
    assert ends[-1] == 64_000


def test_merging_keeps_rows_apart() -> None:
    drawn = bars([(float(time_s), 0.25, row, 0, 0) for time_s in range(100) for row in (0, 1)], 10)
    assert len(drawn) <= 10
    for row in (0, 1):
        assert drawn.count[drawn.row == row].sum() == 100
        assert drawn.duration_ms[drawn.row == row].sum() == pytest.approx(25_000)


def test_merged_micro_batches_of_one_layer_keep_its_number() -> None:
    drawn = bars([(n * 1.0, 0.5, 0, 0, 5) for n in range(9)], 4)
    assert len(drawn) < 9
    assert set(drawn.layer.tolist()) == {5}


def test_columns_travel_as_binary() -> None:
    drawn = bars([(n * 1.0, 0.5, 0, n % 3, 5) for n in range(9)], 20)
    for some in (drawn, drawn.where(drawn.kind == 1)):
        for column in (some.start_ms, some.duration_ms, some.row, some.kind):
            assert (column.dtype, column.ndim, column.flags.c_contiguous) == (np.float32, 1, True)


def test_milliseconds_stay_exact_hours_into_a_run() -> None:
    late_s = 36_000.0
    drawn = bars([(late_s + 0.001, 0.0002, 0, 0, 0)], 5, origin_s=late_s)
    assert drawn.start_ms[0] == pytest.approx(1.0, abs=1e-4)
    assert drawn.duration_ms[0] == pytest.approx(0.2, abs=1e-4)

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dashboard.curves import Curve, largest, mean


def test_few_values_are_points_of_their_own() -> None:
    curve = Curve(["loss", "rate"], mean)
    curve.extend([(0, 3.0, 1.0), (1, math.nan, 2.0)])
    curve.extend([(2, 1.0, 3.0)])
    lines = curve.lines()
    assert lines.x.tolist() == [0, 1, 2]
    assert np.array_equal(lines.y["loss"], np.array([3, math.nan, 1], np.float32), equal_nan=True)
    assert lines.y["rate"].tolist() == [1, 2, 3]


def test_nothing_is_no_points() -> None:
    curve = Curve(["loss"], mean)
    curve.extend([])
    assert len(curve.lines().x) == len(curve.lines().y["loss"]) == 0


@given(st.lists(st.integers(0, 50), max_size=12), st.sampled_from([4, 10]))
def test_every_value_counts_once_and_points_are_bounded(portions: list[int], capacity: int) -> None:
    curve, values = Curve(["n"], mean, capacity), list(range(sum(portions)))
    done = 0
    for size in portions:
        curve.extend([(n, n) for n in values[done : done + size]])
        done += size
    lines = curve.lines()
    assert len(lines.x) <= capacity
    if values:
        assert lines.x[-1] == values[-1]
        weights = np.diff([-1, *lines.x.tolist()])
        assert (weights[:-1] == curve.stride).all()
        assert (weights * lines.y["n"]).sum() == pytest.approx(sum(values))


def test_a_peak_stays_however_long_the_run() -> None:
    curve = Curve(["arena"], largest, 100)
    curve.extend([(n, 9.0 if n == 1234 else 1.0) for n in range(50_000)])
    assert curve.lines().y["arena"].max() == 9


def test_what_exists_counts_where_some_is_missing() -> None:
    for reduce, expected in ((mean, 4.0), (largest, 5.0)):
        points = reduce(np.array([[[3.0], [math.nan], [5.0]], [[math.nan]] * 3]))
        assert points[0, 0] == expected
        assert math.isnan(points[1, 0])


def test_further_rows_are_drawn_and_not_kept() -> None:
    curve = Curve(["n"], mean)
    curve.extend([(0, 1.0)])
    assert curve.lines([(1, 2.0)]).y["n"].tolist() == [1, 2]
    assert curve.lines().y["n"].tolist() == [1]

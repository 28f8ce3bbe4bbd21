"""The time of a drawing: the run's, less what its user held."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dashboard.axis import Axis, Window
from dashboard.columns import lane_bars, make_frame, marker_flags
from dashboard.history import History
from megatrain.trace import HELD, Marker, Records, Span, StepRecord


def test_without_a_hold_it_counts_from_the_window() -> None:
    axis = Axis(Window(10.0, 12.0))
    assert (axis.ms(10.0), axis.ms(11.0), axis.width_ms) == (0.0, 1000.0, 2000.0)


def test_a_hold_takes_no_time() -> None:
    axis = Axis(Window(10.0, 20.0), [(0.0, 9.0), (11.0, 15.0), (16.0, 17.0), (19.5, 40.0)])
    assert [axis.ms(at) for at in (11.0, 13.0, 15.0, 16.5, 18.0, 20.0)] == [1000, 1000, 1000, 2000, 3000, 4500]
    assert axis.width_ms == 4500


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 5)), max_size=6), st.lists(st.floats(0, 200), min_size=2))
def test_moments_keep_their_order(holds: list[tuple[float, float]], times: list[float]) -> None:
    held, end = [], 0.0
    for gap, length in holds:
        held.append((end + gap, end + gap + length))
        end = held[-1][1]
    shown = Axis(Window(0.0, 200.0), held).seconds(np.array(sorted(times)))
    assert (np.diff(shown) >= -1e-9).all()
    assert (shown <= np.array(sorted(times)) + 1e-9).all()


def compute(start_s: float, end_s: float, layer: int) -> Span:
    return Span("compute", "forward", 0, layer, 0, 0, start_s, end_s, 0)


def test_a_drawing_leaves_out_what_was_held() -> None:
    """Layer 0, then five minutes of thought, then layer 1."""
    hold = Marker(301.0, HELD, 1.0, 301.0, 0, 1)
    paused = Marker(1.0, "paused", False, True, 0, 1)
    step = StepRecord(0, 0.0, 302.0, 1.0, 1.0, 1e-3, 600, 600, 10**9, 1, 1, None)
    history = History(Records([compute(0, 1, 0), compute(301, 302, 1)], steps=[step], markers=[paused, hold]))
    frame = make_frame(history, history.window(None, 1))
    assert frame.width_ms == 2000
    assert frame.work.start_ms.tolist() == [0, 1000]
    assert len(frame.waits) == 0
    assert [flag.text for flag in frame.markers] == ["paused"]
    (metrics,) = history.metrics
    assert metrics.waits_s["paused"] == 300
    assert metrics.tokens_per_s == 300


def test_a_bar_that_began_before_a_hold_is_shorter_by_it() -> None:
    load = Span("h2d", "load", 0, 1, None, 0, 0.5, 3.0, 8)
    axis = Axis(Window(0.0, 3.0), [(1.0, 2.0)])
    history = History(Records(spans=[load]))
    bars = lane_bars(history.work(axis.window), history.waited(axis.window), axis)
    assert bars.duration_ms == pytest.approx([1500])
    assert marker_flags([Marker(2.5, "prefetch_depth", 1, 2, 0, 0)], axis)[0].time_ms == 1500

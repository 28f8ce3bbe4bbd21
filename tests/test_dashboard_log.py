from hypothesis import given
from hypothesis import strategies as st

from dashboard.axis import Window
from dashboard.log import Log
from dashboard.pieces import pieces_of_spans
from megatrain.trace import Span

Parts = list[tuple[int, int]]  # start and length
parts = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), max_size=8)


def spans(some: Parts, first: int = 0) -> list[Span]:
    return [
        Span("h2d", "load", 0, first + n, None, 0, start, start + length, 0) for n, (start, length) in enumerate(some)
    ]


def a_log(portions: list[Parts], capacity: int = 1000) -> Log[Span]:
    log = Log(capacity, pieces_of_spans)
    for number, portion in enumerate(portions):
        log.add(spans(portion, 100 * number))
    return log


def test_nothing_noted() -> None:
    log = a_log([[]])
    assert (log.newest_s, len(log.pieces), log.between(0, 9).records) == (0.0, 0, [])


@given(st.lists(parts, max_size=6), st.integers(0, 20), st.integers(0, 9))
def test_whatever_order_records_come_in_a_stretch_of_time_is_found(
    portions: list[Parts], start_s: int, length_s: int
) -> None:
    log = a_log(portions)
    every = [span for number, portion in enumerate(portions) for span in spans(portion, 100 * number)]
    assert log.items == sorted(every, key=lambda span: span.start_s)
    assert (log.pieces == pieces_of_spans(log.items)).all()
    assert log.newest_s == max((span.end_s for span in every), default=0.0)
    found = log.between(start_s, start_s + length_s)
    assert found.records == [s for s in log.items if s.end_s > start_s and s.start_s < start_s + length_s]
    assert (found.pieces == pieces_of_spans(found.records)).all()


def test_what_begins_in_a_window_and_the_last_before_it() -> None:
    log = a_log([[(0, 0), (2, 0), (4, 0), (6, 0)]])
    assert [span.start_s for span in log.reaching(Window(3, 6)).records] == [2, 4]
    assert [span.start_s for span in log.reaching(Window(-9, 1)).records] == [0]


@given(st.lists(parts, max_size=6))
def test_the_oldest_are_dropped_with_their_pieces(portions: list[Parts]) -> None:
    whole, short = a_log(portions), a_log(portions, capacity=8)
    kept = len(short.items)
    assert kept <= 8
    assert short.dropped == (kept < len(whole.items))
    assert (short.pieces == pieces_of_spans(short.items)).all()
    if len(portions) == 1:
        assert short.items == whole.items[-kept:] or not kept

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traced_run import memory_sample

from megatrain.trace import Marker, Recorder, SlotChange, Span, StepRecord


def span(number: int) -> Span:
    return Span("compute", "forward", number, 0, None, None, number, number + 1, 0)


def test_keeps_each_kind_apart_in_the_order_in_which_they_came() -> None:
    recorder = Recorder()
    change = SlotChange(0.0, "weights", 0, "loading", 3, 1)
    step = StepRecord(1, 0.0, 1.0, 2.0, 1.0, 1e-4, 7, 8, 9, 1, 2, None)
    marker = Marker(0.5, "prefetch_depth", 1, 2, 1, 4)
    sample = memory_sample(0.0)
    for record in (span(2), change, step, span(1), marker, sample):
        recorder.add(record)
    assert recorder.spans() == [span(2), span(1)]
    assert recorder.slots() == [change]
    assert recorder.memory() == [sample]
    assert recorder.steps() == [step]
    assert recorder.markers() == [marker]
    assert recorder.snapshot().spans == recorder.spans()
    assert recorder.snapshot().lost == 0


def test_drops_the_oldest_and_says_how_many() -> None:
    recorder = Recorder(capacity=3)
    for number in range(5):
        recorder.add(span(number))
    assert recorder.spans() == [span(2), span(3), span(4)]
    assert recorder.snapshot().lost == 2
    records, next_index = recorder.since(Span, 1)
    assert (records, next_index) == ([span(2), span(3), span(4)], 5)
    assert next_index - 1 - len(records) == 1
    assert recorder.since(Span, 5) == ([], 5)


@given(capacity=st.integers(1, 20), chunks=st.lists(st.integers(0, 30), max_size=10))
def test_a_tailing_reader_sees_every_record_once_or_counts_it_as_lost(capacity: int, chunks: list[int]) -> None:
    recorder = Recorder(capacity)
    seen: list[int] = []
    index = added = lost = 0
    for chunk in chunks:
        for number in range(added, added + chunk):
            recorder.add(span(number))
        added += chunk
        records, next_index = recorder.since(Span, index)
        lost += next_index - index - len(records)
        index = next_index
        seen += [record.step for record in records]
    assert seen == sorted(set(seen))
    assert len(seen) + lost == added


def test_threads_lose_nothing() -> None:
    recorder = Recorder(capacity=10_000)
    seen: list[Span] = []

    def write(thread: int) -> None:
        for number in range(1000):
            recorder.add(span(1000 * thread + number))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    index, alive = 0, True
    while alive:
        alive = any(thread.is_alive() for thread in threads)  # asked first, so that the last read follows the end
        records, index = recorder.since(Span, index)
        seen += records
    assert sorted(record.step for record in seen) == list(range(4000))


def test_the_clock_starts_at_zero_and_runs_forward() -> None:
    recorder = Recorder()
    first = recorder.now()
    assert 0 <= first <= recorder.now()


def test_refuses_what_is_no_record() -> None:
    with pytest.raises(ValueError, match=r"a record must be one of Span, .*; got str"):
        Recorder().add("forward")  # type: ignore[arg-type]


def test_refuses_a_capacity_that_keeps_nothing() -> None:
    with pytest.raises(ValueError, match=r"capacity must be a whole number ≥ 1 .*; got 0"):
        Recorder(capacity=0)

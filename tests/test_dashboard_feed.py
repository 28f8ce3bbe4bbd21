from traced_run import TracedRun, memory_sample

from dashboard.feed import LiveFeed
from megatrain.trace import Marker, Recorder, Records


def test_the_first_poll_brings_all_and_the_next_only_what_is_new() -> None:
    recorder = TracedRun().steps(2)
    feed = LiveFeed(recorder)
    assert feed.poll() == recorder.snapshot()
    assert feed.poll() == Records()
    marker = Marker(9.0, "prefetch_depth", 1, 2, 3, 4)
    recorder.add(marker)
    assert feed.poll() == Records(markers=[marker])


def test_two_feeds_do_not_take_from_each_other() -> None:
    recorder = TracedRun().steps(1)
    first, second = LiveFeed(recorder), LiveFeed(recorder)
    assert first.poll().spans == second.poll().spans == recorder.spans()


def test_says_what_was_lost_since_the_last_poll() -> None:
    recorder = Recorder(capacity=2)
    feed = LiveFeed(recorder)
    for number in range(5):
        recorder.add(memory_sample(float(number)))
    records = feed.poll()
    assert [sample.time_s for sample in records.memory] == [3, 4]
    assert records.lost == 3
    assert feed.poll().lost == 0

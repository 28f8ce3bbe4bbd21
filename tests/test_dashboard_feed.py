import os
from contextlib import closing
from pathlib import Path

from traced_run import TracedRun, memory_sample

from dashboard.feed import FolderFeed, LiveFeed
from megatrain.folder import RunFolder
from megatrain.journal import Journal
from megatrain.report import RunInfo, RunState, Status
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


def test_a_folder_brings_what_the_run_recorded(tmp_path: Path) -> None:
    recorder = TracedRun().steps(2)
    with closing(FolderFeed(tmp_path)) as feed, closing(Journal(recorder, tmp_path)) as journal:
        journal.flush()
        brought, recorded = feed.poll(), recorder.snapshot()
        assert [(span.op, span.layer, span.start_s) for span in brought.spans] == [
            (span.op, span.layer, span.start_s) for span in recorded.spans
        ]
        assert (brought.slots, brought.memory) == (recorded.slots, recorded.memory)
        assert (brought.steps, brought.markers) == (recorded.steps, recorded.markers)
        assert feed.poll() == Records()
        with closing(FolderFeed(tmp_path)) as late:
            assert late.poll() == brought


def test_a_folder_says_when_another_run_began(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    info = RunInfo("tiny", 4, 10, os.getpid(), 0.0, "cpu", 1, 2, 3, {}, 5, 6)
    folder.create(info)
    with closing(FolderFeed(folder.path)) as feed:
        with closing(Journal(TracedRun().steps(1), folder.path)):
            pass
        assert len(feed.poll().steps) == 1
        assert feed.generation == 0
        folder.write_status(Status(RunState.FINISHED))
        folder.create(info)
        assert feed.poll() == Records()
        assert feed.generation == 1

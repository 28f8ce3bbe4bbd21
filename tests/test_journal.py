"""A journal and its readers: nothing lost, nothing twice, whatever the disk does and whenever one looks."""

from __future__ import annotations

import errno
import logging
import math
import os
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from io import FileIO
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traced_run import memory_sample

from megatrain.folder import RunFolder
from megatrain.journal import Journal, JournalReader, append
from megatrain.journal import tail as tail_module
from megatrain.report import RunInfo, RunState, Status
from megatrain.trace import (
    EvaluationRecord,
    LayerStats,
    Marker,
    Recorder,
    Records,
    SampleRecord,
    SlotChange,
    Span,
    StepRecord,
)

pytestmark = pytest.mark.timeout(60)

NEVER_S = 1e6  # only `flush` writes
BOUND_S = 20.0


def span(number: int) -> Span:
    return Span("compute", "forward", number, 0, None, None, number, number + 0.5, 0)


def step(number: int, loss: float = 2.5) -> StepRecord:
    return StepRecord(number, 0.0, 1.0, loss, 1.0, 1e-4, 7, 8, 9, 1, 2, None)


def info(number: int) -> RunInfo:
    return RunInfo("tiny", 4, 10, os.getpid(), float(number), "cpu", 1, 2, 3, {}, 5, 6)


def numbers(records: Records) -> list[int]:
    return [record.step for record in records.spans]


@contextmanager
def journal(recorder: Recorder, folder: Path, **options: Any) -> Iterator[Journal]:
    with closing(Journal(recorder, folder, **{"period_s": NEVER_S, **options})) as opened:
        yield opened


@contextmanager
def reader(folder: Path) -> Iterator[JournalReader]:
    with closing(JournalReader(folder)) as opened:
        yield opened


def test_everything_recorded_can_be_read(tmp_path: Path) -> None:
    recorder = Recorder()
    records = Records(
        [span(1), span(2)],
        [SlotChange(0.5, "weights", 0, "loading", None, 1)],
        [memory_sample(0.25)],
        [step(1), step(2)],
        [LayerStats(1.0, 1, 0, 0.5, 0.25, 0.125)],
        [Marker(0.5, "prefetch_depth", 1, 2, 1, 3)],
        [EvaluationRecord(1.5, 1, 2.5, 100, {"rewards/accuracies": 0.5})],
        [SampleRecord(1.5, 1, "why?", "because\nof ü")],
    )
    lists = (records.spans, records.slots, records.memory, records.steps, records.layers, records.markers)
    for record in (*chain.from_iterable(lists), *records.evaluations, *records.samples):
        recorder.add(record)
    with journal(recorder, tmp_path) as writer, reader(tmp_path) as first:
        assert first.poll() == Records()
        writer.flush()
        assert first.poll() == records
        assert first.poll() == Records()
        recorder.add(span(3))
        writer.flush()
        assert first.poll() == Records(spans=[span(3)])
    with reader(tmp_path) as late:
        assert late.poll().spans == [span(1), span(2), span(3)]
        assert late.generation == 0


def test_writes_by_itself(tmp_path: Path) -> None:
    recorder = Recorder()
    with journal(recorder, tmp_path, period_s=0.001), reader(tmp_path) as tail:
        recorder.add(span(0))
        seen: list[int] = []
        give_up_s = time.monotonic() + BOUND_S
        while not seen:
            assert time.monotonic() < give_up_s
            seen += numbers(tail.poll())


def test_closing_writes_what_is_left(tmp_path: Path) -> None:
    recorder = Recorder()
    writer = Journal(recorder, tmp_path, period_s=NEVER_S)
    recorder.add(span(0))
    writer.close()
    recorder.add(span(1))
    writer.flush()
    writer.close()
    with reader(tmp_path) as tail:
        assert numbers(tail.poll()) == [0]


def test_what_is_not_finite_is_null_on_disk_and_nan_again(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.add(step(1, loss=math.nan))
    recorder.add(step(2, loss=math.inf))
    with journal(recorder, tmp_path), reader(tmp_path):
        pass
    text = RunFolder(tmp_path).metrics.read_text()
    assert text.count('"loss":null') == text.count("\n") == 2
    with reader(tmp_path) as tail:
        assert [math.isnan(record.loss) for record in tail.poll().steps] == [True, True]


def test_only_the_user_may_read(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.add(span(0))
    recorder.add(step(0))
    with journal(recorder, tmp_path):
        pass
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    assert len(os.listdir(tmp_path)) == 2


# ---- nothing lost, nothing twice ----


@settings(deadline=None)
@given(
    deeds=st.lists(st.sampled_from(["flush", "poll", "late"]) | st.integers(0, 25), max_size=40),
    segment_records=st.integers(1, 12),
    keep_segments=st.integers(1, 4),
)
def test_any_order_of_writing_rotating_and_reading(
    deeds: list[str | int], segment_records: int, keep_segments: int
) -> None:
    recorder, added, readers = Recorder(), 0, dict[JournalReader, list[int]]()
    lost: dict[JournalReader, int] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def poll(tail: JournalReader) -> None:
            records = tail.poll()
            readers[tail] += numbers(records)
            lost[tail] += records.lost
            assert [record.step for record in records.steps] == numbers(records) or lost[tail]

        def begin() -> None:
            tail = JournalReader(folder)
            readers[tail], lost[tail] = [], 0

        begin()
        with journal(recorder, folder, segment_records=segment_records, keep_segments=keep_segments) as writer:
            for deed in [*deeds, "flush", "poll"]:
                if deed == "flush":
                    writer.flush()
                    assert len(RunFolder(folder).segments()) <= keep_segments
                elif deed == "late":
                    begin()
                elif deed == "poll":
                    for tail in readers:
                        poll(tail)
                else:
                    assert isinstance(deed, int)
                    for number in range(added, added + deed):
                        recorder.add(span(number))
                        recorder.add(step(number))
                    added += deed
        for tail, seen in readers.items():
            tail.close()
            assert seen == sorted(set(seen))
            assert len(seen) + lost[tail] == added
            if added:
                assert seen[-1] == added - 1


@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, 10_000), max_size=30), data=st.data())
def test_files_that_grow_byte_by_byte(cuts: list[int], data: st.DataObject) -> None:
    """What a reader sees of a write in progress, or after a crash: any first part of each file."""
    recorder = Recorder()
    for number in range(20):
        for record in (span(number), step(number), Marker(0.0, "naïve", None, "…", number, None)):
            recorder.add(record)
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as shown:
        with journal(recorder, Path(name), segment_records=7):
            pass
        files = [(path.read_bytes(), Path(shown) / path.name) for path in sorted(Path(name).iterdir())]
        seen: list[Records] = []
        with reader(Path(shown)) as tail:
            for cut in [*sorted(cuts), 10_000]:
                reveal(files, cut)
                seen.append(tail.poll())
        assert [number for records in seen for number in numbers(records)] == list(range(20))
        assert [record.step for records in seen for record in records.steps] == list(range(20))
        assert [record for records in seen for record in records.markers] == recorder.markers()
        assert not any(records.lost for records in seen)


def reveal(files: list[tuple[bytes, Path]], nbytes: int) -> None:
    """Grow the segments one after the other, the other files at the same pace; nothing ever shrinks."""
    for content, path in files:
        is_segment = path.name.startswith("events-")
        if not is_segment or nbytes >= 0:
            path.write_bytes(content[:nbytes])
        if is_segment:
            nbytes = nbytes - len(content) if nbytes >= len(content) else -1


def test_a_busy_writer_and_several_readers(tmp_path: Path) -> None:
    """Real threads: every reader sees everything once, and no step before its span."""
    recorder = Recorder()
    done = threading.Event()
    failures: list[str] = []

    def follow() -> None:
        spans: list[int] = []
        steps: list[int] = []
        with reader(tmp_path) as tail:
            last = False
            while not last:
                last = done.is_set()
                records = tail.poll()
                spans += numbers(records)
                steps += [record.step for record in records.steps]
                if steps and (not spans or spans[-1] < steps[-1]):
                    failures.append(f"step {steps[-1]} before its span")
        if not spans == steps == list(range(5000)):
            failures.append(f"{len(spans)} spans, {len(steps)} steps")

    readers = [threading.Thread(target=follow) for _ in range(3)]
    for thread in readers:
        thread.start()
    with journal(recorder, tmp_path, period_s=0.001, segment_records=100, keep_segments=1000):
        for number in range(5000):
            recorder.add(span(number))
            recorder.add(step(number))
    done.set()
    for thread in readers:
        thread.join(BOUND_S)
        assert not thread.is_alive()
    assert failures == []


def test_a_segment_that_is_filled_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    decode = tail_module.decode

    def decode_late(data: bytes, version: int) -> Records:
        monkeypatch.setattr(tail_module, "decode", decode)
        for number in range(1, 15):
            recorder.add(span(number))
        writer.flush()
        return decode(data, version)

    with journal(recorder, tmp_path, segment_records=10) as writer, reader(tmp_path) as tail:
        recorder.add(span(0))
        writer.flush()
        monkeypatch.setattr(tail_module, "decode", decode_late)
        polls = [tail.poll(), tail.poll()]
        assert [number for records in polls for number in numbers(records)] == list(range(15))
        assert [records.lost for records in polls] == [0, 0]


def test_a_slow_reader_counts_what_rotated_away(tmp_path: Path) -> None:
    recorder = Recorder()
    with (
        journal(recorder, tmp_path, segment_records=10, keep_segments=2) as writer,
        reader(tmp_path) as tail,
    ):
        for number in range(5):
            recorder.add(span(number))
        writer.flush()
        assert numbers(tail.poll()) == [0, 1, 2, 3, 4]
        for number in range(5, 35):
            recorder.add(span(number))
        writer.flush()
        assert RunFolder(tmp_path).segments() == [2, 3]
        records = tail.poll()  # its own segment is gone by name, but was open
        assert numbers(records) == [*range(5, 10), *range(20, 35)]
        assert records.lost == 10


def test_what_the_recorder_dropped_is_counted(tmp_path: Path) -> None:
    recorder = Recorder(capacity=4)
    with journal(recorder, tmp_path) as writer, reader(tmp_path) as tail:
        for number in range(10):
            recorder.add(span(number))
            recorder.add(step(number))
        writer.flush()
        assert writer.lost == 12
        records = tail.poll()
        assert numbers(records) == [6, 7, 8, 9]
        assert records.lost == 12
        assert tail.poll().lost == 0


def test_polls_with_nothing_new_only_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    for number in range(25):
        recorder.add(span(number))
        recorder.add(step(number))
    recorder.add(memory_sample(0.0))
    recorder.add(Marker(0.0, "pause", None, None, 0, None))
    recorder.add(EvaluationRecord(0.0, 0, 2.5, 100))
    recorder.add(SampleRecord(0.0, 0, "why?", "because"))

    def touched(*_: object) -> None:
        raise AssertionError("a file was opened or read, or the folder was listed")

    with journal(recorder, tmp_path, segment_records=10) as writer, reader(tmp_path) as tail:
        writer.flush()
        assert len(tail.poll().spans) == 25
        monkeypatch.setattr(os, "listdir", touched)
        monkeypatch.setattr("megatrain.journal.tail.FileIO", touched)
        monkeypatch.setattr("megatrain.journal.tail.decode", touched)
        for _ in range(1000):
            assert tail.poll() == Records()


# ---- another run in the same folder ----


def test_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "later")
    recorder = Recorder()
    with reader(folder.path) as tail:
        assert tail.poll() == Records()
        folder.create(info(0))
        assert tail.poll() == Records()
        recorder.add(span(0))
        with journal(recorder, folder.path):
            pass
        assert numbers(tail.poll()) == [0]


@settings(deadline=None)
@given(deeds=st.lists(st.sampled_from(["record", "poll", "flush", "next run", "prepare"]), max_size=30))
def test_a_new_run_in_the_folder_starts_over(deeds: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = RunFolder(Path(name) / "run")
        run = number = 0
        shown: list[int] = []
        recorder, writer = Recorder(), Journal(Recorder(), folder.create(info(0)).path, period_s=NEVER_S)
        writer.close()
        writer = Journal(recorder, folder.path, period_s=NEVER_S, segment_records=3)
        with reader(folder.path) as tail:
            generation = tail.generation
            for deed in [*deeds, "flush", "poll"]:
                if deed == "record":
                    recorder.add(span(100 * run + number))
                    recorder.add(step(100 * run + number))
                    number += 1
                elif deed == "flush":
                    writer.flush()
                elif deed == "poll":
                    records = tail.poll()
                    if tail.generation != generation:
                        generation, shown = tail.generation, []
                    shown += numbers(records)
                    assert shown == list(range(100 * run, 100 * run + len(shown)))
                else:
                    writer.close()
                    folder.write_status(Status(RunState.FINISHED))
                    if deed == "prepare":
                        folder.prepare()
                        assert tail.poll() == Records()
                    folder.create(info(run := run + 1))
                    number, recorder = 0, Recorder()
                    writer = Journal(recorder, folder.path, period_s=NEVER_S, segment_records=3)
        writer.close()
        assert shown == list(range(100 * run, 100 * run + number))


def test_a_run_that_begins_in_the_middle_of_a_poll(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Part of what such a poll reads may be of either run: none of it is given under the old generation."""
    folder = RunFolder(tmp_path / "run").create(info(0))
    second = Recorder()
    second.add(span(100))
    second.add(step(100))
    listing = RunFolder.segments

    def begin_another(self: RunFolder) -> list[int]:
        monkeypatch.setattr(RunFolder, "segments", listing)
        folder.write_status(Status(RunState.FINISHED))
        folder.create(info(1))
        with journal(second, folder.path):
            pass
        return listing(self)

    with reader(folder.path) as tail:
        assert tail.poll() == Records()
        generation = tail.generation
        monkeypatch.setattr(RunFolder, "segments", begin_another)
        records = tail.poll()
        assert tail.generation == generation + 1
        assert numbers(records) == [100]
        assert [record.step for record in records.steps] == [100]


# ---- disks that fail ----


class FullDisk:
    """Takes a number of bytes, all files together, and then no more until room is made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.room = room
        disk, open_new = self, append._new_file

        class File(FileIO):
            def write(self, data: Any) -> int:
                taken = bytes(data)[: disk.room]
                if not taken:
                    raise OSError(errno.ENOSPC, "No space left on device")
                disk.room -= len(taken)
                return super().write(taken)

        def new_file(path: Path) -> FileIO:
            if not disk.room:
                raise OSError(errno.ENOSPC, "No space left on device")
            open_new(path).close()
            return File(path, "ab")

        monkeypatch.setattr(append, "_new_file", new_file)


@pytest.mark.parametrize("portion", [1, 31, 100, 200])
def test_a_full_disk_holds_up_records_but_loses_none(
    portion: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FullDisk(monkeypatch, 0)
    recorder = Recorder()
    seen = Records()
    with journal(recorder, tmp_path, segment_records=5) as writer, reader(tmp_path) as tail:
        for number in range(10_000 // portion):
            disk.room = portion
            if number < 12:
                recorder.add(span(number))
                recorder.add(step(number))
            writer.flush()
            records = tail.poll()
            seen.spans.extend(records.spans)
            seen.steps.extend(records.steps)
            assert records.lost == 0
        assert writer.lost == 0
        assert isinstance(writer.error, OSError)
    assert (seen.spans, seen.steps) == (recorder.spans(), recorder.steps())
    warnings = [message for _, level, message in caplog.record_tuples if level == logging.WARNING]
    assert warnings == [f"the run goes on, but its records do not reach its folder as they should: {writer.error}"]


def test_records_wait_in_the_recorder_while_a_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory stays bounded however long that lasts, and what had to be dropped is told."""
    disk = FullDisk(monkeypatch, 0)
    recorder = Recorder(capacity=3)
    with journal(recorder, tmp_path) as writer, reader(tmp_path) as tail:
        for number in range(10):
            recorder.add(span(number))
            writer.flush()
        disk.room = 10_000
        writer.flush()
        records = tail.poll()
        assert numbers(records) == [0, 7, 8, 9]  # 0 was on its way
        assert writer.lost == records.lost == 6


def test_a_folder_that_vanishes_does_not_end_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    recorder = Recorder()
    with journal(recorder, folder, period_s=0.001) as writer:
        folder.rmdir()
        recorder.add(span(0))
        writer.flush()
        assert isinstance(writer.error, FileNotFoundError)
        folder.mkdir()
        writer.flush()
    with reader(folder) as tail:
        assert numbers(tail.poll()) == [0]


def test_a_record_that_does_not_fit_is_lost_and_named(tmp_path: Path) -> None:
    recorder = Recorder()
    with journal(recorder, tmp_path) as writer, reader(tmp_path) as tail:
        recorder.add(Span("compute", "forward", 0, 2**15, None, None, 0.0, 1.0, 0))
        writer.flush()
        recorder.add(span(1))
        writer.flush()
        records = tail.poll()
        assert (numbers(records), records.lost, writer.lost) == ([1], 1, 1)
        assert "below 32,768" in str(writer.error)


# ---- what is refused ----


def test_refuses_to_mix_two_runs(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.add(span(0))
    with journal(recorder, tmp_path):
        pass
    with pytest.raises(ValueError, match=r"holds the records of another run \(events-00000000.bin, …\)"):
        Journal(recorder, tmp_path)


def test_refuses_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"kept in the folder of a run; .*none is none: RunFolder.create makes it"):
        Journal(Recorder(), tmp_path / "none")


@pytest.mark.parametrize("name", ["period_s", "segment_records", "keep_segments"])
def test_refuses_bounds_that_keep_nothing(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a number > 0; got 0"):
        Journal(Recorder(), tmp_path, **{name: 0})


def test_names_the_file_that_a_newer_version_wrote(tmp_path: Path) -> None:
    RunFolder(tmp_path).segment(0).write_bytes(b"MTevents" + struct.pack("<I", 2) + bytes(20))
    with reader(tmp_path) as tail:
        for _ in range(2):
            with pytest.raises(ValueError, match=r"events-00000000.bin is a journal of file version 2"):
                tail.poll()


def test_names_the_file_that_is_damaged(tmp_path: Path) -> None:
    for text, reason in (("{\n", "Expecting"), ('{"step": 1}\n', "StepRecord lacks end_s")):
        RunFolder(tmp_path).metrics.write_text(text)
        with reader(tmp_path) as tail:
            for _ in range(2):
                with pytest.raises(ValueError, match=rf"metrics.jsonl holds a line that is no StepRecord: {reason}"):
                    tail.poll()

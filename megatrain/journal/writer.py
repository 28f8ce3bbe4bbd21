"""The thread that carries a run's records from memory to its folder, while it trains."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any

from megatrain.folder import RunFolder
from megatrain.journal.append import Lines, Segments
from megatrain.journal.binary import RECORD_BYTES, encode, encode_lost
from megatrain.plain import to_plain
from megatrain.trace import (
    EvaluationRecord,
    LayerStats,
    Marker,
    MemorySample,
    Recorder,
    SampleRecord,
    SlotChange,
    Span,
    StepRecord,
)

logger = logging.getLogger(__name__)

SEGMENT_RECORDS = 2 * 1024 * 1024 // RECORD_BYTES  # with all that are kept, a million: seconds for a late viewer
KEEP_SEGMENTS = 16


class Journal:
    """Tails a recorder into its run's folder every `period_s`, from a daemon thread that starts at once.

    Spans, slot changes and layer statistics go to segments of `segment_records`, of which `keep_segments` are kept;
    steps, memory samples, markers, evaluations and answers to a file of JSON lines each.

    Note: when a disk is full. No failure here ends or slows training. The first one is kept in `error` and warned
    about once; writing is tried again every period, from the very byte where it stopped. Meanwhile records wait in
    the recorder, and what that has to drop is counted in `lost` (and told to readers).
    """

    def __init__(
        self,
        recorder: Recorder,
        folder: str | Path,
        *,
        period_s: float = 0.1,
        segment_records: int = SEGMENT_RECORDS,
        keep_segments: int = KEEP_SEGMENTS,
    ) -> None:
        _require_positive(period_s=period_s, segment_records=segment_records, keep_segments=keep_segments)
        files = _without_records(RunFolder(folder))
        self.error: Exception | None = None
        self.lost = 0
        self._untold = 0  # of `lost`, what no file says yet
        self._recorder = recorder
        self._next: dict[type, int] = {}
        self._period_s = period_s
        self._events = Segments(files, segment_records, keep_segments)
        self._lines: dict[type, Lines] = {
            StepRecord: Lines(files.metrics),
            MemorySample: Lines(files.memory),
            Marker: Lines(files.markers),
            EvaluationRecord: Lines(files.evaluations),
            SampleRecord: Lines(files.samples),
        }
        self._files: list[Lines | Segments] = [self._events, *self._lines.values()]
        self._writing = threading.Lock()
        self._closed = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="megatrain-journal", daemon=True)
        self._thread.start()

    def flush(self) -> None:
        """Return when all that was recorded before this call is in the files, or `error` says why it is not."""
        with self._writing:
            if not self._closed:
                self._write()

    def close(self) -> None:
        """Flush, and write nothing more."""
        self._closing.set()
        self._thread.join()
        self.flush()
        with self._writing:
            self._closed = True
            for file in self._files:
                file.close()

    def _loop(self) -> None:
        while not self._closing.wait(self._period_s):
            self.flush()

    def _write(self) -> None:
        if not all(self._append(file) for file in self._files):
            return
        lines = [(file, self._new_lines(kind)) for kind, file in self._lines.items()]
        self._append(self._events, self._new_events())  # taken last, written first: no step is seen before its spans
        for file, data in lines:
            self._append(file, data)

    def _append(self, file: Lines | Segments, data: bytes = b"") -> bool:
        """Write what the disk refused before, then this; False if it refuses still."""
        try:
            file.append(data)
            return True
        except OSError as error:
            self._keep(error)
            return False

    def _new_lines(self, kind: type) -> bytes:
        return "".join([_line(record) for record in self._take(kind)]).encode()

    def _new_events(self) -> bytes:
        events = [*self._take(Span), *self._take(SlotChange), *self._take(LayerStats)]
        try:
            data = encode(events)
        except ValueError as error:
            self._lose(len(events))
            self._keep(error)
            data = b""
        untold, self._untold = self._untold, 0
        return encode_lost(untold) + data if untold else data

    def _take(self, kind: type) -> list[Any]:
        index = self._next.get(kind, 0)
        records, self._next[kind] = self._recorder.since(kind, index)
        self._lose(self._next[kind] - index - len(records))
        return records

    def _lose(self, count: int) -> None:
        self.lost += count
        self._untold += count

    def _keep(self, error: Exception) -> None:
        if self.error is None:
            self.error = error
            logger.warning("the run goes on, but its records do not reach its folder as they should: %s", error)


def _line(record: object) -> str:
    return json.dumps(to_plain(record), allow_nan=False, separators=(",", ":"), ensure_ascii=False) + "\n"


def _require_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} must be a number > 0; got {value!r}")


def _without_records(folder: RunFolder) -> RunFolder:
    if not folder.path.is_dir():
        raise ValueError(f"a journal is kept in the folder of a run; {folder.path} is none: RunFolder.create makes it")
    kept = [
        folder.metrics,
        folder.memory,
        folder.markers,
        folder.evaluations,
        folder.samples,
        *map(folder.segment, folder.segments()),
    ]
    if held := [path.name for path in kept if path.exists()]:
        raise ValueError(
            f"{folder.path} holds the records of another run ({held[0]}, …): RunFolder.create moves them to earlier/"
        )
    return folder

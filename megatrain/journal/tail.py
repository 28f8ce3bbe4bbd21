"""Reading files that another process appends to, while it does."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import Generic, TypeVar

from megatrain.folder import RunFolder
from megatrain.journal.binary import RECORD_BYTES, VERSION, decode, decode_header
from megatrain.plain import from_plain
from megatrain.trace import (
    EvaluationRecord,
    LayerStats,
    Marker,
    MemorySample,
    SampleRecord,
    SlotChange,
    Span,
    StepRecord,
)

L = TypeVar("L", bound=MemorySample | StepRecord | Marker | EvaluationRecord | SampleRecord)


class LineTail(Generic[L]):
    """The records of one file of JSON lines, as they come."""

    def __init__(self, path: Path, kind: type[L]) -> None:
        self._path = path
        self._kind = kind
        self._file: FileIO | None = None
        self._offset = 0  # of the first line not read

    def read(self) -> list[L]:
        """Return what is in whole lines not read before; ValueError naming the file for one that is damaged."""
        self._file = self._file or _opened(self._path)
        if self._file is None:
            return []
        data = _from(self._file, self._offset)
        whole = data[: data.rfind(b"\n") + 1]
        records = [self._record(line) for line in whole.splitlines()]
        self._offset += len(whole)
        return records

    def close(self) -> None:
        """Let go of the file; another read goes on where this one ended."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _record(self, line: bytes) -> L:
        try:
            return from_plain(self._kind, json.loads(line))
        except ValueError as error:
            raise ValueError(f"{self._path} holds a line that is no {self._kind.__name__}: {error}") from None


class Events:
    """What `EventTail.read` gathers."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.slots: list[SlotChange] = []
        self.layers: list[LayerStats] = []
        self.lost = 0


class EventTail:
    """The records of rotating segments, as they come; those whose segment was deleted before are counted as lost."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._number = -1
        self._file: FileIO | None = None
        self._version = VERSION
        self._offset = 0
        self._seen = 0  # records read or lost

    def read(self) -> Events:
        """Return what was not read before."""
        events = Events()
        while True:
            following = self._following()  # asked first: a segment is complete once there is another
            self._read_rest(events)
            if following is None or not self._enter(following, events):
                return events

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _following(self) -> int | None:
        """The next segment to read; not merely number + 1 where the writer was faster than this reader."""
        if self._file is not None:
            if self._folder.segment(self._number + 1).exists():
                return self._number + 1
            if self._folder.segment(self._number).exists():
                return None
        return min((number for number in self._folder.segments() if number > self._number), default=None)

    def _read_rest(self, events: Events) -> None:
        if self._file is None:
            return
        data = _from(self._file, self._offset)
        whole = data[: len(data) - len(data) % RECORD_BYTES]
        if not whole:
            return
        records = decode(whole, self._version)
        self._offset += len(whole)
        self._seen += len(whole) // RECORD_BYTES
        events.spans += records.spans
        events.slots += records.slots
        events.layers += records.layers
        events.lost += records.lost

    def _enter(self, number: int, events: Events) -> bool:
        """Go on to a segment; False if its header is not written yet."""
        path = self._folder.segment(number)
        file = _opened(path)
        if file is None:  # deleted since it was listed; there is a later one
            return True
        with ExitStack() as unless_entered:
            unless_entered.callback(file.close)
            data = file.read(RECORD_BYTES)
            if len(data) < RECORD_BYTES:
                return False
            self._version, first = decode_header(data, str(path))
            unless_entered.pop_all()
        self.close()
        self._file, self._number, self._offset = file, number, RECORD_BYTES
        events.lost += first - self._seen
        self._seen = first
        return True


def _opened(path: Path) -> FileIO | None:
    try:
        return FileIO(path)
    except FileNotFoundError:
        return None


def _from(file: FileIO, offset: int) -> bytes:
    """What a file holds from an offset on; where that is nothing new, this costs one look at its size."""
    if os.fstat(file.fileno()).st_size <= offset:
        return b""
    file.seek(offset)
    return file.read()

"""Files that only grow, written through: what was appended can be read at once, and survives the process.

What a full disk refuses is kept and tried again first, so files have no holes and torn ends grow whole.
"""

from __future__ import annotations

import os
from io import FileIO
from pathlib import Path

from megatrain.folder import FILE_MODE, RunFolder
from megatrain.journal.binary import RECORD_BYTES, encode_header


class Lines:
    """One file of whole lines, made when the first is written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._refused = b""

    def append(self, lines: bytes) -> None:
        """Write the lines in one go; raises OSError and keeps what the disk would not take."""
        self._refused += lines
        if self._refused:
            self._file = self._file or _new_file(self._path)
            while self._refused:
                self._refused = self._refused[self._file.write(self._refused) :]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class Segments:
    """Files of `records` records each, of which the newest `keep` are kept."""

    def __init__(self, folder: RunFolder, records: int, keep: int) -> None:
        self._folder = folder
        self._records = records
        self._keep = keep
        self._number = -1
        self._room = 0  # bytes that the newest segment still takes
        self._file: FileIO | None = None
        self._refused = b""

    def append(self, records: bytes) -> None:
        """Write whole records; raises OSError and keeps what the disk would not take."""
        self._refused += records
        while self._refused:
            if not self._room:
                self._rotate()
            assert self._file is not None
            written = self._file.write(memoryview(self._refused)[: self._room])
            self._refused = self._refused[written:]
            self._room -= written

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _rotate(self) -> None:
        """Begin the next segment, then delete the one too many: a reader always finds where to go on."""
        number = self._number + 1
        file = _new_file(self._folder.segment(number))
        self.close()
        self._file, self._number = file, number
        self._refused = encode_header(number * self._records) + self._refused
        self._room = (1 + self._records) * RECORD_BYTES
        if number >= self._keep:
            self._folder.segment(number - self._keep).unlink(missing_ok=True)


def _new_file(path: Path) -> FileIO:
    return FileIO(path, "xb", opener=lambda name, flags: os.open(name, flags, FILE_MODE))

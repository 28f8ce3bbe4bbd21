"""A file that is written past the system's page cache, where the file system can do that.

Filling the cache takes processor time from training (a page of it is cleared first), and pushes out what others read.
Direct writes want whole blocks from aligned memory: bytes go through a small aligned buffer that stays warm.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path
from types import TracebackType

import numpy as np

BLOCK_BYTES = 4096
BUFFER_BYTES = 4 << 20


class DirectFile:
    """A new file, written from its beginning to its end. Raises OSError as any file does, also for one that exists."""

    def __init__(self, path: Path, mode: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        self._memory = mmap.mmap(-1, BUFFER_BYTES)  # begins at a page
        self._buffer = np.frombuffer(self._memory, np.uint8)
        self._filled = 0
        self._go_direct(on=True)

    def write(self, data: memoryview) -> None:
        """Append bytes."""
        source = np.frombuffer(data, np.uint8)
        while len(source):
            taken = min(len(source), BUFFER_BYTES - self._filled)
            np.copyto(self._buffer[self._filled : self._filled + taken], source[:taken])  # lets go of the GIL
            self._filled += taken
            source = source[taken:]
            if self._filled == BUFFER_BYTES:
                self._flush()

    def finish(self) -> None:
        """Write what is left, and wait until all is on the disk."""
        if self._filled % BLOCK_BYTES:
            self._go_direct(on=False)
        self._flush()
        os.fsync(self._file)

    def _flush(self) -> None:
        rest = memoryview(self._memory)[: self._filled]
        while rest:
            rest = rest[os.write(self._file, rest) :]
        self._filled = 0

    def _go_direct(self, *, on: bool) -> None:
        direct = getattr(os, "O_DIRECT", 0)
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | direct if on else flags & ~direct)
        except OSError:  # a file system in memory, or across a network: the cache does no harm
            if not on:
                raise

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)

"""Rows that lie in text files: found and checked once, read and parsed when they are asked for.

Files are read here and not by `datasets`, because that takes strings for dates where all of them look like dates, drops
what it cannot decode, unpacks what is half there, and names neither the file nor the line of what is wrong.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, overload

import numpy as np
import numpy.typing as npt

from megatrain.data.formats import Row

BOM = b"\xef\xbb\xbf"
GZIP = b"\x1f\x8b"

Ints = npt.NDArray[np.int64]
Parse = Callable[[bytes], Row]
Place = tuple[int, int]  # first byte, number of bytes
Refuse = Callable[[str], None]
"""Called with what is wrong and where; it raises or counts."""


class UnreadableError(ValueError):
    """Bytes that are no record; the message says why."""


@dataclass(frozen=True)
class SeenFile:
    """A file, and what it was when its rows were found."""

    path: Path
    state: tuple[int, ...]

    def open(self) -> BinaryIO:
        file = opened(self.path)
        try:
            self.check(file)
        except BaseException:
            file.close()
            raise
        return file

    def check(self, file: BinaryIO) -> None:
        if _state(file) != self.state:
            raise ValueError(f"{self.path} was changed while it was read; load it again when it is complete")


@dataclass(frozen=True)
class FileRows(Sequence[Row]):
    """Row n lies in files[file_of[n]], `sizes[n]` bytes from `starts[n]` on: 24 bytes of memory for each."""

    files: tuple[SeenFile, ...]
    file_of: Ints
    starts: Ints
    sizes: Ints
    parse: Parse

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> FileRows: ...
    def __getitem__(self, index: int | slice) -> Row | FileRows:
        if isinstance(index, int):
            index = range(len(self))[index]
            return next(iter(self[index : index + 1]))
        return replace(self, file_of=self.file_of[index], starts=self.starts[index], sizes=self.sizes[index])

    def __iter__(self) -> Iterator[Row]:
        """One file open at a time; ValueError where it is not what it was when its rows were found."""
        ends = np.flatnonzero(np.diff(self.file_of)) + 1
        for rows in np.split(np.arange(len(self)), ends):
            if len(rows):
                yield from self._of_one_file(rows)

    def _of_one_file(self, rows: Ints) -> Iterator[Row]:
        seen = self.files[self.file_of[rows[0]]]
        with seen.open() as file:
            for row in rows:
                file.seek(int(self.starts[row]))
                data = file.read(int(self.sizes[row]))
                seen.check(file)
                yield self.parse(data)


def rows_of(paths: Sequence[Path], find: Callable[[BinaryIO, Path], Iterator[Place]], parse: Parse) -> FileRows:
    """The rows of all files, in order. find: yields the places of a file's rows."""
    files, file_of, places = [], [], []
    for number, path in enumerate(paths):
        with opened(path) as file:
            seen = SeenFile(path, _state(file))
            found = list(find(file, path))
            seen.check(file)
        files.append(seen)
        file_of.append(np.full(len(found), number, dtype=np.int64))
        places.append(np.array(found, dtype=np.int64).reshape(-1, 2))
    starts, sizes = np.concatenate(places).T
    return FileRows(tuple(files), np.concatenate(file_of), starts, sizes, parse)


def opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None


def _state(file: BinaryIO) -> tuple[int, ...]:
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


# ---- JSON, an object a line ----


def json_lines(refuse: Refuse, columns: set[str]) -> Callable[[BinaryIO, Path], Iterator[Place]]:
    """Finds lines that hold a JSON object, and gathers their keys. Blank lines are no records and no problem."""

    def find(file: BinaryIO, path: Path) -> Iterator[Place]:
        start = 0
        for number, line in enumerate(file, start=1):
            skipped = len(BOM) if number == 1 and line.startswith(BOM) else 0
            try:
                if line.strip():
                    columns.update(parse_object(line[skipped:]))
                    yield start + skipped, len(line) - skipped
            except UnreadableError as error:
                refuse(f"{path}, line {number}: {error}")
            start += len(line)

    return find


def parse_object(line: bytes) -> dict[str, Any]:
    row = parse_json(line)
    if not isinstance(row, dict):
        raise UnreadableError("not a JSON object")
    return row


def parse_json(data: bytes) -> Any:
    text = decoded(data)
    try:
        value = json.loads(text)
        if "\\u" in text:  # may be half of a pair, which is no character
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UnreadableError("not JSON (half of a surrogate pair)") from None
    except RecursionError:
        raise UnreadableError("not JSON (nested too deeply)") from None
    except ValueError as error:
        raise UnreadableError(f"not JSON ({error})") from None
    return value


# ---- text, a file a record ----


def whole_files(refuse: Refuse) -> Callable[[BinaryIO, Path], Iterator[Place]]:
    """Finds files that are text."""

    def find(file: BinaryIO, path: Path) -> Iterator[Place]:
        data = file.read()
        try:
            decoded(data)
            yield 0, len(data)
        except UnreadableError as error:
            refuse(f"{path}: {error}")

    return find


def parse_text(data: bytes) -> Row:
    """Lines end as Python's do, whichever system wrote them."""
    return {"text": decoded(data.removeprefix(BOM)).replace("\r\n", "\n").replace("\r", "\n")}


def decoded(data: bytes) -> str:
    if data.startswith(GZIP):
        raise UnreadableError("compressed with gzip; unpack it first")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UnreadableError(f"not UTF-8 (byte {data[error.start]:#04x} at {error.start:,})") from None

"""What is written past the page cache is what was given, whatever its length and whatever the file system can do."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from megatrain.checkpoint.direct import BLOCK_BYTES, BUFFER_BYTES, DirectFile

LENGTHS = [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, 3 * BLOCK_BYTES + 5, BUFFER_BYTES, 2 * BUFFER_BYTES + BLOCK_BYTES + 3]


def written(path: Path, data: bytes, piece: int) -> bytes:
    with DirectFile(path, 0o600) as file:
        for start in range(0, len(data), piece):
            file.write(memoryview(data)[start : start + piece])
        file.finish()
    return path.read_bytes()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("piece", [1 << 20, 10_007])
def test_any_length_in_any_pieces(tmp_path: Path, length: int, piece: int) -> None:
    data = os.urandom(length)
    assert written(tmp_path / "file", data, piece) == data
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def test_a_file_system_that_knows_no_direct_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control, refused = fcntl.fcntl, []

    def without(file: int, command: int, flags: int = 0) -> Any:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            refused.append(flags)
            raise OSError(errno.EINVAL, "Invalid argument")
        return control(file, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", without)
    data = os.urandom(BUFFER_BYTES + 77)
    assert written(tmp_path / "file", data, 1 << 20) == data
    assert refused


def test_a_file_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError):
        DirectFile(tmp_path / "file", 0o600)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"), DirectFile(tmp_path / "file", 0o600) as file:
        file.write(memoryview(bytes(BUFFER_BYTES)))

"""Files that are either the old one or the new one, never half of it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_atomically(path: str | Path, data: bytes, mode: int = 0o644) -> None:
    """Write `data` to `path` by way of a temporary file beside it, so that a reader never sees a part.

    mode: permissions of the file, whatever the umask.
    """
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, mode)  # mkstemp makes it unreadable for anyone else
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise

"""What a viewer and a run say to each other: JSON over a socket in the run's folder, and nothing else is understood.

A request is {"id", "do", "with"}; its answer has the same id and one of "accepted" (a wish, in words), "refused"
(the reason) and "status". An accepted wish is answered once more, with "effect" (a Position, or null for the pause
between two steps), "overtaken", or "failed" (the reason).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Final

from megatrain.folder import RunFolder

# Every wish that a viewer may utter, by the names of its arguments. What they may be is for the steering to check.
WISHES: Final[dict[str, frozenset[str]]] = {
    "pause": frozenset(),
    "resume": frozenset(),
    "step_layer": frozenset(),
    "finish_step": frozenset(),
    "run_to_layer": frozenset({"layer", "phase"}),
    "set_prefetch_depth": frozenset({"depth"}),
    "set_grad_buffers": frozenset({"count"}),
    "set_resident_layers": frozenset({"count"}),
    "set_micro_batch_size": frozenset({"rows"}),
    "checkpoint": frozenset(),
    "stop": frozenset({"save"}),
}
STATUS: Final = "status"
LONGEST_PATH_BYTES: Final = 100  # the operating system's limit is 104 or 108, with the NUL

Message = dict[str, Any]


class Door:
    """The socket file of a run's folder, at an address that is short however long the path to the folder.

    Note: Unix limits the path of a socket to some 107 bytes. Linux lets a folder be named by an open descriptor, so
    the descriptor has to stay open for as long as the address is in use.
    """

    def __init__(self, folder: str | Path) -> None:
        files = RunFolder(folder)
        self._descriptor: int | None = None
        self.path = str(files.socket)
        if sys.platform == "linux":
            self._descriptor = os.open(files.path, os.O_RDONLY | os.O_DIRECTORY)
            self.path = f"/proc/self/fd/{self._descriptor}/{files.socket.name}"
        elif len(os.fsencode(files.socket)) > LONGEST_PATH_BYTES:
            raise ValueError(
                f"a run's socket must have a path of at most {LONGEST_PATH_BYTES} bytes on this system; {files.socket} "
                "is longer: choose a folder with a shorter path"
            )

    @property
    def address(self) -> str:
        return f"ipc://{self.path}"

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

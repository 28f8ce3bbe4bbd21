"""Results that are on disk as soon as they are known: a run cut off keeps all it had measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatrain.trace import write_atomically


class Report:
    """A dictionary that is written whenever it changes. path: None = it is kept in memory only."""

    def __init__(self, path: Path | None, values: dict[str, Any] | None = None) -> None:
        self.values: dict[str, Any] = values or {}
        self.path = path
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self.write()

    def put(self, part: str, value: Any) -> None:
        self.values[part] = value
        self.write()

    def write(self) -> None:
        if self.path is not None:
            write_atomically(self.path, (json.dumps(self.values, indent=1, default=str) + "\n").encode())

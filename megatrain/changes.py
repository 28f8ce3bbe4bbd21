"""What a run that goes on is asked to do otherwise than its checkpoint was: what may change is told, the rest refused.

A checkpoint's weights and moments come of one model, one order of data and one kind of step, in one number format;
under others they would mean something else. Where the data lies may change: that it is the same is checked by content.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.checkpoint.store import Checkpoints
from megatrain.folder import RunFolder
from megatrain.plain import to_plain
from megatrain.settings import Settings, SettingsError

FIXED = ("model", "lora", "data", "recipe", "run.seed", "engine.dtype", "engine.moments_dtype")
ELSEWHERE = ("data.source", "run.folder")  # the same thing may lie in another place


@dataclass(frozen=True)
class Change:
    """One setting, by its key with dots, as it was when a checkpoint was written and as it is asked for."""

    key: str
    before: Any
    now: Any

    @property
    def fixed(self) -> bool:
        return self.key not in ELSEWHERE and any(f"{self.key}.".startswith(f"{part}.") for part in FIXED)

    def __str__(self) -> str:
        return f"{self.key} {json.dumps(self.before)} → {json.dumps(self.now)}"


@dataclass(frozen=True)
class Changes:
    """All of them, since the checkpoint after `step` steps."""

    step: int
    changes: list[Change]

    def __str__(self) -> str:
        return f"changed since the checkpoint of step {self.step}: " + "; ".join(map(str, self.changes))

    def note(self, path: Path) -> None:
        """Add a line to the run's record of changes."""
        line = {"step": self.step, "changed": {change.key: [change.before, change.now] for change in self.changes}}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def changes_since_checkpoint(settings: Settings) -> Changes | None:
    """Compare with the newest checkpoint of the run, from which it would go on; None if there is none, or no change.

    SettingsError for what cannot change; CheckpointError for a checkpoint that does not say what it is.
    """
    checkpoints = Checkpoints(RunFolder(settings.run.folder).checkpoints)
    steps = checkpoints.steps()
    if not steps:
        return None
    asked = checkpoints.manifest(steps[-1]).state.get("settings", {})
    found = [change for change in differences(asked, to_plain(settings)) if change.key != "run.folder"]
    for change in found:
        if change.fixed:
            raise SettingsError(_refusal(change, settings.run.folder, steps[-1]))
    return Changes(steps[-1], found) if found else None


def differences(before: Mapping[str, Any], now: Mapping[str, Any], within: str = "") -> Iterator[Change]:
    """Yield what differs, by key, in the order of `now`; of settings that only one of them knows nothing is said."""
    for name in (name for name in now if name in before):
        old, new, key = before[name], now[name], within + name
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differences(old, new, f"{key}.")
        elif old != new:
            yield Change(key, old, new)


def _refusal(change: Change, folder: str, step: int) -> str:
    before, now = json.dumps(change.before), json.dumps(change.now)
    return (
        f"{change.key} is {now}, and was {before} for the checkpoint of step {step}: a run goes on with the same "
        f"model, data, recipe and number formats. Put it back (megatrain resume {folder} {change.key}={before}), or "
        "begin a new run in another folder, from the exported model"
    )

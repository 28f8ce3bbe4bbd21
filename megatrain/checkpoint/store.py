"""A run's checkpoints on disk: which there are, which are kept, and that a new one appears whole or not at all."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatrain.checkpoint.shards import FILE_MODE, FileNote, note_of
from megatrain.plain import from_plain, to_plain

VERSION = 3
MANIFEST = "checkpoint.json"
SPARE_BYTES = 64 << 20  # left free beside a checkpoint, for logs and records

_NAME = re.compile(r"step-(\d{8,})")
_UNFINISHED = ".writing-"


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read; the message names the file and the way out."""


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay: the newest `last`, and every one whose step is a multiple of `every`."""

    last: int = 3
    every: int | None = None

    def __post_init__(self) -> None:
        for name, count in (("last", self.last), ("every", self.every)):
            if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
                raise ValueError(f"keep {name} must be a whole number ≥ 1; got {count!r}")


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself. step: steps done. state: what is no tensor, as plain values."""

    step: int
    files: dict[str, FileNote]
    state: dict[str, Any] = field(default_factory=dict)
    version: int = VERSION


class Checkpoints:
    """The checkpoints in one folder, each a folder named by the steps done."""

    def __init__(self, folder: str | Path, keep: Keep | None = None) -> None:
        self.folder = Path(folder)
        self.keep = keep or Keep()

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps of the checkpoints there are, in order of their number."""
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))

    # ---- writing ----

    def begin(self, step: int, nbytes: int) -> Path:
        """A folder to write into, that nobody takes for a checkpoint. CheckpointError if the disk has no room."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.clear_unfinished()
        free = shutil.disk_usage(self.folder).free
        if free < nbytes + SPARE_BYTES:
            raise CheckpointError(
                f"a checkpoint needs {nbytes / 1e9:,.3f} GB, and the disk of {self.folder} has {free / 1e9:,.3f} GB "
                "free: make room, keep fewer (keep last), or write them elsewhere; the earlier ones are untouched"
            )
        unfinished = self.folder / f"{_UNFINISHED}{step:08d}"
        unfinished.mkdir(mode=0o700)
        return unfinished

    def commit(self, unfinished: Path, manifest: Manifest) -> Path:
        """Make it a checkpoint at one stroke, then let go of those that need not be kept."""
        text = json.dumps(to_plain(manifest), indent=2).encode() + b"\n"
        with os.fdopen(os.open(unfinished / MANIFEST, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE), "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        _sync(unfinished)
        target = self.path(manifest.step)
        replaced = target.with_name(f"{_UNFINISHED}replaced")
        if target.exists():  # the same step, written before a resume from an earlier one
            os.rename(target, replaced)
        os.rename(unfinished, target)
        _sync(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)
        self._prune()
        return target

    def clear_unfinished(self) -> None:
        """Remove what a killed or failed run had begun to write."""
        for path in self.folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(path, ignore_errors=True)

    def _prune(self) -> None:
        for step in self.steps()[: -self.keep.last]:
            if self.keep.every is None or step % self.keep.every:
                shutil.rmtree(self.path(step))

    # ---- reading ----

    def manifest(self, step: int) -> Manifest:
        """What checkpoint `step` says of itself; CheckpointError naming the file if it is damaged or foreign."""
        path = self.path(step) / MANIFEST
        try:
            values = json.loads(path.read_bytes())
            if values.get("version") != VERSION:
                raise ValueError(f"it is of version {values.get('version')!r}, and this MegaTrain reads {VERSION}")
            return from_plain(Manifest, values)
        except (OSError, ValueError, AttributeError) as error:
            raise self._damaged(step, path, str(error)) from None

    def verify(self, step: int) -> Manifest:
        """Read every byte of a checkpoint; CheckpointError naming the file that is not what it was."""
        manifest = self.manifest(step)
        for name, expected in manifest.files.items():
            path = self.path(step) / name
            if not path.exists():
                raise self._damaged(step, path, "it is missing")
            if (found := note_of(path)) != expected:
                why = f"{found.nbytes} bytes instead of {expected.nbytes}" if found.nbytes != expected.nbytes else ""
                raise self._damaged(step, path, why or "its checksum is another than when it was written")
        return manifest

    def _damaged(self, step: int, path: Path, why: str) -> CheckpointError:
        earlier = [other for other in self.steps() if other < step]
        offer = (
            f"the one before is of step {earlier[-1]}: it is the newest once {self.path(step)} is moved away"
            if earlier
            else "there is none before it"
        )
        return CheckpointError(f"checkpoint of step {step} is damaged: {path}: {why}; {offer}")


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

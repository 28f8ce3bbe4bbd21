"""The folder of a run: the names of its files, who may begin a run in it, and what it says of the run's life.

A run is known by `run.json`, written once when it begins. The records of the run before it have left the folder by
then, and its own do not exist yet: while `run.json` is the same file, records that appear beside it are all its own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

import psutil

from megatrain.plain import from_plain, to_plain
from megatrain.report import RunInfo, RunState, Status
from megatrain.trace import write_atomically

T = TypeVar("T")

FILE_MODE = 0o600
FOLDER_MODE = 0o700
CLOCK_SLACK_S = 2.0  # a process's time of birth is counted from the wall clock, which may be set

_SEGMENT = re.compile(r"events-(\d{8,})\.bin")
_PROCESS_BEGAN = "process_began_unix_s"  # beside RunInfo in run.json: with the id it says which process is meant


class RunFolder:
    """One run on disk. Every path in it, by name; none of them need exist."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self.run = self.path / "run.json"  # RunInfo
        self.status_file = self.path / "status.json"
        self.socket = self.path / "control.sock"
        self.log = self.path / "run.log"
        self.metrics = self.path / "metrics.jsonl"  # StepRecord, one a line
        self.memory = self.path / "memory.jsonl"  # MemorySample
        self.markers = self.path / "markers.jsonl"  # Marker
        self.evaluations = self.path / "evaluations.jsonl"  # EvaluationRecord
        self.samples = self.path / "samples.jsonl"  # SampleRecord
        self.model = self.path / "model"
        self.trace = self.path / "trace.json.gz"
        self.settings = self.path / "settings.yaml"  # what it was asked to do, every default written out
        self.environment = self.path / "environment.txt"  # with which versions
        self.tuning = self.path / "tuning.json"  # how settings that it left open were chosen
        self.data = self.path / "data.json"  # what became of the records that it was given
        self.checkpoints = self.path / "checkpoints"  # stay where they are only for a run that resumes
        self.tensorboard = self.path / "tensorboard"  # likewise
        self.wandb = self.path / "wandb"  # likewise
        self.changes = self.path / "changes.jsonl"  # likewise: of its settings, a line for each resume with others
        self.earlier = self.path / "earlier"  # the runs before this one, by the time they began
        self._is_own = False  # created by this object

    def segment(self, number: int) -> Path:
        """The file of spans, slot changes and layer statistics with this number."""
        return self.path / f"events-{number:08d}.bin"

    def segments(self) -> list[int]:
        """Numbers of the segments that exist, in order."""
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        return sorted(int(match[1]) for name in names if (match := _SEGMENT.fullmatch(name)))

    def records(self) -> list[Path]:
        """What a run leaves behind and the next one would overwrite, as far as it exists; run.json comes last."""
        said = [self.status_file, self.log, self.metrics, self.memory, self.markers, self.evaluations, self.samples]
        paths = [*said, self.tuning, self.data, self.model, self.trace, *map(self.segment, self.segments()), self.run]
        return [path for path in paths if path.exists()]

    # ---- the run's side ----

    def prepare(self, *, resume: bool = False) -> RunFolder:
        """Make room for a run that another process is about to `create`: until then the status is NEW.

        resume: the run goes on from the checkpoints that are here. Else they are put away, too: those of another run
        would be taken for its own.

        The records of an ended run move to `earlier/<UTC time it began>/`. The folder is made readable for its user
        only, unless it held other things before it held a run. Raises ValueError if a run is alive in it.
        """
        self.require_free()
        self._require_no_link_out()
        is_ours = not self.path.exists() or self.run.exists() or not any(self.path.iterdir())
        self.path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        if is_ours:
            self.path.chmod(FOLDER_MODE)
        self._put_away(resume=resume)
        self.write_status(Status(RunState.NEW))
        return self

    def create(self, info: RunInfo, *, resume: bool = False) -> RunFolder:
        """Begin a run here, after `prepare` where nobody called it before; ValueError if a run is alive here."""
        if not self._is_prepared():
            self.prepare(resume=resume)
        self._write(self.run, to_plain(info) | {_PROCESS_BEGAN: _born_unix_s(info.process_id)})
        self._is_own = True
        return self

    def write_status(self, status: Status) -> None:
        """Replace what `status` gives; cheap enough for every step. ValueError if another process's run is alive."""
        if not self._is_own and self.run.exists() and self.info().process_id != os.getpid():
            self.require_free()
        self._write(self.status_file, to_plain(status))

    def write_data(self, about: dict[str, Any]) -> None:
        """Leave what the run is trained on, and what became of the records it was given."""
        self._write(self.data, about)

    def write_tuning(self, about: object) -> None:
        """Leave how settings were chosen: what was measured, the candidates, and the reasons in words."""
        self._write(self.tuning, to_plain(about))

    def data_told(self) -> str:
        """What became of the records that the run was given, in words, without zeros; empty where it does not say."""
        counts = _json(self.data).get("counts", {}) if self.data.exists() else {}
        return ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items() if count)

    def open_log(self) -> FileIO:
        """The file for what a run prints, to write at its end."""
        return FileIO(self.log, "ab", opener=lambda name, flags: os.open(name, flags, FILE_MODE))

    def _is_prepared(self) -> bool:
        return not self.run.exists() and self.status_file.exists() and self.status().state is RunState.NEW

    def require_free(self) -> None:
        """ValueError if a run is alive in it."""
        if not self.run.exists() or (state := self.status().state).over:
            return
        raise ValueError(
            f"a run is alive in {self.path} (process {self.info().process_id}, {state.value}): attach to it, stop it, "
            "or give the new run another folder"
        )

    def _require_no_link_out(self) -> None:
        """Also a link that leads to nothing yet: what is written there would appear outside."""
        for path in self.path.iterdir() if self.path.is_dir() else ():
            if path.name in self._names() and leads_out(path, self.path):
                raise ValueError(
                    f"{path} is a link to {os.readlink(path)}, and a run writes only into its own folder: remove the "
                    "link, or give the run a folder on the disk that is meant"
                )

    def _names(self) -> set[str]:
        """Of everything that a run writes."""
        return {path.name for path in vars(self).values() if isinstance(path, Path) and path != self.path} | {
            self.segment(number).name for number in self.segments()
        }

    def _put_away(self, *, resume: bool) -> None:
        """Move run.json last: as long as it is there, whoever follows the run knows it for the same."""
        records = self.records()
        if not resume:
            lasting = (self.checkpoints, self.tensorboard, self.wandb, self.changes)
            records[:0] = [path for path in lasting if path.exists()]
        if not records:
            return
        place = self._free_place(records)
        owned_folder(self.earlier)
        owned_folder(place)
        for path in records:
            shutil.move(path, place / path.name)

    def _free_place(self, records: list[Path]) -> Path:
        """The folder under `earlier` for the run that was here, named by when it began; no two share one."""
        began_unix_s = self.info().began_unix_s if self.run.exists() else records[0].stat().st_mtime
        name = f"{datetime.fromtimestamp(began_unix_s, UTC):%Y-%m-%dT%H-%M-%SZ}"
        place, number = self.earlier / name, 2
        while place.exists():
            place, number = self.earlier / f"{name}-{number}", number + 1
        return place

    @staticmethod
    def _write(path: Path, values: dict[str, Any]) -> None:
        text = json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False)
        write_atomically(path, text.encode() + b"\n", FILE_MODE)

    # ---- the viewer's side ----

    def info(self) -> RunInfo:
        """What the run said of itself when it began; ValueError for a folder that is no run."""
        return self._read(RunInfo, self._run_values(), self.run)

    def status(self) -> Status:
        """What the run said last, or LOST if its process is gone; ValueError for a folder that is no run."""
        try:
            status = self._read(Status, _json(self.status_file), self.status_file)
        except (FileNotFoundError, NotADirectoryError):
            status = None
        if status is not None and not self.run.exists():
            return status  # of a run in preparation, or one that failed there
        return self._checked(status or Status(RunState.NEW), self._run_values())

    def _checked(self, status: Status, run: dict[str, Any]) -> Status:
        process_id, born_unix_s = run.get("process_id"), run.get(_PROCESS_BEGAN)
        if status.state.over or _lives(process_id, born_unix_s):
            return status
        error = status.error or f"process {process_id} is gone and did not say why; its last words may be in {self.log}"
        done = max(status.steps_done, self._steps_recorded())  # the status was written when the run began
        return replace(status, state=RunState.LOST, steps_done=done, held=None, error=error)

    def _steps_recorded(self) -> int:
        """Steps, also skipped ones, whose records are in the folder."""
        return self.metrics.read_bytes().count(b"\n") if self.metrics.exists() else 0

    def log_tail(self, lines: int = 40) -> str:
        """The last lines that the run printed; empty where it printed nothing."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - lines * 200))
                return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return ""

    def identity(self) -> tuple[int, int, int] | None:
        """Something that changes when, and only when, another run begins here; None where none has."""
        try:
            found = os.stat(self.run)
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino, found.st_mtime_ns

    def _run_values(self) -> dict[str, Any]:
        try:
            return _json(self.run)
        except (FileNotFoundError, NotADirectoryError):
            missing = f"has no {self.run.name}" if self.path.is_dir() else "is no folder"
            raise ValueError(f"a run's folder is needed; {self.path} {missing}: give the run_dir of a run") from None

    @staticmethod
    def _read(kind: type[T], values: dict[str, Any], path: Path) -> T:
        try:
            return from_plain(kind, values)
        except ValueError as error:
            raise ValueError(f"{path} does not say what a run's does: {error}") from None


def owned_folder(path: Path) -> None:
    """Make a folder that is for its user only, or make one so that is there."""
    path.mkdir(mode=FOLDER_MODE, exist_ok=True)
    path.chmod(FOLDER_MODE)


def owner_only(folder: Path) -> None:
    """Take from everyone else what other libraries wrote here, and remove links that lead out of it."""
    for place, folders, files in os.walk(folder):
        os.chmod(place, FOLDER_MODE)
        for path in (Path(place, name) for name in (*folders, *files)):
            if leads_out(path, folder):
                path.unlink()
            elif path.is_file():
                path.chmod(FILE_MODE)


def leads_out(path: Path, folder: Path) -> bool:
    """Whether it is a link to something that is not in `folder`."""
    return path.is_symlink() and not path.resolve().is_relative_to(folder.resolve())


def _json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} is damaged: it must hold an object; it holds {values!r}")
    return values


def _born_unix_s(process_id: int) -> float | None:
    """When a process that runs now began; None if there is none, or only what is left of one (a zombie)."""
    try:
        process = psutil.Process(process_id)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None


def _lives(process_id: int | None, born_unix_s: float | None) -> bool:
    """Whether this very process still runs, and not another one that was given its number."""
    now_unix_s = None if process_id is None else _born_unix_s(process_id)
    return now_unix_s is not None and born_unix_s is not None and abs(now_unix_s - born_unix_s) < CLOCK_SLACK_S

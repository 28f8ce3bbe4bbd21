"""A run as the dashboard sees it: records to draw, a status to tell, and a control to steer by.

Two ways to the same: a run in a thread of this process, and the folder of a run anywhere on this machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from dashboard.feed import FolderFeed, LiveFeed
from megatrain.remote import RemoteRun
from megatrain.report import RunInfo, RunState, Status
from megatrain.steering import Steering
from megatrain.trace import Recorder, Records

LOG_LINES = 20


class Source(Protocol):
    """What the dashboard needs of a run. `generation` grows when another run begins in the same folder."""

    @property
    def folder(self) -> Path | None: ...

    @property
    def generation(self) -> int: ...

    def poll(self) -> Records:
        """What was recorded since the last call."""

    def info(self) -> RunInfo | None:
        """What does not change; None while the run is still being prepared."""

    def status(self) -> Status:
        """What is so now."""

    def log(self) -> str:
        """The last lines of what it printed; empty where it prints elsewhere."""

    def control(self) -> Steering:
        """Where wishes go; RunUnreachableError if there is nobody to hear them."""

    def close(self) -> None: ...


class Run(Protocol):
    """The part of `megatrain.TrainingRun` that a dashboard uses."""

    @property
    def folder(self) -> Path | None: ...

    @property
    def recorder(self) -> Recorder | None: ...

    @property
    def info(self) -> RunInfo: ...

    @property
    def control(self) -> Steering: ...

    def status(self) -> Status: ...


class LiveSource:
    """A run in a thread of this process."""

    def __init__(self, run: Run, recorder: Recorder) -> None:
        self.folder = run.folder
        self.generation = 0
        self._run = run
        self._feed = LiveFeed(recorder)

    def poll(self) -> Records:
        return self._feed.poll()

    def info(self) -> RunInfo:
        return self._run.info

    def status(self) -> Status:
        return self._run.status()

    def log(self) -> str:
        return ""

    def control(self) -> Steering:
        return self._run.control

    def close(self) -> None:
        """Nothing is held."""


class FolderSource:
    """A run of another process, alive or over, through its folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._run = RemoteRun(folder)
        self._feed = FolderFeed(self.folder)

    @property
    def generation(self) -> int:
        return self._feed.generation

    def poll(self) -> Records:
        self._run.poll()
        return self._feed.poll()

    def info(self) -> RunInfo | None:
        return self._run.info()

    def status(self) -> Status:
        """NEW also where no run has begun yet."""
        return self._run.status() if self.folder.is_dir() else Status(RunState.NEW)

    def log(self) -> str:
        return self._run.folder.log_tail(LOG_LINES)

    def control(self) -> Steering:
        return self._run.control()

    def close(self) -> None:
        self._run.close()
        self._feed.close()


def source_of(run: Any) -> Source:
    """Return the way to a `TrainingRun`, in a thread or in a process; TypeError for anything else."""
    if isinstance(run, FolderSource):
        return run
    try:
        recorder, folder = run.recorder, run.folder
    except AttributeError:
        raise TypeError(
            f"a dashboard shows a megatrain.TrainingRun, or with Dashboard.attach(folder) a run folder; got {run!r}"
        ) from None
    return FolderSource(folder) if recorder is None else LiveSource(run, recorder)

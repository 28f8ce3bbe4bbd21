"""A run of any process of this user, as its folder and its socket show it."""

from __future__ import annotations

import threading
from pathlib import Path

from megatrain.folder import RunFolder
from megatrain.remote.client import RemoteControl, RunUnreachableError
from megatrain.report import RunInfo, RunState, Status

STATUS_TIMEOUT_S = 1.0  # a run that answers later is said to be as it was


class RemoteRun:
    """Alive or over, in preparation or gone: what can be said of it can be asked here. Thread-safe."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = RunFolder(folder)
        self._lock = threading.Lock()
        self._asking: RemoteControl | None = None  # one for questions, so that wishes never wait behind them
        self._wishing: RemoteControl | None = None
        self._last = Status(RunState.NEW)

    def info(self) -> RunInfo | None:
        """What does not change; None while the run is still being prepared."""
        try:
            return self.folder.info()
        except ValueError:
            return None

    def status(self) -> Status:
        """By the run's own word while it answers, else by its folder's; while it is too busy, as it was before."""
        written = self.folder.status()
        if written.state.over or not self.folder.socket.exists():
            return written
        with self._lock:
            self._asking = self._asking or RemoteControl(self.folder.path, timeout_s=STATUS_TIMEOUT_S)
            try:
                self._last = self._asking.status()
            except RunUnreachableError:
                return written if self._last.state is RunState.NEW else self._last
            return self._last

    def control(self) -> RemoteControl:
        """Where wishes go; they are refused while nobody is there to hear them."""
        with self._lock:
            self._wishing = self._wishing or RemoteControl(self.folder.path)
            return self._wishing

    def poll(self) -> None:
        """Hear what became of wishes."""
        if self._wishing is not None:
            self._wishing.poll()

    def close(self) -> None:
        """Let go of the run, which goes on."""
        for remote in (self._asking, self._wishing):
            if remote is not None:
                remote.close()

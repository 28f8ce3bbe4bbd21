"""A run in a background thread of this process."""

from __future__ import annotations

import threading
from pathlib import Path

from megatrain.engine import StepResult, StreamingEngine
from megatrain.folder import RunFolder
from megatrain.report import RunInfo, RunState, Status
from megatrain.run.loop import Job, OnStep
from megatrain.run.session import Session
from megatrain.steering import Steering
from megatrain.trace import Recorder


class ThreadRunner:
    """The thread owns the engine while it runs; a failure in it is kept."""

    def __init__(self, job: Job, folder: Path | None, on_step: OnStep | None) -> None:
        if not isinstance(job.engine, StreamingEngine) or callable(job.batches):
            raise ValueError(
                "a run in a thread takes a StreamingEngine and batches; functions that make them are for process=True"
            )
        self.engine, batches = job.engine, job.batches
        run_folder = None if folder is None else RunFolder(folder)
        self._session = Session(self.engine, batches, job, run_folder, on_step or (lambda *_: None))
        self._thread = threading.Thread(target=self._session.run, name="megatrain-run", daemon=True)
        self.started = False

    def start(self) -> None:
        self._session.open()
        self.started = True
        self._thread.start()

    def wait(self, timeout_s: float | None) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def state(self) -> RunState:
        return self._session.state

    @property
    def error(self) -> BaseException | None:
        return self._session.error

    @property
    def results(self) -> list[StepResult]:
        return self._session.results

    @property
    def control(self) -> Steering:
        return self.engine.control

    @property
    def info(self) -> RunInfo:
        return self._session.info

    def status(self) -> Status:
        return self._session.status()

    @property
    def recorder(self) -> Recorder:
        return self.engine.recorder

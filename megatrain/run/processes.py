"""A run in a process of its own, which outlives the one that started it.

The child gets the job through its standard input (cloudpickle, so that functions of a notebook travel, too), leads a
session of its own, so that neither Ctrl-C nor the restart of a notebook kernel reaches it, and writes what it prints
into the folder's run.log. Everything else goes the way any viewer goes: files to read, a socket to steer by.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import cloudpickle

from megatrain.engine import StepResult, StreamingEngine
from megatrain.folder import RunFolder
from megatrain.journal.tail import LineTail
from megatrain.remote import RemoteControl, RemoteRun
from megatrain.report import RunInfo, RunState, Status
from megatrain.run.loop import Job, OnStep
from megatrain.trace import StepRecord

CHILD = "from megatrain.run.child import main; main()"
POLL_S = 0.05


class RunFailedError(RuntimeError):
    """A run in a process of its own failed; the message ends with the child's traceback."""


class ProcessRunner:
    """Starts the child and follows its folder."""

    recorder = None

    def __init__(self, job: Job, folder: Path | None, on_step: OnStep | None) -> None:
        if isinstance(job.engine, StreamingEngine):
            raise ValueError(
                "an engine lives in the process that made it; for process=True pass a function that makes one "
                "(lambda: StreamingEngine(load_model(...), ...))"
            )
        if folder is None:
            raise ValueError("a run in a process of its own is followed through its folder; give run_dir")
        if on_step is not None:
            raise ValueError("on_step cannot be called from another process; show a dashboard, or read run.results")
        self._job = job
        self._folder = RunFolder(folder)
        self._child: subprocess.Popen[bytes] | None = None
        self._results = _Results(self._folder)
        self._remote = RemoteRun(folder)

    def start(self) -> None:
        job = cloudpickle.dumps(self._job)
        self._folder.prepare(resume=self._job.saving.resume)
        path = os.pathsep.join(entry for entry in sys.path if entry)
        with self._folder.open_log() as log:
            self._child = subprocess.Popen(
                [sys.executable, "-c", CHILD, str(self._folder.path)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )
        threading.Thread(target=self._send, args=(job,), name="megatrain-send-job", daemon=True).start()

    def _send(self, job: bytes) -> None:
        """A child that ends before it has read everything says why in its log."""
        assert self._child is not None
        assert self._child.stdin is not None
        try:
            with self._child.stdin as pipe:
                pipe.write(job)
        except BrokenPipeError:
            pass

    @property
    def started(self) -> bool:
        return self._child is not None

    def wait(self, timeout_s: float | None) -> bool:
        assert self._child is not None
        try:
            self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    @property
    def state(self) -> RunState:
        if self._child is None:
            return RunState.NEW
        return self.status().state

    @property
    def error(self) -> BaseException | None:
        if self._child is None or self._child.poll() in (None, 0):
            return None
        said = self._folder.log_tail()
        return RunFailedError(f"the run's process ended with exit code {self._child.returncode}; its log ends:\n{said}")

    @property
    def results(self) -> list[StepResult]:
        return self._results.read() if self.started else []

    @property
    def control(self) -> RemoteControl:
        """Waits until the child has made its engine: before that nobody hears a wish."""
        if self._child is None:
            raise RuntimeError("this run was not started; call start() first")
        while self._child.poll() is None and not self._folder.socket.exists():
            time.sleep(POLL_S)
        return self._remote.control()

    @property
    def info(self) -> RunInfo:
        return self._folder.info()

    def status(self) -> Status:
        return self._remote.status()

    @property
    def engine(self) -> StreamingEngine:
        raise RuntimeError(
            "this run's engine lives in another process; steer it by `run.control`, read `run.results`, and find the "
            f"trained model in {self._folder.model} (save=True)"
        )


class _Results:
    """The steps that another process has done, read from its metrics."""

    def __init__(self, folder: RunFolder) -> None:
        self._lines = LineTail(folder.metrics, StepRecord)
        self._lock = threading.Lock()
        self._found: list[StepResult] = []

    def read(self) -> list[StepResult]:
        with self._lock:
            self._found += [_result(record) for record in self._lines.read()]
            self._lines.close()
            return list(self._found)


def _result(record: StepRecord) -> StepResult:
    return StepResult(record.loss, record.grad_norm, record.tokens, skipped=record.skipped)

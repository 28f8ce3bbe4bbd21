"""The main program of a run in a process of its own: see `processes`."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType

from megatrain.folder import RunFolder
from megatrain.report import RunState, Status
from megatrain.run.loop import Job
from megatrain.run.session import Session

FAILED = 1  # exit code


def main() -> None:
    """Read a job from standard input, train, and leave everything in the folder that the command line names."""
    os.umask(0o077)  # what a run leaves is its owner's
    folder = RunFolder(Path(sys.argv[1]))
    try:
        session = _session(pickle.load(sys.stdin.buffer), folder)
    except BaseException as error:
        traceback.print_exc()
        folder.write_status(Status(RunState.FAILED, error=f"{type(error).__name__}: {error}"))
        sys.exit(FAILED)
    session.run()
    if session.error is not None:
        traceback.print_exception(session.error)
        sys.exit(FAILED)
    session.engine.close()


def _session(job: Job, folder: RunFolder) -> Session:
    engine = job.engine() if callable(job.engine) else job.engine
    batches = job.batches() if callable(job.batches) else job.batches

    def stop(_signal: int, _frame: FrameType | None) -> None:
        engine.control.stop()

    signal.signal(signal.SIGTERM, stop)
    session = Session(engine, batches, job, folder)
    session.open()
    return session

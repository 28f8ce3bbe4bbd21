"""A run in a terminal: its progress, Ctrl-C, and what its end means for the shell."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from tqdm import tqdm

from megatrain.engine import StepResult
from megatrain.folder import RunFolder
from megatrain.jobs import make_run, note_settings
from megatrain.report import RunState
from megatrain.run import TrainingRun
from megatrain.settings import Settings

FINISHED, FAILED, STOPPED, INTERRUPTED = 0, 1, 3, 130  # exit codes; 2 is wrong use
LINE_PERIOD_S = 10.0  # between lines in a log


class Progress:
    """A bar in a terminal; in a file or a pipe a plain line now and then."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._bar = tqdm(total=steps, unit="step", disable=None)
        self._next_line_s = 0.0

    def begin(self, done: int) -> None:
        self._bar.update(done)

    def step(self, done: int, result: StepResult) -> None:
        words = f"loss {result.loss:.4f}, grad norm {result.grad_norm:.3g}"
        if not self._bar.disable:
            self._bar.set_postfix_str(words, refresh=False)
            self._bar.update()
        elif time.monotonic() >= self._next_line_s or done == self._steps:
            self._next_line_s = time.monotonic() + LINE_PERIOD_S
            print(f"step {done} of {self._steps}: {words}", flush=True)

    def say(self, text: str) -> None:
        self._bar.write(text, file=sys.stderr)

    def close(self) -> None:
        self._bar.close()


class _Told(logging.Handler):
    """What the package logs, above the bar."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(logging.INFO)
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        self._progress.say(record.getMessage())


def train(settings: Settings, *, resume: bool = False) -> int:
    """Train to the end, or until Ctrl-C; returns the exit code."""
    progress = Progress(settings.run.steps)
    with _logging_to(progress):
        return _train(settings, progress, resume=resume)


@contextmanager
def _logging_to(progress: Progress) -> Iterator[None]:
    told, log = _Told(progress), logging.getLogger("megatrain")
    before = log.level
    log.addHandler(told)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(told)
        log.setLevel(before)


def _train(settings: Settings, progress: Progress, *, resume: bool) -> int:
    run = make_run(settings, resume=resume, on_step=progress.step)
    try:
        run.start()
        note_settings(settings)
        progress.say(f"data: {RunFolder(settings.run.folder).data_told()}")
        progress.begin(run.status().steps_done)
        with _stopped_by_ctrl_c(run, progress):
            _wait(run)
    except KeyboardInterrupt:  # lanes may be busy for long: nobody waits for them
        progress.say(f"stopped at once; go on from the newest checkpoint with: megatrain resume {settings.run.folder}")
        sys.stdout.flush()
        os._exit(INTERRUPTED)
    finally:
        progress.close()
    return _ending(run, settings)


def _wait(run: TrainingRun) -> None:
    """In short pieces: Python handles signals only between them."""
    while not run.state.over:
        try:
            run.wait(0.2)
        except TimeoutError:
            continue


@contextmanager
def _stopped_by_ctrl_c(run: TrainingRun, progress: Progress) -> Iterator[None]:
    """The first one lets the step finish and saves; the second ends the program at once."""

    def stop(_signal: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        progress.say("stopping after this step, with a checkpoint; Ctrl-C once more stops at once")
        run.stop()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _ending(run: TrainingRun, settings: Settings) -> int:
    folder, done = settings.run.folder, run.status().steps_done
    if run.state is RunState.STOPPED:
        print(f"stopped after step {done} of {settings.run.steps}; go on with: megatrain resume {folder}")
        return STOPPED
    print(f"done: {done} steps; model in {folder}/model" if settings.run.save else f"done: {done} steps in {folder}")
    return FINISHED

"""A run in a terminal: its progress, Ctrl-C, and what its end means for the shell."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TextIO

from tqdm import tqdm

from megatrain.changes import changes_since_checkpoint
from megatrain.engine import StepResult
from megatrain.folder import RunFolder
from megatrain.jobs import complete_model, make_run, note_settings, settle
from megatrain.report import RunState
from megatrain.run import TrainingRun
from megatrain.settings import Settings

log = logging.getLogger("megatrain")

FINISHED, FAILED, STOPPED, INTERRUPTED = 0, 1, 3, 130  # exit codes; 2 is wrong use
LINE_PERIOD_S = 10.0  # between lines in a log
TOLD_METRICS = ("reward/mean", "rewards/accuracies")  # of recipes whose loss alone says little


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
        words += "".join(f", {name} {result.metrics[name]:.3g}" for name in TOLD_METRICS if name in result.metrics)
        if not self._bar.disable:
            self._bar.set_postfix_str(words, refresh=False)
            self._bar.update()
        elif time.monotonic() >= self._next_line_s or done == self._steps:
            self._next_line_s = time.monotonic() + LINE_PERIOD_S
            _print(f"step {done} of {self._steps}: {words}")

    def say(self, text: str) -> None:
        with _still_heard_or_not(sys.stderr):
            self._bar.write(text, file=sys.stderr)

    def close(self) -> None:
        self._bar.close()


def _print(text: str) -> None:
    with _still_heard_or_not(sys.stdout):
        print(text, flush=True)


@contextmanager
def _still_heard_or_not(stream: TextIO) -> Iterator[None]:
    """A pipe whose reader is gone (`| head`) ends no run: what would go into it goes nowhere."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


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
    told = _Told(progress)
    before = log.level
    log.addHandler(told)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(told)
        log.setLevel(before)


def _train(settings: Settings, progress: Progress, *, resume: bool) -> int:
    settings, tuned = settle(settings)
    changes = changes_since_checkpoint(settings) if resume else None  # from which it goes on; soon there are newer ones
    run = make_run(settings, resume=resume, on_step=progress.step)
    try:
        run.start()
        note_settings(settings, tuned)
        progress.say(f"data: {RunFolder(settings.run.folder).data_told()}")
        done = run.status().steps_done
        if resume:
            progress.say(_where_it_goes_on(RunFolder(settings.run.folder), done))
        if changes is not None:
            log.info("%s", changes)
            changes.note(RunFolder(settings.run.folder).changes)
        progress.begin(done)
        with _stopped_by_signals(run, progress):
            _wait(run)
    except KeyboardInterrupt:  # lanes may be busy for long: nobody waits for them
        progress.say(f"stopped at once; go on from the newest checkpoint with: megatrain resume {settings.run.folder}")
        sys.stdout.flush()
        os._exit(INTERRUPTED)
    finally:
        progress.close()
    return _ending(run, settings)


def _wait(run: TrainingRun) -> None:
    """In short pieces: Python handles signals only between them. Raises what ended the run, if it failed."""
    try:
        while not run.state.over:
            with suppress(TimeoutError):
                run.wait(0.2)
        run.wait()
    except ValueError as error:  # once a run has begun, nothing is wrong use
        raise RuntimeError(str(error)) from error


@contextmanager
def _stopped_by_signals(run: TrainingRun, progress: Progress) -> Iterator[None]:
    """The first Ctrl-C (a cluster's SIGTERM) lets the step finish and saves; the second ends the program at once."""

    def stop(_signal: int, _frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.default_int_handler)
        progress.say("stopping after this step, with a checkpoint; Ctrl-C once more stops at once")
        run.stop()

    before = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _where_it_goes_on(folder: RunFolder, done: int) -> str:
    if done:
        return f"going on after step {done}, from its checkpoint"
    return f"there is no checkpoint: beginning with step 1 again; what was there before is in {folder.earlier}"


def _ending(run: TrainingRun, settings: Settings) -> int:
    folder, done = settings.run.folder, run.status().steps_done
    complete_model(settings)
    if run.state is RunState.STOPPED:
        _print(f"stopped after step {done} of {settings.run.steps}; go on with: megatrain resume {folder}")
        return STOPPED
    _print(f"done: {done} steps; model in {folder}/model" if settings.run.save else f"done: {done} steps in {folder}")
    return FINISHED

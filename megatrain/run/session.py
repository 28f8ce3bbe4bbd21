"""One run inside the process that trains: the loop, and beside it what records, samples, and answers viewers."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, Protocol, runtime_checkable

import psutil

from megatrain.config import Throttle
from megatrain.engine import StepResult, StreamingEngine
from megatrain.folder import FILE_MODE, RunFolder, owner_only
from megatrain.journal import Journal
from megatrain.plain import to_plain
from megatrain.remote import ControlServer
from megatrain.report import RunInfo, RunState, Status
from megatrain.run.evaluating import Evaluator
from megatrain.run.loop import Batch, Job, OnStep, epochs, train
from megatrain.run.saving import Saver
from megatrain.sinks import Sinks
from megatrain.trace import Marker, MemorySampler, write_chrome_trace

TRACED_STEPS = 20  # at the end of the run; Perfetto gives up on much more


@runtime_checkable
class Described(Protocol):
    """Batches that say what they are made of, such as `megatrain.data.Batches`."""

    def about(self) -> dict[str, Any]: ...


class Session:
    """Trains in the calling thread (`run`), and answers questions from others.

    folder: where records, status and the control socket go; None keeps everything in memory.
    """

    def __init__(
        self,
        engine: StreamingEngine,
        batches: Iterable[Batch],
        job: Job,
        folder: RunFolder | None,
        on_step: OnStep = lambda *_: None,
    ) -> None:
        self.engine = engine
        self.info = describe(engine, job, folder)
        self.results: list[StepResult] = []
        self.error: BaseException | None = None
        self._batches = batches
        self._job = job
        self._folder = folder
        self._on_step = on_step
        self._state = RunState.NEW
        self._saver: Saver | None = None
        self._sinks: Sinks | None = None
        self._evaluator = None if job.evaluating is None else Evaluator(engine, job.evaluating, self._tell_sinks)
        if folder is None and (job.save or job.saving.every or job.saving.resume or job.sinks):
            raise ValueError("a model, checkpoints and sinks are left in the run's folder; give run_dir, too")

    @property
    def state(self) -> RunState:
        held = self._state is RunState.RUNNING and self.engine.control.paused
        return RunState.PAUSED if held else self._state

    @property
    def steps_done(self) -> int:
        """Also those before a checkpoint that the run went on from."""
        return len(self.results) + (self._saver.steps_done if self._saver else 0)

    def status(self) -> Status:
        """What is so now; from any thread."""
        control = self.engine.control
        return Status(
            state=self.state,
            steps_done=self.steps_done,
            knobs=control.knobs,
            micro_batch_size=control.micro_batch_size,
            position=control.position,
            lanes=self.engine.at_work(),
            planned_bytes=self.engine.planned_bytes,
            held=self.engine.held,
            error=None if self.error is None else f"{type(self.error).__name__}: {self.error}",
        )

    def open(self) -> None:
        """Claim the folder, and go on from its newest checkpoint where that is wanted.

        ValueError if another run is alive in it, CheckpointError for a checkpoint that is damaged or of another model.
        """
        if self._folder is not None:
            self._saver = Saver(self.engine, self._batches, self._folder, self._job.saving)
            self.engine.control.saves = True
            self._folder.create(self.info, resume=self._job.saving.resume)
            if isinstance(self._batches, Described):
                self._folder.write_data(self._batches.about())
            for record in self._saver.past(self.info.began_unix_s):
                self.engine.recorder.add(record)
        self._enter(RunState.RUNNING)

    def run(self) -> None:
        """Train to the end; the outcome is in `state` and `error`."""
        try:
            with ExitStack() as beside:
                self._start_beside(beside)
                self._train()
            self._enter(RunState.STOPPED if self.steps_done < self._job.steps else RunState.FINISHED)
        except BaseException as error:  # kept for whoever waits: a thread has nobody to raise to
            self.error = error
            self._enter(RunState.FAILED)
        finally:
            self.engine.control.close()

    def _start_beside(self, beside: ExitStack) -> None:
        sampler = MemorySampler(
            self.engine.recorder,
            arena_bytes=lambda: self.engine.arena_bytes,
            pinned_bytes=lambda: self.engine.pinned_bytes,
            device_index=self.engine.device_index,
        )
        if self._folder is not None:
            server = ControlServer(self._folder.path, self.engine.control, self.status)
            beside.callback(server.close)
            beside.callback(Journal(self.engine.recorder, self._folder.path).close)
            self._sinks = self._open_sinks(self._folder)
            beside.callback(self._sinks.close)
        sampler.start()
        beside.callback(sampler.stop)

    def _open_sinks(self, folder: RunFolder) -> Sinks:
        settings = {"engine": to_plain(self.engine.config), "optimizer": to_plain(self.engine.optimizer)}
        about = {"model": self.info.model, "steps": self._job.steps, **settings}
        return Sinks(self._job.sinks, folder, self.engine.recorder, steps_done=self.steps_done, about=about)

    def _train(self) -> None:
        batches, done = epochs(self._batches), self.steps_done
        if self._saver is not None:
            batches = self._saver.remaining(batches)
        if self._evaluator is not None and not done:
            self._evaluator.after_step(done)
        train(self.engine, batches, self._job, self._after_step, done=done)
        self.engine.flush()
        if self._evaluator is not None and not self.engine.control.stopping:
            self._evaluator.at_end(self.steps_done)
        if self._saver is not None:
            self._saver.at_end(self.steps_done, stopped=self.steps_done < self._job.steps)
        if self.engine.control.stopping:
            recorder = self.engine.recorder
            recorder.add(Marker(recorder.now(), "stopped", False, True, self.engine.steps_applied - 1, None))
        if self._folder is not None:
            self._leave_files(self._folder)

    def _leave_files(self, folder: RunFolder) -> None:
        recorder = self.engine.recorder
        last = recorder.steps()[-TRACED_STEPS:]
        write_chrome_trace(folder.trace, recorder, start_s=last[0].start_s if last else 0.0, mode=FILE_MODE)
        if self._job.save or self.engine.control.save_wanted:
            self.engine.save_pretrained(folder.model)
            owner_only(folder.model)

    def _after_step(self, done: int, result: StepResult) -> None:
        self.results.append(result)
        if self._saver is not None:
            self._saver.after_step(done, self.engine.control.take_checkpoint_wishes())
        if self._sinks is not None:
            self._sinks.after_step(done)
        self._on_step(done, result)
        if self._evaluator is not None:
            self._evaluator.after_step(done)

    def _tell_sinks(self, done: int, values: dict[str, float]) -> None:
        if self._sinks is not None:
            self._sinks.scalars(done, values)

    def _enter(self, state: RunState) -> None:
        self._state = state
        if self._folder is not None:
            self._folder.write_status(self.status())


def describe(engine: StreamingEngine, job: Job, folder: RunFolder | None) -> RunInfo:
    """What a viewer has to know of a run before its first record."""
    sizes, throttle = engine.sizes, engine.config.throttle or Throttle()
    return RunInfo(
        model=engine.model_name,
        layers=sizes.layers,
        steps=job.steps,
        process_id=os.getpid(),
        began_unix_s=time.time() - engine.recorder.now(),
        device=engine.device_name,
        layer_bytes=sizes.layer_bytes,
        gradient_bytes=sizes.gradient_bytes,
        shell_bytes=sizes.shell_bytes,
        host_arenas=sizes.host_arenas,
        host_total_bytes=int(psutil.virtual_memory().total),
        device_limit_bytes=sizes.device_limit_bytes,
        folder=None if folder is None else str(folder.path),
        h2d_bytes_per_s=_slowest(job.h2d_bytes_per_s, throttle.link_bytes_per_s),
        d2h_bytes_per_s=_slowest(job.d2h_bytes_per_s, throttle.link_bytes_per_s),
        peak_flops_per_s=job.peak_flops_per_s,
    )


def _slowest(*rates: float | None) -> float | None:
    return min((rate for rate in rates if rate is not None), default=None)

"""TrainingRun: what a notebook holds in its hand, wherever the training itself takes place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatrain.checkpoint import Keep
from megatrain.config import SinkName
from megatrain.engine import StepResult, StreamingEngine
from megatrain.machine import Machine
from megatrain.report import RunInfo, RunState, Status
from megatrain.run.evaluating import Evaluating
from megatrain.run.loop import Job, OnStep, Step
from megatrain.run.processes import ProcessRunner
from megatrain.run.saving import Saving
from megatrain.run.schedules import LearningRate
from megatrain.run.threads import ThreadRunner
from megatrain.steering import Steering, Wish
from megatrain.trace import Recorder


class TrainingRun:
    """Trains `steps` optimizer steps over `batches`, begun again from the start as often as needed.

    engine: a StreamingEngine, trained in a background thread; or a function that makes one, called in a process of
        its own, which goes on when this one ends or its notebook kernel restarts.
    batches: an iterable that can be iterated once for each epoch (such as `megatrain.data.Batches`), or with a
        process a function that makes one there.
    step: trains on one batch; by default the engine's own, or that of a recipe, such as `megatrain.recipes.DPO().step`.
    lr_schedule: step → learning rate, steps counted from 0; None keeps the optimizer's.
    run_dir: the run's folder: run.json, metrics.jsonl (a line for each step), events-*.bin (spans), memory.jsonl,
        markers.jsonl, status.json, run.log, the control socket and, at the end, trace.json.gz. A process needs one;
        a thread without one keeps everything in memory.
    on_step: called in the training thread after every step, for progress bars and the like; not with a process.
    process: True asks for a process, False for a thread; None decides by what `engine` is.
    save: leave the trained model in the folder's `model`.
    checkpoint_every: steps between complete states in the folder's `checkpoints`, written while training goes on, and
        one at the end; keep: which of them stay. resume: go on from the newest one, if there is one: the same bits as
        without the break, with the same model, batches and optimizer, whatever the buffer counts. checkpoint_at_stop:
        a run that is stopped before its last step leaves one, also without checkpoint_every.
    evaluating: held-out data and prompts, looked at every so many steps; evaluations.jsonl and samples.jsonl.
    sinks: where the curves go, too: "tensorboard" and "wandb", in folders of these names within the run's folder. One
        that fails is logged once and left alone; training goes on.
    settings: what the run was asked to do, as plain values that are kept in every checkpoint.
    machine: measured rates, for whoever compares with them.
    """

    def __init__(
        self,
        engine: StreamingEngine | Callable[[], StreamingEngine],
        batches: Iterable[Any] | Callable[[], Iterable[Any]],
        *,
        steps: int,
        step: Step = StreamingEngine.step,
        lr_schedule: LearningRate | None = None,
        run_dir: str | Path | None = None,
        on_step: OnStep | None = None,
        process: bool | None = None,
        save: bool = False,
        checkpoint_every: int | None = None,
        checkpoint_at_stop: bool = False,
        keep: Keep | None = None,
        resume: bool = False,
        evaluating: Evaluating | None = None,
        sinks: Sequence[SinkName] = (),
        settings: Mapping[str, Any] | None = None,
        machine: Machine | None = None,
    ) -> None:
        rates = {} if machine is None else machine.rates
        saving = Saving(checkpoint_every, keep or Keep(), resume, checkpoint_at_stop, settings)
        job = Job(engine, batches, steps, step, lr_schedule, save, saving, evaluating, sinks, **rates)
        self.steps = steps
        self.folder = Path(run_dir) if run_dir is not None else None
        apart = not isinstance(engine, StreamingEngine) if process is None else process
        self._runner = ProcessRunner(job, self.folder, on_step) if apart else ThreadRunner(job, self.folder, on_step)

    # ---- life ----

    def start(self) -> TrainingRun:
        """Begin, and return at once."""
        if self._runner.state is not RunState.NEW or self._runner.started:
            raise RuntimeError(f"this run was started before and is {self.state.value}; make a new TrainingRun")
        self._runner.start()
        return self

    def wait(self, timeout_s: float | None = None) -> TrainingRun:
        """Block until the run is over; raise what ended it, or TimeoutError."""
        if not self._runner.started:
            raise RuntimeError("this run was not started; call start() first")
        if not self._runner.wait(timeout_s):
            raise TimeoutError(f"the run is still {self.state.value} after {timeout_s} s")
        if self.error is not None:
            raise self.error
        return self

    @property
    def state(self) -> RunState:
        return self._runner.state

    @property
    def error(self) -> BaseException | None:
        """What ended the run, if it failed."""
        return self._runner.error

    @property
    def results(self) -> list[StepResult]:
        """Of the steps done so far; in this process not of those before a checkpoint that the run went on from."""
        return self._runner.results

    @property
    def steps_done(self) -> int:
        return len(self.results)

    # ---- steering ----

    @property
    def control(self) -> Steering:
        """All wishes; those below are the usual ones."""
        return self._runner.control

    def pause(self) -> Wish:
        """Hold before the next layer."""
        return self.control.pause()

    def resume(self) -> Wish:
        """Run on."""
        return self.control.resume()

    def step_layer(self) -> Wish:
        """Let one more layer run, then hold."""
        return self.control.step_layer()

    def checkpoint(self) -> Wish:
        """Write a checkpoint after the step in progress."""
        return self.control.checkpoint()

    def stop(self, *, save: bool = False) -> Wish:
        """End after the step in progress; `save`: leave the model in the folder."""
        return self.control.stop(save=save)

    # ---- for whoever watches ----

    @property
    def info(self) -> RunInfo:
        """What does not change. With a process, not before it has made its engine: ValueError."""
        return self._runner.info

    def status(self) -> Status:
        """What is so now."""
        return self._runner.status()

    @property
    def recorder(self) -> Recorder | None:
        """The records, where the run is in this process; of others read the folder."""
        return self._runner.recorder

    @property
    def engine(self) -> StreamingEngine:
        """The engine, where it is in this process; RuntimeError if it lives in another."""
        return self._runner.engine

"""A training run: the loop over batches in a background thread, and what it leaves in its folder.

The thread owns the engine while it runs. A failure in it is kept, shown by `error`, and raised by `wait`.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path

import torch

from megatrain.control import StoppedError
from megatrain.engine import StepResult, StreamingEngine
from megatrain.trace import MemorySampler, StepRecord, write_chrome_trace

Batch = dict[str, torch.Tensor]
LearningRate = Callable[[int], float]


class RunState(StrEnum):
    """Where a run is in its life."""

    NEW = "new"
    RUNNING = "running"
    PAUSED = "paused"  # held at a layer boundary
    STOPPED = "stopped"  # by request, before all steps were done
    FINISHED = "finished"
    FAILED = "failed"  # `error` says why


def cosine_schedule(peak: float, steps: int, *, warmup: int = 0, floor: float = 0.0) -> LearningRate:
    """Linear warm-up to `peak`, then a cosine down to `floor` at the last step (Loshchilov & Hutter 2017).

    Returns step → learning rate, steps counted from 0.
    """

    def lr(step: int) -> float:
        if step < warmup:
            return peak * (step + 1) / warmup
        done = (step - warmup) / max(1, steps - 1 - warmup)
        return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    return lr


class TrainingRun:
    """Trains `steps` optimizer steps over `batches`, begun again from the start as often as needed.

    batches: an iterable that can be iterated once for each epoch (such as `megatrain.data.Batches`).
    lr_schedule: step → learning rate, steps counted from 0; None keeps the optimizer's.
    run_dir: folder for metrics.jsonl (a line for each step) and, at the end, trace.json.gz; None writes nothing.
    on_step: called in the training thread after every step, for progress bars and the like.
    """

    def __init__(
        self,
        engine: StreamingEngine,
        batches: Iterable[Batch],
        *,
        steps: int,
        lr_schedule: LearningRate | None = None,
        run_dir: str | Path | None = None,
        on_step: Callable[[int, StepResult], None] | None = None,
    ) -> None:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps must be a whole number ≥ 1 of optimizer steps; got {steps!r}")
        self.engine = engine
        self.steps = steps
        self.results: list[StepResult] = []
        self.error: BaseException | None = None
        self._batches = batches
        self._lr_schedule = lr_schedule
        self._folder = Path(run_dir) if run_dir is not None else None
        self._on_step = on_step
        self._state = RunState.NEW
        self._thread = threading.Thread(target=self._main, name="megatrain-run", daemon=True)

    # ---- steering ----

    def start(self) -> TrainingRun:
        """Begin in a background thread and return at once."""
        if self._state is not RunState.NEW:
            raise RuntimeError(f"this run was started before and is {self.state.value}; make a new TrainingRun")
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
        self._state = RunState.RUNNING
        self._thread.start()
        return self

    def wait(self, timeout_s: float | None = None) -> TrainingRun:
        """Block until the run is over; raise what ended it, or TimeoutError."""
        if self._state is RunState.NEW:
            raise RuntimeError("this run was not started; call start() first")
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the run is still {self.state.value} after {timeout_s} s")
        if self.error is not None:
            raise self.error
        return self

    def pause(self) -> None:
        """Hold before the next layer."""
        self.engine.control.pause()

    def resume(self) -> None:
        """Run on."""
        self.engine.control.resume()

    def step_layer(self) -> None:
        """Let one more layer run, then hold."""
        self.engine.control.step_layer()

    def stop(self) -> None:
        """End after the step in progress."""
        self.engine.control.stop()

    @property
    def state(self) -> RunState:
        held = self._state is RunState.RUNNING and self.engine.control.paused
        return RunState.PAUSED if held else self._state

    @property
    def steps_done(self) -> int:
        return len(self.results)

    # ---- the loop ----

    def _main(self) -> None:
        sampler = MemorySampler(
            self.engine.recorder,
            arena_bytes=lambda: self.engine.arena_bytes,
            pinned_bytes=lambda: self.engine.pinned_bytes,
            device_index=self.engine.device_index,
        )
        sampler.start()
        try:
            self._train()
            self.engine.flush()
            stopped = self.steps_done < self.steps
            self._write_trace()
            self._state = RunState.STOPPED if stopped else RunState.FINISHED
        except BaseException as error:  # kept for wait(): a thread has nobody to raise to
            self.error = error
            self._state = RunState.FAILED
        finally:
            sampler.stop()

    def _train(self) -> None:
        for batch in self._repeated():
            if self.engine.control.stopping or self.steps_done == self.steps:
                return
            if self._lr_schedule is not None:
                self.engine.lr = self._lr_schedule(self.steps_done)
            try:
                result = self.engine.step(batch)
            except StoppedError:  # stop() came between the question above and this step
                return
            self.results.append(result)
            self._write_metrics()
            if self._on_step is not None:
                self._on_step(self.steps_done, result)

    def _repeated(self) -> Iterator[Batch]:
        """Epoch after epoch; ValueError if an epoch has no batch."""
        while True:
            empty = True
            for batch in self._batches:
                empty = False
                yield batch
            if empty:
                raise ValueError(
                    "the batches gave nothing to train on; pass an iterable that can be iterated anew for each epoch "
                    "(a list or megatrain.data.Batches, not a generator)"
                )

    def _write_metrics(self) -> None:
        if self._folder is None:
            return
        record: StepRecord = self.engine.recorder.steps()[-1]
        values = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(record).items()}
        line = json.dumps(values, allow_nan=False) + "\n"
        with (self._folder / "metrics.jsonl").open("a") as file:
            file.write(line)  # one write, so that a killed run leaves whole lines

    def _write_trace(self) -> None:
        if self._folder is not None:
            write_chrome_trace(self._folder / "trace.json.gz", self.engine.recorder)

"""The loop: batch after batch through the engine, until all steps are done or the user says stop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatrain.config import SinkName
from megatrain.control import StoppedError
from megatrain.engine import StepResult, StreamingEngine
from megatrain.run.evaluating import Evaluating
from megatrain.run.saving import Saving
from megatrain.run.schedules import LearningRate
from megatrain.sinks import require_sinks

Batch = dict[str, torch.Tensor]
Step = Callable[[StreamingEngine, Any], StepResult]
OnStep = Callable[[int, StepResult], None]


@dataclass(frozen=True)
class Job:
    """What to train. engine, batches: the things themselves, or (for a process of its own) functions that make them.

    Each epoch iterates `batches` anew. step: trains on one of them, such as a recipe's. lr_schedule: None keeps the
    optimizer's. save: leave the model in the folder. evaluating: what to look at besides.
    """

    engine: StreamingEngine | Callable[[], StreamingEngine]
    batches: Iterable[Any] | Callable[[], Iterable[Any]]
    steps: int
    step: Step = StreamingEngine.step
    lr_schedule: LearningRate | None = None
    save: bool = False
    saving: Saving = field(default_factory=Saving)
    evaluating: Evaluating | None = None
    sinks: Sequence[SinkName] = ()
    h2d_bytes_per_s: float | None = None  # of the machine, measured; for whoever compares
    d2h_bytes_per_s: float | None = None
    peak_flops_per_s: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise ValueError(f"steps must be a whole number ≥ 1 of optimizer steps; got {self.steps!r}")
        require_sinks(self.sinks)


def train(
    engine: StreamingEngine,
    batches: Iterator[Any],
    job: Job,
    on_step: OnStep,
    *,
    done: int = 0,
) -> None:
    """Train in this thread; returns when the job's steps are done or the run was stopped. done: steps done before."""
    while done < job.steps and not engine.control.stopping:
        if job.lr_schedule is not None:
            engine.lr = job.lr_schedule(done)
        try:
            result = job.step(engine, next(batches))
        except StoppedError:  # stop() came between the question above and this step
            return
        done += 1
        on_step(done, result)


def epochs(batches: Iterable[Any]) -> Iterator[Any]:
    """Epoch after epoch; ValueError if there is no batch.

    One epoch may be empty: what is left of it, where a run goes on at its very end.
    """
    empty = 0
    while empty < 2:
        empty += 1
        for batch in batches:
            empty = 0
            yield batch
    raise ValueError(
        "the batches gave nothing to train on; pass an iterable that can be iterated anew for each epoch "
        "(a list or megatrain.data.Batches, not a generator)"
    )

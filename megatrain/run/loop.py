"""The loop: batch after batch through the engine, until all steps are done or the user says stop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from megatrain.control import StoppedError
from megatrain.engine import StepResult, StreamingEngine
from megatrain.run.schedules import LearningRate

Batch = dict[str, torch.Tensor]
OnStep = Callable[[int, StepResult], None]


@dataclass(frozen=True)
class Job:
    """What to train. engine, batches: the things themselves, or (for a process of its own) functions that make them.

    Each epoch iterates `batches` anew. lr_schedule: None keeps the optimizer's. save: leave the model in the folder.
    """

    engine: StreamingEngine | Callable[[], StreamingEngine]
    batches: Iterable[Batch] | Callable[[], Iterable[Batch]]
    steps: int
    lr_schedule: LearningRate | None = None
    save: bool = False
    h2d_bytes_per_s: float | None = None  # of the machine, measured; for whoever compares
    d2h_bytes_per_s: float | None = None
    peak_flops_per_s: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise ValueError(f"steps must be a whole number ≥ 1 of optimizer steps; got {self.steps!r}")


def train(
    engine: StreamingEngine,
    batches: Iterable[Batch],
    job: Job,
    on_step: OnStep,
) -> None:
    """Train in this thread; returns when the job's steps are done or the run was stopped."""
    for done, batch in enumerate(_repeated(batches)):
        if engine.control.stopping or done == job.steps:
            return
        if job.lr_schedule is not None:
            engine.lr = job.lr_schedule(done)
        try:
            result = engine.step(batch)
        except StoppedError:  # stop() came between the question above and this step
            return
        on_step(done + 1, result)


def _repeated(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Epoch after epoch; ValueError if an epoch has no batch."""
    while True:
        empty = True
        for batch in batches:
            empty = False
            yield batch
        if empty:
            raise ValueError(
                "the batches gave nothing to train on; pass an iterable that can be iterated anew for each epoch "
                "(a list or megatrain.data.Batches, not a generator)"
            )

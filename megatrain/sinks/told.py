"""All sinks of one run, and what they are told of its steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from megatrain.config import SinkName
from megatrain.folder import RunFolder
from megatrain.sinks.guarded import GuardedSink
from megatrain.sinks.sink import Sink
from megatrain.sinks.tensorboard import TensorBoardSink
from megatrain.sinks.wandb import WandbSink
from megatrain.trace import Recorder, StepRecord


class Sinks:
    """Opens the named sinks in the run's folder; they are told of steps that the recorder gets from now on.

    steps_done: in the run before, where it goes on from a checkpoint. about: plain values that the run is told by.
    """

    def __init__(
        self,
        names: Sequence[SinkName],
        folder: RunFolder,
        recorder: Recorder,
        *,
        steps_done: int = 0,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        opening: dict[SinkName, Callable[[], Sink]] = {
            "tensorboard": partial(TensorBoardSink, folder, steps_done + 1),
            "wandb": partial(WandbSink, folder, about or {}),
        }
        self._recorder = recorder
        self._next = recorder.since(StepRecord, 0)[1]
        self._sinks = [GuardedSink(name, opening[name]) for name in names]

    def after_step(self, done: int) -> None:
        """Tell of the newest step. done: steps done, this one included."""
        records, self._next = self._recorder.since(StepRecord, self._next)
        for record in records[-1:]:
            self.scalars(done, scalars_of(record))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """A point of each named curve, such as eval/loss, after so many steps; returns at once."""
        for sink in self._sinks:
            sink.scalars(step, values)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def scalars_of(record: StepRecord) -> dict[str, float]:
    """A step as curves, by the names that other trainers use; what is no number is left out."""
    duration_s = record.end_s - record.start_s
    values = {
        "train/loss": record.loss,
        "train/grad_norm": record.grad_norm,
        "train/learning_rate": record.lr,
        "train/tokens_per_second": record.sequence_tokens / duration_s if duration_s > 0 else math.nan,
    }
    values |= {f"train/{name}": value for name, value in record.metrics.items()}
    return {name: value for name, value in values.items() if math.isfinite(value)}

"""A training run: the loop over batches, in a thread or a process of its own, and what it leaves in its folder."""

from megatrain.report import RunState
from megatrain.run.evaluating import Evaluating
from megatrain.run.loop import Batch
from megatrain.run.processes import RunFailedError
from megatrain.run.schedules import LearningRate, cosine_schedule
from megatrain.run.training import TrainingRun

__all__ = ["Batch", "Evaluating", "LearningRate", "RunFailedError", "RunState", "TrainingRun", "cosine_schedule"]

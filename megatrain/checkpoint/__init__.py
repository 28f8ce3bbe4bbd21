"""The complete state of a run on disk: written while training goes on, whole at every instant, resumed bit by bit."""

from megatrain.checkpoint.restore import restore
from megatrain.checkpoint.store import CheckpointError, Checkpoints, Keep
from megatrain.checkpoint.writer import CheckpointWriter

__all__ = ["CheckpointError", "CheckpointWriter", "Checkpoints", "Keep", "restore"]

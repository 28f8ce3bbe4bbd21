"""Where a run's curves go besides its own folder's files: TensorBoard and Weights & Biases, by their own libraries.

names         which there are, and whether their libraries are installed
sink          what one is
tensorboard   event files in the run's folder
wandb         a run of Weights & Biases, its files in the run's folder
guarded       a sink in a thread of its own, which may fail or hang without harm
told          all sinks of one run, told of its steps
"""

from megatrain.sinks.names import require_sinks
from megatrain.sinks.sink import Sink
from megatrain.sinks.told import Sinks

__all__ = ["Sink", "Sinks", "require_sinks"]

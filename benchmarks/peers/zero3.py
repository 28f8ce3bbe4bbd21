"""DeepSpeed ZeRO-3 with parameters and optimizer offloaded to host memory, and its own Adam for CPUs.

It gives up overlap: the optimizer runs alone once backward is over. The first run on a machine compiles that Adam,
which takes a minute or several.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from benchmarks.models import model_of
from benchmarks.peers.contender import MAX_GRAD_NORM, Contender, Task, checkpoint_layers, micro_batches
from benchmarks.peers.group import join_alone
from benchmarks.peers.with_deepspeed import deepspeed


class Zero3(Contender):
    """All that its configuration leaves open is as DeepSpeed sets it."""

    gives_up = "overlap: the optimizer runs alone once backward is over; layers are computed twice"

    def __init__(self, task: Task) -> None:
        join_alone(task.device)
        self._data, self._device, self._rows = task.data(), task.device, task.micro_batch_size
        self._parts = _parts(task)
        model = model_of(task)
        checkpoint_layers(model)
        self._engine: Any = deepspeed.initialize(model=model, config=_config(task), dist_init_required=False)[0]

    def step(self) -> tuple[float, float]:
        total = 0.0
        for part in micro_batches(next(self._data), self._rows, self._device):
            loss = self._engine(**part).loss
            self._engine.backward(self._parts * loss)  # which it takes the mean of
            self._engine.step()  # trains after the last of them
            total += loss.detach()
        return float(total), float(self._engine.get_global_grad_norm())

    def settle(self) -> None:
        """Nothing is pending after a step."""

    def close(self) -> None:
        dist.destroy_process_group()


def _parts(task: Task) -> int:
    """Micro-batches of a step, all of one size."""
    if task.rows % (task.micro_batch_size or task.rows):
        raise ValueError(f"DeepSpeed wants micro-batches of one size; got {task.rows} rows by {task.micro_batch_size}")
    return task.rows // (task.micro_batch_size or task.rows)


def _config(task: Task) -> dict[str, Any]:
    offload = {"device": "cpu", "pin_memory": task.device == "cuda"}
    adamw = {"lr": task.lr, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
    return {
        "train_micro_batch_size_per_gpu": task.micro_batch_size or task.rows,
        "gradient_accumulation_steps": _parts(task),
        "gradient_clipping": MAX_GRAD_NORM,
        "zero_optimization": {"stage": 3, "offload_optimizer": offload, "offload_param": offload},
        "bf16": {"enabled": task.dtype == "bfloat16"},
        "optimizer": {"type": "AdamW", "params": adamw},
    }


def build(task: Task) -> Zero3:
    return Zero3(task)

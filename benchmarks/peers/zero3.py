"""DeepSpeed ZeRO-3 with parameters and optimizer offloaded to host memory, and its own Adam for CPUs.

It gives up overlap: the optimizer runs alone once backward is over. The first run on a machine compiles that Adam,
which takes a minute or several.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from benchmarks.peers.contender import MAX_GRAD_NORM, Contender, Task, checkpoint_layers
from benchmarks.peers.group import join_alone
from benchmarks.peers.with_deepspeed import deepspeed

_OFFLOAD = {"device": "cpu", "pin_memory": False}


class Zero3(Contender):
    """All that its configuration leaves open is as DeepSpeed sets it."""

    gives_up = "overlap: the optimizer runs alone once backward is over; layers are computed twice"

    def __init__(self, task: Task) -> None:
        join_alone()
        self._data = task.data()
        model = task.model()
        checkpoint_layers(model)
        self._engine: Any = deepspeed.initialize(model=model, config=_config(task), dist_init_required=False)[0]

    def step(self) -> tuple[float, float]:
        loss = self._engine(**next(self._data)).loss
        self._engine.backward(loss)
        self._engine.step()
        return float(loss.detach()), float(self._engine.get_global_grad_norm())

    def settle(self) -> None:
        """Nothing is pending after a step."""

    def close(self) -> None:
        dist.destroy_process_group()


def _config(task: Task) -> dict[str, Any]:
    adamw = {"lr": task.lr, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
    return {
        "train_micro_batch_size_per_gpu": task.rows,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": MAX_GRAD_NORM,
        "zero_optimization": {"stage": 3, "offload_optimizer": _OFFLOAD, "offload_param": _OFFLOAD},
        "bf16": {"enabled": task.dtype == "bfloat16"},
        "optimizer": {"type": "AdamW", "params": adamw},
    }


def build(task: Task) -> Zero3:
    return Zero3(task)

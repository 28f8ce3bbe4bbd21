"""FSDP2 (torch's fully_shard) with CPU offload on one rank: every layer is gathered before it computes.

It gives up overlap: the optimizer runs alone once backward is over, and gradients that are accumulated leave without
asynchrony. Per parameter the host holds 16 bytes: float32 weight, gradient and two moments.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from benchmarks.models import model_of
from benchmarks.peers.contender import MAX_GRAD_NORM, Contender, Task, checkpoint_layers, micro_batches
from benchmarks.peers.group import join_alone


class Fsdp2(Contender):
    """With bfloat16 it gathers weights in bfloat16, reduces gradients in float32, and updates its float32 shards."""

    gives_up = "overlap: the optimizer runs alone once backward is over; layers are computed twice"

    def __init__(self, task: Task) -> None:
        join_alone(task.device)
        self._data, self._device, self._rows = task.data(), task.device, task.micro_batch_size
        self._model: Any = model_of(task)
        checkpoint_layers(self._model)
        _shard(self._model, task.torch_dtype, task.device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=task.lr, weight_decay=0.0, fused=True)

    def step(self) -> tuple[float, float]:
        total = 0.0
        for part in micro_batches(next(self._data), self._rows, self._device):
            loss = self._model(**part).loss
            loss.backward()
            total += loss.detach()
        norm: Any = nn.utils.clip_grad_norm_(self._model.parameters(), MAX_GRAD_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(total), float(norm.full_tensor())

    def settle(self) -> None:
        """Nothing is pending after a step."""

    def close(self) -> None:
        dist.destroy_process_group()


def _shard(model: Any, dtype: torch.dtype, device: str) -> None:
    """Each layer by itself, the rest together, as the documentation of fully_shard recommends it."""
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    how: dict[str, Any] = {
        "mesh": init_device_mesh(device, (1,)),
        "mp_policy": MixedPrecisionPolicy() if dtype == torch.float32 else mixed,
        "offload_policy": CPUOffloadPolicy(pin_memory=device == "cuda"),
    }
    for layer in model.model.layers:
        fully_shard(layer, **how)
    fully_shard(model, **how)


def build(task: Task) -> Fsdp2:
    return Fsdp2(task)

"""Plain Hugging Face with torch's fused AdamW: the reference, and without gradient checkpointing the ceiling.

It gives up size: weights, gradients and moments all lie where the model computes. Without checkpointing, so does
everything that backward reads, of every layer at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.models import model_of
from benchmarks.peers.contender import EPS, MAX_GRAD_NORM, Contender, Task, checkpoint_layers, micro_batches
from benchmarks.shapes import Batch

_ON_THE_DEVICE = "size: weights, gradients and moments all lie on the device"


class Plain(Contender):
    """dtype: what the model computes in. With bfloat16 the optimizer works on a float32 master kept by hand.

    micro_batch_size: rows per forward and backward; None = the whole batch.
    checkpointing: recompute each layer in backward, rather than keep what it needs.
    """

    def __init__(
        self,
        model: Any,
        data: Iterator[Batch],
        dtype: torch.dtype,
        lr: float,
        device: str = "cpu",
        micro_batch_size: int | None = None,
        checkpointing: bool = True,
        eps: float = EPS,
    ) -> None:
        self.gives_up = f"{_ON_THE_DEVICE}; " + (
            "layers are computed twice" if checkpointing else "so does what backward reads, of every layer at once"
        )
        self._device = torch.device(device)
        self._model = model.to(self._device)
        self._data = data
        self._micro_batch_size = micro_batch_size
        self._weights: list[nn.Parameter] = [*model.parameters()]
        self.masters = self._take_masters(dtype)
        if checkpointing:
            checkpoint_layers(model)
        self._optimizer = torch.optim.AdamW(self.masters, lr=lr, eps=eps, weight_decay=0.0, fused=True)

    def _take_masters(self, dtype: torch.dtype) -> list[nn.Parameter]:
        if dtype == torch.float32:
            return self._weights
        masters = [nn.Parameter(weight.detach().float()) for weight in self._weights]
        for weight in self._weights:
            weight.data = weight.data.to(dtype)  # not model.to(dtype), which would round the rotary tables too
        return masters

    def step(self) -> tuple[float, float]:
        loss = self._backward(next(self._data))
        if self.masters is not self._weights:
            self._hand_gradients_to_masters()
        norm = nn.utils.clip_grad_norm_(self.masters, MAX_GRAD_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self.masters is not self._weights:
            self._copy_masters_back()
        return float(loss), float(norm)

    def _backward(self, batch: Batch) -> torch.Tensor:
        total = torch.zeros((), device=self._device)
        for part in micro_batches(batch, self._micro_batch_size, self._device):
            loss = self._model(**part).loss
            loss.backward()
            total += loss.detach()
        return total

    def _hand_gradients_to_masters(self) -> None:
        for master, weight in zip(self.masters, self._weights, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None

    def _copy_masters_back(self) -> None:
        with torch.no_grad():
            for master, weight in zip(self.masters, self._weights, strict=True):
                weight.copy_(master)

    def settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def build(task: Task) -> Plain:
    return _build(task, checkpointing=True)


def build_without_checkpointing(task: Task) -> Plain:
    return _build(task, checkpointing=False)


def _build(task: Task, *, checkpointing: bool) -> Plain:
    model, data, dtype, rows = model_of(task), task.data(), task.torch_dtype, task.micro_batch_size
    return Plain(model, data, dtype, task.lr, task.device, rows, checkpointing)

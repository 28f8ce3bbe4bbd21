"""The two sides of a comparison. Each takes the next batch itself, so that data time counts, and trains on it.

Both clip at a global norm of 1, keep a float32 master of every weight, and recompute each layer in backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import nn

from benchmarks.shapes import Batch
from megatrain import AdamWConfig, EngineConfig, StreamingEngine
from megatrain.trace import StepRecord

MAX_GRAD_NORM = 1.0


class Contender(Protocol):
    def step(self) -> tuple[float, float]:
        """Train on the next batch; return loss and gradient norm before clipping."""

    def settle(self) -> None:
        """Complete what is still pending, so that another contender finds the machine idle."""


class Ours:
    """The engine. `depth` is set before every step: several contenders may share one engine.

    records: what the engine said of each step that this contender took.
    """

    def __init__(self, engine: StreamingEngine, data: Iterator[Batch], depth: int | None = None) -> None:
        self.engine = engine
        self.records: list[StepRecord] = []
        self._data = data
        self._depth = depth

    def step(self) -> tuple[float, float]:
        if self._depth is not None:
            self.engine.set_prefetch_depth(self._depth)
        result = self.engine.step(next(self._data))
        self.records.append(self.engine.recorder.steps()[-1])
        return result.loss, result.grad_norm

    def settle(self) -> None:
        self.engine.flush()


def make_ours(model: Any, data: Iterator[Batch], config: EngineConfig, lr: float) -> Ours:
    return Ours(StreamingEngine(model, config, AdamWConfig(lr=lr, max_grad_norm=MAX_GRAD_NORM)), data)


def _checkpoint_layers(model: Any) -> None:
    """Gradient checkpointing as the documentation of torch recommends it; transformers 5.23 has another name for it."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    model.train()


class Plain:
    """Plain Hugging Face: gradient checkpointing and torch's fused AdamW.

    dtype: what the model computes in. With bfloat16 the optimizer works on a float32 master kept by hand.
    micro_batch_size: rows per forward and backward; None = the whole batch.
    """

    def __init__(
        self,
        model: Any,
        data: Iterator[Batch],
        dtype: torch.dtype,
        lr: float,
        device: str = "cpu",
        micro_batch_size: int | None = None,
    ) -> None:
        self._device = torch.device(device)
        self._model = model.to(self._device)
        self._data = data
        self._micro_batch_size = micro_batch_size
        self._weights: list[nn.Parameter] = [*model.parameters()]
        self.masters = self._take_masters(dtype)
        _checkpoint_layers(model)
        self._optimizer = torch.optim.AdamW(self.masters, lr=lr, weight_decay=0.0, fused=True)

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
        rows = batch["input_ids"].shape[0]
        tokens = (batch["labels"][:, 1:] != -100).sum().to(self._device)
        total = torch.zeros((), device=self._device)
        for start in range(0, rows, self._micro_batch_size or rows):
            part = {
                name: tensor[start : start + (self._micro_batch_size or rows)].to(self._device)
                for name, tensor in batch.items()
            }
            loss = self._model(**part, num_items_in_batch=tokens).loss
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

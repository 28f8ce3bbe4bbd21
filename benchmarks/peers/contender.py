"""What every contender can do, and what it is given to train."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from benchmarks.shapes import Batch, Shape, batches
from megatrain.config import Dtype, OptimizerOverlap

MAX_GRAD_NORM = 1.0
EPS = 1e-8  # AdamW's, by default


@dataclass(frozen=True)
class Task:
    """What is trained: `rows` sequences of `tokens` a step, and where. depth and overlap are the engine's own settings.

    micro_batch_size: sequences per forward and backward; None = all rows.
    """

    shape: Shape
    rows: int
    tokens: int
    dtype: Dtype
    lr: float = 3e-4
    depth: int = 1
    overlap: OptimizerOverlap = "forward"
    device: Literal["cuda", "cpu"] = "cpu"
    micro_batch_size: int | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.dtype]

    def data(self) -> Iterator[Batch]:
        return batches(self.shape.vocab, self.rows, self.tokens)


class Contender(Protocol):
    """gives_up: what this way of training costs, in a sentence for the notes below a table."""

    gives_up: str

    def step(self) -> tuple[float, float]:
        """Train on the next batch; return loss and gradient norm before clipping."""

    def settle(self) -> None:
        """Complete what is still pending, so that another contender finds the machine idle."""

    def figures(self, timed: list[int]) -> dict[str, Any]:
        """What it can say of itself beyond losses and times; timed: which of its steps count."""
        return {}

    def close(self) -> None:
        """Give back what would outlive it."""
        return


def micro_batches(batch: Batch, rows: int | None, device: torch.device | str) -> Iterator[dict[str, Any]]:
    """Parts of a batch on the device, each with how many predictions all have: so losses add up to the mean."""
    predictions = (batch["labels"][:, 1:] != -100).sum().to(device)
    count = len(batch["labels"])
    for start in range(0, count, rows or count):
        part = {name: tensor[start : start + (rows or count)].to(device) for name, tensor in batch.items()}
        yield part | {"num_items_in_batch": predictions}


def checkpoint_layers(model: Any) -> None:
    """Gradient checkpointing as the documentation of torch recommends it; transformers 5.23 has another name for it."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    model.train()

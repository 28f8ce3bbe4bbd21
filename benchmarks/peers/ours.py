"""The engine.

It gives up time: layers are copied through a bounded device arena, and each is computed twice in forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.models import model_of
from benchmarks.peers.contender import EPS, MAX_GRAD_NORM, Contender, Task
from benchmarks.pipeline import pipeline
from benchmarks.shapes import Batch
from megatrain import AdamWConfig, EngineConfig, StreamingEngine
from megatrain.trace import StepRecord


class Ours(Contender):
    """`depth` is set before every step: several contenders may share one engine.

    records: what the engine said of each step that this contender took.
    """

    gives_up = "time: layers are copied through a bounded device arena, and computed twice"

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

    def figures(self, timed: list[int]) -> dict[str, Any]:
        return {"device_peak_bytes": self.engine.device_peak_bytes, "lanes": self.lanes(timed)}

    def lanes(self, timed: list[int]) -> dict[str, Any]:
        """Where those steps went; see benchmarks.pipeline."""
        return pipeline(self.engine.recorder.spans(), [self.records[index] for index in timed])

    def close(self) -> None:
        self.engine.close()


def make_ours(model: Any, data: Iterator[Batch], config: EngineConfig, lr: float, eps: float = EPS) -> Ours:
    return Ours(StreamingEngine(model, config, AdamWConfig(lr=lr, eps=eps, max_grad_norm=MAX_GRAD_NORM)), data)


def build(task: Task) -> Ours:
    return _build(task, kept_graphs=0)


def build_with_graphs(task: Task) -> Ours:
    """Like plain training without checkpointing: what autograd saves of each layer stays until backward."""
    ours = _build(task, kept_graphs=task.shape.layers)
    ours.gives_up = "time: layers are copied through a bounded device arena; and memory, for what autograd saves"
    return ours


def _build(task: Task, kept_graphs: int) -> Ours:
    config = EngineConfig(
        device=task.device,
        dtype=task.dtype,
        micro_batch_size=task.micro_batch_size,
        prefetch_depth=task.depth,
        optimizer_overlap=task.overlap,
        kept_graphs=kept_graphs,
    )
    return make_ours(model_of(task), task.data(), config, task.lr)

"""What each operation of a planned run has to do: bytes that move, and arithmetic. No time here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from megatrain.layout import Layout
from megatrain.memory import state_bytes, sum_bytes
from megatrain.optim import DEVICE_TRAFFIC_BYTES
from megatrain.plan import Plan
from megatrain.plan.needs import on_cpu
from megatrain.schedule import SHELL, Kind, Op
from megatrain.trace import causal_area
from megatrain.update import bytes_touched


@dataclass(frozen=True)
class Work:
    """nbytes: over the link, or of the host's memory for AdamW. device_bytes: of the device's memory, least."""

    nbytes: int = 0
    flops: float = 0.0
    device_bytes: int = 0


class Works:
    """Says what each operation of a plan's steps has to do; asked in the order in which they are issued."""

    def __init__(self, plan: Plan) -> None:
        self._subject, self._config = plan.subject, plan.config
        self._on_cpu = on_cpu(plan.config, plan.machine)
        self._size = plan.needs.size
        self._arithmetic = plan.subject.arithmetic
        self._keeps_attention = plan.needs.keeps_attention
        self._areas = _areas(plan)
        self._frozen_in: dict[int | None, int | None] = {}  # weights slot → the layer whose frozen weights lie there
        self._cached = cache(self._work)

    def of(self, op: Op) -> Work:
        if op.kind is Kind.LOAD and op.layer is not SHELL:
            return self._load(op)
        return self._cached(op.kind, op.layer, self._tokens(op.micro_batch), op.graph)

    def _load(self, op: Op) -> Work:
        """Frozen weights that are still there are not loaded again."""
        layout = self._layout(op.layer)
        kept = self._frozen_in.get(op.slot) == op.layer
        self._frozen_in[op.slot] = op.layer
        return Work(layout.trained_nbytes if kept else layout.nbytes)

    def _tokens(self, micro_batch: int | None) -> int:
        """Only the last micro-batch may be smaller."""
        if micro_batch is None:
            return 0
        size = self._size
        return min(size.micro_batch_tokens, size.tokens - micro_batch * size.micro_batch_tokens)

    def _layout(self, layer: int | None) -> Layout:
        return self._subject.shell if layer is SHELL else self._subject.layouts[layer]

    def _work(self, kind: Kind, layer: int | None, tokens: int, graph: bool) -> Work:
        if kind is Kind.BACKWARD and graph:
            return self._backward_alone(layer, tokens)
        known: dict[Kind, Callable[[int | None, int], Work]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._shell_backward if layer is SHELL else self._backward,
            Kind.HEAD: self._head,
            Kind.UPDATE: self._update,
            Kind.ADAMW: self._adamw,
        }
        if kind in known:
            return known[kind](layer, tokens)
        layout, boundary = self._layout(layer), tokens * self._size.token_bytes
        return {
            Kind.LOAD: Work(layout.nbytes),
            Kind.UNLOAD: Work(layout.trained_nbytes),
            Kind.OFFLOAD: Work(boundary),
            Kind.FETCH: Work(boundary),
            Kind.LOAD_STATE: Work(self._state(layout)),
            Kind.STORE: Work(layout.trained_nbytes + self._state(layout)),
            Kind.RECORD: Work(device_bytes=2 * boundary),  # embeddings are read and written
            Kind.NORM: Work(device_bytes=self._sums(layout, 2)),
            Kind.ADD: Work(),
            Kind.REMOVE: Work(),
        }[kind]

    # ---- compute ----

    def _forward(self, layer: int | None, tokens: int) -> Work:
        assert layer is not None
        flops = 2.0 * self._arithmetic.layers[layer].active * tokens + self._attention(layer, tokens)
        return Work(flops=flops, device_bytes=self._layout(layer).nbytes)

    def _backward(self, layer: int | None, tokens: int) -> Work:
        """Recompute, then backward."""
        assert layer is not None
        forward, alone = self._forward(layer, tokens), self._backward_alone(layer, tokens)
        kept = self._attention(layer, tokens) if self._keeps_attention else 0.0
        return Work(flops=forward.flops - kept + alone.flops, device_bytes=forward.device_bytes + alone.device_bytes)

    def _backward_alone(self, layer: int | None, tokens: int) -> Work:
        """A product for the input's gradient and one for the weights' where they are trained."""
        assert layer is not None
        products, layout = self._arithmetic.layers[layer], self._layout(layer)
        flops = 2.0 * (2 * products.active - products.frozen) * tokens + 2 * self._attention(layer, tokens)
        return Work(flops=flops, device_bytes=layout.nbytes + self._sums(layout, self._size.micro_batches))

    def _head(self, layer: int | None, tokens: int) -> Work:
        arithmetic = self._arithmetic
        active = arithmetic.active_parameters - sum(each.active for each in arithmetic.layers)
        frozen = arithmetic.frozen_parameters - sum(each.frozen for each in arithmetic.layers)
        return Work(flops=2.0 * (3 * active - frozen) * tokens)

    def _shell_backward(self, layer: int | None, tokens: int) -> Work:
        return Work(device_bytes=2 * tokens * self._size.token_bytes)

    def _attention(self, layer: int, tokens: int) -> float:
        """Forward: 2·A·H·Q for each sequence; see `trace.model_flops`."""
        rows = tokens / self._size.sequence
        return 2.0 * self._areas[layer] * self._arithmetic.heads * self._arithmetic.head_dim * rows

    def _sums(self, layout: Layout, parts: int) -> int:
        """A gradient is written and read; float32 sums of several are read and written besides."""
        return 2 * layout.trained_nbytes + 2 * sum_bytes(layout, parts)

    # ---- the optimizer ----

    def _update(self, layer: int | None, tokens: int) -> Work:
        split = self._config.dtype == "bfloat16"
        moment_bytes = 4 if self._config.moments_dtype == "float32" else 2
        return Work(bytes_touched(self._layout(layer).trained, split=split, moment_bytes=moment_bytes))

    def _adamw(self, layer: int | None, tokens: int) -> Work:
        """One pass on CPU lanes; on a card torch operations, each of which reads and writes, as if without caches."""
        config, once = self._config, self._update(layer, tokens).nbytes
        kind = (config.dtype == "bfloat16", 4 if config.moments_dtype == "float32" else 2)
        several = DEVICE_TRAFFIC_BYTES[kind] * self._layout(layer).trained_elements
        return Work(once, device_bytes=once if self._on_cpu else several)

    def _state(self, layout: Layout) -> int:
        return sum(state_bytes(layout, self._config))


def _areas(plan: Plan) -> list[float]:
    """Of attention, for each layer; where not every layer has one, all share what there is."""
    windows, layers = plan.subject.arithmetic.windows, len(plan.subject.layouts)
    areas = [float(causal_area(plan.subject.sequence, window)) for window in windows]
    return areas if len(areas) == layers else [sum(areas) / layers] * layers


def step_flops(plan: Plan) -> int:
    """Model FLOPs of a step without padding: recomputing is not counted."""
    return plan.subject.arithmetic.flops([plan.subject.sequence] * plan.subject.batch)

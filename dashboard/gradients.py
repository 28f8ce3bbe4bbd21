"""Where each layer's gradient is on its way from the device to the optimizer, read out of finished spans.

Spans are recorded when they end. What goes on is inferred from the order of the schedule: a gradient buffer that
compute has left is leaving, and the host lane applies what waits one after another: from the shell up once the global
norm of the step is known, or in order of arrival where updates follow each gradient at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from megatrain.trace import SlotChange, Span

HostGradient = Literal["empty", "arriving", "waiting for AdamW", "being applied"]

NEVER = float("-inf")


class GradientWay:
    """Follows unloads and updates; spans may come in any order."""

    def __init__(self) -> None:
        self._unloads: dict[int | None, Span] = {}  # the newest of each layer (None = the shell)
        self._updates: dict[int | None, Span] = {}
        self._compute: Span | None = None
        self._normed_step = -1
        self._at_once = False  # updates follow each gradient; they do not wait for the norm

    def add(self, spans: Iterable[Span]) -> None:
        for span in spans:
            if span.op == "unload":
                _keep_newest(self._unloads, span)
            elif span.op == "update":
                _keep_newest(self._updates, span)
                self._at_once = span.step > self._normed_step
            elif span.op == "norm":
                self._normed_step = max(self._normed_step, span.step)
            elif span.lane == "compute" and (self._compute is None or span.end_s > self._compute.end_s):
                self._compute = span

    def states(self, layers: int, buffers: Iterable[SlotChange]) -> list[HostGradient]:
        """Return the state of the gradient of each layer. buffers: the present state of every device buffer."""
        waiting = [
            layer
            for layer, span in self._unloads.items()
            if layer not in self._updates or span.end_s > self._updates[layer].end_s
        ]
        states: dict[int | None, HostGradient] = dict.fromkeys(waiting, "waiting for AdamW")
        states |= dict.fromkeys(self._next_update(waiting), "being applied")
        states |= {change.layer: "arriving" for change in buffers if self._leaves(change)}
        return [states.get(layer, "empty") for layer in range(layers)]

    def _leaves(self, change: SlotChange) -> bool:
        spent = change.state == "in_use" and self._compute is not None and self._compute.layer != change.layer
        return change.kind == "gradients" and (change.state == "draining" or spent)

    def _next_update(self, waiting: list[int | None]) -> list[int | None]:
        """What the host lane is at: nothing or one."""
        if self._at_once:
            return sorted(waiting, key=lambda layer: self._unloads[layer].end_s)[:1]
        ready = [layer for layer in waiting if self._unloads[layer].step <= self._normed_step]
        return sorted(ready, key=lambda layer: -1 if layer is None else layer)[:1]


def _keep_newest(spans: dict[int | None, Span], span: Span) -> None:
    known = spans.get(span.layer)
    if known is None or span.end_s > known.end_s:
        spans[span.layer] = span

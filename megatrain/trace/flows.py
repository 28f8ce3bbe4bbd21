"""The way of a layer's bytes through a step, as chains of spans: load → compute → unload → update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from megatrain.trace.records import Op, Span

COMPUTE_OPS: tuple[Op, ...] = ("record", "forward", "score", "head", "backward")


def flow_chains(spans: Iterable[Span]) -> list[list[Span]]:
    """Return chains of two spans or more, each in order of time, of one layer in one step.

    Every load leads to the first compute that starts after it. The chain of the last load goes on to the
    last backward (of the last micro-batch), the unload of the gradient and the update (or AdamW on the device and
    the store); the chain of a layer that was resident starts at that backward.
    """
    layers: dict[tuple[int, int | None], list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: (span.start_s, span.end_s)):
        layers[span.step, span.layer].append(span)
    return [chain for layer in layers.values() for chain in _chains(layer) if len(chain) > 1]


def _chains(layer: list[Span]) -> list[list[Span]]:
    loads = [span for span in layer if span.op == "load"]
    chains = [[load, *_first_use(load, layer)] for load in loads] or [[]]
    for op in ("backward", "unload", "update", "adamw", "store"):
        last = [span for span in layer if span.op == op][-1:]
        chains[-1] += [span for span in last if not chains[-1] or span.start_s > chains[-1][-1].start_s]
    return chains


def _first_use(load: Span, layer: list[Span]) -> list[Span]:
    return [span for span in layer if span.op in COMPUTE_OPS and span.start_s > load.start_s][:1]

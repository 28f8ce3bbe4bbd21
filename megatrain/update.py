"""AdamW for one layer: which parameters, with which step count, in runs that one fused pass can take."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

import torch

from megatrain.config import AdamWConfig
from megatrain.host import HostLayer
from megatrain.layout import Entry, align
from megatrain.optim import AdamWStep, update, update_on_device


@dataclass(frozen=True)
class Hyperparameters:
    """The numbers of one optimizer step, fixed when it is decided that the step will be applied."""

    config: AdamWConfig
    lr: float
    grad_scale: float

    def at(self, step: int, decay: bool) -> AdamWStep:
        beta1, beta2 = self.config.betas
        return AdamWStep(
            lr=self.lr,
            beta1=beta1,
            beta2=beta2,
            eps=self.config.eps,
            weight_decay=self.config.weight_decay if decay else 0.0,
            step=step,
            grad_scale=self.grad_scale,
            as_torch=self.config.rounding == "torch",
        )


def update_layer(host: HostLayer, gradient: torch.Tensor, present: set[str], numbers: Hyperparameters) -> None:
    """Apply AdamW in place to the parameters in `present`; one without a gradient is left alone, as torch does.

    gradient: uint8, laid out like the weights' trained prefix. Also keeps `host.weight_norm` up to date.
    """
    host.weight_norm = math.sqrt(float(_apply(host, gradient, present, numbers, update)))


def update_layer_on_device(
    layer: HostLayer, gradient: torch.Tensor, present: set[str], numbers: Hyperparameters
) -> torch.Tensor:
    """The same for a layer whose arrays lie on the device (`HostLayer.elsewhere`).

    Returns the sum of the squares of its trained weights (float64, there), so that nobody waits for the device.
    """
    return _apply(layer, gradient, present, numbers, update_on_device)


def _apply(
    host: HostLayer,
    gradient: torch.Tensor,
    present: set[str],
    numbers: Hyperparameters,
    adamw: Callable[..., float | torch.Tensor],
) -> torch.Tensor:
    """The sum of the squares of all trained weights afterwards."""
    squares = torch.zeros((), dtype=torch.float64, device=host.weights.device)
    for entry in host.layout.trained:
        if entry.name not in present:
            squares += _squares(host, entry)
    for entry in host.layout.trained:
        if entry.name in present:
            host.steps[entry.name] = host.steps.get(entry.name, 0) + 1
    for run in _runs(host, present):
        first, last = run[0], run[-1]
        elements = slice(first.element, last.element + last.spec.numel)
        stop = first.offset_bytes + (elements.stop - elements.start) * first.spec.dtype.itemsize
        split = host.low is not None and first.spec.dtype == torch.bfloat16
        squares += adamw(
            host.weights[first.offset_bytes : stop].view(first.spec.dtype),
            host.low[elements] if split and host.low is not None else None,
            gradient[first.offset_bytes : stop].view(first.spec.dtype),
            host.exp_avg[elements],
            host.exp_avg_sq[elements],
            numbers.at(host.steps[first.name], first.spec.decay),
        )
    return squares


def weight_norm(host: HostLayer) -> float:
    """The 2-norm of a layer's trained weights as they are streamed; NaN where none is trained."""
    squares = [float(_squares(host, entry)) for entry in host.layout.trained]
    return math.sqrt(sum(squares)) if squares else math.nan


def _squares(host: HostLayer, entry: Entry) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(entry.view(host.weights), dtype=torch.float32)
    return norm.double().square()


def _runs(host: HostLayer, present: set[str]) -> Iterator[list[Entry]]:
    """Neighbouring parameters that share dtype, decay rule and step count."""

    def kind(entry: Entry) -> tuple[bool, object, bool, int]:
        spec = entry.spec
        return entry.name in present, spec.dtype, spec.decay, host.steps.get(entry.name, 0)

    for key, run in groupby(host.layout.trained, key=kind):
        if key[0]:
            yield list(run)


def bytes_touched(entries: Iterable[Entry], *, split: bool, moment_bytes: int) -> int:
    """Host memory traffic of an update: weights, low halves and moments read and written, gradients read."""
    return sum(
        (align(e.spec.nbytes) // e.spec.dtype.itemsize)
        * (3 * e.spec.dtype.itemsize + 4 * moment_bytes + (4 if split and e.spec.dtype.itemsize == 2 else 0))
        for e in entries
    )

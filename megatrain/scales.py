"""How large gradients and outputs of each layer are in a step: scalars that stay on the device until its end."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from megatrain.report import TensorStats


@dataclass
class Scales:
    """Filled in on the compute lane, read once, with the step's loss and norm.

    A layer's output is that of all its micro-batches, padding included.
    """

    layers: int
    _norms: dict[int, torch.Tensor] = field(default_factory=dict)  # of gradients, by layer
    _outputs: dict[int, list[torch.Tensor]] = field(default_factory=dict)  # norms, one for each micro-batch
    _elements: dict[int, int] = field(default_factory=dict)

    def add_output(self, layer: int, output: torch.Tensor) -> None:
        self._outputs.setdefault(layer, []).append(torch.linalg.vector_norm(output, dtype=torch.float32))
        self._elements[layer] = self._elements.get(layer, 0) + output.numel()

    def add_gradient(self, layer: int, norms: Iterable[torch.Tensor]) -> None:
        """norms: of the gradients of the layer's parameters."""
        found = [*norms]
        if found:
            self._norms[layer] = _norm(found)

    def on_device(self, like: torch.Tensor) -> torch.Tensor:
        """(2 · layers,) in the dtype of `like`: gradient norms, then root mean squares of outputs; NaN = none."""
        none = torch.full_like(like, math.nan)
        gradients = [self._norms.get(layer, none).to(like) for layer in range(self.layers)]
        outputs = [self._output(layer, none).to(like) for layer in range(self.layers)]
        return torch.stack(gradients + outputs)

    def _output(self, layer: int, none: torch.Tensor) -> torch.Tensor:
        norms = self._outputs.get(layer)
        return _norm(norms) / math.sqrt(self._elements[layer]) if norms else none


def _norm(norms: list[torch.Tensor]) -> torch.Tensor:
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def statistics(tensor: torch.Tensor) -> TensorStats:
    """The four numbers of a tensor; the host waits for the device."""
    values = tensor.detach().float()
    finite = values[torch.isfinite(values)]
    if not finite.numel():
        return TensorStats(math.nan, math.nan, math.nan, values.numel())
    mean, rms = finite.mean(), finite.square().mean().sqrt()
    return TensorStats(float(mean), float(rms), float(finite.abs().max()), values.numel() - finite.numel())

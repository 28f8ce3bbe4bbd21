"""Gradients that arrive in parts, summed on the device in the flat buffer in which they leave.

Where the gradient is narrower than float32 and comes in several parts (micro-batches, loss chunks), the sum
is kept in float32 and rounded once, at the end.
"""

from __future__ import annotations

import torch

from megatrain.layout import Layout


class Norms:
    """Norms of tensors, in float32. A CPU widens narrower ones in a buffer that stays.

    torch would take fresh memory for each, and the system's clearing of its pages takes longer than the norm.
    """

    def __init__(self) -> None:
        self._wide = torch.empty(0)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu" and tensor.dtype != torch.float32:
            if self._wide.numel() < tensor.numel():
                self._wide = torch.empty(tensor.numel())
            tensor = self._wide[: tensor.numel()].view(tensor.shape).copy_(tensor)
        norm: torch.Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float32)
        return norm


class GradientSum:
    """The gradient of one layer (or the shell) in the making.

    flat: uint8, at least `layout.trained_nbytes` long; holds the result. sums: float32, one item for each trained
    element, for what is narrower; None if every gradient comes whole.
    """

    def __init__(
        self, layout: Layout, flat: torch.Tensor, sums: torch.Tensor | None, norm: Norms | None = None
    ) -> None:
        self._layout = layout
        self._norm = norm or Norms()
        self._views = layout.gradient_views(flat)
        for gap in layout.trained_gaps:
            flat[gap].zero_()  # AdamW walks over them, too: what lies there stays zero for good
        self._sums = {} if sums is None else _sum_views(layout, sums)
        self.present: set[str] = set()

    def add(self, name: str, gradient: torch.Tensor) -> None:
        """Add a part of the gradient of one parameter."""
        target = self._sums.get(name, self._views[name])
        if name in self.present:
            target.add_(gradient)
        else:
            target.copy_(gradient)
            self.present.add(name)

    def finish(self) -> dict[str, torch.Tensor]:
        """Round the sums, zero what got no gradient; return the norms (float32 scalars) of what did."""
        for name, total in self._sums.items():
            if name in self.present:
                self._views[name].copy_(total)
        for name in self._views.keys() - self.present:
            self._views[name].zero_()
        return {name: self._norm(view) for name, view in self._views.items() if name in self.present}


def _sum_views(layout: Layout, sums: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        entry.name: sums[entry.element : entry.element + entry.spec.numel].view(entry.spec.shape)
        for entry in layout.trained
        if entry.spec.dtype.itemsize < 4
    }

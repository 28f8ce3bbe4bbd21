"""What a recompute may leave out: products after the last tensor that backward needs.

Backward needs what a layer's operations saved, not what the layer returns. So its last product (the down projection)
need not be computed again: 22 to 27 % of a forward of a dense layer. torch.utils.checkpoint stops its recompute at
that point; here the graph is needed to its end, so the operations after it are recorded with results that nobody reads.

Note: why this is exact. The first recompute of a layer notes its operations in order, and after how many of them the
last tensor was saved. A later one must go through the same operations up to that point, else all are computed. What
follows may be left out only if it consists of operations that compute new values from their arguments and do nothing
else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
Operation = Any  # torch._ops.OpOverload


def _rows_by_columns(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left.new_empty((*left.shape[:-1], right.shape[-1]))


# Not computed, where nobody reads the result; each says what that would look like.
_LEFT_OUT: dict[Operation, Callable[..., torch.Tensor]] = {
    aten.mm.default: _rows_by_columns,
    aten.bmm.default: _rows_by_columns,
    aten.addmm.default: lambda bias, left, right, **_: _rows_by_columns(left, right),
}
# Autograd's own, where it saves a result; it does without while somebody looks on, as is done while learning.
_OF_AUTOGRAD = aten.detach.default
# Computed all the same: they cost next to nothing.
_HARMLESS = {
    aten.add.Tensor,
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten._to_copy.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.t.default,
    aten.transpose.int,
    aten.alias.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.split.Tensor,
    aten.cat.default,
    aten.silu.default,
    aten.gelu.default,
    aten.relu.default,
    aten.tanh.default,
    aten.pow.Tensor_Scalar,
}


class DifferentError(Exception):
    """A recompute went another way than the one before, after something was left out already."""


class _Learning(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operation, and after how many of them the last tensor was saved."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self.needed = 0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.needed = len(self.operations)
        return tensor.detach()  # itself, an output would hold its own graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not _OF_AUTOGRAD:
            self.operations.append(func)
        return func(*args, **(kwargs or {}))


class _LeavingOut(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Goes through known operations; computes those that are needed."""

    def __init__(self, operations: list[Operation], needed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations = operations
        self._needed = needed
        self._at = 0
        self._known = True  # so far they are the same

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _OF_AUTOGRAD:
            return func(*args, **(kwargs or {}))
        at, self._at = self._at, self._at + 1
        same = at < len(self._operations) and self._operations[at] is func
        if not same and self._known and at >= self._needed:
            raise DifferentError
        self._known = self._known and same
        if self._known and at >= self._needed and func in _LEFT_OUT:
            return _LEFT_OUT[func](*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class Tail:
    """Of one layer: what its recomputes leave out. off: nothing, for its operations are not always the same."""

    def __init__(self) -> None:
        self._learnt: _Learning | None = None
        self.off = False

    @property
    def left_out(self) -> list[str]:
        """Names of the products that are not computed; for people and tests."""
        learnt = self._learnt
        return [] if learnt is None or self.off else [str(op) for op in self._rest(learnt) if op in _LEFT_OUT]

    @contextmanager
    def recompute(self) -> Iterator[None]:
        """Within, a layer runs forward under autograd. DifferentError: do it again; it will be computed whole."""
        if self.off:
            yield
        elif self._learnt is None:
            learning = _Learning()
            with learning, saved_tensors_hooks(learning.pack, lambda tensor: tensor):
                yield
            self._learnt = learning
            rest = self._rest(learning)
            self.off = not any(op in _LEFT_OUT for op in rest) or not all(op in _HARMLESS for op in rest)
        else:
            try:
                with _LeavingOut(self._learnt.operations, self._learnt.needed):
                    yield
            except DifferentError:
                self.off = True
                raise

    @staticmethod
    def _rest(learnt: _Learning) -> list[Operation]:
        return learnt.operations[learnt.needed :]


_HARMLESS |= set(_LEFT_OUT)

"""Attention that is not computed again: its output and its statistics are kept from forward to backward.

They are as large as a layer's input, whatever the length of a sequence, while its time grows with the square of that.
What is kept first in selective recomputation (Korthikanti et al. 2022, arXiv 2205.05198) is what fused kernels keep.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain.anatomy.kernels import FUSED_CALLS


@dataclass
class _Result:
    """What one call gave; no values any more where the layer changed one of them in place: it is computed again."""

    func: Any
    values: tuple[Any, ...] | None

    @property
    def storages(self) -> dict[int, int]:
        """Bytes by address."""
        tensors = [value for value in self.values or () if isinstance(value, torch.Tensor)]
        return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


class KeptAttention:
    """What attention gave in one forward of one layer."""

    def __init__(self) -> None:
        self._results: list[_Result] = []

    @property
    def nbytes(self) -> int:
        return sum(sum(result.storages.values()) for result in self._results)

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Within, a layer runs forward under autograd: without, kernels leave out the statistics."""
        with _Watching(self._keep, self._spoil):
            yield

    @contextmanager
    def reusing(self) -> Iterator[None]:
        """Within, the same layer runs forward again; where it goes another way than before, it is computed."""
        results = deque(self._results)

        def reuse(func: Any, args: Any, kwargs: Any) -> Any:
            result = results.popleft() if results and results[0].func is func else None
            return func(*args, **kwargs) if result is None or result.values is None else _detached(result.values)

        with _Watching(reuse):
            yield

    def _keep(self, func: Any, args: Any, kwargs: Any) -> Any:
        values = func(*args, **kwargs)
        self._results.append(_Result(func, _detached(values)))
        return values

    def _spoil(self, changed: set[int]) -> None:
        for result in self._results:
            if not changed.isdisjoint(result.storages):
                result.values = None


def _detached(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Autograd ties a graph to what a call returned, which must not be held."""
    return tuple(value.detach() if isinstance(value, torch.Tensor) else value for value in values)


class _Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands calls of fused attention to `do`, and what is changed in place to `on_change`, by address.

    Not calls that draw random numbers: what is drawn after them would change.
    """

    def __init__(self, do: Callable[..., Any], on_change: Callable[[set[int]], None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._do = do
        self._on_change = on_change

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in FUSED_CALLS and not _argument(func, args, kwargs, "dropout_p"):
            return self._do(func, args, kwargs)
        if self._on_change is not None and func._schema.is_mutable:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            self._on_change({tensor.untyped_storage().data_ptr() for tensor in tensors})
        return func(*args, **kwargs)


def _argument(func: Any, args: Any, kwargs: dict[str, Any], name: str) -> Any:
    at = [argument.name for argument in func._schema.arguments].index(name)
    return args[at] if at < len(args) else kwargs.get(name, func._schema.arguments[at].default_value)

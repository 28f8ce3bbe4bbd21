"""Stubs in place of the decoder layers, so that a call of the model is a call of its shell alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from megatrain.anatomy.structure import LayerStack

OnCall = Callable[[int, tuple[Any, ...], dict[str, Any]], Any]


class LayerStub(nn.Module):
    """Stands where a layer stood: shows the layer's attributes, holds none of its tensors, and calls back.

    The layer itself is kept out of `_modules`, so the shell's parameters are all that the model has left.
    """

    def __init__(self, index: int, layer: nn.Module, on_call: Callable[[], OnCall]) -> None:
        super().__init__()
        self.__dict__["_real_layer"] = layer
        self.__dict__["_index"] = index
        self.__dict__["_on_call"] = on_call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._on_call()(self._index, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real_layer"], name)

    def _save_to_state_dict(self, *_: Any) -> None:
        raise RuntimeError(
            "the layers of this model are streamed by an engine, and what is left of it is not the model: use "
            "engine.state_dict() or engine.save_pretrained(folder), or close the engine first"
        )


class StubbedModel:
    """A model whose layers are stubs for as long as it is `hollow`; `restore` puts the layers back."""

    def __init__(self, model: nn.Module, stack: LayerStack) -> None:
        self.model = model
        self.layers: list[nn.Module] = list(stack.container)
        self._container = stack.container
        self._on_call: OnCall | None = None
        self._stubs = [LayerStub(i, layer, self._current) for i, layer in enumerate(self.layers)]

    @property
    def is_hollow(self) -> bool:
        return isinstance(self._container[0], LayerStub)

    def hollow_out(self) -> None:
        for index, stub in enumerate(self._stubs):
            self._container[index] = stub

    def restore(self) -> None:
        for index, layer in enumerate(self.layers):
            self._container[index] = layer

    @contextmanager
    def answering(self, on_call: OnCall) -> Iterator[None]:
        """Within, a call of stub i with (args, kwargs) returns `on_call(i, args, kwargs)`."""
        self._on_call = on_call
        try:
            yield
        finally:
            self._on_call = None

    def _current(self) -> OnCall:
        if self._on_call is None:
            raise RuntimeError(
                "the layers of this model are streamed by an engine; close the engine before you call it"
            )
        return self._on_call


def hidden_of(output: Any) -> torch.Tensor:
    """The hidden state in what a layer returned: the tensor itself, or the first of a tuple."""
    hidden = output[0] if isinstance(output, tuple | list) else output
    assert isinstance(hidden, torch.Tensor), f"a layer returned {type(output).__name__}"
    return hidden


class Elsewhere:
    """Stands for a further tensor that a layer returned; nothing else may use it."""


def form_of(output: Any) -> Any:
    """A layer's output without its tensors: what `like_output` needs to know."""
    if not isinstance(output, tuple | list):
        return None
    return type(output)([Elsewhere() if isinstance(item, torch.Tensor) else None for item in output])


def like_output(form: Any, hidden: torch.Tensor) -> Any:
    """`hidden` in the form in which the layer returns it."""
    return hidden if form is None else type(form)([hidden, *form[1:]])

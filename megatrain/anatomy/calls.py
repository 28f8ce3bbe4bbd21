"""A recorded layer call, replayed: forward without a graph or with one that waits for its gradient.

Note: what passes between shell and layers
    Apart from the hidden state, a layer gets tensors that the shell made (masks, position embeddings). Those
    that need a gradient are *extras*: each layer's share is summed and sent back through the shell. What
    transformers' output-recording hooks collect inside a layer (router logits) is a further output of it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from megatrain.anatomy.stub import hidden_of

try:
    from transformers.utils.output_capturing import _active_collector
except ImportError:  # before transformers 5.2 there are no such hooks to serve
    _active_collector = None

Collected = dict[str, list[torch.Tensor]]
OnGradient = Callable[[str, torch.Tensor], None]


@contextmanager
def collecting(keys: tuple[str, ...]) -> Iterator[Collected]:
    """Within, the output-recording hooks append what they see to fresh lists, one for each key."""
    collected: Collected = {key: [] for key in keys}
    if _active_collector is None or not keys:
        yield collected
        return
    token = _active_collector.set(collected)
    try:
        yield collected
    finally:
        _active_collector.reset(token)


def active_collector() -> Collected:
    """The lists that the model's own call is filling at this moment; empty if it records nothing."""
    collected = _active_collector.get() if _active_collector is not None else None
    return {} if collected is None else {k: v for k, v in collected.items() if isinstance(v, list)}


@dataclass
class LayerCall:
    """What the shell would call a layer with, apart from the hidden state.

    leaves: args and kwargs, flattened; the hidden state's place is `hidden_at`. extras: where tensors that
    need a gradient are, with the key under which the tape sums their gradients.
    """

    leaves: list[Any]
    tree: TreeSpec
    hidden_at: int
    extras: dict[int, int]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    @property
    def kind(self) -> Hashable:
        """The same for calls that go through the same operations, as a rule: with a mask, or without."""
        return tuple((leaf.dtype, leaf.ndim) if isinstance(leaf, torch.Tensor) else type(leaf) for leaf in self.leaves)

    def arguments(self, hidden: torch.Tensor, extras: dict[int, torch.Tensor]) -> tuple[Any, Any]:
        leaves = list(self.leaves)
        leaves[self.hidden_at] = hidden
        for at, tensor in extras.items():
            leaves[at] = tensor
        args, kwargs = tree_unflatten(leaves, self.tree)
        return args, kwargs


@dataclass
class Tape:
    """One micro-batch's way through the model, as the shell recorded it.

    hidden: layer 0's input, still attached to the shell's graph. extra_sources: tensors of the shell that
    layers use and that need a gradient; extra_gradients: the sums so far. keys: what the hooks must collect.
    collected: what they did, per layer, detached; and its gradients once the shell's loss gave them.
    """

    inputs: dict[str, torch.Tensor]
    hidden: torch.Tensor
    calls: list[LayerCall] = field(default_factory=list)
    extra_sources: dict[int, torch.Tensor] = field(default_factory=dict)
    extra_gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    keys: tuple[str, ...] = ()
    collected: dict[int, Collected] = field(default_factory=dict)
    collected_gradients: dict[int, list[torch.Tensor | None]] = field(default_factory=dict)

    def make_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], hidden: torch.Tensor) -> LayerCall:
        """Flatten a call; tensors attached to the shell's graph become extras."""
        leaves, tree = tree_flatten((args, kwargs))
        hidden_at = next(at for at, leaf in enumerate(leaves) if leaf is hidden)
        extras: dict[int, int] = {}
        for at, leaf in enumerate(leaves):
            if at != hidden_at and isinstance(leaf, torch.Tensor):
                if leaf.requires_grad:
                    self.extra_sources[id(leaf)] = leaf
                    extras[at] = id(leaf)
                leaves[at] = leaf.detach()
        leaves[hidden_at] = None
        return LayerCall(leaves, tree, hidden_at, extras)

    def add_extra_gradient(self, key: int, gradient: torch.Tensor) -> None:
        known = self.extra_gradients.get(key)
        self.extra_gradients[key] = gradient if known is None else known + gradient


def call(layer: nn.Module, tensors: dict[str, torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `layer` gives for these arguments with `tensors` as its weights and buffers, without a graph."""
    with torch.no_grad():
        return functional_call(layer, tensors, args, kwargs, strict=True)


def forward(
    layer: nn.Module, tensors: dict[str, torch.Tensor], tape: Tape, index: int, hidden: torch.Tensor
) -> torch.Tensor:
    """Run layer `index` with `tensors` as its weights and buffers, without a graph; (B, T, D) → (B, T, D)."""
    args, kwargs = tape.calls[index].arguments(hidden, {})
    with collecting(tape.keys) as collected:
        output = call(layer, tensors, args, kwargs)
    if tape.keys:
        tape.collected[index] = collected
    return hidden_of(output).detach()


class Graph:
    """Layer `index`, run forward under autograd, until the gradient of its output comes.

    tensors: its weights and buffers; trained: the names of those whose gradient is wanted. hidden: (B, T, D).
    within: entered while the layer runs. output: (B, T, D), without a graph.
    """

    def __init__(
        self,
        layer: nn.Module,
        tensors: dict[str, torch.Tensor],
        trained: frozenset[str],
        tape: Tape,
        index: int,
        hidden: torch.Tensor,
        within: AbstractContextManager[None] | None = None,
    ) -> None:
        self._tape, self._index = tape, index
        self._reports = _Reports()
        call = tape.calls[index]
        with torch.enable_grad(), collecting(tape.keys) as collected:
            leaf: Any = hidden.detach().requires_grad_()
            self._arrived: list[torch.Tensor] = []  # as autograd sums it; leaf.grad would get the leaf's strides
            leaf.register_hook(self._arrived.append)
            self._extras = {at: call.leaves[at].detach().requires_grad_() for at in call.extras}
            args, kwargs = call.arguments(leaf, self._extras)
            with within or nullcontext():
                leaves = _leaves(tensors, trained, self._reports)
                self._output = hidden_of(functional_call(layer, leaves, args, kwargs, strict=True))
        self._collected = collected
        self.output = self._output.detach()

    @property
    def collected(self) -> Collected:
        """What the output-recording hooks saw, without a graph."""
        return {key: [tensor.detach() for tensor in found] for key, found in self._collected.items()}

    def backward(self, gradient: torch.Tensor, on_gradient: OnGradient) -> torch.Tensor:
        """Send `gradient` (of the output) back, once; returns the gradient of `hidden`.

        `on_gradient(name, gradient)` is called once for each trained tensor that has one, as soon as autograd has it
        whole; the tensor passed is not used afterwards.
        """
        self._reports.to = on_gradient
        outputs = [self._output, *_in_order(self._collected)]
        _run_backward(outputs, [gradient, *self._tape.collected_gradients.get(self._index, [])])
        call = self._tape.calls[self._index]
        for at, extra in self._extras.items():
            if extra.grad is not None:
                self._tape.add_extra_gradient(call.extras[at], extra.grad)
        return self._arrived[0] if self._arrived else torch.zeros_like(self.output)


class _Reports:
    """Where gradients of weights go; known only once they come. Refers to nothing of the graph that refers to it."""

    to: OnGradient


def _leaves(tensors: dict[str, torch.Tensor], trained: frozenset[str], reports: _Reports) -> dict[str, torch.Tensor]:
    """`tensors`, the trained among them as fresh autograd leaves that report and drop their gradient."""

    def report(name: str) -> Callable[[torch.Tensor], None]:
        def hook(leaf: torch.Tensor) -> None:
            assert leaf.grad is not None
            reports.to(name, leaf.grad)
            leaf.grad = None

        return hook

    leaves: dict[int, torch.Tensor] = {}  # tied names keep sharing one leaf
    for name, tensor in tensors.items():
        if id(tensor) not in leaves:
            if name not in trained:
                leaves[id(tensor)] = tensor.data  # with a version of its own: peft's expert adapters set_ one of them
                continue
            leaf: Any = tensor.detach().requires_grad_()
            leaf.register_post_accumulate_grad_hook(report(name))
            leaves[id(tensor)] = leaf
    return {name: leaves[id(tensor)] for name, tensor in tensors.items()}


def _in_order(collected: Collected) -> list[torch.Tensor]:
    return [tensor for key in collected for tensor in collected[key]]


def _run_backward(outputs: list[torch.Tensor], gradients: list[torch.Tensor | None]) -> None:
    pairs = [
        (output, gradient)
        for output, gradient in zip(outputs, gradients, strict=False)
        if gradient is not None and output.requires_grad
    ]
    if pairs:
        torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])


def send_back_collected(tape: Tape, loss: torch.Tensor, leaves: list[list[torch.Tensor]]) -> torch.Tensor:
    """Keep the gradients of `loss` with respect to each layer's collected tensors for its backward."""
    wanted = [leaf for layer in leaves for leaf in layer if leaf.requires_grad]
    found = dict(zip(map(id, wanted), torch.autograd.grad(loss, wanted, allow_unused=True), strict=True))
    for index, layer in enumerate(leaves):
        tape.collected_gradients[index] = [found.get(id(leaf)) for leaf in layer]
    return loss.detach()


def shell_gradients(
    tape: Tape, gradient: torch.Tensor, parameters: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of the recorded shell call: of layer 0's input (`gradient`) and of the extras, summed over layers."""
    outputs = [tape.hidden, *(tape.extra_sources[key] for key in tape.extra_gradients)]
    gradients = [gradient, *tape.extra_gradients.values()]
    pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad]
    if not pairs or not parameters:
        return (None,) * len(parameters)
    return torch.autograd.grad(
        [output for output, _ in pairs], parameters, [gradient for _, gradient in pairs], allow_unused=True
    )

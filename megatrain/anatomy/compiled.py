"""torch.compile of layers: one compiled function for all layers of equal structure, forward and backward.

A compiled layer shares every attribute with the layer; only its forward differs. `functional_call` puts weights into it
as into any other, and torch.compile takes a module's tensors as arguments, so no weight is baked in. What Python
attributes it reads, it checks at every call; layers that differ in one that matters are compiled again.

Note: before a kind of call is compiled for good, it is rehearsed
    The first call with new shapes runs once as it is and once compiled, forward and backward, on leaves of its own,
    and the two are compared. Where the compiler fails, the two differ, or the layer does what cannot be compiled
    exactly (it draws random numbers, or hooks collect from it), one warning names the layer and the reason, and
    layers of this structure run as they are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from megatrain.anatomy.calls import active_collector
from megatrain.anatomy.check import TOLERANCE
from megatrain.anatomy.rng import RandomState
from megatrain.anatomy.stub import hidden_of

log = logging.getLogger("megatrain")

MOST_KINDS = 8  # torch's own limit for one function (recompile_limit), beyond which it would silently not compile

Attributes = dict[tuple[str, str], Any]  # (name of a module, name of an attribute) → value
Function = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]


class CompiledLayers:
    """modules[i]: what to call instead of layer i; the layers themselves are left as they are."""

    def __init__(self, layers: Sequence[nn.Module], backend: Any = "inductor") -> None:
        found: dict[Hashable, Structure] = {}
        self._structures = [found.setdefault(key, Structure(backend)) for key in structure_keys(layers)]
        for structure, layer in zip(self._structures, layers, strict=True):
            structure.layers += 1
            structure.name = type(layer).__name__
        self.modules = [_stand_in(layer, s) for layer, s in zip(layers, self._structures, strict=True)]
        log.info("compile: %d layers, %d different structures", len(layers), len(found))

    def works(self, layer: int) -> bool:
        """Whether the layer runs compiled, as far as is known by now."""
        return self._structures[layer].refused is None


@dataclass
class Structure:
    """Layers that share a compiled function. refused: why they run as they are, or None. kinds: rehearsed calls."""

    backend: Any
    name: str = ""
    layers: int = 0
    refused: str | None = None
    kinds: set[Hashable] = field(default_factory=set)
    compiled_again: int = 0
    _function: Function | None = None
    _told_of_kinds: bool = False
    _told_of_breaks: bool = False

    def call(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the layer gives for these arguments."""
        if self.refused is None:
            kind = _kind_of_call(layer, args, kwargs)
            if kind in self.kinds or self._learn(kind, layer, args, kwargs):
                return self._compiled(layer, args, kwargs)
        return _plain(layer, args, kwargs)

    def _compiled(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._function is not None
        before = _graphs()
        output = self._function(layer, args, kwargs)
        if _graphs() > before:
            self.compiled_again += 1
            log.info("compile: %s was compiled again, for a layer that differs (%d)", self.name, self.compiled_again)
            if len(self.kinds) + self.compiled_again > MOST_KINDS:
                self._refuse(f"its layers differ in more than {MOST_KINDS} ways")
        return output

    def _learn(self, kind: Hashable, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Rehearse a kind of call that is new; whether it may be compiled."""
        if len(self.kinds) >= MOST_KINDS:
            if not self._told_of_kinds:
                log.warning("compile: %s meets more than %d shapes; new ones run uncompiled", self.name, MOST_KINDS)
                self._told_of_kinds = True
            return False
        reason = self._rehearse(layer, args, kwargs)
        if reason is not None:
            self._refuse(reason)
            return False
        self.kinds.add(kind)
        return True

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        log.warning("compile: %d layers (%s) run uncompiled: %s", self.layers, self.name, reason)

    def _rehearse(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Why this call cannot be compiled, in one line; None if it can, and now is."""
        if active_collector():
            return "hooks collect from it (router logits)"
        random = RandomState(next(leaf.device for leaf in tree_flatten((args, kwargs))[0] if _is_tensor(leaf)))
        before = random.get()
        expected = _outcome(_plain, layer, args, kwargs)
        if not torch.equal(before, random.get()):
            random.set(before)
            return "it draws random numbers (dropout), which a compiled layer would draw in another way"
        try:
            return self._compile(layer, args, kwargs, expected)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a compiler raises
            return _in_short(error)

    def _compile(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], expected: list[torch.Tensor]
    ) -> str | None:
        if self._function is None:
            self._function = torch.compile(_fresh(_plain), dynamic=False, backend=self.backend)
        start_s, graphs, breaks = time.perf_counter(), _graphs(), _breaks()
        found = _outcome(self._function, layer, args, kwargs)
        seconds, graphs = time.perf_counter() - start_s, _graphs() - graphs
        if not graphs:
            return "torch.compile found nothing in it to compile"
        if (gap := max(map(_gap, found, expected))) > TOLERANCE[expected[0].dtype]:
            return f"compiled it gives another result (relative difference {gap:.1e})"
        broken = {reason: count - breaks.get(reason, 0) for reason, count in _breaks().items()}
        self._tell(seconds, graphs, {reason: count for reason, count in broken.items() if count})
        return None

    def _tell(self, seconds: float, graphs: int, broken: dict[str, int]) -> None:
        mode = "with" if torch.is_grad_enabled() else "without"
        log.info("compile: %s %s backward took %.1f s, %d graphs", self.name, mode, seconds, graphs)
        if broken:
            level, self._told_of_breaks = logging.INFO if self._told_of_breaks else logging.WARNING, True
            reasons = "; ".join(f"{reason.splitlines()[0]} ({count} times)" for reason, count in broken.items())
            log.log(level, "compile: %s in %d graphs only, because of graph breaks: %s", self.name, graphs, reasons)


def _stand_in(layer: nn.Module, structure: Structure) -> nn.Module:
    """A module that is `layer` in all but its forward: they share every attribute."""

    def forward(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return structure.call(layer, args, kwargs)

    kind = type(layer)
    module: nn.Module = object.__new__(type(f"Compiled{kind.__name__}", (kind,), {"forward": forward}))
    module.__dict__ = layer.__dict__
    return module


def _plain(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return layer.forward(*args, **kwargs)


def _fresh(function: Function) -> Function:
    """A copy with a code object of its own: torch counts what it compiled for each."""
    assert isinstance(function, FunctionType)
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


# ---- what is compared ----


def _outcome(function: Function, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The output, and where gradients are wanted those of the arguments; nobody else's gradient changes."""
    leaves, tree = tree_flatten((args, kwargs))
    own = [leaf.detach().requires_grad_(leaf.requires_grad) if _is_tensor(leaf) else leaf for leaf in leaves]
    output = hidden_of(function(layer, *tree_unflatten(own, tree)))
    wanted = [leaf for leaf in own if _is_tensor(leaf) and leaf.requires_grad]
    if not output.requires_grad or not wanted:
        return [output.detach()]
    found = torch.autograd.grad(output, wanted, torch.ones_like(output), allow_unused=True)
    return [output.detach(), *(gradient for gradient in found if gradient is not None)]


def _gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (found.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-30)
    return float(difference.nan_to_num(nan=torch.inf))


def _kind_of_call(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """What decides whether a compiled function fits: modes, and the arguments without their values."""
    modes = (torch.is_grad_enabled(), layer.training, bool(active_collector()))
    return modes + tuple(map(_kind_of_argument, tree_flatten((args, kwargs))[0]))


def _kind_of_argument(leaf: Any) -> Hashable:
    if _is_tensor(leaf):
        return (leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad)
    return (type(leaf), leaf if _is_plain(leaf) else None)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


# ---- what is shared ----


def structure_keys(layers: Sequence[nn.Module]) -> list[Hashable]:
    """One key for each layer; layers of equal keys have equal modules, tensors and Python attributes.

    An attribute that is nothing but the layer's place in the list does not count. Should a layer read it all the same,
    torch.compile sees that.
    """
    found = [_attributes(layer) for layer in layers]
    elsewhere = {name for index, own in enumerate(found) for name, value in own.items() if not _is_place(value, index)}
    return [
        (
            tuple((name, value) for name, value in own.items() if name in elsewhere),
            tuple((name, t.shape, t.dtype, t.requires_grad) for name, t in _tensors(layer)),
        )
        for layer, own in zip(layers, found, strict=True)
    ]


def _is_place(value: Any, index: int) -> bool:
    return type(value) is int and value == index


def _attributes(layer: nn.Module) -> Attributes:
    found: Attributes = {}
    for path, module in layer.named_modules():
        found[path, ""] = type(module)
        for name, value in vars(module).items():
            if name != "training":
                found[path, name] = value if _is_plain(value) else type(value)
    return found


def _tensors(layer: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from layer.named_parameters()
    yield from layer.named_buffers()


# ---- what torch says of its doings ----


def _graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def _breaks() -> dict[str, int]:
    from torch._dynamo.utils import counters

    return dict(counters["graph_break"])


def _in_short(error: BaseException) -> str:
    """The first line of what went wrong; torch wraps what a backend raises."""
    error = getattr(error, "inner_exception", error)
    first = next((line for line in str(error).splitlines() if line.strip()), "no reason given")
    return f"{type(error).__name__}: {first}"

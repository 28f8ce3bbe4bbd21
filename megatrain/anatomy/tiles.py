"""A layer's token-wise part, its MLP, over tiles of the tokens, so that one tile's activations exist at a time.

Note: why this is not torch.utils.checkpoint
    A tile is computed again while the layer's backward runs. By then `functional_call` has put the layer's own tensors
    back in place of the streamed ones, so a tile must bring its weights along, saved as autograd saves them, since
    they may lie in another slot by then (`saved`). And `tail` asks what backward needs: the input of the tiles, which
    is therefore saved before they are computed; what the tiles give is then left out of a recompute like any other
    product that nobody reads.

The gradient of a weight is a sum over tiles, in float32 whatever the weight's dtype, and rounded once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

# How transformers' layers call it. What bears the name is still compared with the whole before it is used (`check`).
NAMES = ("mlp", "feed_forward", "ffn", "ff", "mlp_block")

Tensors = dict[str, torch.Tensor]
Run = Callable[[Tensors, torch.Tensor], torch.Tensor]


def is_tileable(name: str) -> bool:
    """Whether a layer's tensor of this name belongs to its token-wise part."""
    return name.split(".", 1)[0] in NAMES


def token_wise(layer: nn.Module) -> dict[str, nn.Module]:
    """The token-wise parts of a layer by name; empty if it has none."""
    return {
        name: child
        for name, child in layer.named_children()
        if name in NAMES and any(parameter.ndim > 1 for parameter in child.parameters())
    }


def tile(layers: Sequence[nn.Module], tokens: int) -> None:
    """Let the token-wise parts of these layers run over tiles of so many tokens, until `untile`."""
    for layer in layers:
        for module in token_wise(layer).values():
            if not isinstance(module, _Tiled):
                module.__class__ = _tiled_class(type(module), tokens)  # type: ignore[arg-type]


@functools.cache  # layers of one structure keep one: torch.compile goes by classes
def _tiled_class(kind: type[nn.Module], tokens: int) -> type[nn.Module]:
    # A compiled layer has a seam here. Not a decorator: that would import the compiler, which takes a second.
    in_tiles = torch.compiler.disable(_Tiled._in_tiles)  # type: ignore[no-untyped-call]
    members = {"tile_tokens": tokens, "whole": kind, "_in_tiles": in_tiles}
    return type(f"Tiled{kind.__name__}", (_Tiled, kind), members)


def untile(layers: Sequence[nn.Module]) -> None:
    """Undo `tile`; of no effect where nothing is tiled."""
    for layer in layers:
        for module in token_wise(layer).values():
            if isinstance(module, _Tiled):
                module.__class__ = module.whole  # type: ignore[assignment]


@contextmanager
def tiled(layers: Sequence[nn.Module], tokens: int) -> Iterator[None]:
    """Within, the token-wise parts of these layers run over tiles."""
    tile(layers, tokens)
    try:
        yield
    finally:
        untile(layers)


class _Tiled(nn.Module):
    """What a tiled module's class gains. whole: the class that it had."""

    tile_tokens: int
    whole: type[nn.Module]

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or hidden.ndim != 3:
            raise ValueError(f"{self.whole.__name__} takes more than one hidden state (B, T, D), so it cannot be tiled")
        if hidden.shape[0] * hidden.shape[1] <= self.tile_tokens:
            return super().forward(hidden)
        return self._in_tiles(hidden)

    def _in_tiles(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.flatten(0, 1)  # (B·T, D)
        tensors = dict(self.named_parameters()) | dict(self.named_buffers())
        if torch.is_grad_enabled() and hidden.requires_grad:
            names = list(tensors)
            values = [tensor.detach() for tensor in tensors.values()]
            kept = _Keep.apply(tokens, *values)  # type: ignore[no-untyped-call]
            output = _Tiles.apply(  # type: ignore[no-untyped-call]
                self._one, self.tile_tokens, names, kept, *tensors.values()
            )
        else:
            output = _over_tiles(self._one, self.tile_tokens, tensors, tokens)
        whole: torch.Tensor = output.view(*hidden.shape[:-1], output.shape[-1])
        return whole

    def _one(self, tensors: Tensors, tokens: torch.Tensor) -> torch.Tensor:
        """One tile (t, D) → (t, D); it is no larger than a tile, so this comes back to the whole class's forward."""
        output: Any = functional_call(self, tensors, (tokens.unsqueeze(0),))
        if not isinstance(output, torch.Tensor):
            raise ValueError(f"{self.whole.__name__} returns more than a hidden state, so it cannot be tiled")
        return output.squeeze(0)


def _over_tiles(run: Run, tile_tokens: int, tensors: Tensors, tokens: torch.Tensor) -> torch.Tensor:
    return torch.cat([run(tensors, part) for part in torch.split(tokens, tile_tokens)])


class _Keep(torch.autograd.Function):
    """Gives the tokens on; autograd saves them, and the weights, now."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tokens, *tensors)
        return tokens.view_as(tokens)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (gradient,) + (None,) * (len(ctx.needs_input_grad) - 1)


class _Tiles(torch.autograd.Function):
    """All tiles forward; in backward each one again, then back."""

    @staticmethod
    def forward(
        ctx: Any, run: Run, tile_tokens: int, names: list[str], kept: torch.Tensor, *tensors: torch.Tensor
    ) -> torch.Tensor:
        ctx.run, ctx.tile_tokens, ctx.names, ctx.kept_by = run, tile_tokens, names, kept.grad_fn
        return _over_tiles(run, tile_tokens, dict(zip(names, tensors, strict=True)), kept)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        tokens, *tensors = ctx.kept_by.saved_tensors  # the weights as they lie now: a kept graph's may have moved
        sums: Tensors = {}
        trained = ctx.needs_input_grad[-len(tensors) :]
        named = zip(ctx.names, tensors, trained, strict=True)
        leaves = {name: _leaf(name, tensor, sums, trained=train) for name, tensor, train in named}
        pairs = zip(torch.split(tokens, ctx.tile_tokens), torch.split(gradient, ctx.tile_tokens), strict=True)
        back = torch.cat([_send_back(ctx.run, leaves, part, its) for part, its in pairs])
        found = (sums.pop(name).to(leaf.dtype) if name in sums else None for name, leaf in leaves.items())
        return (None, None, None, back, *found)


def _leaf(name: str, tensor: torch.Tensor, sums: Tensors, *, trained: bool) -> torch.Tensor:
    """`tensor` for the tiles to compute with; where it is trained, what arrives at it is added to `sums`."""
    leaf = tensor.detach()
    if trained:
        hooked: Any = leaf.requires_grad_()

        def add(found: torch.Tensor) -> None:
            assert found.grad is not None
            sums[name] = sums[name].add_(found.grad) if name in sums else _wide(found.grad)
            found.grad = None

        hooked.register_post_accumulate_grad_hook(add)
    return leaf


def _wide(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.float() if gradient.dtype.itemsize < 4 else gradient


def _send_back(run: Run, leaves: Tensors, tokens: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        leaf: Any = tokens.detach().requires_grad_()
        torch.autograd.backward([run(leaves, leaf)], [gradient])
    return leaf.grad  # type: ignore[no-any-return]

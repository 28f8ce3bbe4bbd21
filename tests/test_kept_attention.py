"""Attention that is kept is not computed again, and no bit changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import dropout, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain.anatomy.attention import KeptAttention

SHAPE = (2, 4, 32, 16)  # batch, heads, tokens, width of a head


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """How often fused attention ran forward."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.forwards = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.forwards += "attention" in str(func) and "backward" not in str(func)
        return func(*args, **(kwargs or {}))


def parts(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SHAPE, generator=generator).requires_grad_() for _ in range(3)]


def layer(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, calls: int = 1) -> torch.Tensor:
    for _ in range(calls):
        query = scaled_dot_product_attention(query.tanh(), key, value, is_causal=True)
    return query.sin()


@pytest.mark.parametrize("calls", [1, 3])
def test_gradients_are_the_same_bits_and_attention_runs_once(calls: int) -> None:
    plain, again = parts(), parts()
    expected = torch.autograd.grad(layer(*plain, calls=calls).sum(), plain)
    kept = KeptAttention()
    with Counting() as counting:
        with kept.keeping():
            first = layer(*again, calls=calls).detach()
        assert counting.forwards == calls
        with kept.reusing():
            second = layer(*again, calls=calls)
        assert counting.forwards == calls
    assert torch.equal(first, second)
    found = torch.autograd.grad(second.sum(), again)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    elements = 2 * 4 * 32
    assert kept.nbytes == calls * 4 * (elements * 16 + elements)  # outputs, and one number for each row of scores


def test_a_recompute_that_goes_another_way_is_computed() -> None:
    kept, others = KeptAttention(), parts(1)
    with kept.keeping():
        layer(*parts())
    with Counting() as counting, kept.reusing():
        found = layer(*others, calls=2)
    assert counting.forwards == 1  # the second: the first took what there was
    with kept.reusing():
        assert torch.equal(layer(*parts()), layer(*parts()))
    assert found.shape == SHAPE


def test_what_draws_is_computed_again() -> None:
    """Later draws of the layer must find the generator where they found it before."""

    def drawing(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return dropout(scaled_dot_product_attention(query, key, value, dropout_p=0.5), 0.5)

    kept = KeptAttention()
    state = torch.get_rng_state()
    with kept.keeping():
        first = drawing(*parts())
    torch.set_rng_state(state)
    with kept.reusing():
        assert torch.equal(drawing(*parts()), first)
    assert kept.nbytes == 0


def test_what_a_layer_changed_in_place_is_computed_again() -> None:
    def changing(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return scaled_dot_product_attention(query, key, value).mul_(2)

    kept = KeptAttention()
    with kept.keeping():
        first = changing(*parts())
    assert kept.nbytes == 0
    expected = first.clone()
    with Counting() as counting, kept.reusing():
        assert torch.equal(changing(*parts()), expected)
    assert counting.forwards == 1


def test_it_may_be_reused_twice() -> None:
    """A recompute that went another way is done again from its beginning."""
    kept = KeptAttention()
    with kept.keeping():
        layer(*parts())
    for _ in range(2):
        with Counting() as counting, kept.reusing():
            layer(*parts())
        assert counting.forwards == 0

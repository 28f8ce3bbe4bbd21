"""What a recompute leaves out is never read: results are the same bits, whatever way a layer goes."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models as tm
import torch
from families import LAYERS, build
from pairs import Outcome, batches_for, outcome, require_same
from tiny_models import tiny
from torch import Tensor

from megatrain import AdamWConfig
from megatrain.anatomy import tail as tail_module
from megatrain.anatomy.tail import Tail

ADAMW = AdamWConfig(lr=1e-3)


def without_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(self: Tail) -> None:
        self._learnt, self.off = None, True

    monkeypatch.setattr(Tail, "__init__", off)


def watched_tails(monkeypatch: pytest.MonkeyPatch) -> list[Tail]:
    """Every tail that is made from now on."""
    tails: list[Tail] = []
    make = Tail.__init__

    def kept(self: Tail) -> None:
        make(self)
        tails.append(self)

    monkeypatch.setattr(Tail, "__init__", kept)
    return tails


@pytest.mark.parametrize(
    ("family", "products"),
    [
        ("llama", ["aten.mm.default"]),
        ("gpt2", ["aten.addmm.default"]),
        ("phi3", ["aten.mm.default"]),
        ("gemma3_text", []),  # a norm after the last product needs its input
        ("mixtral", []),  # the sum over experts is no product
    ],
)
@pytest.mark.parametrize("rows", [None, 2])  # of each batch the last two are padded: they have a mask, others none
def test_the_last_product_is_left_out_and_no_bit_changes(
    family: str, products: list[str], rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as watched:
        tails, left_out = watched_tails(watched), counted_products(watched)
        found = trained(build(family), rows)
    assert [tail.left_out for tail in tails] == [products] * len(tails)
    recomputes = 3 * (1 if rows is None else 3) * LAYERS
    assert len(left_out) == (recomputes - len(tails)) * len(products)  # the first of each kind of call learns
    without_tails(monkeypatch)
    require_same(found, trained(build(family), rows))


def counted_products(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one name for each product that is not computed."""
    calls: list[str] = []

    def counting(name: str, shape: Any) -> Any:
        def left_out(*args: Any, **kwargs: Any) -> Tensor:
            calls.append(name)
            return shape(*args, **kwargs).fill_(torch.nan)  # whoever read it would show

        return left_out

    for op, shape in tail_module._LEFT_OUT.items():
        monkeypatch.setitem(tail_module._LEFT_OUT, op, counting(str(op), shape))
    return calls


def trained(model: Any, rows: int | None = None) -> Outcome:
    return outcome(model, batches_for(model), ADAMW, micro_batch_size=rows)


class Wandering(tm.TinyLayer):
    """Goes another way in every third backward pass: before the last tensor it saves, or after it."""

    early = False
    passes = 0

    def forward(self, hidden: Tensor, **kwargs: Any) -> Any:
        counts = torch.arange(1, hidden.shape[1] + 1, dtype=hidden.dtype)[:, None]
        means = self.mix(self.norm(hidden)).cumsum(dim=1) / counts
        self.passes += torch.is_grad_enabled()
        other = self.passes % 3 == 0
        means = means * 1.0 if other and self.early else means
        changed = self.down(torch.tanh(self.up(hidden + means)))
        return changed.neg().neg() + hidden if other and not self.early else changed + hidden


class WanderingEarly(Wandering):
    early = True


class WanderingForCausalLM(tm.TinyForCausalLM):
    layer_class = Wandering


class WanderingEarlyForCausalLM(tm.TinyForCausalLM):
    layer_class = WanderingEarly


@pytest.mark.parametrize("model_class", [WanderingForCausalLM, WanderingEarlyForCausalLM])
@pytest.mark.parametrize("rows", [None, 2])
def test_a_layer_that_goes_another_way_is_computed_whole(
    model_class: type[tm.TinyForCausalLM], rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as watched:
        tails = watched_tails(watched)
        found = trained(tiny(model_class), rows)
    assert all(tail._learnt is not None for tail in tails)
    assert all(tail.off is not model_class.layer_class.early for tail in tails)  # type: ignore[attr-defined]
    without_tails(monkeypatch)
    require_same(found, trained(tiny(model_class), rows))


class DroppingWanderer(Wandering):
    def forward(self, hidden: Tensor, **kwargs: Any) -> Any:
        return super().forward(torch.nn.functional.dropout(hidden, 0.2, self.training), **kwargs)


class DroppingWandererForCausalLM(tm.TinyForCausalLM):
    layer_class = DroppingWanderer


def test_what_is_done_again_draws_the_same_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    found = trained(tiny(DroppingWandererForCausalLM), 2)
    without_tails(monkeypatch)
    torch.manual_seed(0)
    require_same(found, trained(tiny(DroppingWandererForCausalLM), 2))

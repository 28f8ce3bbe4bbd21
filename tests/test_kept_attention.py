"""Attention that is kept is not computed again, and no bit changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from crossed import each_pair
from families import build
from pairs import batches_for, engine_config, outcome, require_same
from torch.nn.functional import dropout, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain import AdamWConfig, StreamingEngine
from megatrain.anatomy import KeptAttention
from megatrain.plan import plan

ADAMW = AdamWConfig(lr=1e-3)
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


# ---- in the engine ----


FAMILIES = ["llama", "gemma3_text", "qwen3_moe", "gpt2", "gpt_oss", "qwen3_next"]


@pytest.mark.parametrize(("family", "rows", "dtype"), each_pair(FAMILIES, [None, 2], ["float32", "bfloat16"]))
def test_no_bit_changes(family: str, rows: int | None, dtype: str) -> None:
    """gpt_oss computes attention that is not fused: nothing of it is kept."""
    require_same_as_computed_again(family, dtype=dtype, micro_batch_size=rows)


@pytest.mark.parametrize("changes", [{"offload_activations": True}, {"kept_graphs": 1}, {"prefetch_depth": 0}])
def test_beside_other_settings(changes: dict[str, Any]) -> None:
    require_same_as_computed_again("llama", micro_batch_size=2, **changes)


def test_dropout_in_attention() -> None:
    require_same_as_computed_again("llama", attention_dropout=0.2, micro_batch_size=2)


def require_same_as_computed_again(family: str, attention_dropout: float | None = None, **config: Any) -> None:
    overrides = {} if attention_dropout is None else {"attention_dropout": attention_dropout}
    found = []
    for keep in (False, True):
        torch.manual_seed(0)
        model = build(family, **overrides)
        found.append(outcome(model, batches_for(model), ADAMW, keep_attention=keep, **config))
    require_same(*found)


@pytest.mark.parametrize("rows", [None, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_plan_says_what_it_takes(dtype: Any, rows: int | None) -> None:
    model = build("llama", layers=4)
    planned, held = {}, {}
    for keep in (False, True):
        config = engine_config(dtype=dtype, micro_batch_size=rows, keep_attention=keep, offload_activations=False)
        planned[keep] = plan(model, config, ADAMW, batch=4, sequence=32)
        ids = torch.randint(3, 50, (4, 32))
        with StreamingEngine(build("llama", layers=4), config, ADAMW) as engine:
            engine.step({"input_ids": ids, "labels": ids})
            held[keep] = engine.device_peak_bytes
            idle = engine.arena_bytes
            engine.step({"input_ids": ids, "labels": ids})
            assert engine.arena_bytes == idle
    assert held[True] - held[False] == planned[True].device["kept attention"] > 0
    assert planned[False].device["kept attention"] == 0


def test_auto_keeps_it_where_it_fits_and_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama", layers=4)
    batch = batches_for(model)[0]
    rows, tokens = batch["input_ids"].shape
    least = plan(model, engine_config(), ADAMW, batch=rows, sequence=tokens).held_bytes
    for nbytes, keeps in ((least + 1, False), (100_000_000, True)):
        config = engine_config(keep_attention="auto", device_memory_bytes=nbytes)
        with StreamingEngine(build("llama", layers=4), config, ADAMW) as engine:
            engine.step(batch)
            assert engine._room.keep_attention is keeps
    with StreamingEngine(build("llama", layers=4), config, ADAMW) as engine, monkeypatch.context() as broken:
        broken.setattr("megatrain.executor.parts.KeptAttention.keeping", _out_of_memory)
        engine.step(batch)
        assert engine._room.keep_attention is False


def _out_of_memory(*args: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

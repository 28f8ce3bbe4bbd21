"""Kernels of attention on a CUDA device: each trains as plain training by it, and the fastest is measured."""

from __future__ import annotations

import pytest
import torch
from card import ADAMW, DEVICE, config_for, needs_card, on_device
from families import build
from pairs import MICRO_ROWS, batches_for, gap
from reference import Batch, make_batch
from test_engine_bfloat16 import ByHand

from megatrain import StreamingEngine
from megatrain.anatomy.kernels import BACKENDS, attention_by, rehearsed


def plainly_by(name: str, by_hand: ByHand, batch: Batch, micro_rows: int | None) -> tuple[float, float]:
    try:
        with attention_by(name):
            return by_hand.step(batch, micro_rows)
    except RuntimeError as error:
        if "cuDNN" in str(error):
            pytest.skip(f"cuDNN has no plan for so small a call: {error}")
        raise


@pytest.mark.parametrize("micro_rows", [None, MICRO_ROWS])
@pytest.mark.parametrize("name", list(BACKENDS))
def test_a_kernel_of_attention_trains_as_plain_training_by_it(name: str, micro_rows: int | None) -> None:
    """In bfloat16, as flash attention and cuDNN have no other; each runs where it can, torch's choice elsewhere."""
    by_hand = ByHand.of("llama", ADAMW)
    by_hand.model.to(DEVICE)
    by_hand.optimizer.param_groups[0]["eps"] = by_hand.optimizer.param_groups[1]["eps"] = ADAMW.eps
    config = config_for(dtype="bfloat16", micro_batch_size=micro_rows, attention=name)
    with StreamingEngine(build("llama"), config, ADAMW) as engine:
        for batch in batches_for(build("llama")):
            loss, norm = plainly_by(name, by_hand, batch, micro_rows)
            result = engine.step(batch)
            assert result.loss == pytest.approx(loss, rel=2e-3)
            assert result.grad_norm == pytest.approx(norm, rel=2e-2)
        state = engine.state_dict()
    assert gap(state, {n: tensor.cpu() for n, tensor in by_hand.state().items()}) <= 5e-3


@needs_card
@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn"])
def test_a_kernel_that_is_first_in_order_is_the_one_that_runs(name: str) -> None:
    """Where there is no mask; that cuDNN does not run on an old card is its own affair."""
    parts = [torch.randn(2, 4, 128, 64, dtype=torch.bfloat16, device=DEVICE, requires_grad=True) for _ in range(3)]

    def run() -> None:
        torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True).sum().backward()

    seen = rehearsed(name, run, "a call")
    if seen is None or (name == "cudnn" and torch.cuda.get_device_capability() < (9, 0)):
        pytest.skip(f"{name} cannot run on this card")
    assert seen.kernels == {name}


@needs_card
def test_the_fastest_kernel_is_measured_and_kept(caplog: pytest.LogCaptureFixture) -> None:
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
    batches = [make_batch(build("llama", **sizes), 4, 256, padding=False)]
    expected = on_device(build("llama", **sizes), batches, dtype="bfloat16")
    with caplog.at_level("INFO", "megatrain"):
        found = on_device(build("llama", **sizes), batches, dtype="bfloat16", attention="measured")
    [line] = [record.message for record in caplog.records if "is taken" in record.message]
    assert line.count(" ms") >= 2
    assert found.losses == pytest.approx(expected.losses, rel=2e-3)

"""What a step says of each layer: the same norms and scales as a plain model's, whatever the micro-batches."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from pairs import LR, engine_config
from reference import make_batch
from tiny_models import tiny

from megatrain import AdamWConfig, StreamingEngine
from megatrain.report import TensorStats
from megatrain.scales import Scales, statistics
from megatrain.trace import LayerStats

LAYERS = 3
CLOSE = {"rel": 1e-5}


def plainly(model: Any, batch: dict[str, torch.Tensor]) -> list[tuple[float, float, float]]:
    """Gradient norm, weight norm and output RMS of each layer of an ordinary model."""
    outputs: dict[int, torch.Tensor] = {}
    for number, layer in enumerate(model.layers):
        layer.register_forward_hook(lambda _m, _i, output, at=number: outputs.update({at: output.detach()}))
    model(**batch, use_cache=False).loss.backward()
    return [
        (
            float(torch.stack([p.grad.norm() for p in layer.parameters()]).norm()),
            float(torch.stack([p.detach().norm() for p in layer.parameters()]).norm()),
            float(outputs[number].square().mean().sqrt()),
        )
        for number, layer in enumerate(model.layers)
    ]


def stats(engine: StreamingEngine, step: int) -> list[tuple[float, float, float]]:
    found = [s for s in engine.recorder.layers() if s.step == step]
    assert [s.layer for s in found] == list(range(LAYERS))
    return [(s.grad_norm, s.weight_norm, s.output_rms) for s in found]


@pytest.mark.parametrize("rows", [None, 2])
@pytest.mark.parametrize("offload", [False, True])
def test_they_are_those_of_a_plain_model(rows: int | None, offload: bool) -> None:
    model = tiny(layers=LAYERS)
    batch = make_batch(model, 4, 12, seed=1, padding=False)
    expected = plainly(copy.deepcopy(model), batch)
    with StreamingEngine(model, engine_config(micro_batch_size=rows, offload_activations=offload)) as engine:
        engine.step(batch)
        for found, plain in zip(stats(engine, 0), expected, strict=True):
            assert found == pytest.approx(plain, **CLOSE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("native", ["0", "1"])
def test_the_weight_norm_follows_the_updates(dtype: str, native: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRAIN_NATIVE", native)
    model = tiny(layers=LAYERS)
    with StreamingEngine(model, engine_config(dtype=dtype), AdamWConfig(lr=LR)) as engine:
        batch = make_batch(model, 4, 12, seed=1)
        engine.step(batch)
        weights = engine.state_dict()
        engine.step(batch)
        for layer, (_, norm, _) in enumerate(stats(engine, 1)):
            mine = [w.float().norm() for name, w in weights.items() if f"layers.{layer}." in name]
            assert norm == pytest.approx(float(torch.stack(mine).norm()), rel=1e-5)


def test_a_frozen_layer_has_no_gradient_and_no_trained_weights() -> None:
    model = tiny(layers=LAYERS)
    for parameter in model.layers[1].parameters():
        parameter.requires_grad_(False)
    with StreamingEngine(model, engine_config()) as engine:
        engine.step(make_batch(model, 4, 12, seed=1))
        frozen = [s for s in engine.recorder.layers() if s.layer == 1]
        assert [(math.isnan(s.grad_norm), math.isnan(s.weight_norm)) for s in frozen] == [(True, True)]
        assert frozen[0].output_rms > 0


def test_a_layer_that_nothing_was_measured_of_is_nan() -> None:
    assert Scales(2).on_device(torch.zeros((), dtype=torch.float64)).isnan().tolist() == [True] * 4


def test_statistics_leave_out_what_is_not_finite_and_count_it() -> None:
    found = statistics(torch.tensor([3.0, -4.0, 0.0, -1.0, math.nan, math.inf]))
    assert found == TensorStats(-0.5, pytest.approx(math.sqrt(6.5)), 4.0, 2)  # type: ignore[arg-type]
    nothing = statistics(torch.full((3,), math.nan, dtype=torch.bfloat16))
    assert math.isnan(nothing.rms)
    assert nothing.not_finite == 3


def test_layer_records_can_be_tailed() -> None:
    with StreamingEngine(tiny(layers=LAYERS), engine_config()) as engine:
        engine.step(make_batch(engine.model, 4, 12, seed=1))
        first, index = engine.recorder.since(LayerStats, 0)
        assert (len(first), index) == (LAYERS, LAYERS)

"""Rates measured on two layers of a model: finite, positive, and of the model that was given."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from simulations import tiny_config
from transformers import GptOssConfig

from megatrain.anatomy.adapters import add_lora
from megatrain.anatomy.excerpt import excerpt
from megatrain.anatomy.load import from_config
from megatrain.anatomy.meta import meta_model
from megatrain.config import AdamWConfig, EngineConfig
from megatrain.engine import DeviceMemoryError, StreamingEngine
from megatrain.machine import describe
from megatrain.plan import plan
from megatrain.simulate import simulate
from megatrain.tune import tune
from megatrain.tune.calibration import Calibration, calibrate
from megatrain.tune.lines import line

CONFIG = EngineConfig(device="cpu", dtype="float32")


def values(found: Calibration) -> list[float]:
    rates = found.rates
    lanes = (rates.h2d_bytes_per_s, rates.d2h_bytes_per_s, rates.adamw_bytes_per_s, rates.both_ways)
    return [*lanes, *rates.flops_per_s.values(), *rates.shell_bytes_per_s.values()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rates_of_a_tiny_model_are_finite_and_of_every_operation(dtype: Any) -> None:
    found = calibrate(meta_model(tiny_config(5)), EngineConfig(device="cpu", dtype=dtype), batch=4, sequence=8)
    assert all(math.isfinite(value) and value > 0 for value in values(found))
    assert found.rates.both_ways <= 1
    assert found.rows == (1, 4)
    assert set(found.rates.flops_per_s) == set(found.rates.launch_s) == {"forward", "backward", "head"}
    assert {"record", "backward", "norm"} <= set(found.rates.fixed_s)
    planned = plan(tiny_config(5), CONFIG, AdamWConfig(), batch=4, sequence=8)
    assert 0 < simulate(planned, found.rates).step_s < 60


def test_one_sequence_is_timed_at_one_size() -> None:
    found = calibrate(meta_model(tiny_config(3)), CONFIG, batch=1, sequence=8)
    assert found.rows == (1,)
    assert not found.rates.launch_s


def test_the_model_stays_as_it_is() -> None:
    model = from_config(tiny_config(3), dtype=torch.float32)
    drawn = torch.get_rng_state()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    calibrate(model, CONFIG, batch=2, sequence=8)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert model.config.num_hidden_layers == len(model.model.layers) == 3
    assert torch.equal(torch.get_rng_state(), drawn)


def test_adapters_are_measured_as_adapters() -> None:
    model = add_lora(meta_model(tiny_config(3)), {"r": 2, "target_modules": "all-linear"})
    assert all(value > 0 for value in values(calibrate(model, CONFIG, batch=2, sequence=8)))


def test_two_layers_that_do_not_fit_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain.tune.calibration.detect", lambda: describe("small", host_bytes=10_000))
    with pytest.raises(ValueError, match=r"two layers of this model do not fit here, .* choose the settings .*RAM"):
        calibrate(meta_model(tiny_config(3)), CONFIG, batch=2, sequence=8)


def test_a_micro_batch_for_which_the_device_lacks_memory_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    train = StreamingEngine.step

    def step(engine: StreamingEngine, batch: dict[str, torch.Tensor], *more: Any) -> Any:
        if len(batch["input_ids"]) > 2:
            raise DeviceMemoryError("too large")
        return train(engine, batch, *more)

    monkeypatch.setattr(StreamingEngine, "step", step)
    assert calibrate(meta_model(tiny_config(3)), CONFIG, batch=4, sequence=8).rows == (1, 2)


def test_layers_that_are_not_trained_are_not_measured() -> None:
    model = meta_model(tiny_config(3))
    model.model.layers.requires_grad_(False)
    with pytest.raises(ValueError, match="no layer is trained"):
        calibrate(model, CONFIG, batch=2, sequence=8)


def test_what_is_measured_is_chosen_by() -> None:
    found = tune(tiny_config(4), CONFIG, batch=4, sequence=8)
    assert found.plan.fits
    assert found.summary[0].startswith("measured in ")
    assert found.candidates[0].knob is None
    assert found.config.dtype == "float32"


# ---- the line through two sizes ----


def test_a_line_meets_both_sizes() -> None:
    at_0_s, per_s = line((2.0, 5.0), (6.0, 7.0))
    assert at_0_s + 2 / per_s == pytest.approx(5)
    assert at_0_s + 6 / per_s == pytest.approx(7)


def test_noise_never_makes_more_work_take_less_time() -> None:
    at_0_s, per_s = line((2.0, 9.0), (6.0, 7.0))
    assert 0 < per_s < math.inf
    assert at_0_s + 6 / per_s == pytest.approx(7)


# ---- the excerpt ----


def test_an_excerpt_is_a_model_of_two_layers_with_its_own_memory() -> None:
    model = from_config(tiny_config(4), dtype=torch.float32)
    part = excerpt(model, torch.float32)
    assert len(part.model.layers) == part.config.num_hidden_layers == 2
    part.model.layers[0].self_attn.q_proj.weight.data.zero_()
    assert model.model.layers[0].self_attn.q_proj.weight.abs().sum() > 0
    assert len(model.model.layers) == model.config.num_hidden_layers == 4


def test_an_excerpt_of_a_model_without_values_has_some_that_are_finite() -> None:
    config = GptOssConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_local_experts=4, num_experts_per_tok=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=128, tie_word_embeddings=True,
    )  # fmt: skip
    part = excerpt(meta_model(config), torch.bfloat16)
    assert len(part.config.layer_types) == 2
    assert all(torch.isfinite(tensor).all() for tensor in [*part.parameters(), *part.buffers()])
    assert part.lm_head.weight is part.model.embed_tokens.weight
    assert not any(tensor.is_meta for tensor in [*part.parameters(), *part.buffers()])
    ids = torch.arange(8)[None]
    assert torch.isfinite(part(input_ids=ids, labels=ids).loss)

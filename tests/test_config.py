"""Every rule of the configuration is refused by its own sentence, with the value that broke it."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from megatrain.config import AdamWConfig, EngineConfig, Throttle, check_grad_buffers, check_prefetch_depth

ENGINE_RULES: list[tuple[str, str, list[object]]] = [
    ("device", r"device must be one of \('auto', 'cuda', 'cpu'\)", ["gpu", "cuda:0", None]),
    ("dtype", r"dtype must be one of \('bfloat16', 'float32'\)", ["float16", "bf16", None]),
    ("micro_batch_size", r"micro_batch_size must be a whole number ≥ 1, or None", [0, -1, 1.0, True, "2"]),
    ("prefetch_depth", r"prefetch_depth must be a whole number ≥ 0", [-1, 1.5, False, None]),
    ("grad_buffers", r"grad_buffers must be a whole number ≥ 1", [0, -2, 2.0, True, None]),
    ("resident_layers", r'resident_layers must be a whole number ≥ 0 or "auto"', [-1, 0.5, True, "all", None]),
    ("kept_graphs", r'kept_graphs must be a whole number ≥ 0 or "auto"', [-1, 0.5, True, "all", None]),
    ("offload_activations", r'offload_activations must be True, False or "auto"', [1, "yes", None]),
    ("keep_attention", r'keep_attention must be True, False or "auto"', [1, "yes", None]),
    ("attention", r"attention must be one of \('torch', 'measured', 'flash', .*\)", ["sdpa", "auto", True, None]),
    ("loss_chunk_tokens", r"loss_chunk_tokens must be a whole number ≥ 1", [0, -5, 1e3, True, None]),
    ("tile_tokens", r"tile_tokens must be a whole number ≥ 1, or None", [0, -5, 1e3, True]),
    ("compile", r"compile must be True or False", [1, None, "yes"]),
    ("optimizer_overlap", r"optimizer_overlap must be one of \('forward', 'backward', 'none'\)", ["both", None]),
    ("optimizer_device", r"optimizer_device must be one of \('host', 'device'\)", ["cpu", None]),
    ("moments_dtype", r"moments_dtype must be one of \('bfloat16', 'float32'\)", ["float16", None]),
    ("placement", r"placement must be one of \('auto', 'none'\)", ["numa", None]),
    ("keep_reference", r"keep_reference must be True or False", [1, None, "yes"]),
    ("device_memory_bytes", r"device_memory_bytes must be a positive number of bytes, or None", [0, -1, 8e9, True]),
    ("throttle", r"throttle must be a Throttle", [1e9, {"link_bytes_per_s": 1e9}]),
]

INFINITE = float("inf")
ADAMW_RULES: list[tuple[str, str, list[object]]] = [
    ("lr", r"lr must be a finite number ≥ 0", [-1e-5, float("nan"), INFINITE, True, "1e-5", None]),
    ("betas", r"betas must be two numbers in \[0, 1\)", [(0.9,), (0.9, 1.0), (-0.1, 0.9), (0.9, float("nan"))]),
    ("eps", r"eps must be a finite number > 0", [0, -1e-8, float("nan"), None]),
    ("weight_decay", r"weight_decay must be a finite number ≥ 0", [-0.1, INFINITE, None]),
    ("max_grad_norm", r"max_grad_norm must be a finite number > 0, or None", [0, -1.0, float("nan"), INFINITE, True]),
    ("rounding", r"rounding must be one of \('torch', 'fast'\)", ["exact", None, True]),
]

ENGINE_ALLOWED: dict[str, list[object]] = {
    "device": ["auto", "cuda", "cpu"],
    "dtype": ["bfloat16", "float32"],
    "micro_batch_size": [None, 1, 64],
    "prefetch_depth": [0, 1, 100],
    "grad_buffers": [1, 8],
    "resident_layers": ["auto", 0, 12],
    "kept_graphs": ["auto", 0, 12],
    "offload_activations": ["auto", True, False],
    "keep_attention": ["auto", True, False],
    "attention": ["torch", "measured", "flash", "cudnn", "efficient", "math"],
    "loss_chunk_tokens": [1, 1 << 20],
    "tile_tokens": [None, 1, 4096],
    "compile": [True, False],
    "optimizer_overlap": ["forward", "backward", "none"],
    "optimizer_device": ["host"],
    "moments_dtype": ["float32", "bfloat16"],
    "placement": ["auto", "none"],
    "keep_reference": [True, False],
    "device_memory_bytes": [None, 1, 80 << 30],
    "throttle": [None, Throttle(), Throttle(link_bytes_per_s=1e9, update_bytes_per_s=2e9)],
}

ADAMW_ALLOWED: dict[str, list[object]] = {
    "lr": [0, 1e-5, 1],
    "betas": [(0.0, 0.0), (0.9, 0.999), [0.9, 0.95]],
    "eps": [1e-8, 1],
    "weight_decay": [0, 0.1],
    "max_grad_norm": [None, 1, 0.5],
    "rounding": ["torch", "fast"],
}


def cases(rules: list[tuple[str, str, list[object]]]) -> list[Any]:
    return [pytest.param(name, rule, v, id=f"{name}={v}") for name, rule, values in rules for v in values]


def allowed(fields: dict[str, list[object]]) -> list[Any]:
    return [pytest.param(name, v, id=f"{name}={v}") for name, values in fields.items() for v in values]


def ending(value: object) -> str:
    return f"; got {value!r}"


@pytest.mark.parametrize(("field", "rule", "value"), cases(ENGINE_RULES))
def test_engine_rule(field: str, rule: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rule) as error:
        EngineConfig(**{field: value})
    assert str(error.value).endswith(ending(value))


@pytest.mark.parametrize(("field", "rule", "value"), cases(ADAMW_RULES))
def test_adamw_rule(field: str, rule: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rule) as error:
        AdamWConfig(**{field: value})
    assert str(error.value).endswith(ending(value))


@pytest.mark.parametrize(("field", "value"), allowed(ENGINE_ALLOWED))
def test_engine_value(field: str, value: Any) -> None:
    assert getattr(EngineConfig(**{field: value}), field) == value


@pytest.mark.parametrize(("field", "value"), allowed(ADAMW_ALLOWED))
def test_adamw_value(field: str, value: Any) -> None:
    assert getattr(AdamWConfig(**{field: value}), field) == value


def test_compiled_layers_keep_no_attention() -> None:
    with pytest.raises(ValueError, match="keep_attention needs layers that run as they are"):
        EngineConfig(compile=True, keep_attention=True)


@pytest.mark.parametrize("attention", ["measured", "flash", "math"])
def test_compiled_layers_run_the_attention_that_torch_chooses(attention: Any) -> None:
    with pytest.raises(ValueError, match=f'leave attention at "torch", or compile; got {attention!r}'):
        EngineConfig(compile=True, attention=attention)
    assert EngineConfig(compile=True).attention == "torch"


@pytest.mark.parametrize("overlap", ["forward", "none"])
def test_the_device_applies_gradients_in_backward_only(overlap: Any) -> None:
    rule = r'set optimizer_overlap="backward" \(and max_grad_norm=None\), or optimizer_device="host"; got '
    with pytest.raises(ValueError, match=rule + f"'{overlap}'"):
        EngineConfig(optimizer_device="device", optimizer_overlap=overlap)
    assert EngineConfig(optimizer_device="device", optimizer_overlap="backward").optimizer_device == "device"


def test_every_field_has_its_rule() -> None:
    assert {name for name, _, _ in ENGINE_RULES} == set(ENGINE_ALLOWED) == set(EngineConfig.__dataclass_fields__)
    assert {name for name, _, _ in ADAMW_RULES} == set(ADAMW_ALLOWED) == set(AdamWConfig.__dataclass_fields__)


def test_a_configuration_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        EngineConfig().prefetch_depth = 2  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        AdamWConfig().lr = 1.0  # type: ignore[misc]


def test_fields_are_named_at_the_call() -> None:
    with pytest.raises(TypeError, match="positional"):
        EngineConfig("cpu")  # type: ignore[call-arg]


def test_the_rules_of_knobs_hold_wherever_they_are_turned() -> None:
    check_prefetch_depth(0)
    check_grad_buffers(1)
    with pytest.raises(ValueError, match=r"prefetch_depth must be a whole number ≥ 0 \(1 = double buffering\); got -1"):
        check_prefetch_depth(-1)
    with pytest.raises(ValueError, match=r"grad_buffers must be a whole number ≥ 1; got 0"):
        check_grad_buffers(0)


@pytest.mark.parametrize("rate", [0, -1.0, float("nan"), float("inf"), True, "1GB"])
def test_a_throttled_lane_has_a_positive_rate(rate: Any) -> None:
    with pytest.raises(ValueError, match=r"link_bytes_per_s must be a number > 0 of bytes per second, or None; got"):
        Throttle(link_bytes_per_s=rate)
    with pytest.raises(ValueError, match="update_bytes_per_s must be a number > 0"):
        Throttle(update_bytes_per_s=rate)

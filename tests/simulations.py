"""Small plans to simulate, and rates that a test can reckon with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from transformers import LlamaConfig

from megatrain.anatomy.meta import meta_model
from megatrain.config import EngineConfig
from megatrain.plan import Plan, planned
from megatrain.plan.needs import Subject
from megatrain.schedule import Op
from megatrain.simulate import Rates
from megatrain.simulate.work import Work

ROWS, TOKENS = 3, 8


def tiny_config(layers: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
    )


@cache
def subject(layers: int, dtype: str) -> Subject:
    config = EngineConfig(dtype=dtype)  # type: ignore[arg-type]
    return Subject.of(meta_model(tiny_config(layers)), config, batch=ROWS, sequence=TOKENS)


def tiny_plan(layers: int, *, machine: Any = None, **choices: Any) -> Plan:
    """Of `layers` Llama layers and 3 × 8 tokens; the whole batch at once and double buffering unless said otherwise."""
    config = EngineConfig(**({"dtype": "float32", "offload_activations": False} | choices))
    return planned(subject(layers, config.dtype), config, machine)


def rates(*, link: float = 1e9, adamw: float = 1e9, flops: float = 1e9, **others: Any) -> Rates:
    each = dict.fromkeys(("forward", "backward", "head"), flops)
    return Rates(h2d_bytes_per_s=link, d2h_bytes_per_s=link, adamw_bytes_per_s=adamw, flops_per_s=each, **others)


@dataclass(frozen=True, kw_only=True)
class Seconds(Rates):
    """Every operation takes what the table says, whatever it has to do. "load shell" comes before "load"."""

    table: dict[str, float]

    def seconds(self, op: Op, work: Work) -> float:
        kind = op.kind.value
        named = self.table.get(f"{kind} shell") if op.layer is None else self.table.get(f"{kind} {op.layer}")
        return self.table[kind] if named is None else named


def seconds(**table: float) -> Seconds:
    """Underscores stand for blanks."""
    plain = rates()
    return Seconds(
        h2d_bytes_per_s=plain.h2d_bytes_per_s,
        d2h_bytes_per_s=plain.d2h_bytes_per_s,
        adamw_bytes_per_s=plain.adamw_bytes_per_s,
        flops_per_s=plain.flops_per_s,
        table={name.replace("_", " "): value for name, value in table.items()},
    )

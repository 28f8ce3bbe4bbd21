"""Configurations by name: some that are built in, a folder's, or the hub's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import AutoConfig, GptOssConfig, LlamaConfig

from megatrain.anatomy.hub import loading


def gpt_oss_120b() -> GptOssConfig:
    """openai/gpt-oss-120b: 116.8 B parameters, of which a token meets 5.1 B."""
    return _gpt_oss(layers=36, experts=128)


def gpt_oss_20b() -> GptOssConfig:
    """openai/gpt-oss-20b: 20.9 B parameters, of which a token meets 3.6 B."""
    return _gpt_oss(layers=24, experts=32)


def _gpt_oss(*, layers: int, experts: int) -> GptOssConfig:
    return GptOssConfig(
        hidden_size=2880,
        intermediate_size=2880,
        num_hidden_layers=layers,
        num_local_experts=experts,
        num_experts_per_tok=4,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        sliding_window=128,
        vocab_size=201_088,
        pad_token_id=199_999,
        eos_token_id=200_002,
        use_cache=False,
    )


def llama_8b() -> LlamaConfig:
    """The shape of Llama 3.1 8B."""
    return _llama(hidden=4096, layers=32, heads=32, intermediate=14_336)


def dense_120b() -> LlamaConfig:
    """A dense model of 119.8 B parameters: 88 Llama layers of 1.33 B each."""
    return _llama(hidden=10_240, layers=88, heads=80, intermediate=35_840)


def _llama(*, hidden: int, layers: int, heads: int, intermediate: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        vocab_size=128_256,
        max_position_embeddings=131_072,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=False,
        bos_token_id=128_000,
        eos_token_id=128_001,
        use_cache=False,
    )


PRESETS: Mapping[str, Callable[[], Any]] = {
    "gpt-oss-120b": gpt_oss_120b,
    "gpt-oss-20b": gpt_oss_20b,
    "llama-8b": llama_8b,
    "dense-120b": dense_120b,
}


def named_config(name: str) -> Any:
    """A preset's configuration, or the one in a folder or on the hub (no weights are fetched, no code is run).

    Raises ValueError, in one line, for a name that leads to none.
    """
    if name in PRESETS:
        return PRESETS[name]()
    try:
        with loading(name):
            return as_trained(AutoConfig.from_pretrained(name, trust_remote_code=False))
    except ValueError as error:
        raise ValueError(
            f"no configuration found for {name!r}, which should be one of {', '.join(PRESETS)}, a folder with a "
            f"config.json, or a model of the hub: {error}"
        ) from error


def as_trained(config: Any) -> Any:
    """MXFP4 (gpt-oss) is a way to store weights: they are expanded when they are loaded, and trained so."""
    stored = getattr(config, "quantization_config", None)
    method = stored.get("quant_method") if isinstance(stored, dict) else getattr(stored, "quant_method", None)
    if method == "mxfp4":
        del config.quantization_config
    return config

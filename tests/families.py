"""Every causal-LM family of the installed transformers as a tiny, randomly initialised model.

A configuration is the family's own default, shrunk by attribute name: sizes by a table, per-layer lists to a few of
their layers, so that every kind of layer stays. `OVERRIDES` says what the names cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from itertools import cycle
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

LAYERS = 4
VOCAB = 101
POSITIONS = 128
WINDOW = 8  # a third of the 24 tokens that tests use, so that a window that is ignored shows
NOISE_STD = 0.02
_TRAINED_BUFFERS = ("correction_bias", "expert_bias", "balancing_biases", "layer_scalar")

_FLAGS = {"is_decoder": True, "use_cache": False}

PerLayer = Callable[[int], Any]  # number of layers → value of an attribute that depends on it

_LAYER_COUNTS = {"num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks", "depth"}
_LAYER_COUNTS |= {"decoder_layers", "encoder_layers", "num_decoder_layers", "num_encoder_layers"}

_SIZES_BY_VALUE: Sequence[tuple[int, str]] = (
    (64, "hidden_size d_model n_embd emb_dim embedding_dim dim embed_dim lru_width ple_embed_dim out_hidden_size"),
    (64, "nemo_conv_channels ext_pw_out_channel depthwise_separable_out_channel"),
    (128, "attention_hidden_size mamba_d_ssm hidden_size_global"),
    (96, "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size feed_forward_size d_inner dff"),
    (96, "dim_ff intermediate_size_mlp dense_intermediate_size"),
    (32, "moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size shared_intermediate_size"),
    (32, "shared_experts_intermediate_size moe_shared_expert_intermediate_size attention_head_dim"),
    (48, "embedding_size input_embedding_size output_embedding_size"),
    (40, "q_lora_rank"),
    (24, "kv_lora_rank qk_head_dim pronunciation_embed_dim shape_embed_dim router_hidden_size"),
    (16, "head_dim swa_head_dim kv_channels dim_head d_head v_head_dim linear_head_dim linear_key_head_dim"),
    (16, "linear_value_head_dim index_head_dim qk_nope_head_dim o_lora_rank attention_head_size mamba_head_dim"),
    (16, "query_pre_attn_scalar rel_extent hc_lowrank hidden_size_per_layer_input laurel_rank dim_model_base"),
    (16, "position_bias_num_buckets position_bias_max_distance adapter_rank"),
    (8, "qk_rope_head_dim rotary_dim mamba_n_heads mamba_num_heads state_size ssm_state_size mamba_d_state"),
    (4, "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads"),
    (4, "encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads"),
    (4, "swa_num_attention_heads linear_num_heads linear_num_value_heads index_n_heads index_block_size"),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts time_step_rank mamba_dt_rank"),
    (2, "num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads linear_num_key_heads"),
    (2, "num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts n_group num_expert_group"),
    (2, "n_groups o_groups zero_expert_num index_topk_blocks"),
    (1, "topk_group first_k_dense_replace num_dense_layers moe_layer_start_index n_shared_experts"),
    (VOCAB, "vocab_size decoder_vocab_size vocab_size_per_layer_input pronunciation_vocab_size shape_vocab_size"),
    (VOCAB, "unpadded_vocab_size encoder_hash_byte_group_vocab"),
    (POSITIONS, "max_position_embeddings n_positions n_ctx max_seq_len context_length max_target_positions"),
    (POSITIONS, "max_source_positions"),
    (WINDOW, "sliding_window sliding_window_size local_attention attention_window_size window_size block_size"),
    (WINDOW, "attention_chunk_size index_topk chunk_size mamba_chunk_size local_attention_window_len"),
    (WINDOW, "keep_window_size log_scaling_n_floor floor_scale lsh_attn_chunk_length local_attn_chunk_length"),
)
_SIZES: Mapping[str, int] = {name: size for size, names in _SIZES_BY_VALUE for name in names.split()}


def _cycle(*kinds: Any) -> PerLayer:
    return lambda layers: [kinds[i % len(kinds)] for i in range(layers)]


def _every_other(layers: int) -> list[int]:
    return list(range(1, layers, 2))


def _half_of_each_four(layers: int) -> int:
    return layers // 4 * 2


_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SLIDING_AND_FULL = {"layer_types": _cycle("sliding_attention", "full_attention"), "sliding_window": WINDOW}
_CONV_AND_FULL = {"layer_types": _cycle("conv", "full_attention")}
_LATENT = {"num_key_value_heads": 4, "head_dim": 8}  # multi-head latent attention: head_dim is the rotary part
_LATENT_SHARED_INDEX = {**_LATENT, "indexer_types": _cycle("full", "shared")}

OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "axk1": _LATENT,
    "axk2": _LATENT,
    "bailing_hybrid": _LATENT,
    "bamba": {"attn_layer_indices": _every_other, "mamba_d_head": 16},
    "big_bird": {"attention_type": "original_full"},  # the block-sparse one draws its blocks at random
    "bigbird_pegasus": {"attention_type": "original_full"},
    "blt": {"global_config": {"hidden_size": 128}},
    "cohere_compass_text": {
        **_SLIDING_AND_FULL,
        "num_key_value_heads": 2,
        "rope_parameters": {"sliding_attention": {**_ROPE, "mrope_section": [3, 3, 2]}, "full_attention": None},
    },
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"moe_top_k": 2},
    },
    "deepseek_v2": {**_LATENT, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    "dots1": {
        **_SLIDING_AND_FULL,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "dots3_note_text": {
        "num_key_value_heads": 4,
        "head_dim": 24,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 32,
        "swa_qk_nope_head_dim": 24,
        "swa_v_head_dim": 16,
    },
    "ernie4_5_moe": {"moe_layer_end_index": lambda layers: layers - 1},
    "falcon_h1": {"mamba_d_head": 16},
    "flint": {"mlp_only_layers": [0]},
    "gemma3n_text": {"num_kv_shared_layers": _half_of_each_four},
    "gemma4_text": {"num_kv_shared_layers": _half_of_each_four, "global_head_dim": 32},
    "gemma4_unified_text": {"global_head_dim": 32},
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _LATENT_SHARED_INDEX,
    "gpt_neo": {"attention_types": lambda layers: [[_cycle("global", "local")(layers), 1]]},
    "granitemoehybrid": {"layer_types": _cycle("linear_attention", "full_attention"), "mamba_d_head": 16},
    "hrm_text": {"num_layers_per_stack": None},  # None: num_hidden_layers is the layers of one stack
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "hy_v4": _LATENT_SHARED_INDEX,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": _LATENT,
    "laguna": {**_SLIDING_AND_FULL, "num_attention_heads_per_layer": _cycle(4, 8)},
    "lfm2": {**_CONV_AND_FULL, "full_attn_idxs": None},
    "lfm2_moe": _CONV_AND_FULL,
    "llama4_text": {"moe_layers": _every_other},
    "longcat_flash": _LATENT,
    "mamba2": {"num_heads": 8},
    "mellum": _SLIDING_AND_FULL,
    "minicpm3": _LATENT,
    "minimax_m3_vl_text": {"layer_types": _cycle("full_attention", "minimax_m3_sparse")},
    "ministral": {"head_dim": 16},
    "mllama_text_model": {"cross_attention_layers": [1]},  # skipped where there is no image
    "nemotron": {"num_key_value_heads": 2},
    "qwen2": {**_SLIDING_AND_FULL, "use_sliding_window": True},
    "qwen2_moe": {**_SLIDING_AND_FULL, "use_sliding_window": True, "mlp_only_layers": [0]},
    "qwen3": {**_SLIDING_AND_FULL, "use_sliding_window": True},
    "qwen3_moe": {"mlp_only_layers": [0]},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [1],
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "split_ngram_parts": 2,
        "make_ngram_vocab_size_divisible_by": 1,
        "eos_token_id": 2,
    },
    "reformer": {
        "attn_layers": _cycle("local", "lsh"),
        "axial_pos_shape": [4, 6],
        "axial_pos_embds_dim": [16, 48],
        "hash_seed": 0,
    },
    "xmod": {"default_language": "en_XX"},
    "youtu": _LATENT,
    "zaya": {"layer_types": _cycle("hybrid", "hybrid_sliding"), "sliding_window": WINDOW},
}

_READS_ANOTHER_MODEL = "it drafts for another model and reads that model's keys and values"
_CODEBOOKS = "it predicts several audio codebooks at once, not one stream of tokens"
NOT_BUILDABLE: Mapping[str, str] = {
    "gemma4_assistant": _READS_ANOTHER_MODEL,
    "gemma4_unified_assistant": _READS_ANOTHER_MODEL,
    "git": "its loss skips as many positions as an image has tokens, so that text alone has no loss",
    "musicgen": _CODEBOOKS,
    "musicgen_melody": _CODEBOOKS,
}


class NotBuildable(ValueError):  # noqa: N818 - a verdict on a family, not a fault
    """The family has no tiny text model that trains on input_ids and labels; the message says why."""


def families() -> list[str]:
    """Model types that the installed transformers maps to a causal LM, sorted."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(model_type: str, *, layers: int | None = None, **overrides: Any) -> PretrainedConfig:
    """The family's default configuration, shrunk; that of its text model where it is multimodal.

    `layers` is LAYERS where it is None. Raises NotBuildable, with the reason.
    """
    if model_type in NOT_BUILDABLE:
        raise NotBuildable(f"{model_type} cannot be built: {NOT_BUILDABLE[model_type]}")
    config_class = _text_config_class(CONFIG_MAPPING[model_type])
    return _shrunk(config_class, LAYERS if layers is None else layers, overrides)


def build(model_type: str, *, seed: int = 0, layers: int | None = None, **overrides: Any) -> PreTrainedModel:
    """A tiny float32 model in training mode, without dropout, whose every parameter carries seeded noise.

    `overrides` are attributes of its configuration. The global random state is left as it was.
    """
    config = tiny_config(model_type, layers=layers, **overrides)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None) or _model_class(CONFIG_MAPPING[model_type])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = model_class(config).train()
        _add_noise(model)
    return model


def _model_class(config_class: type[PretrainedConfig]) -> type[PreTrainedModel]:
    model_class: type[PreTrainedModel] = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    return model_class


def _text_config_class(config_class: type[PretrainedConfig]) -> type[PretrainedConfig]:
    """What the text model is configured by: the class itself, or its part for text where that is a causal LM."""
    model_class = _model_class(config_class)
    if issubclass(config_class, model_class.config_class) and not model_class.__name__.endswith("Generation"):
        return config_class
    text_config = config_class().get_text_config(decoder=True)
    trained_alone = type(text_config) in MODEL_FOR_CAUSAL_LM_MAPPING or isinstance(
        text_config, model_class.config_class
    )
    return type(text_config) if trained_alone else config_class


def _add_noise(model: PreTrainedModel) -> None:
    """Move every float parameter, and buffers that training sets, so that no bias is 0 and no norm 1.

    Other buffers follow from the configuration (rotary frequencies, decay masks): noise there would be another model.
    """
    parameters = list(model.parameters())
    set_by_training = [b for name, b in model.named_buffers() if name.endswith(_TRAINED_BUFFERS)]
    for tensor in (t for t in parameters + set_by_training if t.is_floating_point()):
        tensor.data.add_(torch.randn_like(tensor), alpha=NOISE_STD)


def _shrunk(
    config_class: type[PretrainedConfig], layers: int, overrides: Mapping[str, Any] | None = None
) -> PretrainedConfig:
    values = _default_values(config_class)
    kept = _kept_layers(values, layers)
    small = {name: _small(name, value, kept, _height(values)) for name, value in values.items()}
    changed = {name: value for name, value in small.items() if value is not values[name]}
    special = {**OVERRIDES.get(config_class.model_type, {}), **(overrides or {})}
    special = {name: value(layers) if callable(value) else value for name, value in special.items()}
    parts = {
        name: _shrunk(type(value), layers, special.pop(name, None))
        for name, value in values.items()
        if isinstance(value, PretrainedConfig)
    }
    return config_class(**{**changed, **parts, **special})


def _default_values(config_class: type[PretrainedConfig]) -> dict[str, Any]:
    default = config_class()
    names = [f.name for f in fields(config_class)]
    values = {name: vars(default).get(default.attribute_map.get(name, name)) for name in names}
    # Some language models declare no pad token.
    return {"pad_token_id": None, **values} if "vocab_size" in values else values


def _height(values: Mapping[str, Any]) -> int:
    counts = (value for name, value in values.items() if name in _LAYER_COUNTS and isinstance(value, int))
    return next(counts, len(values.get("layers_block_type") or ()))


def _kept_layers(values: Mapping[str, Any], layers: int) -> list[int]:
    """Which layers of the default stack stay: its kinds in turn, so that none is lost and neighbours differ."""
    height = _height(values)
    lists = [value for value in values.values() if isinstance(value, list) and len(value) == height]
    per_layer = [value for value in lists if value != list(range(height))]  # all indices: no kinds
    kinds = [str([value[i] for value in per_layer]) for i in range(height)]
    turns = cycle(dict.fromkeys(kinds))
    kept: list[int] = []
    while len(kept) < layers and (start := kept[-1] + 1 if kept else 0) < height:
        if (kind := next(turns)) in kinds[start:]:
            kept.append(kinds.index(kind, start))
    rest = [i for i in range(height) if i not in kept]
    kept = sorted(kept + rest[: layers - len(kept)])
    return [kept[i % len(kept)] for i in range(layers)] if kept else []


def _small(name: str, value: Any, kept: list[int], height: int) -> Any:
    """What stands for a default value in a tiny configuration; the value itself where no rule knows the name."""
    if isinstance(value, list) and len(value) == height:
        return [_small(name, value[i], kept, height) for i in kept]
    if name.endswith(("_token_id", "_token_index")):
        return _small_token(name, value)
    if name in _FLAGS:
        return _FLAGS[name]
    if isinstance(value, float):
        return 0.0 if "drop" in name or "jitter" in name else value
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    return len(kept) if name in _LAYER_COUNTS else min(value, _SIZES.get(name, value))


def _small_token(name: str, value: Any) -> Any:
    if name == "pad_token_id" and value is None:
        return 0
    first = value[0] if isinstance(value, list) else value
    if first is None or 0 <= first < VOCAB:
        return first
    return 0 if name == "pad_token_id" else VOCAB - 1

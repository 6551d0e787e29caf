"""Small configs: sizes by field name, and a table of exceptions by model type."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import CONFIG_MAPPING

__all__ = ["BOS", "CONTEXT", "EOS", "FIRST", "PAD", "TABLE", "VOCABULARY", "WINDOW", "small"]

PAD, BOS, EOS = 0, 1, 2
FIRST = 32  # the smallest token of prompts; ids below are for special tokens
VOCABULARY = 128
CONTEXT = 128
WINDOW = 5

_HIDDEN, _INNER, _LAYERS, _HEADS, _GROUPS, _HEAD = 32, 48, 2, 4, 2, 8

# The value of each field name, for every config where it is a number.
_NAMED: dict[str, Any] = {
    **dict.fromkeys(
        ("vocab_size", "src_vocab_size", "tgt_vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input",
         "unpadded_vocab_size"),
        VOCABULARY,
    ),
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim", "embedding_size",
         "word_embed_proj_dim", "input_embedding_size", "output_embedding_size",
         "attention_hidden_size", "lru_width"),
        _HIDDEN,
    ),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers",
         "num_decoder_layers", "num_encoder_layers", "num_blocks"),
        _LAYERS,
    ),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads",
         "attention_heads", "encoder_attention_heads", "num_decoder_attention_heads",
         "num_encoder_attention_heads",
         "linear_num_value_heads", "linear_num_heads", "swa_num_attention_heads"),
        _HEADS,
    ),
    **dict.fromkeys(
        ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "linear_num_key_heads",
         "n_groups"),
        _GROUPS,
    ),
    **dict.fromkeys(
        ("head_dim", "d_kv", "dim_head", "attention_head_size", "d_head", "kv_channels", "v_head_dim",
         "qk_nope_head_dim", "qk_rope_head_dim", "index_head_dim", "linear_key_head_dim", "linear_head_dim",
         "linear_value_head_dim", "swa_head_dim", "mamba_d_head", "mamba_head_dim", "global_head_dim"),
        _HEAD,
    ),
    **dict.fromkeys(
        ("intermediate_size", "d_ff", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "d_inner", "dff",
         "dim_ff", "moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size",
         "ffn_hidden_size", "expert_ffn_hidden_size", "dense_intermediate_size", "intermediate_size_mlp",
         "moe_shared_expert_intermediate_size", "feed_forward_size", "prefix_dense_intermediate_size"),
        _INNER,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"), 2
    ),
    "n_group": 2, "num_expert_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "o_lora_rank": 16, "qk_head_dim": 2 * _HEAD,
    "index_n_heads": 2, "index_topk": 8,
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length",
         "max_target_positions", "max_source_positions", "max_encoder_position_embeddings",
         "max_decoder_position_embeddings", "model_max_length"),
        CONTEXT,
    ),
    **dict.fromkeys(
        ("sliding_window", "window_size", "attention_window_size", "sliding_window_size", "local_attention",
         "attention_chunk_size"),
        WINDOW,
    ),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank"), 4),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 4),
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16,
    "num_buckets": 8, "relative_max_distance": 16,
    "rotary_dim": 4, "query_pre_attn_scalar": _HEAD,
}  # fmt: skip

# Set even where a config has None, which means a large default.
_ALWAYS = frozenset({"num_key_value_heads"})

_SPECIAL = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}

_SLIDING = ["sliding_attention", "full_attention"]
_RECURRENT = ["linear_attention", "full_attention"]
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_UNGROUPED = {"num_key_value_heads": _HEADS}  # all heads, where grouped heads are unsupported
_ASSISTANT = {
    "backbone_hidden_size": _HIDDEN, "num_centroids": 8, "centroid_intermediate_top_k": 4,
}  # fmt: skip
_CODEBOOKS = {"pad_token_id": VOCABULARY, "bos_token_id": VOCABULARY, "eos_token_id": None}
_GEMMA4 = {"num_hidden_layers": 4, "layer_types": _SLIDING * 2, "global_head_dim": 2 * _HEAD}

# Exceptions by model type; a dict under the name of a sub-config applies to that.
TABLE: dict[str, dict[str, Any]] = {
    # These need layers of every kind.
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"num_hidden_layers": 4, "layer_types": _RECURRENT * 2},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
              "expert_layer_period": 3, "expert_layer_offset": 2},
    "lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2,
             "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2,
                 "num_dense_layers": 1},
    "llama4_text": {"no_rope_layers": [1, 0, 1, 0], "floor_scale": 4},
    "recurrent_gemma": {"num_hidden_layers": 4, "block_types": ["recurrent", "attention"]},
    "smollm3": {"no_rope_layer_interval": 2},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, **_UNGROUPED},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, **_UNGROUPED,
               "adapter_rank": 8},
    "zaya": {"num_hidden_layers": 4, "layer_types": ["hybrid", "hybrid_sliding"] * 2,
             "sliding_window": WINDOW, "num_experts_per_tok": 1, "router_hidden_size": 16},
    # Sizes that depend on each other.
    "blt": {"num_hidden_layers": 2,  # read where caches are built
            "encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3, 4],
            "encoder_config": {"hidden_size_global": 2 * _HIDDEN, **_UNGROUPED},
            "decoder_config": {"hidden_size_global": 2 * _HIDDEN, **_UNGROUPED},
            "global_config": {"hidden_size": 2 * _HIDDEN, **_UNGROUPED}, "patcher_config": _UNGROUPED},
    "cpmant": {"prompt_length": 4, "prompt_types": 4, "segment_types": 4, "position_bias_num_buckets": 8,
               "position_bias_max_distance": 16},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
             "ffn_config": {"moe_top_k": 2, "hidden_size": _HIDDEN}},
    "falcon_h1": {"mamba_d_ssm": 2 * _HIDDEN},
    "mamba2": {"num_heads": 8},
    "led": {"attention_window": 4},
    "longt5": {"local_radius": 3, "global_block_size": 4},
    "longcat_flash": {"zero_expert_num": 2},
    "minimax": {"block_size": 4},
    "minimax_m3_vl_text": {"index_block_size": 4, "index_topk_blocks": 2},
    "pegasus_x": {"block_size": 4, "num_global_tokens": 4},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": _HEAD,
                       "indexer_budget": 8, "indexer_compress_ratio": 2, "hc_lowrank": 8,
                       "ple_layer_ids": [1], "ple_embed_dim": _HIDDEN, "heads_per_ngram": 2,
                       "ngram_vocab_size_base": 64, "make_ngram_vocab_size_divisible_by": 8,
                       "split_ngram_parts": 4},
    "reformer": {"attn_layers": ("local", "lsh"), "axial_pos_shape": (8, 16), "axial_pos_embds_dim": (16, 16),
                 "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 32, "num_buckets": 4, "hash_seed": 0},
    "roc_bert": {"pronunciation_vocab_size": VOCABULARY, "shape_vocab_size": VOCABULARY,
                 "pronunciation_embed_dim": 8, "shape_embed_dim": 8},
    "xlstm": {"hidden_size": 128},  # its own sizes are rounded up to 64 in one place and not in another
    # None by default, but not in real models.
    "cohere_compass_text": {"num_hidden_layers": 4, "layer_types": _SLIDING * 2,
                            "rope_parameters": {kind: {**_ROPE, "mrope_section": [2, 1, 1]}
                                                for kind in _SLIDING}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "dots3_note_text": {
        "sliding_window": WINDOW, "shared_experts_intermediate_size": _INNER,
        "swa_num_attention_heads": _HEADS, "swa_num_key_value_heads": _HEADS, "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16, "swa_head_dim": 2 * _HEAD, "swa_qk_nope_head_dim": _HEAD,
        "swa_v_head_dim": _HEAD,
    },
    "encoder-decoder": {
        "encoder": {"model_type": "bert"},
        "decoder": {"model_type": "bert", "is_decoder": True, "add_cross_attention": True},
    },
    "hunyuan_v1_dense": {"head_dim": _HEAD},
    "hunyuan_v1_moe": {"head_dim": _HEAD},
    "ministral": {"head_dim": _HEAD, "num_hidden_layers": 4, "layer_types": _SLIDING * 2},
    "xmod": {"default_language": "en_XX"},
    # Token ids that are beyond the vocabulary, or clash with ours.
    "musicgen_decoder": _CODEBOOKS,
    "musicgen_melody_decoder": _CODEBOOKS,
    "whisper": {"begin_suppress_tokens": (4, 5)},
    "xlm": {"mask_token_id": 5},
    # Scales that make the outputs of small models constant.
    "cohere": {"logit_scale": 1.0},
    "cohere2": {"logit_scale": 1.0},
    "cohere2_moe": {"logit_scale": 1.0},
    "minicpm3": {"dim_model_base": _HIDDEN, "scale_emb": 1},
    "t5": {"scale_decoder_outputs": False},
    "umt5": {"scale_decoder_outputs": False},
    "inkling_text": {"logits_mup_width_multiplier": 1.0, "rel_extent": 16},
    # Gemma's own ways.
    "gemma3n_text": {"num_kv_shared_layers": 2, "laurel_rank": 4, "hidden_size_per_layer_input": 8,
                     "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0]},
    "gemma4_text": {**_GEMMA4, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2},
    "gemma4_unified_text": _GEMMA4,
    "gemma4_assistant": {
        **_ASSISTANT,
        "text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0,
                        "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 4},
    },
    "gemma4_unified_assistant": {
        **_ASSISTANT, "text_config": {"model_type": "gemma4_unified_text", "num_kv_shared_layers": 4},
    },
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    },
}  # fmt: skip


def small(kind: type[Any], given: Mapping[str, Any] | None = None, decoder: bool = False) -> Any:
    """A small config of a class, with the fields of `given` unchanged.

    `decoder` selects the causal form of a class that can also be an encoder.
    """
    given = {**TABLE.get(kind.model_type, {}), **(given or {})}
    parts = dict(getattr(kind, "sub_configs", {}))
    fields: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(kind)}
    chosen: dict[str, Any] = {}
    for name in sorted(set(fields) - set(given) - set(parts)):
        value = fields[name]
        if name in _SPECIAL:
            chosen[name] = _SPECIAL[name]
        elif name in _NAMED and (name in _ALWAYS or _is_int(value)):
            chosen[name] = _NAMED[name]
        elif name.endswith(("_token_id", "_token_index")) and _is_int(value) and value >= FIRST:
            chosen[name] = 4 + len([taken for taken in chosen if taken.endswith(("_id", "_index"))])
        elif name == "is_decoder" and decoder:
            chosen[name] = True
        elif name == "tie_word_embeddings":
            chosen[name] = False  # a random model with tied embeddings repeats its last token
    if "kv_lora_rank" in fields and "num_key_value_heads" not in given:
        chosen["num_key_value_heads"] = _HEADS  # the compressed state is shared by all heads already
    for name, part in parts.items():
        some = given.get(name)
        if isinstance(some, Mapping) or (name not in given and bool(getattr(part, "model_type", ""))):
            chosen[name] = small(_class(part, some), some)
    chosen |= {name: value for name, value in given.items() if name not in chosen and name != "model_type"}
    return kind(**_with_layer_types(kind, chosen, set(fields)))


def _class(part: type[Any], given: Mapping[str, Any] | None) -> type[Any]:
    """The class of a sub-config; where it may be any, the one its model type names."""
    named = (given or {}).get("model_type")
    return CONFIG_MAPPING[named] if named else part


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _with_layer_types(kind: type[Any], chosen: dict[str, Any], fields: set[str]) -> dict[str, Any]:
    """Lists of layer types, each type twice: attention alternates, feed-forward comes in blocks."""
    count = next((name for name in ("num_hidden_layers", "num_layers") if name in fields), None)
    list_fields = [name for name in ("layer_types", "mlp_layer_types") if name in fields]
    if count is None or not list_fields:
        return chosen
    layers = len(chosen["layer_types"]) if "layer_types" in chosen else chosen[count]
    found = {
        name: list(dict.fromkeys(getattr(kind(), name) or ())) for name in list_fields if name not in chosen
    }
    mixing, feeding = found.get("layer_types", []), found.get("mlp_layer_types", [])
    if len(mixing) > 1:
        layers = 2 * len(mixing)
    if mixing:
        chosen["layer_types"] = _repeat_types(mixing, layers)
    if feeding:
        chosen["mlp_layer_types"] = [feeding[layer * len(feeding) // layers] for layer in range(layers)]
    return chosen | {count: layers}


def _repeat_types(kinds: Sequence[str], count: int) -> list[str]:
    return [kinds[index % len(kinds)] for index in range(count)]

"""A llama of transformers written as a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
BLOCK_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
UNKNOWN, CONTROL, BYTE, NORMAL = 2, 3, 6, 1


def write_llama(path: Path, model: Any, tokenizer: Any, *, quantized: bool = False) -> None:
    """Write a model and a sentencepiece tokenizer with bytes; `quantized`: matrices in Q8_0."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, tokenizer)
    for name, weight in model.state_dict().items():
        values = _half_split(name, weight.numpy().astype(np.float32), config)
        if quantized and values.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(_name(name), quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, tokenizer: Any) -> None:
    vocabulary = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    special = {tokenizer.bos_token: CONTROL, tokenizer.eos_token: CONTROL, tokenizer.unk_token: UNKNOWN}
    kinds = [special.get(token, BYTE if token.startswith("<0x") else NORMAL) for token in tokens]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(index) for index in range(len(tokens))])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_unk_token_id(tokenizer.unk_token_id)
    writer.add_add_bos_token(True)


def _name(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{BLOCK_NAMES[rest.removesuffix('.weight')]}.weight"


def _half_split(name: str, values: Any, config: Any) -> Any:
    """The rows of queries and keys in GGUF's order of rotated pairs."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for part, count in heads.items():
        if part in name:
            halves = values.reshape(count, 2, values.shape[0] // count // 2, *values.shape[1:])
            return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
    return values

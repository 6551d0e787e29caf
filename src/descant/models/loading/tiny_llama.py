"""`toy`: a tiny Llama with random weights, to try a method in seconds."""

from __future__ import annotations

from typing import Any, Final

import torch
from transformers import LlamaConfig, LlamaForCausalLM

# Logits are sharp enough that rounding decides no choice, and flat enough that sampling varies.
_OUTPUT_SCALE: Final = 3.0
_WEIGHT_SCALE: Final = 2.0
BOS, EOS, PAD = 1, 2, 0


def toy(vocab_size: int = 61, seed: int = 0) -> Any:
    """A tiny Llama with weights from `seed`; torch's global generator is unused. Greedy text soon repeats."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    with torch.random.fork_rng(devices=[]):
        model: Any = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    output = model.get_output_embeddings().weight
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:  # a norm
                parameter.copy_(1 + 0.1 * noise)
            else:
                is_query_or_key = name.endswith(("q_proj.weight", "k_proj.weight"))
                inner_scale = 1.0 if is_query_or_key else _WEIGHT_SCALE
                scale = _OUTPUT_SCALE if parameter is output else inner_scale
                parameter.copy_(scale * noise / parameter.shape[1] ** 0.5)
    return model.eval()

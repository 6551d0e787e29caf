"""A tiny random T5."""

from __future__ import annotations

from typing import Any

import torch
import transformers

__all__ = ["random_t5"]


def random_t5() -> Any:
    """A tiny random T5 that does not always say the same."""
    config = transformers.T5Config(
        vocab_size=61, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        model.lm_head.weight.normal_()
    return model

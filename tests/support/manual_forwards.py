"""Forwards that a user runs by hand over one cache, and the models for which caches differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.support import tiny_models
from tests.support.tiny_models import ARCHITECTURES, Architecture, Tiny, pad, prompts

_GEMMA, _LLAMA = ARCHITECTURES["gemma"], ARCHITECTURES["llama"]

MORE: dict[str, Architecture] = {
    a.name: a
    for a in (
        replace(
            _GEMMA,
            name="gemma2",
            config={
                **_GEMMA.config,
                "model_type": "gemma2",
                "architectures": ["Gemma2ForCausalLM"],
                "num_hidden_layers": 4,
                "sliding_window": 6,
                "query_pre_attn_scalar": 16,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
        ),
        # Heads of 32, which a group of the quantizing packages fits.
        replace(_LLAMA, name="wide", config={**_LLAMA.config, "head_dim": 32, "hidden_size": 64}),
        Architecture(
            "mamba",
            {
                "model_type": "mamba",
                "architectures": ["MambaForCausalLM"],
                "vocab_size": 97,
                "hidden_size": 32,
                "intermediate_size": 64,
                "state_size": 4,
                "num_hidden_layers": 2,
                "conv_kernel": 4,
                "expand": 2,
                "time_step_rank": 2,
                "use_bias": False,
                "use_conv_bias": True,
                "hidden_act": "silu",
                "tie_word_embeddings": False,
            },
            bos=1,
            eos=2,
            pad=0,
        ),
    )
}


def loader(root: Path, tiny: Callable[..., Tiny]) -> Callable[..., Tiny]:
    """`get(name)`: a tiny model, one of MORE or of the usual ones; keywords go to `from_pretrained`."""
    loaded: dict[Any, Tiny] = {}

    def get(name: str, **options: Any) -> Tiny:
        if name not in MORE:
            return tiny(name, **options)
        key = name, *sorted(options.items())
        if key not in loaded:
            with mock.patch.dict(ARCHITECTURES, MORE):
                if not (root / name).exists():
                    tiny_models.build(name, root / name)
                loaded[key] = tiny_models.load(name, root / name, **options)
        return loaded[key]

    return get


def level(model: Tiny, length: int, rows: int = 3, seed: int = 3) -> Tensor:
    """Rows of one length [R, L]."""
    return torch.tensor(prompts(model.arch, (length,) * rows, seed=seed))


def padded(model: Tiny, lengths: Sequence[int], seed: int = 3) -> tuple[Tensor, Tensor]:
    """Ids and mask of rows padded at the left [R, L]."""
    return pad(prompts(model.arch, lengths, seed=seed), model.pad, "left")


def feeds(
    ids: Tensor, widths: Sequence[int], mask: Tensor | None = None, first: int = 0
) -> list[dict[str, Tensor]]:
    """What forwards of so many tokens each are fed, one after the other, from column `first` on."""
    found, at = [], first
    for width in widths:
        feed = {"input_ids": ids[:, at : at + width]}
        if mask is not None:
            feed |= {
                "attention_mask": mask[:, : at + width],
                "position_ids": (mask.cumsum(1) - 1).clamp(min=0)[:, at : at + width],
            }
        found.append(feed)
        at += width
    return found


@torch.no_grad()
def stepped(
    model: Any, cache: Any, fed: Sequence[dict[str, Tensor]], past: str = "past_key_values", **more: Any
) -> Tensor:
    """The logits [R, L, V] of forwards over one cache."""
    said = []
    for feed in fed:
        out = model(**feed, **more, **{past: cache}, use_cache=True)
        assert out[past] is cache
        said.append(out.logits)
    return torch.cat(said, 1)


@torch.no_grad()
def whole(model: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """The logits [R, L, V] of one forward without a cache."""
    return model(**feeds(ids, [ids.shape[1]], mask)[0], use_cache=False).logits

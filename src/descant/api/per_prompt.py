"""Arguments of a call with an entry for each prompt."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from descant.decoding.guidance.cfg import NEGATIVE_PROMPT_KEY
from descant.errors import InputError

__all__ = ["adapter_names_of", "negative_prompts"]


def adapter_names_of(given: Any, num_prompts: int) -> list[str | None]:
    """The adapter of each prompt."""
    names = [given] * num_prompts if given is None or isinstance(given, str) else given
    if not isinstance(names, list | tuple) or not all(one is None or isinstance(one, str) for one in names):
        raise InputError("adapter_names", "must be a name, or a list with a name for each prompt", given)
    if len(names) != num_prompts:
        raise InputError("adapter_names", f"must have a name for each of the {num_prompts} prompts", given)
    return list(names)


def negative_prompts(ids: Any, mask: Any) -> list[Tensor] | None:
    """Negative prompts [B, L] as rows without padding."""
    if ids is None:
        if mask is not None:
            do = "leave it out"
            raise InputError(
                "negative_prompt_attention_mask", f"has no use without `{NEGATIVE_PROMPT_KEY}`", mask, do
            )
        return None
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point() or not ids.numel():
        raise InputError(NEGATIVE_PROMPT_KEY, "must be [batch, length] of ids", ids)
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != ids.shape):
        raise InputError(
            "negative_prompt_attention_mask", f"must have the shape of `{NEGATIVE_PROMPT_KEY}`", mask
        )
    return [row if mask is None else row[mask[index].bool()] for index, row in enumerate(ids)]

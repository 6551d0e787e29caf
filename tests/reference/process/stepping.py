"""Forwards that a user runs by hand over one cache; on the reference's side of the pipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers


def made(name: str, given: Mapping[str, Any], net: Any) -> Any:
    """The cache of that name; `config` True is the model's, and dtypes come by name."""
    arguments = dict(given)
    if name == "EncoderDecoderCache":
        return transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())
    if arguments.get("config"):
        arguments["config"] = net.config
    if "dtype" in arguments:
        arguments["dtype"] = getattr(torch, arguments["dtype"])
    if "cache_config" in arguments:
        settings = dict(arguments["cache_config"])
        settings["compute_dtype"] = getattr(torch, settings.get("compute_dtype", "float16"))
        arguments["cache_config"] = transformers.QuantizedCacheConfig(**settings)
    kind = getattr(transformers, name, None) or getattr(transformers.cache_utils, name)
    return kind(**arguments)


def logits(
    net: Any, cache: Any, feeds: Sequence[Mapping[str, Any]], past: str = "past_key_values"
) -> list[torch.Tensor]:
    """The logits of several consecutive forwards over one cache."""
    return [net(**feed, **{past: cache}, use_cache=True, return_dict=True).logits for feed in feeds]

"""What tells a model from another whose keys and values are not its own."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor

__all__ = ["fingerprint"]

# What of a config changes from load to load, or says how to run it and not what it is.
_IGNORED_CONFIG_KEYS = frozenset({
    "_name_or_path", "transformers_version", "use_cache", "torch_dtype", "dtype", "attn_implementation",
    "_attn_implementation_autoset", "output_attentions", "output_hidden_states", "return_dict",
    "architectures",
})  # fmt: skip

_SAMPLES_PER_WEIGHT = 32  # numbers looked at of every weight


@torch.no_grad()
def fingerprint(model: Any) -> dict[str, str]:
    """A model's kind, config, dtype, and a sample of all its weights, each as a short text.

    Two fine-tunes of one model have the same config and other weights; all weights would take too long.
    """
    model = getattr(model, "model", model) if hasattr(model, "traits") else model
    config: Any = getattr(model, "config", None)
    named = getattr(model, "named_parameters", None)
    told = {"kind": type(model).__name__}
    if hasattr(config, "to_dict"):
        kept = {name: value for name, value in config.to_dict().items() if name not in _IGNORED_CONFIG_KEYS}
        told["config"] = _digest(json.dumps(kept, sort_keys=True, default=str).encode())
    if callable(named):
        told["dtype"] = str(getattr(model, "dtype", "")).removeprefix("torch.")
        told["weights"] = _digest(b"".join(_weight_sample(name, weight) for name, weight in sorted(named())))
    return told


def _weight_sample(name: str, weight: Tensor) -> bytes:
    """Some numbers of a weight, spread over all of it."""
    flat = weight.detach().flatten()
    step = max(1, flat.numel() // _SAMPLES_PER_WEIGHT)
    some = flat[::step][:_SAMPLES_PER_WEIGHT].float() if weight.device.type != "meta" else torch.zeros(0)
    return f"{name}{tuple(weight.shape)}".encode() + some.cpu().numpy().tobytes()


def _digest(told: bytes) -> str:
    return hashlib.sha256(told).hexdigest()[:32]

"""Fingerprint of a model, to check that saved keys and values belong to it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor

__all__ = ["fingerprint"]

# Config keys that change from load to load, or affect how the model runs but not what it computes.
_IGNORED_CONFIG_KEYS = frozenset({
    "_name_or_path", "transformers_version", "use_cache", "torch_dtype", "dtype", "attn_implementation",
    "_attn_implementation_autoset", "output_attentions", "output_hidden_states", "return_dict",
    "architectures",
})  # fmt: skip

_SAMPLES_PER_WEIGHT = 32  # values hashed per weight


@torch.no_grad()
def fingerprint(model: Any) -> dict[str, str]:
    """The class, config digest, dtype and weights digest of a model.

    Fine-tunes of one model share the config, so weights are included; they are sampled, to be fast.
    """
    model = getattr(model, "model", model) if hasattr(model, "traits") else model
    config: Any = getattr(model, "config", None)
    named = getattr(model, "named_parameters", None)
    parts = {"kind": type(model).__name__}
    if hasattr(config, "to_dict"):
        settings = {
            name: value for name, value in config.to_dict().items() if name not in _IGNORED_CONFIG_KEYS
        }
        parts["config"] = _digest(json.dumps(settings, sort_keys=True, default=str).encode())
    if callable(named):
        parts["dtype"] = str(getattr(model, "dtype", "")).removeprefix("torch.")
        parts["weights"] = _digest(b"".join(_weight_sample(name, weight) for name, weight in sorted(named())))
    return parts


def _weight_sample(name: str, weight: Tensor) -> bytes:
    """Evenly spaced values of a weight."""
    flat = weight.detach().flatten()
    step = max(1, flat.numel() // _SAMPLES_PER_WEIGHT)
    sample = flat[::step][:_SAMPLES_PER_WEIGHT].float() if weight.device.type != "meta" else torch.zeros(0)
    return f"{name}{tuple(weight.shape)}".encode() + sample.cpu().numpy().tobytes()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]

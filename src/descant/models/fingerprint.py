"""Fingerprint of a model, to check that saved keys and values belong to it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from descant.errors import InputError, format_value
from descant.kv_cache.weight_versions import adapter_states, weight_versions
from descant.models.wrapped_model import unwrap_model

__all__ = ["check_fingerprint", "fingerprint"]

# Config keys that change from load to load, or affect how the model runs but not what it computes.
_IGNORED_CONFIG_KEYS = frozenset({
    "_name_or_path", "transformers_version", "use_cache", "torch_dtype", "dtype", "attn_implementation",
    "_attn_implementation_autoset", "output_attentions", "output_hidden_states", "return_dict",
    "architectures",
})  # fmt: skip

# Words of 8 bytes are summed in this many columns; a prime, so that rows of a matrix that trade places do
# not keep their columns.
_NUM_COLUMNS = 1021
_WORD_BYTES = 8


_known: WeakKeyDictionary[torch.nn.Module, tuple[tuple[object, ...], dict[str, str]]] = WeakKeyDictionary()


def check_fingerprint(model: Any, made_by: Mapping[str, Any], argument: str, *, cheap: bool) -> None:
    """Raise unless a model has this fingerprint.

    `cheap`: read the weights only if torch has counted changes since they were last read.
    """
    network = _network(model)
    own = (
        _known_fingerprint(network) if cheap and isinstance(network, torch.nn.Module) else fingerprint(model)
    )
    key = next((name for name in {**own, **made_by} if own.get(name) != made_by.get(name)), None)
    if key is None:
        return
    name, made = key if key in own else format_value(key), format_value(made_by.get(key))
    do = "load the model as it was, or call prefill() again"
    if key == "weights":
        do = "the weights have changed, or an earlier version wrote the cache: call prefill() again"
    if argument == "model":
        raise InputError(
            argument, f"must be the one that made the cache, whose {name} is {made}", own.get(key), do
        )
    must = f"must be made by this model, whose {name} is {format_value(own.get(key))}"
    raise InputError(argument, must, made_by.get(key), do)


def _known_fingerprint(network: torch.nn.Module) -> dict[str, str]:
    """The fingerprint of a network as last computed, if its weights have not changed since."""
    versions, parts = _known.get(network, (None, {}))
    return parts if versions == weight_versions(network) else fingerprint(network)


def _network(model: Any) -> Any:
    """The torch module of a model."""
    model = getattr(model, "model", model) if hasattr(model, "traits") else model
    return unwrap_model(model)


@torch.no_grad()
def fingerprint(model: Any) -> dict[str, str]:
    """The class, config digest, dtype and weights digest of a model.

    Fine-tunes of one model share the config, so weights are included, and all of each weight: an edit may
    change a single row. This reads the weights once, as one step of decoding does.
    """
    model = _network(model)
    config: Any = getattr(model, "config", None)
    parts = {"kind": type(model).__name__}
    if hasattr(config, "to_dict"):
        settings = {
            name: value for name, value in config.to_dict().items() if name not in _IGNORED_CONFIG_KEYS
        }
        parts["config"] = _digest(json.dumps(settings, sort_keys=True, default=str).encode())
    if callable(getattr(model, "named_parameters", None)):
        parts["dtype"] = str(getattr(model, "dtype", "")).removeprefix("torch.")
        parts["weights"] = _digest(b"".join(_weight_digest(*named) for named in _named_weights(model)))
    if adapters := adapter_states(model):
        parts["adapters"] = ", ".join(adapters)
    if isinstance(model, torch.nn.Module):
        _known[model] = weight_versions(model), parts
    return dict(parts)


def _named_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The parameters and saved buffers of a model by name, in order; quantized weights may be buffers."""
    weights: dict[str, Tensor] = dict(model.named_parameters())
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            # A buffer that is not saved is computed from the config, and some change while a model runs.
            if buffer is not None and name not in module._non_persistent_buffers_set:
                weights[f"{path}.{name}" if path else name] = buffer
    for name in sorted(weights):
        weight = weights[name]
        yield name, weight if weight.device.type != "meta" else _offloaded_weight(model, name, weight)


def _offloaded_weight(model: Any, name: str, weight: Tensor) -> Tensor:
    """A weight that accelerate keeps elsewhere until its module runs; the placeholder if there is none."""
    path, _, own_name = name.rpartition(".")
    hook = getattr(model.get_submodule(path), "_hf_hook", None)
    for part in getattr(hook, "hooks", (hook,)):
        weights_map = getattr(part, "weights_map", None)
        if weights_map is not None and own_name in weights_map:
            stored: Tensor = weights_map[own_name]
            return stored
    return weight


def _weight_digest(name: str, weight: Tensor) -> bytes:
    """Name, shape, dtype and checksum of a weight, the same on every device."""
    header = f"{name} {tuple(weight.shape)} {weight.dtype}".encode()
    if hasattr(weight, "full_tensor"):  # a shard of a weight that is spread over processes
        weight = weight.full_tensor()
    names = weight.__tensor_flatten__()[0] if hasattr(weight, "__tensor_flatten__") else None
    if names is not None:  # a quantized weight made of several tensors
        return header + b"".join(_weight_digest(part, getattr(weight, part)) for part in names)
    return header + _checksum(weight.detach())


def _checksum(weight: Tensor) -> bytes:
    """The sums of the words of a weight by column; exact, so that they do not depend on the device."""
    if weight.device.type == "meta" or not weight.numel():
        return b""
    flat = weight.as_subclass(Tensor).contiguous().view(-1).view(torch.uint8)
    stride = _NUM_COLUMNS * _WORD_BYTES
    whole = len(flat) // stride * stride
    if flat.storage_offset() % _WORD_BYTES:
        flat = flat.clone()
    words = flat[:whole].view(torch.int64).view(-1, _NUM_COLUMNS)
    return words.sum(0).cpu().numpy().tobytes() + flat[whole:].cpu().numpy().tobytes()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]

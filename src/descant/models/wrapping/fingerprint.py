"""The fingerprint of a model, with which kept keys and values are checked, and reports of its changes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from descant.errors import InputError, format_value
from descant.kv_cache.model_state import ModelState, adapter_settings, last_change, note_change
from descant.models.wrapping.wrapped_model import unwrap_model

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


# Libraries whose hooks serve how a model is spread over devices and processes, not what it computes.
_HOOK_LIBRARIES = frozenset({"torch", "transformers", "accelerate", "deepspeed", "peft"})

_known: WeakKeyDictionary[torch.nn.Module, tuple[ModelState, dict[str, str]]] = WeakKeyDictionary()


def weights_changed(model: Any) -> None:
    """Report that a model computes something else from now on, so that what is kept of it is not used again.

    Prefix caches drop their blocks, caches of `prefill` made before are refused, and prepacked layers use
    their plain weights. Most changes are noticed without it: what torch counts as an in-place change, a
    replaced weight, steps of optimizers that change whole matrices, and other adapters, hooks or modes. Call
    it after changes that torch does not count and that leave most of a weight as it was (one row through
    `.data`, a fused optimizer on embeddings alone), and after changes of what is no tensor of the model (a
    number or a function in a module, what a hook refers to, a hook of the whole model that changes its
    inputs). A backward pass through a forward before it
    raises, as after `torch.autograd.graph.increment_version` of the weights.
    """
    network = _network(model)
    if not isinstance(network, torch.nn.Module):
        do = "report each of several models by itself"
        raise InputError("model", "must be a torch module", type(model).__name__, do)
    tensors = (*network.parameters(), *network.buffers())
    torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])
    note_change(network)


def check_prompt_cache(cache: Any, model: Any, argument: str, adapters: Iterable[str | None]) -> None:
    """Raise for a cache of `prefill` that another model made, this one before it changed, or other adapters.

    `adapters` are those that the requests name.
    """
    made_by, network = getattr(cache, "model_fingerprint", None), _network(model)
    if not made_by or not isinstance(network, torch.nn.Module):
        return
    if last_change(network) > cache.made_at:
        must = "must be made by this model after its last `weights_changed`"
        raise InputError(argument, must, type(cache).__name__, "call prefill() again")
    check_fingerprint(model, made_by, argument, cheap=True)
    for name in {*adapters} - {None}:
        if not all(active in (f"{name} False", f"{[name]} False") for active, _ in adapter_settings(network)):
            must = f"must be made with the adapter {name!r}, which is not the active one"
            raise InputError(argument, must, made_by.get("adapters"), "leave one of them out")


def check_fingerprint(model: Any, made_by: Mapping[str, Any], argument: str, *, cheap: bool) -> None:
    """Raise unless a model has this fingerprint.

    `cheap`: read the weights only if their state has changed since they were last read.
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
    """The fingerprint of a network as last computed, if it has not changed since."""
    state, parts = _known.get(network, (None, {}))
    return parts if state == ModelState(network) else fingerprint(network)


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
        values = {name: value for name, value in config.to_dict().items() if name not in _IGNORED_CONFIG_KEYS}
        parts["config"] = _digest(json.dumps(values, sort_keys=True, default=str).encode())
    if callable(getattr(model, "named_parameters", None)):
        parts["dtype"] = str(getattr(model, "dtype", "")).removeprefix("torch.")
        parts["weights"] = _digest(b"".join(_weight_digest(*named) for named in _named_weights(model)))
    if not isinstance(model, torch.nn.Module):
        return parts
    if settings := list(adapter_settings(model)):
        parts["adapters"] = ", ".join(sorted({active for active, _ in settings}))
        parts["adapter settings"] = _digest(repr([each for _, each in settings]).encode())
    if hooks := ", ".join(_hook_names(model)):
        parts["forward hooks"] = hooks
    _known[model] = ModelState(model), parts
    return dict(parts)


def _hook_names(model: torch.nn.Module) -> Iterator[str]:
    """The hooks that a user has put around the forwards of modules, each with its place.

    Those of the model itself do not count: they see its inputs and logits, not its hidden states.
    """
    for path, module in list(model.named_modules())[1:]:
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            name = getattr(hook, "__qualname__", type(hook).__qualname__)
            if str(getattr(hook, "__module__", "")).partition(".")[0] not in _HOOK_LIBRARIES:
                yield f"{name} at {path}"


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

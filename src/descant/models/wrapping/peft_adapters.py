"""PEFT adapters by request: rows of different adapters share a forward (Hu et al. 2021, LoRA)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from torch import nn

from descant.errors import InputError

ADAPTER_NAME_KEY: Final = "adapter_name"  # the request input that holds it
BASE_MODEL: Final = "__base__"  # PEFT's name of the model without an adapter

# LoRA layers whose weights are no matrices that rows pass one by one.
_UNMIXABLE_LAYERS: Final = frozenset({"MultiheadAttention", "ParamWrapper"})


@dataclass(eq=False)
class PeftAdapters:
    """The adapters of the running requests, applied in PEFT's own layers as a mixed batch.

    A request without a name has the active adapter of the model.
    """

    _model: nn.Module
    # Whether a request names an adapter: PEFT chooses by line of a batch, and packed rows share one.
    in_use: bool = False
    _names: dict[int, str] = field(default_factory=dict)
    _layers: dict[str, Any] = field(default_factory=dict)  # by path; read when the first name is checked

    def has_layer(self, module: nn.Module) -> bool:
        """Whether a module is a layer with adapters."""
        return any(layer is module for layer in self._layers.values())

    def check(self, name: Any) -> None:
        """Raise unless rows of this adapter can share a forward with rows of others."""
        layers = self._layers = _adapter_layers(self._model)
        if not layers:
            do = "add one with peft or model.load_adapter, or leave it out"
            raise InputError(ADAPTER_NAME_KEY, "must be None for a model without PEFT adapters", name, do)
        known = sorted({adapter for layer in layers.values() for adapter in layer._get_available_adapters()})
        if name not in (*known, BASE_MODEL):
            must = f"must be one of {', '.join(map(repr, known))}, or {BASE_MODEL!r} for none"
            raise InputError(ADAPTER_NAME_KEY, must, name)
        for path, layer in layers.items():
            reason = _unmixable_reason(layer)
            if reason is not None:
                do = "leave it out and use model.set_adapter"
                raise InputError(ADAPTER_NAME_KEY, f"must be None while {path} {reason}", name, do)

    def add_requests(self, requests: Sequence[int], names: Sequence[str | None]) -> None:
        """Register requests with the names of their adapters."""
        for name in dict.fromkeys(names):  # each once: a check walks all modules
            if name is not None:
                self.check(name)
        self._names |= {
            request: name for request, name in zip(requests, names, strict=True) if name is not None
        }
        self.in_use = bool(self._names)

    def remove_requests(self, requests: Sequence[int]) -> None:
        """Drop requests."""
        for request in requests:
            self._names.pop(request, None)
        self.in_use = bool(self._names)

    @contextmanager
    def applied(self, requests: Sequence[int]) -> Iterator[None]:
        """A block whose forward has one row for each of these requests, each with its adapter."""
        # An unconditional row has the number -1 - n and the adapter of request n.
        names = [self._names.get(request if request >= 0 else -1 - request) for request in requests]
        if not any(names):
            yield
            return
        with ExitStack() as stack:
            for path, layer in self._layers.items():
                # `_unmixable_reason` has found one at most.
                active = next(iter(layer.active_adapters), BASE_MODEL)
                hook = partial(_route_rows, path, [active if name is None else name for name in names])
                handle = layer.register_forward_pre_hook(hook, with_kwargs=True)
                stack.callback(handle.remove)
            yield


def _route_rows(
    path: str, names: list[str], _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a layer, with the adapter of each row."""
    if len(args[0]) != len(names):
        must = f"must be None, since {path} does not see the rows of a batch one by one"
        raise InputError(ADAPTER_NAME_KEY, must, names, "leave it out and use model.set_adapter")
    return args, {**kwargs, "adapter_names": names}


def _adapter_layers(model: nn.Module) -> dict[str, Any]:
    """The layers of a model that have adapters, by path."""
    peft: Any = sys.modules.get("peft.tuners.tuners_utils")
    others: Any = sys.modules.get("peft.utils.other")
    if peft is None or others is None:  # without PEFT no layer has one
        return {}
    kinds = (peft.BaseTunerLayer, others.AuxiliaryTrainingWrapper)
    return {path: module for path, module in model.named_modules() if isinstance(module, kinds)}


def _unmixable_reason(layer: Any) -> str | None:
    """Why rows of different adapters cannot pass a layer together; None: they can."""
    kind = type(layer).__name__
    if not hasattr(layer, "_mixed_batch_forward") or kind in _UNMIXABLE_LAYERS:
        return f"is a {type(layer).__module__}.{kind}, which PEFT runs with one adapter at a time"
    if layer.disable_adapters:
        return "has its adapters disabled"
    if getattr(layer, "merged", False):
        return "has an adapter merged into its weights (model.unmerge_adapter() undoes it)"
    if any(getattr(layer, "use_dora", {}).values()) or getattr(layer, "lora_variant", None):
        return "has a variant of LoRA, which PEFT runs with one adapter at a time"
    if len(layer.active_adapters) > 1:
        return f"has {len(layer.active_adapters)} active adapters"
    return None

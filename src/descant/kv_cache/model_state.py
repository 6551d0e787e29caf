"""`ModelState`: the state of a model at one time, with which kept keys and values are checked."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

_OUTPUT_HOOKS: Final = "transformers.utils.output_capturing"
_MAX_WHOLE: Final = 1024  # numbers of a tensor that is sampled whole
_NUM_SAMPLES: Final = 32  # numbers of a larger one; their product with one less must be below `_MAX_WHOLE`

# By model the number of its last change that a caller has reported.
_reported: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
_last_number = 0


def note_change(model: nn.Module) -> None:
    """Record that a caller has changed what a model computes with."""
    global _last_number  # noqa: PLW0603 - the clock of all models
    _last_number += 1
    _reported[model] = _last_number


def last_change(model: nn.Module) -> int:
    """The number of the last recorded change of a model; 0: there is none."""
    return _reported.get(model, 0)


def changes_so_far() -> int:
    """The number of the last recorded change of any model."""
    return _last_number


class ModelState:
    """The state that a model computes with: weights, buffers, hooks, adapters and training mode.

    A tensor counts by identity, address, number of in-place changes, and some of its numbers. The numbers
    show what torch does not count: steps of fused optimizers on a CPU, and writes through `.data`. To compare
    two states takes a wait for each device and type of the weights.
    """

    def __init__(self, model: Any) -> None:
        self._marks: list[object] = []
        self._samples: list[Tensor] = []
        if not isinstance(model, nn.Module):
            return
        self._marks.append(last_change(model))
        every: Any = nn.modules.module
        self._marks += (*every._global_forward_pre_hooks, *every._global_forward_hooks)
        samples: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        num_training = 0
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for own in _module_dicts(model):
                num_training += own["training"]
                self._add_code(own)
                for tensors in (own["_parameters"], own["_buffers"]):
                    for tensor in tensors.values():
                        if tensor is not None:
                            self._add_tensor(tensor, samples)
            self._marks += (num_training, *samples)
            # As bytes: a number that is not one does not equal itself.
            self._samples += [torch.cat(parts).view(torch.uint8) for parts in samples.values()]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModelState) or self._marks != other._marks:
            return False
        return all(map(torch.equal, self._samples, other._samples))

    __hash__ = None  # type: ignore[assignment]

    def _add_code(self, own: dict[str, Any]) -> None:
        """Add the hooks of a module, a `forward` of its own, and the settings of its adapters."""
        for hooks in (own["_forward_pre_hooks"], own["_forward_hooks"]):
            if hooks:  # the number of a hook is never given again
                self._marks += [number for number, hook in hooks.items() if not collects_states(hook)]
        forward = own.get("forward")
        if forward is not None and not _module_of(forward).startswith("descant."):  # faster layers are equal
            self._marks.append(id(forward))
        if "_active_adapter" in own:
            self._marks.append(_layer_settings(own))

    def _add_tensor(
        self, tensor: Tensor, samples: dict[tuple[torch.dtype, torch.device], list[Tensor]]
    ) -> None:
        """Add a weight or a buffer."""
        self._marks += (id(tensor), 0 if tensor.is_inference() else tensor._version)
        if hasattr(tensor, "__tensor_flatten__"):  # it is made of several
            for name in tensor.__tensor_flatten__()[0]:
                self._add_tensor(getattr(tensor, name), samples)
            return
        try:
            self._marks.append(tensor.data_ptr())
            sample = sample_numbers(tensor)
        except RuntimeError:  # it has no memory of its own, or not now
            return
        if sample is not None:
            samples.setdefault((tensor.dtype, tensor.device), []).append(sample)


def sample_numbers(tensor: Tensor) -> Tensor | None:
    """Some numbers of a tensor as a view [N], all of a small one; None: they cannot be read."""
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_quantized or not tensor.numel():
        return None
    span = tensor.numel()
    if not tensor.is_contiguous():
        span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    if span <= _MAX_WHOLE:
        return tensor.as_strided((span,), (1,))
    # An odd step does not stay in a column of a matrix.
    return tensor.as_strided((_NUM_SAMPLES,), ((span - 1) // _NUM_SAMPLES | 1,))


def _module_dicts(model: nn.Module) -> Iterator[dict[str, Any]]:
    """The attributes of each module; torch's own walk makes their names too and takes three times as long."""
    stack, seen = [model], {id(model)}
    while stack:
        own = stack.pop().__dict__
        yield own
        for part in own["_modules"].values():
            if part is not None and id(part) not in seen:
                seen.add(id(part))
                stack.append(part)


def adapter_settings(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Of each layer with PEFT adapters: which are active and whether they are disabled, and all settings."""
    for own in _module_dicts(model) if "peft" in sys.modules else ():
        # As they are stored: PEFT's properties search base classes of torch.
        if "_active_adapter" in own:
            yield f"{own['_active_adapter']} {own.get('_disable_adapters')}", _layer_settings(own)


def _layer_settings(own: dict[str, Any]) -> str:
    """The choice and the weights of the adapters of a layer."""
    names: Iterable[str] = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")
    return repr([own.get(name) for name in names])


def collects_states(hook: Any) -> bool:
    """Whether a hook of transformers collects hidden states: it changes no output, and comes by itself."""
    return _module_of(hook) == _OUTPUT_HOOKS


def _module_of(code: Any) -> str:
    """The Python module of a function, or of the class of an object that can be called."""
    return str(getattr(code, "__module__", ""))

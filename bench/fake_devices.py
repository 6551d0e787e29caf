"""Devices that this machine does not have: tensors that compute on the CPU but have distinct devices.

A pretended tensor reports a device of the type that torch leaves to others to build. What torch refuses on
hardware is refused here: operands on two devices, a tensor of the host among them unless it is a number or an
index, and reading its memory from the host without a copy. Nothing is learnt of speed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

if not hasattr(torch._C, "_acc"):
    pytest.skip("this torch has no device guard that Python implements", allow_module_level=True)

aten = torch.ops.aten

FIRST, SECOND = torch.device("privateuseone:0"), torch.device("privateuseone:1")


class _Guard(torch._C._acc.DeviceGuard):  # type: ignore[misc]
    """The guard that torch uses for the current device; it does nothing."""

    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


class _Module:
    """What torch looks for under the name of the device's type."""

    @staticmethod
    def is_available() -> bool:
        return False  # must not be chosen

    @staticmethod
    def _lazy_init() -> None:
        """Nothing to set up."""

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        """Chance comes from the CPU."""

    @staticmethod
    def device_count() -> int:
        return 2

    @staticmethod
    def current_device() -> int:
        return 0


@functools.cache
def _guard() -> None:
    """Set the guard of the devices, which torch keeps until the process ends."""
    torch._C._acc.register_python_privateuseone_device_guard(_Guard())


# Copies are what crosses devices; an index may lie on the host, since its values are sent along.
_COPIES = {aten.copy_.default, aten._to_copy.default}
_INDEXED = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}


class Pretended(Tensor):
    """A tensor on a pretended device: `held` has its values, on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, device: torch.device) -> Pretended:
        made: Pretended = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=device,
        )
        made.held = held
        return made

    def __repr__(self, **_: Any) -> str:
        return f"Pretended({self.held!r}, {self.device})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


class _Factories(TorchDispatchMode):
    """Catches what is made on a pretended device out of nothing, or moved to one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


class _Literals(TorchFunctionMode):
    """Makes tensors of Python numbers on the host and moves them, which torch does out of our sight."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            return func(*args, **{**kwargs, "device": "cpu"}).to(kwargs["device"])
        if func is Tensor.tolist and isinstance(args[0], Pretended):
            return args[0].cpu().tolist()
        if func is Tensor.__getitem__ and isinstance(args[1], tuple):
            args = (args[0], tuple(torch.tensor(one) if isinstance(one, list) else one for one in args[1]))
        return func(*args, **kwargs)


@contextmanager
def pretended() -> Iterator[None]:
    """Pretended devices exist inside and nowhere else, since torch seeds all registered devices."""
    _guard()
    torch._register_device_module("privateuseone", _Module)
    try:
        with _Literals(), _Factories():
            yield
    finally:
        del torch.privateuseone
        del sys.modules["torch.privateuseone"]


def placed(module: torch.nn.Module, where: Callable[[str], torch.device]) -> torch.nn.Module:
    """The module with each parameter and buffer on the device that `where` gives for its name."""
    homes: dict[int, torch.nn.Parameter] = {}  # tied parameters stay tied
    for name, child in module.named_modules():
        for key, value in list(child._parameters.items()):
            if value is not None:
                whole = f"{name}.{key}".lstrip(".")
                if id(value) not in homes:
                    homes[id(value)] = torch.nn.Parameter(
                        Pretended(value.detach(), where(whole)), requires_grad=False
                    )
                child._parameters[key] = homes[id(value)]
        for key, value in list(child._buffers.items()):
            if value is not None:
                child._buffers[key] = Pretended(value, where(f"{name}.{key}"))
    return module


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)]
    homes = {one.device for one in given if isinstance(one, Pretended)}
    target = kwargs.get("device")
    if target is not None:
        target = torch.device(target)
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if func not in _COPIES:
        _refuse_strangers(func, given, homes, args)
    home = args[0].device if func is aten.copy_.default else next(iter(homes), None)
    if target is not None:
        home = target
    owners = {id(one.held): one for one in given if isinstance(one, Pretended)}

    def bare(one: Any) -> Any:
        return one.held if isinstance(one, Pretended) else one

    answer = func(*tree_map(bare, args), **tree_map(bare, kwargs))

    def dressed(one: Any) -> Any:
        if not isinstance(one, Tensor) or home is None or home.type != "privateuseone":
            return one
        return owners.get(id(one)) if id(one) in owners else Pretended(one, home)

    return tree_map(dressed, answer)


def _refuse_strangers(func: Any, given: list[Tensor], homes: set[torch.device], args: Any) -> None:
    """Raise for operands on more than one device, as hardware does."""
    if not homes:
        return
    indices = {id(one) for one in tree_flatten(args[1])[0]} if func in _INDEXED else set()
    hosts = [one for one in given if not isinstance(one, Pretended) and one.ndim and id(one) not in indices]
    if len(homes) > 1 or hosts:
        found = sorted(str(home) for home in homes) + ["cpu"] * bool(hosts)
        raise RuntimeError(f"{func}: expected all tensors on the same device, got {' and '.join(found)}")

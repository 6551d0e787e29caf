"""Keys and values that are not laid out until somebody insists."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

__all__ = ["AttentionCall", "KVProxy", "sdpa"]

_ALL = slice(None)


class AttentionCall(NamedTuple):
    """What scaled_dot_product_attention is asked for beside keys and values."""

    query: Tensor  # [N, Hq, T, D]
    mask: Tensor | None = None  # [N or 1, Hq or 1, T, S], of bits or to be added
    dropout: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False  # several query heads share a head of keys


class KVProxy:
    """The keys or values [N, H, S, D] of some rows as a cache holds them.

    torch's attention asks the cache itself (`attend`), which can then do better than lay everything out, or
    see who looks at what; for anything else it is the tensor that `dense` makes. So it can be given to any
    model, of which nothing has to be changed.
    """

    def __init__(self, shape: Sequence[int], like: Tensor) -> None:
        self.shape = torch.Size(shape)
        self.dtype, self.device = like.dtype, like.device
        self.head_repeats = 1  # how often every head is repeated, beside the next one
        self._dense: Tensor | None = None

    def build_tensor(self) -> Tensor:
        """All of it as a tensor [N, H, S, D], without repeats."""
        raise NotImplementedError

    def attend(self, values: KVProxy, asked: AttentionCall) -> Tensor:
        """What the query sees in these keys and those values [N, Hq, T, D]."""
        return sdpa(self.materialize(), values.materialize(), asked)

    def materialize(self) -> Tensor:
        """All of it as a tensor [N, H, S, D]."""
        if self._dense is None:
            plain = self.build_tensor()
            self._dense = plain if self.head_repeats == 1 else plain.repeat_interleave(self.head_repeats, 1)
        return self._dense

    @property
    def ndim(self) -> int:
        """How many dimensions it has."""
        return len(self.shape)

    def dim(self) -> int:
        """How many dimensions it has."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """Its shape, or one side of it."""
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        # How heads of keys are repeated for the query heads that share them, which need not be done.
        if isinstance(index, tuple) and len(index) == 5 and index[2] is None:
            rest = (*index[:2], *index[3:])
            return _RepeatedKVProxy(self) if all(part == _ALL for part in rest) else self.materialize()[index]
        return self.materialize()[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_dense":
            raise AttributeError(name)
        return getattr(self.materialize(), name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            query, keys, values, asked = _bind_sdpa_args(*args, **kwargs)
            if isinstance(keys, KVProxy) and isinstance(values, KVProxy) and isinstance(query, Tensor):
                grouped = asked.enable_gqa or keys.head_repeats > 1
                return keys.without_repeats().attend(
                    values.without_repeats(), asked._replace(enable_gqa=grouped)
                )
        return func(*tree_map(_as_tensor, tuple(args)), **tree_map(_as_tensor, dict(kwargs)))

    def without_repeats(self) -> KVProxy:
        """The same without repeats."""
        return self if self.head_repeats == 1 else self.with_repeats(1)

    def with_repeats(self, count: int) -> KVProxy:
        """The same with every head so many times."""
        other = copy.copy(self)
        heads = self.shape[1] // self.head_repeats
        other.shape = torch.Size((self.shape[0], heads * count, *self.shape[2:]))
        other.head_repeats, other._dense = count, None
        return other


def _make_operator(name: str) -> Any:
    def operate(self: KVProxy, *others: Any) -> Any:
        return getattr(self.materialize(), name)(*(_as_tensor(one) for one in others))

    return operate


# Python looks these up on the class, past `__getattr__`.
for _name in ("add", "sub", "mul", "truediv", "matmul"):
    setattr(KVProxy, f"__{_name}__", _make_operator(f"__{_name}__"))
    setattr(KVProxy, f"__r{_name}__", _make_operator(f"__r{_name}__"))
for _name in ("neg", "pow", "abs", "iter"):
    setattr(KVProxy, f"__{_name}__", _make_operator(f"__{_name}__"))


class _RepeatedKVProxy:
    """Lazy keys with a dimension for repeats put in [N, H, 1, S, D], or already widened."""

    def __init__(self, lazy: KVProxy, count: int = 1) -> None:
        self._proxy, self._head_repeats = lazy, count

    def expand(self, *sizes: int) -> Any:
        rows, heads, length, size = self._proxy.shape
        if (
            len(sizes) == 5
            and self._head_repeats == 1
            and sizes[:2] + sizes[3:] == (rows, heads, length, size)
        ):
            return _RepeatedKVProxy(self._proxy, sizes[2])
        return self._materialize().expand(*sizes)

    def reshape(self, *sizes: int) -> Any:
        rows, heads, length, size = self._proxy.shape
        if sizes == (rows, heads * self._head_repeats, length, size) and self._proxy.head_repeats == 1:
            return self._proxy.with_repeats(self._head_repeats)
        return self._materialize().reshape(*sizes)

    def _materialize(self) -> Tensor:
        rows, heads, length, size = self._proxy.shape
        return self._proxy.materialize()[:, :, None].expand(rows, heads, self._head_repeats, length, size)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._materialize(), name)


def sdpa(keys: Tensor, values: Tensor, asked: AttentionCall) -> Tensor:
    """torch's own attention."""
    return torch.nn.functional.scaled_dot_product_attention(
        asked.query,
        keys,
        values,
        attn_mask=asked.mask,
        dropout_p=asked.dropout,
        is_causal=asked.is_causal,
        scale=asked.scale,
        enable_gqa=asked.enable_gqa,
    )


def _bind_sdpa_args(  # noqa: PLR0913 - torch's own arguments
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Any, Any, Any, AttentionCall]:
    """The arguments of scaled_dot_product_attention, however they were given."""
    return query, key, value, AttentionCall(query, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _as_tensor(thing: Any) -> Any:
    return thing.materialize() if isinstance(thing, KVProxy) else thing

"""Stand-ins for key and value tensors that intercept attention, so a cache need not build the tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

V = TypeVar("V", bound=Iterable[Any])

# The index by which transformers' `repeat_kv` adds a dimension for the repeats: `kv[:, :, None, :, :]`.
_REPEAT_KV_INDEX = (slice(None), slice(None), None, slice(None), slice(None))


class AttentionCall(NamedTuple):
    """The arguments of one scaled_dot_product_attention call besides keys and values."""

    query: Tensor  # [N, Hq, T, D]
    mask: Tensor | None = None  # [N or 1, Hq or 1, T, S], boolean or additive
    dropout: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False  # several query heads share one key head


class KVProxy:
    """Stand-in for the keys or values [N, H, S, D] of one forward.

    torch's scaled_dot_product_attention calls `attend`, which a cache may compute without the full tensor.
    Every other use sees the tensor of `materialize`, so models need no changes. The head repeats of grouped
    query attention (transformers' `repeat_kv`) are only counted: `attend` always gets unrepeated heads.
    Subclasses must stay traceable by torch.compile.
    """

    def __init__(self, shape: Sequence[int], like: Tensor) -> None:
        self.shape = torch.Size(shape)
        self.dtype, self.device = like.dtype, like.device
        self.head_repeats = 1  # how often each head is repeated; repeats of a head are adjacent
        self.num_queries: int | None = None  # of the forward, where the model's view says it
        self._materialized: Tensor | None = None

    def build_tensor(self) -> Tensor:
        """The full tensor [N, H, S, D], without head repeats."""
        raise NotImplementedError

    def attend(self, values: KVProxy, call: AttentionCall) -> Tensor:
        """The attention output [N, Hq, T, E] over these keys and those values, both without repeats."""
        return sdpa(self.materialize(), values.materialize(), call)

    def scores(self, query: Tensor) -> Tensor:
        """The product [N, Hq, T, S] of queries [N, Hq, T, D] with these keys."""
        return query @ self.materialize().mT

    def materialize(self) -> Tensor:
        """The full tensor [N, H, S, D], with head repeats."""
        if self._materialized is None:
            tensor = self.build_tensor()
            if self.head_repeats > 1:
                tensor = tensor.repeat_interleave(self.head_repeats, 1)
            self._materialized = tensor
        return self._materialized

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def dim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """The shape, or one dimension of it."""
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        if self.head_repeats == 1 and isinstance(index, tuple) and index == _REPEAT_KV_INDEX:
            return _ExpandedKVProxy(self)
        return self.materialize()[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_materialized":
            raise AttributeError(name)
        return getattr(self.materialize(), name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            keys, values, call = _bind_sdpa_args(*args, **kwargs)
            if isinstance(keys, KVProxy) and isinstance(values, KVProxy) and isinstance(call.query, Tensor):
                if keys.num_queries == 1 and call.query.shape[2] > 1:
                    return keys._attend_by_group(values, call)
                grouped = call.enable_gqa or keys.head_repeats > 1
                call = call._replace(enable_gqa=grouped)
                return keys.with_repeats(1).attend(values.with_repeats(1), call)
        return func(*tree_map(_as_tensor, tuple(args)), **tree_map(_as_tensor, dict(kwargs)))

    def _attend_by_group(self, values: KVProxy, call: AttentionCall) -> Tensor:
        """The output [N, H, G, E] of one query, whose heads transformers 5.23 passes as positions of a group.

        `attend` gets them as heads of one position [N, H * G, 1, D].
        """
        query, mask = call.query, call.mask
        if mask is not None and mask.shape[1] * mask.shape[2] > 1:
            mask = mask.reshape(len(mask), -1, 1, mask.shape[3])
        heads = query.reshape(len(query), -1, 1, query.shape[3])
        out = self.attend(values, call._replace(query=heads, mask=mask, enable_gqa=True))
        return out.reshape(*query.shape[:3], out.shape[3])

    def with_repeats(self, count: int) -> KVProxy:
        """The same keys or values with every head `count` times."""
        if count == self.head_repeats:
            return self
        other = copy.copy(self)
        heads = self.shape[1] // self.head_repeats
        other.shape = torch.Size((self.shape[0], heads * count, *self.shape[2:]))
        other.head_repeats, other._materialized = count, None
        return other


def _make_operator(name: str) -> Any:
    def operate(self: KVProxy, *others: Any) -> Any:
        return getattr(self.materialize(), name)(*(_as_tensor(other) for other in others))

    return operate


# Python looks operators up on the class and bypasses `__getattr__`.
for _name in ("add", "sub", "mul", "truediv", "matmul"):
    setattr(KVProxy, f"__{_name}__", _make_operator(f"__{_name}__"))
    setattr(KVProxy, f"__r{_name}__", _make_operator(f"__r{_name}__"))
for _name in ("neg", "pow", "abs", "iter"):
    setattr(KVProxy, f"__{_name}__", _make_operator(f"__{_name}__"))


def with_queries(visible: V, count: int) -> V:
    """The keys and values of a layer, which know the number of queries of their forward."""
    for part in visible:
        if isinstance(part, KVProxy):
            part.num_queries = count
    return visible


class TensorKVProxy(KVProxy):
    """A proxy over keys or values that exist as a tensor; a subclass changes how they are attended."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor.shape, tensor)
        self.tensor = tensor

    def build_tensor(self) -> Tensor:
        """The tensor itself."""
        return self.tensor


class _ExpandedKVProxy:
    """The intermediate [N, H, repeats, S, D] of transformers' `repeat_kv`: index, `expand`, `reshape`."""

    def __init__(self, proxy: KVProxy, count: int = 1) -> None:
        self._proxy, self._head_repeats = proxy, count

    def expand(self, *sizes: int) -> Any:
        rows, heads, slots, size = self._proxy.shape
        if (
            len(sizes) == 5
            and self._head_repeats == 1
            and sizes[:2] + sizes[3:] == (rows, heads, slots, size)
        ):
            return _ExpandedKVProxy(self._proxy, sizes[2])
        return self._materialize().expand(*sizes)

    def reshape(self, *sizes: int) -> Any:
        rows, heads, slots, size = self._proxy.shape
        if sizes == (rows, heads * self._head_repeats, slots, size):
            return self._proxy.with_repeats(self._head_repeats)
        return self._materialize().reshape(*sizes)

    def _materialize(self) -> Tensor:
        rows, heads, slots, size = self._proxy.shape
        return self._proxy.materialize()[:, :, None].expand(rows, heads, self._head_repeats, slots, size)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._materialize(), name)


class TransposedKVProxy:
    """Keys [N, H, D, S] as transposed by eager attention; a product with queries calls `KVProxy.scores`."""

    def __init__(self, keys: KVProxy) -> None:
        self._keys = keys

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._keys.materialize().mT, name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (torch.matmul, Tensor.matmul, Tensor.__matmul__) and len(args) == 2 and not kwargs:
            query, keys = args
            if isinstance(keys, cls) and isinstance(query, Tensor):
                return keys._keys.scores(query)
        tensors = [part._keys.materialize().mT if isinstance(part, cls) else part for part in args]
        return func(*tensors, **(kwargs or {}))


def sdpa(keys: Tensor, values: Tensor, call: AttentionCall) -> Tensor:
    """torch's scaled_dot_product_attention."""
    return torch.nn.functional.scaled_dot_product_attention(
        call.query,
        keys,
        values,
        attn_mask=call.mask,
        dropout_p=call.dropout,
        is_causal=call.is_causal,
        scale=call.scale,
        enable_gqa=call.enable_gqa,
    )


def _bind_sdpa_args(  # noqa: PLR0913 - the signature of scaled_dot_product_attention
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Any, Any, AttentionCall]:
    """Keys, values and the other arguments of scaled_dot_product_attention, positional or by keyword."""
    return key, value, AttentionCall(query, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _as_tensor(value: Any) -> Any:
    return value.materialize() if isinstance(value, KVProxy) else value

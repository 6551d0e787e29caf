"""Attention of one new token per row on a CPU: one kernel that writes the cache and reads it once.

torch's scaled_dot_product_attention is made for long queries. With one token per row it spends most of its
time outside of its products, and rows of different length need a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import resources
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import Array
from descant.kv_cache.attention.packed_span import PackedSpan
from descant.kv_cache.stores.dense import DenseStore
from descant.kv_cache.stores.paged import PagedStore

# The type of keys, values and weights in C++. All is computed in float.
_SCALARS = {torch.float32: "float", torch.bfloat16: "c10::BFloat16"}
_SHARED = "kv_cache/kernels/shared.cpp"


@cache
def load_decode_kernel(
    source: str, arguments: Sequence[str], dtype: torch.dtype
) -> Callable[..., None] | None:
    """The compiled function `kernel` of a file in the package, whose `Scalar` is the type.

    None if there is no kernel for the type, or torch cannot compile for the CPU.
    """
    if dtype not in _SCALARS:
        return None
    scalar = f"#include <c10/util/BFloat16.h>\nusing Scalar = {_SCALARS[dtype]};\n"
    texts = [(resources.files("descant") / name).read_text("utf-8") for name in (_SHARED, source)]
    try:
        from torch._inductor.codecache import CppPythonBindingsCodeCache

        kernel: Any = CppPythonBindingsCodeCache.load_pybinding(arguments, "\n".join((scalar, *texts)))
    except Exception:  # no compiler, or another interface of torch
        return None
    return kernel if callable(kernel) else None


_VECTORS = ("Scalar*", *("const Scalar*",) * 3)  # the output; queries, keys and values


@cache
def _scale_tensor(scale: float) -> Tensor:
    """A scale as kernels take it: before torch 2.13 its bindings know integers and addresses only."""
    return torch.tensor(scale, dtype=torch.float32)


class KernelAttention:
    """The attention of all layers in one forward that feeds one token per row of a store."""

    store_class: ClassVar[type]
    source: ClassVar[str]  # the file of the kernel
    memory_arguments: ClassVar[tuple[str, ...]]  # in C++, behind output, queries, keys and values

    def __init__(self, store: Any, span: PackedSpan) -> None:
        self._store, self._span = store, span
        self._layouts: dict[tuple[int, ...], Tensor] = {}  # most layers have the same

    @classmethod
    def kernel(cls, dtype: torch.dtype) -> Callable[..., None] | None:
        """The kernel for keys of a type, compiled the first time; None: there is none."""
        return load_decode_kernel(cls.source, (*_VECTORS, *cls.memory_arguments, "const float*"), dtype)

    @classmethod
    def serves(cls, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether there is a kernel for such keys and values; it is compiled the first time."""
        return device.type == "cpu" and cls.kernel(dtype) is not None

    @classmethod
    def create(cls, store: object, span: PackedSpan) -> Self | None:
        """None if the kernel does not serve such a store or forward."""
        return cls(store, span) if type(store) is cls.store_class and span.is_decode else None

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float | None
    ) -> Tensor | None:
        """Write the keys and values [1, H, P, D] of a layer; the attention output [1, P, Hq, E].

        There may be more tokens than rows; their output is 0. None: the kernel does not serve such tensors.
        """
        dtype, scale = query.dtype, query.shape[3] ** -0.5 if scale is None else scale
        for vectors in (query, key, value):
            if vectors.device.type != "cpu" or vectors.dtype is not dtype or vectors.stride(3) != 1:
                return None
        if scale <= 0 or (kernel := self.kernel(dtype)) is None:
            return None
        memory = self._memory(query, key, value, layer)
        if memory is None:
            return None
        num_rows, (_, num_heads, num_tokens, _) = len(self._span.rows), query.shape
        create = query.new_empty if num_rows == num_tokens else query.new_zeros
        out = create((1, num_tokens, num_heads, value.shape[3]))
        kernel(out, query, key, value, *memory, _scale_tensor(scale))
        return out

    def _memory(self, query: Tensor, key: Tensor, value: Tensor, layer: int) -> Sequence[Any] | None:
        """The further arguments of the kernel; None: the store has blocks of another kind."""
        raise NotImplementedError

    def _layout(self, query: Tensor, key: Tensor, value: Tensor, *strides: int) -> Tensor:
        """Sizes, and strides in elements of the vectors and of a store: `Layout` in shared.cpp."""
        heads = key.shape[1]
        sizes = (len(self._span.rows), heads, query.shape[1] // heads, key.shape[3], value.shape[3])
        fed = [size for vectors in (query, key, value) for size in (vectors.stride(2), vectors.stride(1))]
        layout = (*sizes, *fed, *(strides or (0, 0, 0, 0)))
        if layout not in self._layouts:
            self._layouts[layout] = torch.tensor(layout)
        return self._layouts[layout]


class DecodeAttention(KernelAttention):
    """The attention on a dense store."""

    store_class = DenseStore
    source = "kv_cache/kernels/decode_attention.cpp"
    memory_arguments = (*("Scalar*",) * 2, *("const int64_t*",) * 3)

    def __init__(self, store: DenseStore, span: PackedSpan) -> None:
        super().__init__(store, span)
        self._rows, self._starts = (
            torch.from_numpy(np.ascontiguousarray(index, dtype=np.int64))
            for index in (span.rows, span.starts)
        )

    def _memory(self, query: Tensor, key: Tensor, value: Tensor, layer: int) -> Sequence[Any] | None:
        keys, values = self._store.blocks_for_write(layer, key, value, self._span)
        for block in (keys, values):  # they may come from a cache that a user gave
            if block.dtype is not query.dtype or block.stride()[2:] != (block.shape[3], 1):
                return None
        strides = keys.stride(0), keys.stride(1), values.stride(0), values.stride(1)
        return keys, values, self._rows, self._starts, self._layout(query, key, value, *strides)


class _Plan(NamedTuple):
    """The writes and reads of a forward: a line for each record, as the kernel takes them."""

    slab_ids: list[int]  # those that the records number
    writes: Tensor  # [N, 3] slab, slot, and the number of slots of the row
    parts: Tensor  # [P, 4] what one thread attends for a key head: row, stop row, block, stop block
    blocks: Tensor  # [B, 6] slab, first slot in it, first position, size, reader, stop reader
    readers: Tensor  # the row of each reader of each block


class PagedDecodeAttention(KernelAttention):
    """The attention on a paged store."""

    store_class = PagedStore
    source = "kv_cache/kernels/paged_decode_attention.cpp"
    memory_arguments = (*("const int64_t*",) * 6, "int64_t")
    _plan: _Plan | None = None

    def _memory(self, query: Tensor, key: Tensor, value: Tensor, layer: int) -> Sequence[Any] | None:
        if self._plan is None:
            self._plan = _plan_blocks(self._store, self._span, key.shape[1])
        slab_ids, *records = self._plan
        pool = self._store.pool
        slabs: list[int] = []  # `Slab` in C++: addresses, and strides of the heads
        for slab_id in slab_ids:
            slab = pool.slabs[slab_id]
            keys = slab.ensure_capacity(slab.keys, layer, key, pool.block_size)
            values = slab.ensure_capacity(slab.values, layer, value, pool.block_size)
            for block in (keys, values):  # they may come from a saved cache
                if block.dtype is not key.dtype or block.device != key.device or not block.is_contiguous():
                    return None
            slabs += (keys.data_ptr(), values.data_ptr(), keys.stride(0), values.stride(0))
        layout = self._layout(query, key, value)
        return torch.tensor(slabs), *records, layout, len(self._plan.parts)


def _plan_blocks(store: PagedStore, span: PackedSpan, num_heads: int) -> _Plan:
    """The plan of a forward; blocks are in the order of parts and positions."""
    pool, stops = store.pool, span.starts + span.widths
    write_slabs, write_slots = store.reserve_slots(span)
    size, num_blocks = pool.block_size, -(-stops // pool.block_size)
    table = store.block_ids(span.rows)[:, : int(num_blocks.max())]  # [N, M]
    parts = _split_rows(table[:, 0], num_heads)  # [N]
    rows, columns = np.nonzero(np.arange(table.shape[1]) < num_blocks[:, None])
    read = table[rows, columns]
    order_key = (parts[rows] * table.shape[1] + columns) * len(pool.ref_counts) + read
    order = np.argsort(order_key, kind="stable")
    rows, columns, read, order_key = rows[order], columns[order], read[order], order_key[order]
    first = np.flatnonzero(np.diff(order_key, prepend=-1))  # the first reader of each block
    ids, positions = read[first], columns[first] * size
    slab_ids, slab_index = np.unique(np.concatenate((pool.slab_of[ids], write_slabs)), return_inverse=True)
    index = np.arange(int(parts[-1]) + 2)
    row_bounds, block_bounds = np.searchsorted(parts, index), np.searchsorted(parts[rows[first]], index)
    return _Plan(
        slab_ids.tolist(),
        _table((slab_index[len(ids) :], write_slots, stops)),
        _table((row_bounds[:-1], row_bounds[1:], block_bounds[:-1], block_bounds[1:])),
        _table(
            (
                slab_index[: len(ids)],
                pool.index_in_slab[ids] * size,
                positions,
                np.minimum(size, stops[rows[first]] - positions),
                first,
                np.append(first[1:], len(rows)),
            )
        ),
        _table((rows,)),
    )


def _table(columns: Sequence[Array]) -> Tensor:
    """A line of 64-bit integers for each record."""
    return torch.from_numpy(np.stack(columns, 1).astype(np.int64, copy=False))


def _split_rows(first_blocks: Array, num_heads: int) -> Array:
    """The part of each row [N]: neighbours that share their first block, split where threads have no work."""
    index = np.arange(len(first_blocks))
    wanted = min(-(-torch.get_num_threads() // num_heads), len(index))
    starts = np.diff(first_blocks, prepend=-1) != 0
    if int(starts.sum()) < wanted:
        starts |= index % -(-len(index) // wanted) == 0
    return np.cumsum(starts) - 1

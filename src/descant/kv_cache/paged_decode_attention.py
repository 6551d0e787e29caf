"""Attention of one new token per row of a paged store on a CPU: rows read the blocks that they share once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import Array
from descant.kv_cache.decode_kernel import load_decode_kernel
from descant.kv_cache.packed_span import PackedSpan
from descant.kv_cache.paged import PagedStore

__all__ = ["PagedDecodeAttention"]

# For each part of the rows and key head: write the new keys and values, then block by block the scores of all
# queries that read it, the softmax of each query, and block by block the weighted sums of the values.
_SOURCE = """
// Adds to C vectors of the outputs of Q queries the weighted values of a block; the sums stay in registers.
template <int Q, int C>
static inline void add_weighted(
    float* const* outs, float* const* scores, int64_t at, const Scalar* v, int64_t e, int64_t size, int64_t E)
{
    Vec sums[Q][C];
    for (int j = 0; j < Q; j++)
        for (int c = 0; c < C; c++) sums[j][c] = Vec::loadu(outs[j] + e + c * W);
    for (int64_t s = 0; s < size; s++) {
        const Scalar* one = v + s * E + e;
        for (int c = 0; c < C; c++) {
            const Vec part = load(one + c * W);
            for (int j = 0; j < Q; j++) sums[j][c] = at::vec::fmadd(Vec(scores[j][at + s]), part, sums[j][c]);
        }
    }
    for (int j = 0; j < Q; j++)
        for (int c = 0; c < C; c++) sums[j][c].store(outs[j] + e + c * W);
}

template <int Q>
static inline void add_block(
    float* const* outs, float* const* scores, int64_t at, const Scalar* v, int64_t size, int64_t E)
{
    int64_t e = 0;
    for (; e + 4 * W <= E; e += 4 * W) add_weighted<Q, 4>(outs, scores, at, v, e, size, E);
    for (; e + W <= E; e += W) add_weighted<Q, 1>(outs, scores, at, v, e, size, E);
    for (; e < E; e++)
        for (int j = 0; j < Q; j++)
            for (int64_t s = 0; s < size; s++) outs[j][e] += scores[j][at + s] * v[s * E + e];
}

struct Slab { Scalar* keys; Scalar* values; int64_t keys_head, values_head; };
struct Write { int64_t slab, slot, stop; };  // where a row writes, and its number of slots
struct Block { int64_t slab, slot, at, size, first_reader, stop_reader; };  // `at`: its first position
struct Part { int64_t row, stop_row, block, stop_block; };

extern "C" void kernel(
    Scalar* out, const Scalar* query, const Scalar* key, const Scalar* value,
    const int64_t* slab_table, const int64_t* plan, const int64_t* sizes, float scale)
{
    const int64_t H = sizes[0], R = sizes[1], D = sizes[2], E = sizes[3];
    const int64_t query_row = sizes[4], query_head = sizes[5], key_row = sizes[6], key_head = sizes[7];
    const int64_t value_row = sizes[8], value_head = sizes[9];
    const int64_t N = plan[0], P = plan[1], B = plan[2];
    const Slab* slabs = reinterpret_cast<const Slab*>(slab_table);
    const Write* writes = reinterpret_cast<const Write*>(plan + 3);
    const Part* parts = reinterpret_cast<const Part*>(writes + N);
    const Block* blocks = reinterpret_cast<const Block*>(parts + P);
    const int64_t* readers = reinterpret_cast<const int64_t*>(blocks + B);
    #pragma omp parallel if (P * H > 1)
    {
        std::vector<float> buffer, floats;  // scores; queries and outputs as floats
        std::vector<const float*> queries, own_queries;  // of a block's readers; of the part's rows
        std::vector<float*> scores, outs, own_outs;
        #pragma omp for collapse(2)
        for (int64_t p = 0; p < P; p++) {
            for (int64_t h = 0; h < H; h++) {
                const Part part = parts[p];
                const int64_t count = part.stop_row - part.row;
                int64_t stride = 0;
                for (int64_t n = part.row; n < part.stop_row; n++) {
                    const Write& own = writes[n];
                    const Slab& slab = slabs[own.slab];
                    std::memcpy(slab.keys + h * slab.keys_head + own.slot * D,
                                key + n * key_row + h * key_head, D * sizeof(Scalar));
                    std::memcpy(slab.values + h * slab.values_head + own.slot * E,
                                value + n * value_row + h * value_head, E * sizeof(Scalar));
                    stride = std::max(stride, own.stop);
                }
                if ((int64_t)buffer.size() < count * R * stride) buffer.resize(2 * count * R * stride);
                queries.resize(count * R); scores.resize(count * R); outs.resize(count * R);
                own_queries.resize(count * R); own_outs.resize(count * R);
                floats.resize(count * R * (D + E));
                for (int64_t i = 0; i < count * R; i++) {
                    const int64_t n = part.row + i / R, head = h * R + i % R;
                    float* copy = floats.data() + i * (D + E);
                    own_queries[i] = as_floats(query + n * query_row + head * query_head, D, copy);
                    own_outs[i] = output_sums(out + (n * H * R + head) * E, copy + D);
                }
                auto gather = [&](const Block& block) {  // what the queries that read a block have
                    int64_t j = 0;
                    for (int64_t i = block.first_reader; i < block.stop_reader; i++)
                        for (int64_t r = 0; r < R; r++, j++) {
                            const int64_t own = (readers[i] - part.row) * R + r;
                            queries[j] = own_queries[own];
                            scores[j] = buffer.data() + own * stride;
                            outs[j] = own_outs[own];
                        }
                    return j;
                };
                for (int64_t b = part.block; b < part.stop_block; b++) {
                    const Block& block = blocks[b];
                    const Slab& slab = slabs[block.slab];
                    const Scalar* k = slab.keys + h * slab.keys_head + block.slot * D;
                    const int64_t total = gather(block);
                    int64_t s = 0;
                    if (D % W == 0)
                        for (; s + W <= block.size; s += W)
                            score_tile(scores.data(), block.at + s, queries.data(), total, k + s * D, D);
                    for (; s < block.size; s++)
                        for (int64_t j = 0; j < total; j++)
                            scores[j][block.at + s] = dot(queries[j], k + s * D, D);
                }
                for (int64_t i = 0; i < count * R; i++) {
                    const int64_t stop = writes[part.row + i / R].stop;
                    float* one = buffer.data() + i * stride;
                    const float largest = *std::max_element(one, one + stop);
                    const float factor = 1 / softmax(one, largest, stop, scale);
                    for (int64_t s = 0; s < stop; s++) one[s] *= factor;
                    std::memset(own_outs[i], 0, E * sizeof(float));
                }
                for (int64_t b = part.block; b < part.stop_block; b++) {
                    const Block& block = blocks[b];
                    const Slab& slab = slabs[block.slab];
                    const Scalar* v = slab.values + h * slab.values_head + block.slot * E;
                    const int64_t total = gather(block);
                    int64_t j = 0;
                    for (; j + 3 <= total; j += 3)
                        add_block<3>(outs.data() + j, scores.data() + j, block.at, v, block.size, E);
                    for (; j < total; j++)
                        add_block<1>(outs.data() + j, scores.data() + j, block.at, v, block.size, E);
                }
                for (int64_t i = 0; i < count * R; i++)
                    round_output(out + ((part.row + i / R) * H * R + h * R + i % R) * E, own_outs[i], E);
            }
        }
    }
}
"""
_ARGUMENTS = ("Scalar*", *("const Scalar*",) * 3, *("const int64_t*",) * 3, "float")


def _decode_kernel(dtype: torch.dtype) -> Callable[..., None] | None:
    return load_decode_kernel(_SOURCE, _ARGUMENTS, dtype)


class PagedDecodeAttention:
    """The attention of all layers in one forward that feeds one token per row of a paged store."""

    def __init__(self, store: PagedStore, span: PackedSpan) -> None:
        self._store, self._span = store, span
        self._plan: Tensor | None = None
        self._slab_ids: list[int] = []
        self._sizes: dict[Any, Tensor] = {}

    @staticmethod
    def serves(dtype: torch.dtype, device: torch.device) -> bool:
        """Whether there is a kernel for such keys and values; it is compiled the first time."""
        return device.type == "cpu" and _decode_kernel(dtype) is not None

    @classmethod
    def create(cls, store: object, span: PackedSpan) -> PagedDecodeAttention | None:
        """None if the kernel does not serve such a store or forward."""
        return cls(store, span) if type(store) is PagedStore and span.is_decode else None

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float | None
    ) -> Tensor | None:
        """Write the keys and values [1, H, P, D] of a layer; the attention output [1, P, Hq, E].

        There may be more tokens than rows; their output is 0. None: the kernel does not serve such tensors.
        """
        new = (query, key, value)
        if any(one.device.type != "cpu" or one.dtype is not query.dtype for one in new):
            return None
        if (kernel := _decode_kernel(query.dtype)) is None:
            return None
        scale = query.shape[3] ** -0.5 if scale is None else scale
        if any(one.stride(3) != 1 for one in new) or scale <= 0:
            return None
        if self._plan is None:
            self._plan, self._slab_ids = _plan_blocks(self._store, self._span, key.shape[1])
        slabs = self._slab_table(key, value, layer)
        if slabs is None:
            return None
        num_rows, (_, num_heads, num_tokens, _) = len(self._span.rows), query.shape
        create = query.new_empty if num_rows == num_tokens else query.new_zeros
        out = create((1, num_tokens, num_heads, value.shape[3]))
        kernel(out, query, key, value, slabs, self._plan, self._layout(query, key, value), scale)
        return out

    def _slab_table(self, key: Tensor, value: Tensor, layer: int) -> Tensor | None:
        """The address and stride of the heads of a layer in each slab; None if a slab is of another type."""
        pool = self._store.pool
        table: list[int] = []
        for slab_id in self._slab_ids:
            slab = pool.slabs[slab_id]
            keys = slab.ensure_capacity(slab.keys, layer, key, pool.block_size)
            values = slab.ensure_capacity(slab.values, layer, value, pool.block_size)
            # They may come from a saved cache.
            if not (keys.dtype is values.dtype is key.dtype and keys.device == values.device == key.device):
                return None
            if not (keys.is_contiguous() and values.is_contiguous()):
                return None
            table += (keys.data_ptr(), values.data_ptr(), keys.stride(0), values.stride(0))
        return torch.tensor(table)

    def _layout(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The sizes and strides that the kernel takes; the same for most layers."""
        strides = [size for one in (query, key, value) for size in (one.stride(2), one.stride(1))]
        heads = key.shape[1]
        layout = (heads, query.shape[1] // heads, key.shape[3], value.shape[3], *strides)
        if layout not in self._sizes:
            self._sizes[layout] = torch.tensor(layout)
        return self._sizes[layout]


def _plan_blocks(store: PagedStore, span: PackedSpan, num_heads: int) -> tuple[Tensor, list[int]]:
    """The plan that the kernel takes, as flat integers, and the slabs that it numbers.

    It has the number of rows, parts and blocks, then what the kernel's structs of these hold, by part and
    position, and the rows that read each block.
    """
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
    blocks, positions = read[first], columns[first] * size
    slab_ids, slab_index = np.unique(np.concatenate((pool.slab_of[blocks], write_slabs)), return_inverse=True)
    blocks_of = np.stack(
        (
            slab_index[: len(blocks)],
            pool.index_in_slab[blocks] * size,
            positions,
            np.minimum(size, stops[rows[first]] - positions),
            first,
            np.append(first[1:], len(rows)),
        ),
        1,
    )
    num_parts = int(parts[-1]) + 1
    row_bounds = np.searchsorted(parts, np.arange(num_parts + 1))
    block_bounds = np.searchsorted(parts[rows[first]], np.arange(num_parts + 1))
    parts_of = np.stack((row_bounds[:-1], row_bounds[1:], block_bounds[:-1], block_bounds[1:]), 1)
    writes = np.stack((slab_index[len(blocks) :], write_slots, stops), 1)
    header = np.array([len(stops), num_parts, len(blocks)])
    plan = np.concatenate((header, writes.ravel(), parts_of.ravel(), blocks_of.ravel(), rows))
    return torch.from_numpy(plan.astype(np.int64, copy=False)), slab_ids.tolist()


def _split_rows(first_blocks: Array, num_heads: int) -> Array:
    """The part of each row [N]: neighbours that share their first block, split where threads have no work."""
    index = np.arange(len(first_blocks))
    wanted = min(-(-torch.get_num_threads() // num_heads), len(index))
    starts = np.diff(first_blocks, prepend=-1) != 0
    if int(starts.sum()) < wanted:
        starts |= index % -(-len(index) // wanted) == 0
    return np.cumsum(starts) - 1

"""Attention of one new token per row on a CPU: one kernel that writes the cache and reads it once.

torch's scaled_dot_product_attention is made for long queries. With one token per row it spends most of its
time outside of its products, and rows of different length need a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from descant.kv_cache.dense import DenseStore
from descant.kv_cache.packed_span import PackedSpan

__all__ = ["DecodeAttention"]

# For each row and key head: write the new key and value, then for all query heads of the group the scores,
# their softmax, and the weighted sum of the values. The slots of a row are adjacent.
_SOURCE = """
#include <torch/csrc/inductor/cpp_prefix.h>
#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>
using Vec = at::vec::Vectorized<float>;
constexpr int64_t W = Vec::size();

static inline float dot(const float* a, const float* b, int64_t size) {
    Vec sum(0.0f), more(0.0f);
    int64_t d = 0;
    for (; d + 2 * W <= size; d += 2 * W) {
        sum = at::vec::fmadd(Vec::loadu(a + d), Vec::loadu(b + d), sum);
        more = at::vec::fmadd(Vec::loadu(a + d + W), Vec::loadu(b + d + W), more);
    }
    for (; d + W <= size; d += W) sum = at::vec::fmadd(Vec::loadu(a + d), Vec::loadu(b + d), sum);
    float rest = 0;
    for (; d < size; d++) rest += a[d] * b[d];
    return rest + at::vec::vec_reduce_all<float>([](Vec x, Vec y) { return x + y; }, sum + more);
}

// The scores of W slots for R queries. A tile of keys is transposed once for all queries.
static inline void score_slots(
    float* scores, int64_t stride, const float* q, int64_t query_head, const float* k, int64_t R, int64_t D)
{
    alignas(64) float tile[W * W];
    for (int64_t d = 0; d < D; d += W) {
        at::vec::transpose_mxn<float, W, W>(k + d, D, tile, W);
        for (int64_t r = 0; r < R; r++) {
            const float* one = q + r * query_head + d;
            Vec sum = d ? Vec::loadu(scores + r * stride) : Vec(0.0f), more(0.0f);
            for (int64_t i = 0; i < W; i += 2) {
                sum = at::vec::fmadd(Vec(one[i]), Vec::loadu(tile + i * W), sum);
                more = at::vec::fmadd(Vec(one[i + 1]), Vec::loadu(tile + (i + 1) * W), more);
            }
            (sum + more).store(scores + r * stride);
        }
    }
}

static inline float softmax(float* scores, float largest, int64_t size, float scale) {
    Vec total(0.0f), top(largest), factor(scale);
    int64_t s = 0;
    for (; s + W <= size; s += W) {
        Vec one = ((Vec::loadu(scores + s) - top) * factor).exp_u20();
        one.store(scores + s);
        total = total + one;
    }
    float rest = 0;
    for (; s < size; s++) {
        scores[s] = std::exp((scores[s] - largest) * scale);
        rest += scores[s];
    }
    return rest + at::vec::vec_reduce_all<float>([](Vec x, Vec y) { return x + y; }, total);
}

// The weighted sum of the values, a few vectors of the output at a time, which stay in registers.
template <int C>
static inline void weighted_sum(
    float* out, const float* p, const float* v, int64_t size, int64_t dim, float factor)
{
    Vec sums[C];
    for (int c = 0; c < C; c++) sums[c] = Vec(0.0f);
    for (int64_t s = 0; s < size; s++) {
        const Vec weight(p[s]);
        const float* one = v + s * dim;
        for (int c = 0; c < C; c++) sums[c] = at::vec::fmadd(weight, Vec::loadu(one + c * W), sums[c]);
    }
    for (int c = 0; c < C; c++) (sums[c] * Vec(factor)).store(out + c * W);
}

extern "C" void kernel(
    float* out, const float* query, const float* key, const float* value, float* keys, float* values,
    const int64_t* rows, const int64_t* starts, const int64_t* sizes, float scale)
{
    const int64_t N = sizes[0], H = sizes[1], R = sizes[2], D = sizes[3], E = sizes[4];
    const int64_t query_row = sizes[5], query_head = sizes[6], key_row = sizes[7], key_head = sizes[8];
    const int64_t value_row = sizes[9], value_head = sizes[10], keys_row = sizes[11], keys_head = sizes[12];
    const int64_t values_row = sizes[13], values_head = sizes[14];
    #pragma omp parallel if (N * H > 1)
    {
        std::vector<float> buffer;
        #pragma omp for collapse(2)
        for (int64_t n = 0; n < N; n++) {
            for (int64_t h = 0; h < H; h++) {
                const int64_t start = starts[n], stop = start + 1;
                float* k = keys + rows[n] * keys_row + h * keys_head;
                float* v = values + rows[n] * values_row + h * values_head;
                std::memcpy(k + start * D, key + n * key_row + h * key_head, D * sizeof(float));
                std::memcpy(v + start * E, value + n * value_row + h * value_head, E * sizeof(float));
                if ((int64_t)buffer.size() < R * stop) buffer.resize(2 * R * stop);
                float* scores = buffer.data();
                const float* q = query + n * query_row + h * R * query_head;
                int64_t s = 0;
                if (D % W == 0)
                    for (; s + W <= stop; s += W)
                        score_slots(scores + s, stop, q, query_head, k + s * D, R, D);
                for (; s < stop; s++)
                    for (int64_t r = 0; r < R; r++)
                        scores[r * stop + s] = dot(q + r * query_head, k + s * D, D);
                for (int64_t r = 0; r < R; r++) {
                    float* p = scores + r * stop;
                    float* o = out + ((n * H + h) * R + r) * E;
                    const float largest = *std::max_element(p, p + stop);
                    const float factor = 1 / softmax(p, largest, stop, scale);
                    int64_t e = 0;
                    for (; e + 4 * W <= E; e += 4 * W) weighted_sum<4>(o + e, p, v + e, stop, E, factor);
                    for (; e + W <= E; e += W) weighted_sum<1>(o + e, p, v + e, stop, E, factor);
                    for (; e < E; e++) {
                        float sum = 0;
                        for (int64_t s = 0; s < stop; s++) sum += p[s] * v[s * E + e];
                        o[e] = sum * factor;
                    }
                }
            }
        }
    }
}
"""
_ARGUMENTS = ("float*", *("const float*",) * 3, *("float*",) * 2, *("const int64_t*",) * 3, "float")


@cache
def _decode_kernel() -> Callable[..., None] | None:
    """The compiled kernel; None where torch cannot compile for the CPU."""
    try:
        from torch._inductor.codecache import CppPythonBindingsCodeCache

        kernel: Any = CppPythonBindingsCodeCache.load_pybinding(_ARGUMENTS, _SOURCE)
    except Exception:  # no compiler, or another interface of torch
        return None
    return kernel if callable(kernel) else None


class DecodeAttention:
    """The attention of all layers in one forward that feeds one token per row of a dense store."""

    def __init__(self, store: DenseStore, span: PackedSpan) -> None:
        self._store, self._span = store, span
        self._rows, self._starts = (
            torch.from_numpy(np.ascontiguousarray(one, dtype=np.int64)) for one in (span.rows, span.starts)
        )
        self._sizes: dict[Any, Tensor] = {}

    @staticmethod
    def serves(dtype: torch.dtype, device: torch.device) -> bool:
        """Whether there is a kernel for such keys and values; it is compiled the first time."""
        return dtype is torch.float32 and device.type == "cpu" and _decode_kernel() is not None

    @classmethod
    def create(cls, store: object, span: PackedSpan) -> DecodeAttention | None:
        """None if the kernel does not serve such a store or forward, or does not exist here."""
        if type(store) is not DenseStore or not span.is_decode or _decode_kernel() is None:
            return None
        return cls(store, span)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float | None
    ) -> Tensor | None:
        """Write the keys and values [1, H, P, D] of a layer; the attention output [1, P, Hq, E].

        There may be more tokens than rows; their output is 0. None: the kernel does not serve such tensors.
        """
        if query.device.type != "cpu":
            return None
        scale = query.shape[3] ** -0.5 if scale is None else scale
        if query.stride(3) != 1 or key.stride(3) != 1 or value.stride(3) != 1 or scale <= 0:
            return None
        keys, values = self._store.blocks_for_write(layer, key, value, self._span)
        # The blocks may come from a cache that a user gave.
        if any(one.dtype is not torch.float32 for one in (query, key, value, keys, values)):
            return None
        if any(one.stride(3) != 1 or one.stride(2) != one.shape[3] for one in (keys, values)):
            return None
        num_rows, (_, num_heads, num_tokens, _) = len(self._rows), query.shape
        new = query.new_empty if num_rows == num_tokens else query.new_zeros
        out = new((1, num_tokens, num_heads, value.shape[3]))
        kernel = _decode_kernel()
        assert kernel is not None
        sizes = self._layout(query, key, value, keys, values)
        kernel(out, query, key, value, keys, values, self._rows, self._starts, sizes, scale)
        return out

    def _layout(self, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """The sizes and strides that the kernel takes; the same for most layers."""
        strides = [(one.stride(2), one.stride(1)) for one in (query, key, value)]
        strides += [(one.stride(0), one.stride(1)) for one in (keys, values)]
        heads = key.shape[1]
        layout = (heads, query.shape[1] // heads, key.shape[3], value.shape[3], *strides)
        if layout not in self._sizes:
            flat = [len(self._rows), *layout[:4], *(size for pair in strides for size in pair)]
            self._sizes[layout] = torch.tensor(flat)
        return self._sizes[layout]

"""Attention of one new token per row on a CPU: one kernel that writes the cache and reads it once.

torch's scaled_dot_product_attention is made for long queries. With one token per row it spends most of its
time outside of its products, and rows of different length need a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from descant.kv_cache.decode_kernel import load_decode_kernel
from descant.kv_cache.dense import DenseStore
from descant.kv_cache.packed_span import PackedSpan

__all__ = ["DecodeAttention"]

# For each row and key head: write the new key and value, then for all query heads of the group the scores,
# their softmax, and the weighted sum of the values. The slots of a row are adjacent.
_SOURCE = """
extern "C" void kernel(
    Scalar* out, const Scalar* query, const Scalar* key, const Scalar* value, Scalar* keys, Scalar* values,
    const int64_t* rows, const int64_t* starts, const int64_t* sizes, float scale)
{
    const int64_t N = sizes[0], H = sizes[1], R = sizes[2], D = sizes[3], E = sizes[4];
    const int64_t query_row = sizes[5], query_head = sizes[6], key_row = sizes[7], key_head = sizes[8];
    const int64_t value_row = sizes[9], value_head = sizes[10], keys_row = sizes[11], keys_head = sizes[12];
    const int64_t values_row = sizes[13], values_head = sizes[14];
    #pragma omp parallel if (N * H > 1)
    {
        std::vector<float> buffer, floats(R * D + E);  // scores; queries and one output as floats
        std::vector<const float*> queries(R);
        std::vector<float*> scores(R);
        #pragma omp for collapse(2)
        for (int64_t n = 0; n < N; n++) {
            for (int64_t h = 0; h < H; h++) {
                const int64_t start = starts[n], stop = start + 1;
                Scalar* k = keys + rows[n] * keys_row + h * keys_head;
                Scalar* v = values + rows[n] * values_row + h * values_head;
                std::memcpy(k + start * D, key + n * key_row + h * key_head, D * sizeof(Scalar));
                std::memcpy(v + start * E, value + n * value_row + h * value_head, E * sizeof(Scalar));
                if ((int64_t)buffer.size() < R * stop) buffer.resize(2 * R * stop);
                for (int64_t r = 0; r < R; r++) {
                    const Scalar* one = query + n * query_row + (h * R + r) * query_head;
                    queries[r] = as_floats(one, D, floats.data() + r * D);
                    scores[r] = buffer.data() + r * stop;
                }
                int64_t s = 0;
                if (D % W == 0)
                    for (; s + W <= stop; s += W)
                        score_tile(scores.data(), s, queries.data(), R, k + s * D, D);
                for (; s < stop; s++)
                    for (int64_t r = 0; r < R; r++) scores[r][s] = dot(queries[r], k + s * D, D);
                for (int64_t r = 0; r < R; r++) {
                    float* p = scores[r];
                    Scalar* own = out + ((n * H + h) * R + r) * E;
                    float* o = output_sums(own, floats.data() + R * D);
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
                    round_output(own, o, E);
                }
            }
        }
    }
}
"""
_ARGUMENTS = ("Scalar*", *("const Scalar*",) * 3, *("Scalar*",) * 2, *("const int64_t*",) * 3, "float")


def _decode_kernel(dtype: torch.dtype) -> Callable[..., None] | None:
    return load_decode_kernel(_SOURCE, _ARGUMENTS, dtype)


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
        return device.type == "cpu" and _decode_kernel(dtype) is not None

    @classmethod
    def create(cls, store: object, span: PackedSpan) -> DecodeAttention | None:
        """None if the kernel does not serve such a store or forward."""
        return cls(store, span) if type(store) is DenseStore and span.is_decode else None

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float | None
    ) -> Tensor | None:
        """Write the keys and values [1, H, P, D] of a layer; the attention output [1, P, Hq, E].

        There may be more tokens than rows; their output is 0. None: the kernel does not serve such tensors.
        """
        if query.device.type != "cpu" or (kernel := _decode_kernel(query.dtype)) is None:
            return None
        scale = query.shape[3] ** -0.5 if scale is None else scale
        if query.stride(3) != 1 or key.stride(3) != 1 or value.stride(3) != 1 or scale <= 0:
            return None
        keys, values = self._store.blocks_for_write(layer, key, value, self._span)
        # The blocks may come from a cache that a user gave.
        if any(one.dtype is not query.dtype for one in (key, value, keys, values)):
            return None
        if any(one.stride(3) != 1 or one.stride(2) != one.shape[3] for one in (keys, values)):
            return None
        num_rows, (_, num_heads, num_tokens, _) = len(self._rows), query.shape
        new = query.new_empty if num_rows == num_tokens else query.new_zeros
        out = new((1, num_tokens, num_heads, value.shape[3]))
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

"""C++ kernels of the attention of one new token per row: the code that they share, and their compilation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

__all__ = ["load_decode_kernel"]

_SHARED = """
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

"""


@cache
def load_decode_kernel(source: str, arguments: Sequence[str]) -> Callable[..., None] | None:
    """The compiled function `kernel` of a source; None where torch cannot compile for the CPU."""
    try:
        from torch._inductor.codecache import CppPythonBindingsCodeCache

        kernel: Any = CppPythonBindingsCodeCache.load_pybinding(arguments, _SHARED + source)
    except Exception:  # no compiler, or another interface of torch
        return None
    return kernel if callable(kernel) else None

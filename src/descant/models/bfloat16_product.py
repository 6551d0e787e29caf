"""Products with bfloat16 weights on a CPU, in float32: a kernel that reads the weights as they are.

torch's product of one vector takes longer than its weights take to be read. Its products of several emulate
bfloat16 where the CPU has no instructions for it, and take longer than those of float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from descant.kv_cache.decode_kernel import load_decode_kernel
from descant.models.packed_product import plain_product

__all__ = ["BFloat16Forward", "bfloat16_product", "has_bfloat16_product", "serves_any_number"]

# The sums of R rows of the weight and L vectors stay in registers. Each has the same order for any R and L,
# so that a product does not depend on the others. For one vector the rows are read one after the other, as
# they lie in memory. The processor by itself fetches them too late.
_SOURCE = """
constexpr int64_t BYTES_AHEAD = 4096, LINES = 60, ROWS = 4;

template <int R, int L>
static inline void multiply_tile(
    Scalar* out, int64_t stride, const Scalar* weight, const Scalar* bias, const float* vectors, int64_t size)
{
    Vec sums[R][L];
    for (int r = 0; r < R; r++)
        for (int l = 0; l < L; l++) sums[r][l] = Vec(0.0f);
    int64_t i = 0;
    for (; i + W <= size; i += W) {
        Vec own[R];
        for (int r = 0; r < R; r++) {
            own[r] = load(weight + r * size + i);
            __builtin_prefetch(reinterpret_cast<const char*>(weight + r * size + i) + BYTES_AHEAD);
        }
        for (int l = 0; l < L; l++) {
            const Vec one = load(vectors + l * size + i);
            for (int r = 0; r < R; r++) sums[r][l] = at::vec::fmadd(one, own[r], sums[r][l]);
        }
    }
    for (int l = 0; l < L; l++)
        for (int r = 0; r < R; r++) {
            float rest = bias ? static_cast<float>(bias[r]) : 0.0f;
            for (int64_t j = i; j < size; j++) rest += vectors[l * size + j] * weight[r * size + j];
            const auto add = [](Vec x, Vec y) { return x + y; };
            out[l * stride + r] = rest + at::vec::vec_reduce_all<float>(add, sums[r][l]);
        }
}

template <int R>
static inline void multiply_rows(
    Scalar* out, int64_t stride, const Scalar* weight, const Scalar* bias, const float* vectors, int64_t size,
    int64_t lines)
{
    const auto run = [&](auto multiply, int64_t count) {
        for (; lines >= count; lines -= count, out += count * stride, vectors += count * size)
            multiply(out, stride, weight, bias, vectors, size);
    };
    run(multiply_tile<R, 6>, 6);
    run(multiply_tile<R, 4>, 4);
    run(multiply_tile<R, 2>, 2);
    run(multiply_tile<R, 1>, 1);
}

// The products are written from column `start` on.
extern "C" void kernel(
    Scalar* out, const Scalar* given, const Scalar* weight, const Scalar* bias,
    int64_t start, int64_t stride, int64_t num_outputs, int64_t size, int64_t num_lines, int64_t has_bias)
{
    std::vector<float> floats(num_lines * size);
    const float* vectors = as_floats(given, num_lines * size, floats.data());
    for (int64_t line = 0; line < num_lines; line += LINES) {
        const int64_t lines = std::min(LINES, num_lines - line), rows = lines > 1 ? ROWS : 1;
        #pragma omp parallel for if (num_outputs * size > 32768)
        for (int64_t o = 0; o < num_outputs; o += rows) {
            Scalar* to = out + line * stride + start + o;
            const float* from = vectors + line * size;
            const int64_t count = std::min(rows, num_outputs - o);
            const Scalar* added = has_bias ? bias + o : nullptr;
            if (count == ROWS)
                multiply_rows<ROWS>(to, stride, weight + o * size, added, from, size, lines);
            else
                for (int64_t r = 0; r < count; r++) {
                    const Scalar* own = added ? added + r : nullptr;
                    multiply_rows<1>(to + r, stride, weight + (o + r) * size, own, from, size, lines);
                }
        }
    }
}
"""
_ARGUMENTS = ("Scalar*", *("const Scalar*",) * 3, *("int64_t",) * 6)

_OPS = torch.library.Library("descant", "FRAGMENT")
_OPS.define("bfloat16_linear(Tensor vectors, Tensor[] weights, Tensor? bias) -> Tensor")


@cache
def _product_kernel(dtype: torch.dtype) -> Callable[..., None] | None:
    return load_decode_kernel(_SOURCE, _ARGUMENTS, dtype) if dtype is torch.bfloat16 else None


@cache
def serves_any_number() -> bool:
    """Whether the kernel is faster for any number of vectors: the CPU has no instructions for bfloat16."""
    cpu: Any = torch.cpu
    is_x86 = cpu._is_avx2_supported() or cpu._is_avx512_supported()
    return bool(is_x86 and not cpu._is_avx512_bf16_supported() and not cpu._is_amx_tile_supported())


def has_bfloat16_product(weight: Tensor) -> bool:
    """Whether there is a kernel for such a weight; it is compiled the first time."""
    is_plain = type(weight) in (Tensor, nn.Parameter) and weight.device.type == "cpu"
    return is_plain and _product_kernel(weight.dtype) is not None


def bfloat16_product(vectors: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """The products of vectors [..., I] with weights [O, I], one after the other: [..., sum of O].

    A bias is that of a single weight. What the kernel does not serve is left to torch.
    """
    kernel, size = _product_kernel(vectors.dtype), vectors.shape[-1]
    num_lines = vectors.numel() // size
    given = weights if bias is None else (*weights, bias)
    if (
        kernel is None
        or not (num_lines == 1 or serves_any_number())
        or any(one.dtype is not torch.bfloat16 or not one.is_contiguous() for one in given)
    ):
        return plain_product(vectors, weights, bias)
    counts = [len(weight) for weight in weights]
    stride, has_bias = sum(counts), int(bias is not None)
    out = vectors.new_empty((*vectors.shape[:-1], stride))
    vectors, start = vectors.contiguous(), 0
    for weight, count in zip(weights, counts, strict=True):
        # Without a bias its argument is not read.
        added = weight if bias is None else bias
        kernel(out, vectors, weight, added, start, stride, count, size, num_lines, has_bias)
        start += count
    return out


def _bfloat16_linear_shape(vectors: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> Tensor:  # noqa: ARG001
    return vectors.new_empty(*vectors.shape[:-1], sum(weight.shape[0] for weight in weights))


_OPS.impl("bfloat16_linear", bfloat16_product, "CompositeExplicitAutograd")
torch.library.register_fake("descant::bfloat16_linear", _bfloat16_linear_shape, lib=_OPS)


class BFloat16Forward:
    """The forward of a linear layer outside of compiled graphs, until `restore`."""

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer
        layer.__dict__["forward"] = self

    @staticmethod
    def serves(layer: Any) -> bool:
        """Whether a layer is a plain product that has a kernel; another library may have replaced it."""
        return (
            isinstance(layer, nn.Linear)
            and type(layer).forward is nn.Linear.forward
            and "forward" not in layer.__dict__
            and has_bfloat16_product(layer.weight)
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """The plain forward of the copied layer."""
        copied = memo[id(self._layer)]
        return MethodType(type(copied).forward, copied)

    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002 - the name of torch
        """The product of vectors [..., I] with the weight [O, I]: [..., O]."""
        layer = self._layer
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or not has_bfloat16_product(layer.weight):
            return nn.functional.linear(input, layer.weight, layer.bias)
        return bfloat16_product(input, [layer.weight], layer.bias)

    def restore(self) -> None:
        """Let the layer run its own code again."""
        if self._layer.__dict__.get("forward") is self:
            del self._layer.__dict__["forward"]

"""Products with weights in the layouts of MKL and oneDNN, which read them once for a few lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from descant.kv_cache.kernels.decode_attention import load_decode_kernel

__all__ = [
    "BFloat16Forward",
    "PackedProduct",
    "ReplacedForward",
    "bfloat16_product",
    "define_product",
    "has_bfloat16_product",
    "has_packed_products",
    "plain_product",
    "serves_any_number",
]

_OPS = torch.library.Library("descant", "FRAGMENT")

_MAX_MKL_LINES = 20  # MKL's layout is the fastest up to here, oneDNN's from here on
_PACKED_FOR = 16  # lines; MKL's layout serves other numbers too, which is checked for each of them
_TOLERANCE = 1e-4  # of the largest output


def has_packed_products() -> bool:
    """Whether torch was built with both libraries."""
    return bool(torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available())


def plain_product(vectors: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """The products of vectors [..., I] with weights [O, I], one after the other: [..., sum of O]."""
    if len(weights) == 1:
        return functional.linear(vectors, weights[0], bias)
    return torch.cat([functional.linear(vectors, weight) for weight in weights], -1)


def define_product(name: str, product: Callable[[Tensor, Sequence[Tensor], Tensor | None], Tensor]) -> None:
    """Make `torch.ops.descant.<name>` of a function with the arguments of `plain_product`."""

    def shape(vectors: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> Tensor:  # noqa: ARG001
        return vectors.new_empty(*vectors.shape[:-1], sum(weight.shape[0] for weight in weights))

    _OPS.define(f"{name}(Tensor vectors, Tensor[] weights, Tensor? bias) -> Tensor")
    _OPS.impl(name, product, "CompositeExplicitAutograd")
    torch.library.register_fake(f"descant::{name}", shape, lib=_OPS)


class PackedProduct:
    """The product with one weight, or with several of the same vectors at once.

    `is_exact` says for which (lines, outputs, inputs) MKL's product equals the plain one up to rounding.
    oneDNN's layout is made for any number of lines.
    """

    def __init__(self, weights: Sequence[Tensor], is_exact: dict[tuple[int, int, int], bool]) -> None:
        self._is_exact = is_exact
        self._versions = [_version(weight) for weight in weights]
        joined = torch.cat([weight.detach() for weight in weights])
        self.nbytes = 2 * joined.nbytes
        self._outputs, self._inputs = joined.shape
        self._mkl_weight = torch.ops.mkl._mkl_reorder_linear_weight(joined, _PACKED_FOR)
        self._onednn_weight = torch.ops.mkldnn._reorder_linear_weight(joined, None)
        # MKL's operator takes the size of the product from a weight, whose values it does not read.
        self._size_example = joined.new_zeros(1, 1).expand(joined.shape)

    def __call__(self, vectors: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        """The products of vectors [..., I] with the weights, which must be those that were packed."""
        lines = vectors.numel() // self._inputs
        if not self._applies(vectors, weights, lines):
            return plain_product(vectors, weights, bias)
        if lines > _MAX_MKL_LINES:
            return self._onednn_product(vectors, bias)
        key = lines, self._outputs, self._inputs
        if self._is_exact.get(key, False):
            return self._mkl_product(vectors, bias, lines)
        plain = plain_product(vectors, weights, bias)
        if key not in self._is_exact and bool(plain.isfinite().all()):
            error = (self._mkl_product(vectors, bias, lines) - plain).abs().max()
            self._is_exact[key] = bool(error <= _TOLERANCE * plain.abs().max())
        return plain

    def _applies(self, vectors: Tensor, weights: Sequence[Tensor], lines: int) -> bool:
        """Whether the packed weights are valid and made for such vectors."""
        return (
            lines > 0
            and vectors.dtype is torch.float32
            and type(vectors) is Tensor
            and not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and [_version(weight) for weight in weights] == self._versions
        )

    def _mkl_product(self, vectors: Tensor, bias: Tensor | None, lines: int) -> Tensor:
        packed, example = self._mkl_weight, self._size_example
        result: Tensor = torch.ops.mkl._mkl_linear(vectors, packed, example, bias, lines)
        return result

    def _onednn_product(self, vectors: Tensor, bias: Tensor | None) -> Tensor:
        weight = self._onednn_weight
        result: Tensor = torch.ops.mkldnn._linear_pointwise(vectors, weight, bias, "none", [], "")
        return result


def _version(weight: Tensor) -> tuple[int, int]:
    """What changes when a weight is written or replaced."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


class ReplacedForward:
    """The forward of a module from `install` to `restore`; a copy of the module has its plain one."""

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module

    def install(self) -> None:
        """Let the module run this."""
        self.module.__dict__["forward"] = self

    def restore(self) -> None:
        """Let the module run its own code again."""
        if self.module.__dict__.get("forward") is self:
            del self.module.__dict__["forward"]

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the module's own code."""
        return type(self.module).forward(self.module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self.module)]
        return MethodType(type(copied).forward, copied)


_SOURCE = "models/kernels/bfloat16_product.cpp"
_ARGUMENTS = ("Scalar*", *("const Scalar*",) * 3, *("int64_t",) * 6)


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


define_product("bfloat16_linear", bfloat16_product)


class BFloat16Forward(ReplacedForward):
    """The forward of a linear layer outside of compiled graphs."""

    @staticmethod
    def serves(layer: Any) -> bool:
        """Whether a layer is a plain product that has a kernel; another library may have replaced it."""
        return (
            isinstance(layer, nn.Linear)
            and type(layer).forward is nn.Linear.forward
            and "forward" not in layer.__dict__
            and has_bfloat16_product(layer.weight)
        )

    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002 - the name of torch
        """The product of vectors [..., I] with the weight [O, I]: [..., O]."""
        layer = self.module
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or not has_bfloat16_product(layer.weight):
            return nn.functional.linear(input, layer.weight, layer.bias)
        return bfloat16_product(input, [layer.weight], layer.bias)

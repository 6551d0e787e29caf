"""Products with weights in the layouts of MKL and oneDNN, which read them once for a few lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["PackedProduct", "has_packed_products", "plain_product"]

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
        result: Any = torch.ops.mkl._mkl_linear(vectors, packed, example, bias, lines)
        assert isinstance(result, Tensor)
        return result

    def _onednn_product(self, vectors: Tensor, bias: Tensor | None) -> Tensor:
        result: Any = torch.ops.mkldnn._linear_pointwise(vectors, self._onednn_weight, bias, "none", [], "")
        assert isinstance(result, Tensor)
        return result


def _version(weight: Tensor) -> tuple[int, int]:
    """What changes when a weight is written or replaced."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version

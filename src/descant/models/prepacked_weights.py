"""Weights of linear layers in the layout that matrix products on a CPU read fastest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType, TracebackType
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from descant.errors import DescantError, InputError

__all__ = [
    "MIN_PREPACKED_LINES",
    "PrepackedWeights",
    "num_prepacked_layers",
    "prepack_weights",
    "traceable_products",
    "unprepackable_reason",
    "use_prepacked_weights",
]

# Products of fewer lines are bound by memory, those of more than the last bound read plain weights as fast.
MIN_PREPACKED_LINES = 4
_MAX_MKL_LINES = 20  # MKL's layout is the fastest up to here, oneDNN's from here on
_MAX_LINES = 96
_PACKED_FOR = 16  # lines; MKL's layout serves other numbers too, which is checked for each of them
_MIN_NUMEL = 2**16  # of a weight: below it the product costs less than the call
_TOLERANCE = 1e-4  # of the largest output
_NEEDED_LAYERS = "linear layers of float32 weights on the CPU"


# Products by the address of their weight, for the operator that stands for them in compiled graphs.
_PRODUCTS: WeakValueDictionary[int, PrepackedProduct] = WeakValueDictionary()
_OPS = torch.library.Library("descant", "FRAGMENT")
_OPS.define("prepacked_linear(Tensor vectors, Tensor weight, Tensor? bias) -> Tensor")


def _prepacked_linear(vectors: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product of a layer in a compiled graph, with prepacked weights as long as it has them."""
    product = _PRODUCTS.get(weight.data_ptr())
    return nn.functional.linear(vectors, weight, bias) if product is None else product(vectors)


def _prepacked_linear_shape(vectors: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: ARG001
    return vectors.new_empty(*vectors.shape[:-1], weight.shape[0])


_OPS.impl("prepacked_linear", _prepacked_linear, "CompositeExplicitAutograd")
torch.library.register_fake("descant::prepacked_linear", _prepacked_linear_shape, lib=_OPS)


@contextmanager
def traceable_products(module: nn.Module) -> Iterator[None]:
    """Within it the linear layers of a module are plain, as torch's compiler can trace them."""
    forwards = [
        (layer, layer.__dict__.pop("forward"))
        for layer in module.modules()
        if isinstance(layer.__dict__.get("forward"), PrepackedProduct)
    ]
    try:
        yield
    finally:
        for layer, product in forwards:
            layer.__dict__["forward"] = product


def use_prepacked_weights(graph: torch.fx.Graph) -> None:
    """Replace the plain products of a traced graph by products that use prepacked weights."""
    for node in graph.find_nodes(op="call_function", target=torch._C._nn.linear):
        node.args = (*node.args, None)[:3] if not node.kwargs else node.args
        if not node.kwargs:
            node.target = torch.ops.descant.prepacked_linear.default


class _Version(NamedTuple):
    """What changes when a weight is written or replaced."""

    address: int
    writes: int

    @classmethod
    def of(cls, weight: Tensor) -> _Version:
        return cls(weight.data_ptr(), 0 if weight.is_inference() else weight._version)


class PrepackedWeights:
    """The prepacked linear layers of a model, until `restore` or the end of its `with` block."""

    def __init__(self) -> None:
        self._layers: list[nn.Linear] = []

    @property
    def num_layers(self) -> int:
        """The number of prepacked layers."""
        return len(self._layers)

    @property
    def nbytes(self) -> int:
        """The bytes that the prepacked weights take beside the model's own: two layouts of each."""
        return sum(2 * layer.weight.nbytes for layer in self._layers)

    def add(self, layer: nn.Linear, product: PrepackedProduct) -> None:
        """Let a layer compute its product from prepacked weights."""
        layer.__dict__["forward"] = product
        _PRODUCTS[layer.weight.data_ptr()] = product
        self._layers.append(layer)

    def restore(self) -> None:
        """Let the layers use their own weights alone again."""
        while self._layers:
            layer = self._layers.pop()
            product = layer.__dict__.pop("forward")
            if _PRODUCTS.get(layer.weight.data_ptr()) is product:
                del _PRODUCTS[layer.weight.data_ptr()]

    def __enter__(self) -> PrepackedWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.restore()


def prepack_weights(model: nn.Module) -> PrepackedWeights:
    """Prepack the weights of a model's linear layers, so that steps of 4 to 96 rows on a CPU take less time.

    It replaces the `forward` of the layers, which `restore()` of the result undoes, and needs twice the
    memory of their weights beside them. Outputs differ by rounding alone. A layer whose weight is changed in
    place or replaced uses its plain weight from then on; a change through `.data` is not noticed, so restore
    before.
    """
    if not _has_packed_products():
        raise DescantError("`prepack_weights` needs a torch build with MKL and oneDNN: use the plain weights")
    if num_prepacked_layers(model):
        raise InputError("model", "must not be prepacked already", type(model).__name__, "restore it first")
    layers = [layer for layer in _linear_layers(model) if _can_prepack(layer)]
    if not layers:
        must = f"must have {_NEEDED_LAYERS}"
        raise InputError("model", must, type(model).__name__)
    prepacked, is_exact = PrepackedWeights(), dict[tuple[int, int, int], bool]()
    try:
        for layer in layers:
            prepacked.add(layer, PrepackedProduct(layer, is_exact))
    except BaseException:
        prepacked.restore()
        raise
    return prepacked


def num_prepacked_layers(model: nn.Module) -> int:
    """The number of a model's linear layers whose weights are prepacked."""
    forwards = [layer.__dict__.get("forward") for layer in _linear_layers(model)]
    return sum(isinstance(forward, PrepackedProduct) for forward in forwards)


def _has_packed_products() -> bool:
    return bool(torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available())


def unprepackable_reason(model: nn.Module) -> str | None:
    """Why the weights of a model cannot be prepacked; None: they can, or are."""
    if not _has_packed_products():
        return "torch has no MKL or no oneDNN"
    layers = _linear_layers(model)
    if num_prepacked_layers(model) or any(_can_prepack(layer) for layer in layers):
        return None
    if any(layer.weight.is_meta for layer in layers):
        return "the weights are not loaded"
    if all(layer.weight.numel() < _MIN_NUMEL for layer in layers):
        return "the weights are too small to gain from it"
    return f"the model has no {_NEEDED_LAYERS}"


def _linear_layers(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def _can_prepack(layer: nn.Linear) -> bool:
    """Whether a layer is a plain product; a subclass or another library may have replaced it."""
    weight = layer.weight
    return (
        type(layer).forward is nn.Linear.forward
        and "forward" not in layer.__dict__
        and type(weight) in (Tensor, nn.Parameter)
        and weight.device.type == "cpu"
        and weight.dtype is torch.float32
        and weight.is_contiguous()
        and weight.numel() >= _MIN_NUMEL
    )


class PrepackedProduct:
    """The forward of a linear layer with prepacked weights.

    `is_exact` says for which (lines, outputs, inputs) MKL's product equals the plain one up to rounding.
    oneDNN's layout is made for any number of lines.
    """

    def __init__(self, layer: nn.Linear, is_exact: dict[tuple[int, int, int], bool]) -> None:
        self._layer, self._is_exact = layer, is_exact
        weight = layer.weight.detach()
        self.version = _Version.of(layer.weight)
        self._mkl_weight = torch.ops.mkl._mkl_reorder_linear_weight(weight, _PACKED_FOR)
        self._onednn_weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)

    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002 - the name of torch
        """The product of vectors [..., I] with the weight [O, I]: [..., O]."""
        layer = self._layer
        weight, bias = layer.weight, layer.bias
        if not self._applies(input, weight):
            return nn.functional.linear(input, weight, bias)
        lines = input.numel() // weight.shape[1]
        if lines > _MAX_MKL_LINES:
            return self._onednn_product(input, bias)
        key = lines, *weight.shape
        if self._is_exact.get(key, False):
            return self._mkl_product(input, weight, bias, lines)
        plain = nn.functional.linear(input, weight, bias)
        if key not in self._is_exact and bool(plain.isfinite().all()):
            error = (self._mkl_product(input, weight, bias, lines) - plain).abs().max()
            self._is_exact[key] = bool(error <= _TOLERANCE * plain.abs().max())
        return plain

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """The plain forward of the copied layer: packed weights have no storage that could be copied."""
        return MethodType(nn.Linear.forward, memo[id(self._layer)])

    def _applies(self, vectors: Tensor, weight: Tensor) -> bool:
        """Whether the packed weights are valid and made for such vectors."""
        return (
            MIN_PREPACKED_LINES * weight.shape[1] <= vectors.numel() <= _MAX_LINES * weight.shape[1]
            and vectors.dtype is torch.float32
            and type(vectors) is Tensor
            and not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and _Version.of(weight) == self.version
        )

    def _mkl_product(self, vectors: Tensor, weight: Tensor, bias: Tensor | None, lines: int) -> Tensor:
        result: Any = torch.ops.mkl._mkl_linear(vectors, self._mkl_weight, weight, bias, lines)
        assert isinstance(result, Tensor)
        return result

    def _onednn_product(self, vectors: Tensor, bias: Tensor | None) -> Tensor:
        result: Any = torch.ops.mkldnn._linear_pointwise(vectors, self._onednn_weight, bias, "none", [], "")
        assert isinstance(result, Tensor)
        return result

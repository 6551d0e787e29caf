"""Weights of linear layers in the layout that matrix products on a CPU read fastest."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from descant.errors import DescantError, InputError
from descant.kv_cache.model_state import sample_numbers
from descant.models.fast.products import (
    PackedProduct,
    ReplacedForward,
    define_product,
    has_packed_products,
    plain_product,
)

__all__ = [
    "PrepackedWeights",
    "num_prepacked_layers",
    "prepack_weights",
    "traceable_products",
    "unprepackable_reason",
    "use_products",
]

# A layer by itself reads plain weights as fast with fewer lines.
_MIN_LINES = 4
_MIN_NUMEL = 2**16  # of a weight: below it the product costs less than the call
_NEEDED_LAYERS = "linear layers of float32 weights on the CPU"

# Products by the address of their weight, for the operator that stands for them in compiled graphs.
_PRODUCTS: WeakValueDictionary[int, PrepackedProduct] = WeakValueDictionary()


def _prepacked_linear(vectors: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """The products of layers with the same input in a compiled graph, prepacked as long as they are."""
    product = _PRODUCTS.get(weights[0].data_ptr())
    if product is None:
        return plain_product(vectors, weights, bias)
    return product.multiply(vectors, weights, bias)


define_product("prepacked_linear", _prepacked_linear)


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


def use_products(graph: torch.fx.Graph, product: Any) -> None:
    """Replace the plain products of a traced graph by an operator of vectors, weights and a bias.

    Products of the same vectors (queries, keys and values, or both inputs of a gate) become one.
    """
    groups: dict[Any, list[torch.fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=torch._C._nn.linear):
        if node.kwargs:
            continue
        bias = node.args[2] if len(node.args) > 2 else None
        groups.setdefault(node.args[0] if bias is None else node, []).append(node)
    for nodes in groups.values():
        first, weights = nodes[0], [node.args[1] for node in nodes]
        bias = first.args[2] if len(first.args) > 2 else None
        with graph.inserting_before(first):
            joined: Any = graph.call_function(product, (first.args[0], weights, bias))
            start = 0
            for node in nodes:
                stop = start + node.meta["example_value"].shape[-1]
                index: Any = (..., slice(start, stop))
                part = graph.call_function(operator.getitem, (joined, index))
                node.replace_all_uses_with(joined if len(nodes) == 1 else part)
                start = stop
        for node in nodes:
            graph.erase_node(node)


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
        """The bytes that the prepacked weights take beside the model's own, in two layouts."""
        return sum(layer.__dict__["forward"].nbytes for layer in self._layers)

    def add(self, layer: nn.Linear, product: PrepackedProduct) -> None:
        """Let a layer compute its product from prepacked weights."""
        product.install()
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
    """Prepack the weights of a model's linear layers, so that steps of 4 or more rows on a CPU are faster.

    It replaces the `forward` of the layers, which `restore()` of the result undoes, and needs twice the
    memory of their weights beside them. Outputs differ by rounding alone. A layer whose weight is changed in
    place or replaced uses its plain weight from then on. What torch does not count as a change, such as a
    step of a fused optimizer, is noticed when a call or a session begins, as far as it changes some of the
    numbers that are compared; report other changes with `descant.weights_changed(model)`.
    """
    if not has_packed_products():
        raise DescantError("`prepack_weights` needs a torch build with MKL and oneDNN: use the plain weights")
    if num_prepacked_layers(model):
        raise InputError("model", "must not be prepacked already", type(model).__name__, "restore it first")
    layers = [layer for layer in _linear_layers(model) if _can_prepack(layer)]
    if not layers:
        raise InputError("model", f"must have {_NEEDED_LAYERS}", type(model).__name__)
    prepacked, is_exact = PrepackedWeights(), dict[tuple[int, int, int], bool]()
    try:
        for layer in layers:
            prepacked.add(layer, PrepackedProduct(layer, is_exact))
    except BaseException:
        prepacked.restore()
        raise
    return prepacked


def drop_stale_products(model: nn.Module) -> None:
    """Let the layers of a model use their plain weights whose prepacked ones are not current."""
    if not _PRODUCTS:
        return
    for layer in _linear_layers(model):
        product = layer.__dict__.get("forward")
        if isinstance(product, PrepackedProduct) and product.is_stale():
            torch.autograd.graph.increment_version(layer.weight)  # for products of several


def num_prepacked_layers(model: nn.Module) -> int:
    """The number of a model's linear layers whose weights are prepacked."""
    forwards = [layer.__dict__.get("forward") for layer in _linear_layers(model)]
    return sum(isinstance(forward, PrepackedProduct) for forward in forwards)


def unprepackable_reason(model: nn.Module) -> str | None:
    """Why the weights of a model cannot be prepacked; None: they can, or are."""
    if not has_packed_products():
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


class PrepackedProduct(ReplacedForward):
    """The forward of a linear layer with prepacked weights."""

    def __init__(self, layer: nn.Linear, is_exact: dict[tuple[int, int, int], bool]) -> None:
        super().__init__(layer)
        self._is_exact = is_exact
        self._packed: PackedProduct | None = PackedProduct([layer.weight], is_exact)
        self._group: PackedProduct | None = None  # of this layer and others with the same input
        self._sample = self._read_sample()

    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002 - the name of torch
        """The product of vectors [..., I] with the weight [O, I]: [..., O]."""
        layer = self.module
        if self._packed is None or input.numel() < _MIN_LINES * layer.in_features:
            return nn.functional.linear(input, layer.weight, layer.bias)
        return self._packed(input, [layer.weight], layer.bias)

    def is_stale(self) -> bool:
        """Whether numbers of the weight have changed since it was packed."""
        sample = self._read_sample()
        return sample.device != self._sample.device or not torch.equal(sample, self._sample)

    def _read_sample(self) -> Tensor:
        sample = sample_numbers(self.module.weight.detach())
        return torch.empty(0) if sample is None else sample.clone().view(torch.uint8)

    @property
    def nbytes(self) -> int:
        """The bytes of the packed weights."""
        return sum(product.nbytes for product in (self._packed, self._group) if product is not None)

    def multiply(self, vectors: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        """The products of this layer and others with the same input, in a compiled graph.

        The weights are packed anew where they are joined first. By themselves they are read plain from then
        on, so that the memory stays the same.
        """
        if len(weights) == 1 and self._packed is not None:
            return self._packed(vectors, weights, bias)
        if self._group is None:
            others = [_PRODUCTS.get(weight.data_ptr()) for weight in weights]
            if any(other is None or other._packed is None for other in others):
                return plain_product(vectors, weights, bias)
            self._group = PackedProduct(weights, self._is_exact)
            for other in others:
                assert other is not None
                other._packed = None
        return self._group(vectors, weights, bias)

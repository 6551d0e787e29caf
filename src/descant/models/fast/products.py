"""Products with weights in the layouts of MKL and oneDNN, which read them once for a few lines."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import MethodType, TracebackType
from typing import Any, Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from descant.errors import DescantError, InputError
from descant.kv_cache.kernels.decode_attention import load_decode_kernel
from descant.kv_cache.model_state import sample_numbers

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
            weight = self._onednn_weight
            result: Tensor = torch.ops.mkldnn._linear_pointwise(vectors, weight, bias, "none", [], "")
            return result
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


def _version(weight: Tensor) -> tuple[int, int]:
    """Numbers that change when a weight is written or replaced."""
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


def _is_plain_weight(weight: Tensor) -> bool:
    return type(weight) in (Tensor, nn.Parameter) and weight.device.type == "cpu"


def _is_plain_layer(layer: Any) -> bool:
    """Whether a layer is a plain product on a CPU; a subclass or another library may have replaced it."""
    is_own = isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward
    return is_own and "forward" not in layer.__dict__ and _is_plain_weight(layer.weight)


def has_bfloat16_product(weight: Tensor) -> bool:
    """Whether there is a kernel for such a weight; it is compiled the first time."""
    return _is_plain_weight(weight) and _product_kernel(weight.dtype) is not None


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
        or any(tensor.dtype is not torch.bfloat16 or not tensor.is_contiguous() for tensor in given)
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
        """Whether a layer is a plain product that has a kernel."""
        return _is_plain_layer(layer) and has_bfloat16_product(layer.weight)

    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002 - the name of torch
        """The product of vectors [..., I] with the weight [O, I]: [..., O]."""
        layer = self.module
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or not has_bfloat16_product(layer.weight):
            return nn.functional.linear(input, layer.weight, layer.bias)
        return bfloat16_product(input, [layer.weight], layer.bias)


# A layer by itself reads plain weights as fast with fewer lines.
_MIN_LINES = 4
_MIN_NUMEL = 2**16  # of a weight: below it the product costs less than the call
_NEEDED_LAYERS = "linear layers of float32 weights on the CPU"

# Products by the address of their weight, for the operator that stands for them in compiled graphs.
PRODUCTS: WeakValueDictionary[int, PrepackedProduct] = WeakValueDictionary()


def _prepacked_linear(vectors: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """The products of layers with the same input in a compiled graph, prepacked as long as they are."""
    product = PRODUCTS.get(weights[0].data_ptr())
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


class RestoredAtExit:
    """A change of a model, until `restore` or the end of its `with` block."""

    def restore(self) -> None:
        """Undo the change."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.restore()


class PrepackedWeights(RestoredAtExit):
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
        PRODUCTS[layer.weight.data_ptr()] = product
        self._layers.append(layer)

    def restore(self) -> None:
        """Let the layers use their own weights alone again."""
        while self._layers:
            layer = self._layers.pop()
            product = layer.__dict__.pop("forward")
            if PRODUCTS.get(layer.weight.data_ptr()) is product:
                del PRODUCTS[layer.weight.data_ptr()]


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
    """Whether a layer is a plain product with a weight that can be packed."""
    weight = layer.weight
    is_packable = weight.dtype is torch.float32 and weight.is_contiguous() and weight.numel() >= _MIN_NUMEL
    return is_packable and _is_plain_layer(layer)


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
            others = [PRODUCTS.get(weight.data_ptr()) for weight in weights]
            if any(other is None or other._packed is None for other in others):
                return plain_product(vectors, weights, bias)
            self._group = PackedProduct(weights, self._is_exact)
            for other in others:
                assert other is not None
                other._packed = None
        return self._group(vectors, weights, bias)

"""Decoder layers compiled once for all layers of a kind and for forwards of any number of tokens."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from descant.errors import InputError, UnsupportedModel, first_line
from descant.kv_cache.attention.attention_proxy import AttentionCall, KVProxy
from descant.kv_cache.model_state import collects_states
from descant.models.fast.products import (
    BFloat16Forward,
    ReplacedForward,
    RestoredAtExit,
    has_bfloat16_product,
    num_prepacked_layers,
    serves_any_number,
    traceable_products,
    use_products,
)
from descant.models.forward.encoder import SelfAttentionView

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# torch takes sizes of 0 and 1 as constants: a forward of one token is padded, or has a graph of its own.
MIN_TOKENS = 2


class PackedLayerCache(Protocol):
    """The cache of one packed forward, as compiled layers call it."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float | None) -> Tensor:
        """The attention output [1, P, Hq, E] after one layer's keys and values [1, H, P, D] are written.

        Tokens may be padded at the end.
        """


class _ActiveForward(threading.local):
    """The packed forward that this thread runs on compiled layers; `cache` is None outside of one."""

    cache: PackedLayerCache | None = None
    owner: CompiledLayers | None = None
    layer = 0


_ACTIVE = _ActiveForward()
# The sizes of all inputs are known to be right. Checking them takes longer than the smallest kernels.
_INDUCTOR_CONFIG = {"size_asserts": False, "alignment_asserts": False}
_OPS = torch.library.Library("descant", "FRAGMENT")
_OPS.define("packed_attention(Tensor query, Tensor key, Tensor value, float? scale) -> Tensor")


def _packed_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """The attention output [1, Hq, P, E] of the active forward's current layer, heads innermost."""
    assert _ACTIVE.cache is not None
    return _ACTIVE.cache.attend(query, key, value, _ACTIVE.layer, scale).transpose(1, 2)


def _packed_attention_shape(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:  # noqa: ARG001
    rows, heads, width, _ = query.shape
    return query.new_empty(rows, width, heads, value.shape[3]).transpose(1, 2)


_OPS.impl("packed_attention", _packed_attention, "CompositeExplicitAutograd")
torch.library.register_fake("descant::packed_attention", _packed_attention_shape, lib=_OPS)


class _TracedKV(KVProxy):
    """One layer's new keys or values while its graph is traced; attention becomes one operator."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor.shape, tensor)
        self.new = tensor

    def build_tensor(self) -> Tensor:
        """Not possible: the cached keys are not part of the graph."""
        raise UnsupportedModel("the model uses keys or values outside of scaled_dot_product_attention")

    def attend(self, values: KVProxy, call: AttentionCall) -> Tensor:
        """The attention output [1, Hq, P, E]."""
        if call.is_causal or call.dropout:
            raise UnsupportedModel("the model does not attend by the mask that it is given")
        assert isinstance(values, _TracedKV)
        out: Tensor = torch.ops.descant.packed_attention(call.query, self.new, values.new, call.scale)
        return out

    def with_repeats(self, count: int) -> KVProxy:
        """The same keys or values with every head `count` times; older torch does not trace `copy`."""
        if count == self.head_repeats:
            return self
        other = _TracedKV(self.new)
        rows, heads, *rest = self.new.shape
        other.shape, other.head_repeats = torch.Size((rows, heads * count, *rest)), count
        return other


class _TracedView(SelfAttentionView):
    """The cache argument of a layer while its graph is traced.

    It never reads the number of a layer: torch would compile another graph for each.
    """

    def __init__(self) -> None:
        pass  # no store

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Proxies of one layer's new keys and values [1, H, P, D]."""
        return _TracedKV(key_states), _TracedKV(value_states)

    def get_seq_length(self, layer_idx: int = 0, *_: Any) -> int:  # noqa: ARG002
        """1: zero would mean an empty cache; positions and mask are given."""
        return 1

    get_query_offset = get_seq_length


class _Graph:
    """A compiled graph of a layer, as torch's compiler calls it while it is traced."""

    def __init__(self, run: Callable[..., Sequence[Tensor]], owner: CompiledLayers) -> None:
        self.run, self._owner = run, owner

    def __call__(self, *args: Any) -> Sequence[Tensor]:
        self._owner.last_call = self, args
        return self.run(*args)


class _Trace(NamedTuple):
    """A graph of a layer, and what each of its arguments is."""

    graph: _Graph
    args: list[Any]  # parameters and buffers; None for inputs
    places: list[tuple[int, str, int | None]]  # argument, name of the input, index in it
    sizes: list[int]  # arguments that are the number of tokens


class _LayerForward(ReplacedForward):
    """The forward of one layer: its compiled graph in a packed forward, else its own code.

    After it is traced no guard of torch is evaluated any more, which would take longer than the operators of
    the layer. What the guards protect is compared once per call by `CompiledLayers.is_current`.
    """

    def __init__(self, layer: nn.Module, index: int, owner: CompiledLayers) -> None:
        super().__init__(layer)
        self._index, self._owner = index, owner
        self._many: _Trace | None = None  # for any number of tokens from two on
        self._single: _Trace | None = None  # for one token

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        active = _ACTIVE
        if active.owner is not self._owner or args:
            return self.plain(hidden_states, *args, **kwargs)
        active.layer = self._index
        size = hidden_states.shape[1]
        trace = self._many if size >= MIN_TOKENS else self._single
        if trace is None:
            return self._trace(hidden_states, kwargs)
        kwargs[""] = hidden_states
        inputs = trace.args.copy()
        for place, name, index in trace.places:
            inputs[place] = kwargs[name] if index is None else kwargs[name][index]
        for place in trace.sizes:
            inputs[place] = size
        return trace.graph.run(*inputs)[0]

    def _trace(self, hidden_states: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """The first compiled call: find out which input is which argument of the graph."""
        named = {"": hidden_states, **kwargs}
        places: dict[int, tuple[str, int | None]] = {}
        size = hidden_states.shape[1]
        for name, value in named.items():
            for index, tensor in enumerate(value if isinstance(value, tuple) else (value,)):
                if isinstance(tensor, Tensor):
                    places[id(tensor)] = name, (index if isinstance(value, tuple) else None)
                    for dim in (dim for dim, length in enumerate(tensor.shape) if 1 < length == size):
                        torch._dynamo.mark_dynamic(tensor, dim)
        layer = self.module
        own = {id(tensor) for tensor in (*layer.parameters(), *layer.buffers())}
        # Another model may have had other sizes; only those of this one count.
        static = torch._dynamo.config.patch(automatic_dynamic_shapes=False)
        with static, traceable_products(layer), _without_output_hooks(layer):
            plain = MethodType(type(layer).forward, layer)
            out = self._owner.traced(plain, hidden_states, {**kwargs, "past_key_values": _TracedView()})
        if not isinstance(out, Tensor):
            raise UnsupportedModel(f"{type(layer).__name__} must return one tensor")
        graph, args = self._owner.last_call
        self._owner.last_call = None
        trace = _Trace(graph, [value if id(value) in own else None for value in args], [], [])
        for place, value in enumerate(args):
            if isinstance(value, int) and value == size:
                trace.sizes.append(place)
            elif id(value) in places:
                trace.places.append((place, *places[id(value)]))
            elif id(value) not in own:
                raise UnsupportedModel(f"a graph of {type(layer).__name__} has an input that is not its own")
        if size >= MIN_TOKENS:
            self._many = trace
        else:
            self._single = trace
        return out


@contextmanager
def _without_output_hooks(layer: nn.Module) -> Iterator[None]:
    """Within it the modules of a layer have no hooks that collect states, which torch cannot trace.

    Those of a layer run outside of its graph. Those of its modules collect attentions; forwards that return
    attentions are plain.
    """
    saved = [(module._forward_hooks, list(module._forward_hooks.items())) for module in layer.modules()]
    for hooks, items in saved:
        for key, hook in items:
            if collects_states(hook):
                del hooks[key]
    try:
        yield
    finally:
        for hooks, items in saved:
            hooks.clear()
            hooks.update(items)


def _layer_output(forward: Callable[..., Any], hidden_states: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """The compiled function: the output of one layer."""
    out: Tensor = forward(hidden_states, **kwargs)
    return out


class CompiledLayers(RestoredAtExit):
    """The compiled decoder layers of a model, until `restore` or the end of its `with` block."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[nn.Module]) -> None:
        self.compile_seconds = 0.0  # the time that it took to compile and compare them
        self.graphs: list[_Graph] = []
        self.last_call: Any = None
        # torch limits recompilations per code object, so each model gets its own.
        function = FunctionType(_layer_output.__code__.replace(), _layer_output.__globals__, "_layer")
        self.traced: Callable[..., Tensor] = torch.compile(function, backend=self._compile, fullgraph=True)
        self._is_prepacked = any(num_prepacked_layers(layer) for layer in layers)
        self._layers = [_LayerForward(layer, index, self) for index, layer in enumerate(layers)]
        head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        heads = [BFloat16Forward(head)] if BFloat16Forward.serves(head) else []
        self._replaced: list[ReplacedForward] = [*self._layers, *heads]
        for forward in self._replaced:
            forward.install()
        self._state = _ModelState(model, layers)

    @property
    def num_layers(self) -> int:
        """The number of compiled layers."""
        return len(self._layers)

    @property
    def num_graphs(self) -> int:
        """The number of graphs; layers of one kind share one, and one for single tokens in half precision."""
        return len(self.graphs)

    def is_current(self, model: PreTrainedModel) -> bool:
        """Whether nothing has changed in the model that the graphs depend on."""
        return (
            bool(self._layers) and _ModelState(model, [layer.module for layer in self._layers]) == self._state
        )

    def register(self, model: PreTrainedModel) -> None:
        """Let all later calls and sessions of a model use the graphs."""
        _COMPILED[model] = self

    @contextmanager
    def running(self, cache: PackedLayerCache) -> Iterator[None]:
        """Run the layers compiled in this thread, with this attention."""
        _ACTIVE.owner, _ACTIVE.cache = self, cache
        try:
            yield
        finally:
            _ACTIVE.owner = _ACTIVE.cache = None

    def restore(self) -> None:
        """Let the layers run their own code again."""
        self.last_call = None
        while self._replaced:
            self._replaced.pop().restore()
        self._layers.clear()

    def _compile(self, graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> _Graph:
        """The backend of torch.compile: inductor, whose result is called without guards later."""
        from torch._inductor.compile_fx import compile_fx

        outputs = next(iter(graph.graph.find_nodes(op="output"))).args[0]
        if not isinstance(outputs, tuple | list) or len(outputs) != 1:
            raise UnsupportedModel("a layer must return one tensor and change nothing else")
        if (product := self._product(inputs)) is not None:
            use_products(graph.graph, product)
            graph.recompile()
        run: Any = compile_fx(graph, list(inputs), config_patches=_INDUCTOR_CONFIG)
        _check_sizes()
        compiled = _Graph(run, self)
        self.graphs.append(compiled)
        return compiled

    def _product(self, inputs: Sequence[Tensor | torch.SymInt]) -> Any:
        """The operator of the products in a graph with these inputs; None: torch's own."""
        if self._is_prepacked:
            return torch.ops.descant.prepacked_linear.default
        is_single = not any(isinstance(value, torch.SymInt) for value in inputs)
        weights = [weight for weight in self._layers[0].module.parameters() if weight.ndim == 2]
        is_served = bool(weights) and all(map(has_bfloat16_product, weights))
        if is_served and (is_single or serves_any_number()):
            return torch.ops.descant.bfloat16_linear.default
        return None


_COMPILED: WeakKeyDictionary[Any, CompiledLayers] = WeakKeyDictionary()


def compiled_layers_of(model: Any) -> CompiledLayers | None:
    """The compiled layers of a model; None if it has none, or was changed since."""
    try:
        compiled = _COMPILED.get(model)
    except TypeError:  # not every model can be weakly referenced
        return None
    return compiled if compiled is not None and compiled.is_current(model) else None


class _ModelState:
    """State that a graph depends on; objects are held, so that no other takes their address."""

    def __init__(self, model: Any, layers: Sequence[nn.Module]) -> None:
        self._objects: list[Any] = []
        self._values: list[Any] = [
            model.config._attn_implementation,
            model.training,
            torch.get_num_threads(),  # inductor's kernels are made for so many
            torch.is_autocast_enabled("cpu"),
        ]
        for layer in layers:
            for module in layer.modules():
                self._add_module(module.__dict__, module)

    def _add_module(self, own: dict[str, Any], module: nn.Module) -> None:
        self._objects += (module, own.get("forward"))
        for tensor in (*own["_parameters"].values(), *own["_buffers"].values()):
            self._objects.append(tensor)
            if tensor is not None:  # `model.to(dtype)` changes a parameter in place
                self._values += (tensor.dtype, tensor.device, tensor.shape)
        for hooks in (own["_forward_hooks"], own["_forward_pre_hooks"]):
            self._objects += [hook for hook in hooks.values() if not collects_states(hook)]
        # Adapters and switches of a module are plain attributes.
        self._values += [(name, *found) for name, value in own.items() if (found := _plain_values(value))]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _ModelState) or len(self._objects) != len(other._objects):
            return False
        return all(map(operator.is_, self._objects, other._objects)) and self._values == other._values

    __hash__ = None  # type: ignore[assignment]


def _plain_values(value: Any) -> tuple[Any, ...]:
    """A copy of the numbers and names in an attribute, which may change in place; else nothing."""
    values = value if isinstance(value, list | tuple) else [value]
    if isinstance(value, dict):
        values = [*value, *value.values()] if all(isinstance(name, str) for name in value) else ()
    is_plain = all(value is None or isinstance(value, bool | int | float | str) for value in values)
    return tuple(values) if is_plain else ()


# Numbers of tokens that a forward may have; a condition on the number must hold for all of them.
_SIZES = (2, 3, 7, 8, 15, 16, 17, 64, 100, 1024, 4097, 2**16)


def _check_sizes() -> None:
    """Raise UnsupportedModel if the graph being compiled holds for some numbers of tokens only."""
    context = torch._guards.TracingContext.try_get()
    environment = None if context is None or context.fake_mode is None else context.fake_mode.shape_env
    for guard in () if environment is None else environment.guards:
        symbols = guard.expr.free_symbols
        if any(guard.expr.subs(dict.fromkeys(symbols, size)) == False for size in _SIZES):  # noqa: E712 - of sympy
            raise UnsupportedModel(f"a layer depends on the number of tokens ({guard.expr})")


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that a model calls one after the other: those of its decoder, or its longest list."""
    find: Any = getattr(model, "get_decoder", None)
    own = getattr(find() if callable(find) else None, "layers", None)
    lists = [own] if isinstance(own, nn.ModuleList) else model.modules()
    layers = max((list(part) for part in lists if isinstance(part, nn.ModuleList)), key=len, default=[])
    if not layers:
        raise InputError("model", "must have a list of layers", type(model).__name__)
    return layers


def previous_layers(model: Any) -> CompiledLayers | None:
    """The compiled layers of a model, also if it was changed since and runs its own code."""
    return _COMPILED.get(model)


def trace_error(model: Any, error: BaseException) -> UnsupportedModel:
    """The error of a model whose layers cannot be compiled."""
    name, error = type(model).__name__, getattr(error, "inner_exception", error)
    return UnsupportedModel(
        f"the layers of {name} cannot be compiled ({first_line(error)}): use them as they are"
    )

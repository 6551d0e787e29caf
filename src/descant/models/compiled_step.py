"""The decode step of a model, compiled: one token a row, on the blocks of a static store."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from descant.config.compile_config import CompileConfig
from descant.core.interfaces import Facts
from descant.errors import ConfigError, UnsupportedModel
from descant.models.devices import spread
from descant.models.forward_view import SelfView
from descant.models.rank_group import ranks_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Fixed", "Steps", "steps_of", "uncompilable"]

Blocks = Mapping[int, Tensor]  # by layer, [R, H, S, D]


@runtime_checkable
class Fixed(Protocol):
    """A cache whose blocks keep their size, so that a step on them can be compiled."""

    capacity: int
    compile: CompileConfig | None

    def lend(self, rows: int) -> tuple[Blocks, Blocks] | None:
        """The first lines of the keys and values of every layer, to write and read in place."""
        ...


def uncompilable(model: PreTrainedModel, facts: Facts) -> str | None:
    """Why the step of a model cannot be compiled; None: it can be tried."""
    kind = type(model).__name__
    if facts.encoder_decoder:
        return f"{kind} has an encoder, whose outputs differ in size from text to text"
    if facts.memory != "keys":
        return f"{kind} does not remember by keys and values"
    if facts.asks or facts.places or not facts.masks:
        return f"{kind} cannot be shown positions and a mask of our own"
    if spread(model) or ranks_of(model) is not None:
        return f"{kind} is spread over several devices"
    return None


class _Heads:
    """A block [R, H, S, D], each head `count` times, that is not laid out for torch's attention.

    Several query heads that share a head of keys are to it as several tokens: so nothing is repeated, which
    with a mask models would do, for all slots at every step. For anything else it is the repeated tensor.
    """

    def __init__(self, block: Tensor, count: int = 1) -> None:
        self.block, self.count = block, count

    @property
    def shape(self) -> torch.Size:
        """What the repeated tensor's would be."""
        rows, heads, slots, size = self.block.shape
        return torch.Size((rows, heads * self.count, slots, size))

    def dense(self) -> Tensor:
        """The repeated tensor."""
        return self.block if self.count == 1 else self.block.repeat_interleave(self.count, 1)

    def __getitem__(self, index: Any) -> Any:
        if index == _BESIDE and self.count == 1:
            return _Widened(self.block)
        return self.dense()[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dense(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            query, keys, values = args[:3]
            rows, heads, width, size = query.shape
            mask, count = kwargs.get("attn_mask"), heads // keys.block.shape[1]
            if width == 1 and len(args) == 3 and mask is not None and mask.shape[1] == 1:
                folded = query.reshape(rows, heads // count, count, size)
                kwargs = {**kwargs, "enable_gqa": False}
                seen = func(folded, keys.block, values.block, **kwargs)
                return seen.reshape(rows, heads, 1, seen.shape[3])
        args, kwargs = (tree_map(_dense, given) for given in (args, kwargs))
        return func(*args, **kwargs)


class _Widened:
    """A block on the way to be repeated [R, H, count, S, D], the way models do it."""

    def __init__(self, block: Tensor, count: int = 1) -> None:
        self._block, self._count = block, count

    def expand(self, *sizes: int) -> _Widened:
        return _Widened(self._block, sizes[2])

    def reshape(self, *_: int) -> _Heads:
        return _Heads(self._block, self._count)


# How models put in a dimension for repeats.
_BESIDE = (slice(None), slice(None), None, slice(None), slice(None))


def _dense(thing: Any) -> Any:
    return thing.dense() if isinstance(thing, _Heads) else thing


class _View(SelfView):
    """The borrowed blocks as a model sees them inside the compiled step: all slots, whatever they hold."""

    def __init__(self, keys: Blocks, values: Blocks, at: Tensor, shared: bool) -> None:
        self._shared = shared
        self.layers: list[Any] = []
        self.offloading = False
        self.layer_class_to_replicate = None
        self._sliding = (False,)
        self._keys, self._values = keys, values
        self._line = torch.arange(at.shape[0], device=at.device)[:, None, None]
        self._slot = at[:, None, None]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Any, Any]:
        """Write one layer's new keys and values [R, H, 1, D]; its whole blocks [R, H, S, D]."""
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        for block, new in ((keys, key_states), (values, value_states)):
            head = torch.arange(block.shape[1], device=block.device)[None, :, None]
            block.index_put_((self._line, head, self._slot), new)
        return (_Heads(keys), _Heads(values)) if self._shared else (keys, values)

    def get_seq_length(self, layer_idx: int = 0, *_: Any) -> int:  # noqa: ARG002
        """Not 0, which would say that nothing was read; positions and mask are given."""
        return 1

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:  # noqa: ARG002
        """How many keys attention will see, and the position of the first."""
        return next(iter(self._keys.values())).shape[2], 0


class _Traits(NamedTuple):
    """What a step must know of the model beforehand."""

    windows: tuple[tuple[str, int | None], ...]  # kind of layer, how far back it sees
    filling: torch.dtype | None  # of a mask that is added; None: a mask of bools
    shared: bool  # whether heads of keys are left as they are for all query heads that share them


def _step(model: Any, ids: Tensor, at: Tensor, keys: Blocks, values: Blocks, traits: _Traits) -> Tensor:
    """The logits [R, 1, V] after one token a row [R, 1] at its position [R]; the blocks hold it then."""
    slots = torch.arange(next(iter(keys.values())).shape[2], device=at.device)
    masks = {}
    for kind, window in traits.windows:
        mask = slots <= at[:, None]  # [R, S]
        if window is not None:
            mask = mask & (slots > at[:, None] - window)
        if traits.filling is not None:
            low = torch.finfo(traits.filling).min
            mask = torch.zeros_like(mask, dtype=traits.filling).masked_fill(~mask, low)
        masks[kind] = mask[:, None, None]
    answer = model(
        input_ids=ids,
        position_ids=at[:, None],
        attention_mask=next(iter(masks.values())) if len(masks) == 1 else masks,
        past_key_values=_View(keys, values, at, traits.shared),
        use_cache=True,
        return_dict=True,
    )
    logits: Tensor = answer.logits.float()
    return logits


class _Shape(NamedTuple):
    """What a step is compiled for: nothing else that changes from call to call has a say in it."""

    settings: CompileConfig
    rows: int
    capacity: int
    dtype: torch.dtype
    device: torch.device


class _Compiled:
    """A step for one shape, with the tensors that it is fed from."""

    def __init__(self, shape: _Shape, traits: _Traits) -> None:
        self._shape, self._traits = shape, traits
        self.whole = shape.settings.fullgraph
        with torch.inference_mode(False):
            self._ids = torch.zeros(shape.rows, 1, dtype=torch.long, device=shape.device)
            self._at = torch.zeros(shape.rows, dtype=torch.long, device=shape.device)
        _stay(self._ids, self._at)
        # torch counts what it has compiled by code, so that each step needs code of its own.
        own = FunctionType(_step.__code__.replace(), _step.__globals__, "_step")
        try:
            self._run: Callable[..., Tensor] = torch.compile(own, **shape.settings.arguments)
        except RuntimeError as error:  # a backend or an option that torch does not know
            raise ConfigError(
                "compile_config", f"is refused by torch ({_line(error)})", shape.settings.to_dict()
            ) from error

    def __call__(self, model: Any, ids: Tensor, at: Tensor, blocks: tuple[Blocks, Blocks]) -> Tensor:
        """The logits [N, 1, V] after the tokens [N, 1] at the positions [N] (host)."""
        rows = len(ids)  # lines behind them hold nothing: whatever is fed and written there, nobody sees it
        graphs = self._shape.device.type == "cuda"
        # The mode of the caller must not decide what is compiled.
        with torch.inference_mode(False), torch.no_grad():
            self._ids[:rows].copy_(ids)
            self._at[:rows].copy_(at, non_blocking=True)
            if graphs:
                torch.compiler.cudagraph_mark_step_begin()
            logits = self._run(model, self._ids, self._at, *blocks, self._traits)[:rows]
            # A recorded graph writes its next answer where this one lies.
            return logits.clone() if graphs else logits


class Steps:
    """The compiled steps of one model, each for its shape."""

    def __init__(self, traits: _Traits) -> None:
        self.traits = traits
        self._known: dict[_Shape, _Compiled] = {}
        self.graphs = 0  # how many were compiled
        self.seconds = 0.0  # how long that took, by the wall

    def step(self, model: PreTrainedModel, ids: Tensor, at: Tensor, cache: Fixed) -> Tensor | None:
        """The logits [N, 1, V] after the tokens [N, 1] at the positions [N] (host) of all rows.

        None where the cache holds nothing yet.
        """
        assert cache.compile is not None
        rows = 1 << (len(ids) - 1).bit_length()
        blocks = cache.lend(rows)
        if blocks is None:
            return None
        some = next(iter(blocks[0].values()))
        if not hasattr(some, _STAYS):
            _stay(*blocks[0].values(), *blocks[1].values())
        shape = _Shape(cache.compile, rows, cache.capacity, some.dtype, some.device)
        known = self._known.get(shape)
        if known is not None:
            return self._watched(known, model, ids, at, blocks)
        try:
            new = _Compiled(shape, self.traits)
            logits = self._watched(new, model, ids, at, blocks)
        except UnsupportedModel:
            if not self.traits.shared:
                raise
            # It does something with keys that torch cannot follow; they can be plain tensors as well.
            new = _Compiled(shape, self.traits._replace(shared=False))
            logits = self._watched(new, model, ids, at, blocks)
        self._known[shape] = new
        return logits

    def _watched(
        self, compiled: _Compiled, model: Any, ids: Tensor, at: Tensor, blocks: tuple[Blocks, Blocks]
    ) -> Tensor:
        """The step's answer; what is compiled for it is counted, and what cannot be compiled is an error."""
        import torch._dynamo as dynamo

        counted, start = dynamo.utils.counters["stats"], time.perf_counter()
        before = counted["unique_graphs"]
        # torch runs uncompiled what it has compiled too often, unless it is one graph or told otherwise.
        limited = nullcontext() if compiled.whole else dynamo.config.patch(fail_on_recompile_limit_hit=True)
        try:
            with limited:
                logits = compiled(model, ids, at, blocks)
        except dynamo.exc.FailOnRecompileLimitHit as error:
            raise UnsupportedModel(
                f"{type(model).__name__} has changed so often that torch compiles its step no more: leave it "
                "as it is, leave out `compile_config`, or raise `torch._dynamo.config.recompile_limit`"
            ) from error
        except dynamo.exc.TorchDynamoException as error:
            raise UnsupportedModel(
                f"the step of {type(model).__name__} cannot be compiled ({_line(error)}): leave out "
                "`compile_config`, or try it with `fullgraph=False`"
            ) from error
        new = counted["unique_graphs"] - before
        if new:
            self.graphs += new
            self.seconds += time.perf_counter() - start
        return logits


_KNOWN: WeakKeyDictionary[PreTrainedModel, Steps] = WeakKeyDictionary()


def steps_of(model: PreTrainedModel, facts: Facts) -> Steps:
    """The compiled steps of a model, the same for everybody who asks, as long as there is the model."""
    if reason := uncompilable(model, facts):
        raise UnsupportedModel(f"{reason}, so that its step cannot be compiled: leave out `compile_config`")
    filling = model.dtype if facts.attention == "eager" else None
    traits = _Traits(tuple(facts.windows.items()), filling, facts.attention == "sdpa")
    found = _KNOWN.get(model)
    if found is None or found.traits != traits:  # its attention can be exchanged
        found = _KNOWN[model] = Steps(traits)
    return found


_STAYS = "_dynamo_static_input_type"  # how torch marks them


def _stay(*tensors: Tensor) -> None:
    """Say that tensors stay where they are: a recorded graph may write to them and need not copy them.

    Others may take their place, for which nothing is compiled again.
    """
    import torch._dynamo as dynamo

    for tensor in tensors:
        dynamo.mark_static_address(tensor, guard=False)


def _line(error: Exception) -> str:
    """What an error says first."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)

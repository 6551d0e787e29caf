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
from descant.core.interfaces import ModelTraits
from descant.errors import ConfigError, UnsupportedModel
from descant.models.devices import is_multi_device
from descant.models.forward_view import SelfAttentionView
from descant.models.rank_group import rank_group_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["CompilableStore", "CompiledSteps", "compiled_steps_of", "uncompilable_reason"]

LayerBlocks = Mapping[int, Tensor]  # by layer, [R, H, S, D]


@runtime_checkable
class CompilableStore(Protocol):
    """A cache whose blocks keep their size, so that a step on them can be compiled."""

    capacity: int
    compile_config: CompileConfig | None

    def layer_views(self, rows: int) -> tuple[LayerBlocks, LayerBlocks] | None:
        """The first lines of the keys and values of every layer, to write and read in place."""
        ...


def uncompilable_reason(model: PreTrainedModel, facts: ModelTraits) -> str | None:
    """Why the step of a model cannot be compiled; None: it can be tried."""
    kind = type(model).__name__
    if facts.is_encoder_decoder:
        return f"{kind} has an encoder, whose outputs differ in size from text to text"
    if facts.cache_type != "kv":
        return f"{kind} does not remember by keys and values"
    if facts.prepares_own_inputs or facts.has_own_position_ids or not facts.supports_custom_mask:
        return f"{kind} cannot be shown positions and a mask of our own"
    if is_multi_device(model) or rank_group_of(model) is not None:
        return f"{kind} is spread over several devices"
    return None


class _GroupedKVProxy:
    """A block [R, H, S, D], each head `count` times, that is not laid out for torch's attention.

    Several query heads that share a head of keys are to it as several tokens: so nothing is repeated, which
    with a mask models would do, for all slots at every step. For anything else it is the repeated tensor.
    """

    def __init__(self, block: Tensor, count: int = 1) -> None:
        self.block, self.head_repeats = block, count

    @property
    def shape(self) -> torch.Size:
        """What the repeated tensor's would be."""
        rows, heads, slots, size = self.block.shape
        return torch.Size((rows, heads * self.head_repeats, slots, size))

    def materialize(self) -> Tensor:
        """The repeated tensor."""
        return self.block if self.head_repeats == 1 else self.block.repeat_interleave(self.head_repeats, 1)

    def __getitem__(self, index: Any) -> Any:
        if index == _REPEAT_KV_INDEX and self.head_repeats == 1:
            return _ExpandedKVProxy(self.block)
        return self.materialize()[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.materialize(), name)

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
        args, kwargs = (tree_map(_materialize, given) for given in (args, kwargs))
        return func(*args, **kwargs)


class _ExpandedKVProxy:
    """A block on the way to be repeated [R, H, count, S, D], the way models do it."""

    def __init__(self, block: Tensor, count: int = 1) -> None:
        self._block, self._head_repeats = block, count

    def expand(self, *sizes: int) -> _ExpandedKVProxy:
        return _ExpandedKVProxy(self._block, sizes[2])

    def reshape(self, *_: int) -> _GroupedKVProxy:
        return _GroupedKVProxy(self._block, self._head_repeats)


# How models put in a dimension for repeats.
_REPEAT_KV_INDEX = (slice(None), slice(None), None, slice(None), slice(None))


def _materialize(thing: Any) -> Any:
    return thing.materialize() if isinstance(thing, _GroupedKVProxy) else thing


class _CompiledStepView(SelfAttentionView):
    """The borrowed blocks as a model sees them inside the compiled step: all slots, whatever they hold."""

    def __init__(self, keys: LayerBlocks, values: LayerBlocks, at: Tensor, shared: bool) -> None:
        self._grouped_kv = shared
        self.layers: list[Any] = []
        self.offloading = False
        self.layer_class_to_replicate = None
        self._is_sliding = (False,)
        self._keys, self._values = keys, values
        self._row_index = torch.arange(at.shape[0], device=at.device)[:, None, None]
        self._slot_index = at[:, None, None]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Any, Any]:
        """Write one layer's new keys and values [R, H, 1, D]; its whole blocks [R, H, S, D]."""
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        for block, new in ((keys, key_states), (values, value_states)):
            head = torch.arange(block.shape[1], device=block.device)[None, :, None]
            block.index_put_((self._row_index, head, self._slot_index), new)
        return (_GroupedKVProxy(keys), _GroupedKVProxy(values)) if self._grouped_kv else (keys, values)

    def get_seq_length(self, layer_idx: int = 0, *_: Any) -> int:  # noqa: ARG002
        """Not 0, which would say that nothing was read; positions and mask are given."""
        return 1

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:  # noqa: ARG002
        """How many keys attention will see, and the position of the first."""
        return next(iter(self._keys.values())).shape[2], 0


class _StepTraits(NamedTuple):
    """What a step must know of the model beforehand."""

    windows: tuple[tuple[str, int | None], ...]  # kind of layer, how far back it sees
    mask_dtype: torch.dtype | None  # of a mask that is added; None: a mask of bools
    grouped_kv: bool  # whether heads of keys are left as they are for all query heads that share them


def _decode_step(
    model: Any, ids: Tensor, at: Tensor, keys: LayerBlocks, values: LayerBlocks, traits: _StepTraits
) -> Tensor:
    """The logits [R, 1, V] after one token a row [R, 1] at its position [R]; the blocks hold it then."""
    slots = torch.arange(next(iter(keys.values())).shape[2], device=at.device)
    masks = {}
    for kind, window in traits.windows:
        mask = slots <= at[:, None]  # [R, S]
        if window is not None:
            mask = mask & (slots > at[:, None] - window)
        if traits.mask_dtype is not None:
            low = torch.finfo(traits.mask_dtype).min
            mask = torch.zeros_like(mask, dtype=traits.mask_dtype).masked_fill(~mask, low)
        masks[kind] = mask[:, None, None]
    answer = model(
        input_ids=ids,
        position_ids=at[:, None],
        attention_mask=next(iter(masks.values())) if len(masks) == 1 else masks,
        past_key_values=_CompiledStepView(keys, values, at, traits.grouped_kv),
        use_cache=True,
        return_dict=True,
    )
    logits: Tensor = answer.logits.float()
    return logits


class _StepShape(NamedTuple):
    """What a step is compiled for: nothing else that changes from call to call has a say in it."""

    compile_config: CompileConfig
    rows: int
    capacity: int
    dtype: torch.dtype
    device: torch.device


class _CompiledStep:
    """A step for one shape, with the tensors that it is fed from."""

    def __init__(self, shape: _StepShape, traits: _StepTraits) -> None:
        self._shape, self._traits = shape, traits
        self.fullgraph = shape.compile_config.fullgraph
        with torch.inference_mode(False):
            self._ids = torch.zeros(shape.rows, 1, dtype=torch.long, device=shape.device)
            self._positions = torch.zeros(shape.rows, dtype=torch.long, device=shape.device)
        _mark_static(self._ids, self._positions)
        # torch counts what it has compiled by code, so that each step needs code of its own.
        own = FunctionType(_decode_step.__code__.replace(), _decode_step.__globals__, "_step")
        try:
            self._run: Callable[..., Tensor] = torch.compile(own, **shape.compile_config.arguments)
        except RuntimeError as error:  # a backend or an option that torch does not know
            raise ConfigError(
                "compile_config",
                f"is refused by torch ({_first_line(error)})",
                shape.compile_config.to_dict(),
            ) from error

    def __call__(
        self, model: Any, ids: Tensor, at: Tensor, blocks: tuple[LayerBlocks, LayerBlocks]
    ) -> Tensor:
        """The logits [N, 1, V] after the tokens [N, 1] at the positions [N] (host)."""
        rows = len(ids)  # lines behind them hold nothing: whatever is fed and written there, nobody sees it
        graphs = self._shape.device.type == "cuda"
        # The mode of the caller must not decide what is compiled.
        with torch.inference_mode(False), torch.no_grad():
            self._ids[:rows].copy_(ids)
            self._positions[:rows].copy_(at, non_blocking=True)
            if graphs:
                torch.compiler.cudagraph_mark_step_begin()
            logits = self._run(model, self._ids, self._positions, *blocks, self._traits)[:rows]
            # A recorded graph writes its next answer where this one lies.
            return logits.clone() if graphs else logits


class CompiledSteps:
    """The compiled steps of one model, each for its shape."""

    def __init__(self, traits: _StepTraits) -> None:
        self.traits = traits
        self._steps_by_shape: dict[_StepShape, _CompiledStep] = {}
        self.num_graphs = 0  # how many were compiled
        self.compile_seconds = 0.0  # how long that took, by the wall

    def run(self, model: PreTrainedModel, ids: Tensor, at: Tensor, cache: CompilableStore) -> Tensor | None:
        """The logits [N, 1, V] after the tokens [N, 1] at the positions [N] (host) of all rows.

        None where the cache holds nothing yet.
        """
        assert cache.compile_config is not None
        rows = 1 << (len(ids) - 1).bit_length()
        blocks = cache.layer_views(rows)
        if blocks is None:
            return None
        some = next(iter(blocks[0].values()))
        if not hasattr(some, _STATIC_MARK):
            _mark_static(*blocks[0].values(), *blocks[1].values())
        shape = _StepShape(cache.compile_config, rows, cache.capacity, some.dtype, some.device)
        known = self._steps_by_shape.get(shape)
        if known is not None:
            return self._run_and_count(known, model, ids, at, blocks)
        try:
            new = _CompiledStep(shape, self.traits)
            logits = self._run_and_count(new, model, ids, at, blocks)
        except UnsupportedModel:
            if not self.traits.grouped_kv:
                raise
            # It does something with keys that torch cannot follow; they can be plain tensors as well.
            new = _CompiledStep(shape, self.traits._replace(grouped_kv=False))
            logits = self._run_and_count(new, model, ids, at, blocks)
        self._steps_by_shape[shape] = new
        return logits

    def _run_and_count(
        self,
        compiled: _CompiledStep,
        model: Any,
        ids: Tensor,
        at: Tensor,
        blocks: tuple[LayerBlocks, LayerBlocks],
    ) -> Tensor:
        """The step's answer; what is compiled for it is counted, and what cannot be compiled is an error."""
        import torch._dynamo as dynamo

        counted, start = dynamo.utils.counters["stats"], time.perf_counter()
        before = counted["unique_graphs"]
        # torch runs uncompiled what it has compiled too often, unless it is one graph or told otherwise.
        limited = (
            nullcontext() if compiled.fullgraph else dynamo.config.patch(fail_on_recompile_limit_hit=True)
        )
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
                f"the step of {type(model).__name__} cannot be compiled ({_first_line(error)}): leave out "
                "`compile_config`, or try it with `fullgraph=False`"
            ) from error
        new = counted["unique_graphs"] - before
        if new:
            self.num_graphs += new
            self.compile_seconds += time.perf_counter() - start
        return logits


_STEPS_BY_MODEL: WeakKeyDictionary[PreTrainedModel, CompiledSteps] = WeakKeyDictionary()


def compiled_steps_of(model: PreTrainedModel, facts: ModelTraits) -> CompiledSteps:
    """The compiled steps of a model, the same for everybody who asks, as long as there is the model."""
    if reason := uncompilable_reason(model, facts):
        raise UnsupportedModel(f"{reason}, so that its step cannot be compiled: leave out `compile_config`")
    filling = model.dtype if facts.attn_implementation == "eager" else None
    traits = _StepTraits(tuple(facts.sliding_windows.items()), filling, facts.attn_implementation == "sdpa")
    found = _STEPS_BY_MODEL.get(model)
    if found is None or found.traits != traits:  # its attention can be exchanged
        found = _STEPS_BY_MODEL[model] = CompiledSteps(traits)
    return found


_STATIC_MARK = "_dynamo_static_input_type"  # how torch marks them


def _mark_static(*tensors: Tensor) -> None:
    """Say that tensors stay where they are: a recorded graph may write to them and need not copy them.

    Others may take their place, for which nothing is compiled again.
    """
    import torch._dynamo as dynamo

    for tensor in tensors:
        dynamo.mark_static_address(tensor, guard=False)


def _first_line(error: Exception) -> str:
    """What an error says first."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)

"""The compiled decode step of a model: one token per row, on the blocks of a static store."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from descant.config.compile_config import CompileConfig
from descant.core.interfaces import ModelTraits
from descant.errors import ConfigError, UnsupportedModel, first_line
from descant.kv_cache.attention.attention_proxy import AttentionCall, KVProxy, TensorKVProxy, sdpa
from descant.kv_cache.stores.dense import StaticStore
from descant.models.distributed import is_multi_device, rank_group_of
from descant.models.forward.encoder import SelfAttentionView
from descant.models.forward.inputs import attention_mask

if TYPE_CHECKING:
    from transformers import PreTrainedModel


LayerBlocks = Mapping[int, Tensor]  # by layer, [R, H, S, D]


def uncompilable_reason(model: PreTrainedModel, traits: ModelTraits) -> str | None:
    """Why the step of a model cannot be compiled; None: no known reason."""
    name = type(model).__name__
    if traits.is_encoder_decoder:
        return f"{name} has an encoder, whose outputs vary in size"
    if traits.has_aligned_inputs:
        return f"{name} takes another input beside every token"
    if traits.cache_type != "kv":
        return f"{name} does not use a KV cache"
    if traits.prepares_own_inputs or traits.has_own_position_ids or not traits.supports_custom_mask:
        return f"{name} does not take position ids and a 4D mask"
    if is_multi_device(model) or rank_group_of(model) is not None:
        return f"{name} is spread over several devices"
    return None


class _GroupedKVProxy(TensorKVProxy):
    """A static block [R, H, S, D] whose heads are not repeated for the query heads that share them.

    In a decode step the query heads of a group are passed to attention as query positions, so no key or
    value is copied. A model would otherwise repeat every slot in every step.
    """

    def attend(self, values: KVProxy, call: AttentionCall) -> Tensor:
        """The attention output [R, Hq, 1, E]."""
        rows, heads, width, size = call.query.shape
        if width > 1 or call.is_causal or call.mask is None or call.mask.shape[1] > 1:
            return super().attend(values, call)
        grouped = call.query.reshape(rows, self.shape[1], heads // self.shape[1], size)
        call = call._replace(query=grouped, enable_gqa=False)
        out = sdpa(self.materialize(), values.materialize(), call)
        return out.reshape(rows, heads, 1, out.shape[3])


class _CompiledStepView(SelfAttentionView):
    """The blocks of a static store as a transformers cache, in the compiled step; all slots are visible."""

    def __init__(self, keys: LayerBlocks, values: LayerBlocks, positions: Tensor, grouped_kv: bool) -> None:
        self._grouped_kv = grouped_kv
        self._keys, self._values = keys, values
        self._row_index = torch.arange(positions.shape[0], device=positions.device)[:, None, None]
        self._slot_index = positions[:, None, None]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Any, Any]:
        """Write one layer's new keys and values [R, H, 1, D]; returns its whole blocks [R, H, S, D]."""
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        for block, new in ((keys, key_states), (values, value_states)):
            head = torch.arange(block.shape[1], device=block.device)[None, :, None]
            block.index_put_((self._row_index, head, self._slot_index), new)
        return (_GroupedKVProxy(keys), _GroupedKVProxy(values)) if self._grouped_kv else (keys, values)

    def get_seq_length(self, layer_idx: int = 0, *_: Any) -> int:  # noqa: ARG002
        """1: zero would mean an empty cache; the value is not used, since positions and mask are given."""
        return 1

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:  # noqa: ARG002
        """The number of keys that attention will see, and the position of the first."""
        return next(iter(self._keys.values())).shape[2], 0


class _StepTraits(NamedTuple):
    """Model traits that a step is compiled with."""

    windows: tuple[tuple[str, int | None], ...]  # layer type and its window
    mask_dtype: torch.dtype | None  # of an additive mask; None: a bool mask
    grouped_kv: bool  # whether grouped query attention reads KV heads without repeating them


def _decode_step(
    model: Any, ids: Tensor, positions: Tensor, keys: LayerBlocks, values: LayerBlocks, traits: _StepTraits
) -> Tensor:
    """Feed one token per row [R, 1] at its position [R] and write the blocks; returns logits [R, 1, V]."""
    capacity = next(iter(keys.values())).shape[2]
    output = model(
        input_ids=ids,
        position_ids=positions[:, None],
        attention_mask=attention_mask(
            positions[:, None], capacity, {}, dict(traits.windows), traits.mask_dtype
        ),
        past_key_values=_CompiledStepView(keys, values, positions, traits.grouped_kv),
        use_cache=True,
        return_dict=True,
    )
    logits: Tensor = output.logits.float()
    return logits


class _StepShape(NamedTuple):
    """The key of a compiled step: everything that may change between calls and needs another graph."""

    compile_config: CompileConfig
    rows: int
    capacity: int
    dtype: torch.dtype
    device: torch.device


class _CompiledStep:
    """A step compiled for one shape, with its input buffers."""

    def __init__(self, shape: _StepShape, traits: _StepTraits) -> None:
        self._shape, self._traits = shape, traits
        self.fullgraph = shape.compile_config.fullgraph
        with torch.inference_mode(False):
            self._ids = torch.zeros(shape.rows, 1, dtype=torch.long, device=shape.device)
            self._positions = torch.zeros(shape.rows, dtype=torch.long, device=shape.device)
        _mark_static(self._ids, self._positions)
        # torch limits recompilations per code object, so each step gets its own.
        step = FunctionType(_decode_step.__code__.replace(), _decode_step.__globals__, "_step")
        try:
            self._run: Callable[..., Tensor] = torch.compile(step, **shape.compile_config.arguments)
        except RuntimeError as error:  # an unknown backend or option
            must = f"must be accepted by torch.compile ({first_line(error)})"
            raise ConfigError("compile_config", must, shape.compile_config.to_dict()) from error

    def __call__(
        self, model: Any, ids: Tensor, positions: Tensor, blocks: tuple[LayerBlocks, LayerBlocks]
    ) -> Tensor:
        """The logits [N, 1, V] after the tokens [N, 1] at the positions [N] (host)."""
        rows = len(ids)  # the rows after them are unused; what is written there is never read
        uses_cuda_graphs = self._shape.device.type == "cuda"
        # The grad mode of the caller must not cause a recompilation.
        with torch.inference_mode(False), torch.no_grad():
            self._ids[:rows].copy_(ids)
            self._positions[:rows].copy_(positions, non_blocking=True)
            if uses_cuda_graphs:
                torch.compiler.cudagraph_mark_step_begin()
            logits = self._run(model, self._ids, self._positions, *blocks, self._traits)[:rows]
            # A CUDA graph overwrites its output in the next step.
            return logits.clone() if uses_cuda_graphs else logits


class CompiledSteps:
    """The compiled steps of one model, by shape."""

    def __init__(self, traits: _StepTraits) -> None:
        self.traits = traits
        self._steps_by_shape: dict[_StepShape, _CompiledStep] = {}
        self.num_graphs = 0  # graphs compiled so far
        self.compile_seconds = 0.0  # wall time of the steps that compiled them

    def run(
        self, model: PreTrainedModel, ids: Tensor, positions: Tensor, cache: StaticStore
    ) -> Tensor | None:
        """The logits [N, 1, V] after the tokens [N, 1] at the positions [N] (host) of all rows.

        None if the cache is empty. The number of rows is rounded up to a power of two, to share steps.
        """
        assert cache.compile_config is not None
        rows = 1 << (len(ids) - 1).bit_length()
        blocks = cache.layer_views(rows)
        if blocks is None:
            return None
        block = next(iter(blocks[0].values()))
        if not hasattr(block, _STATIC_MARK):
            _mark_static(*blocks[0].values(), *blocks[1].values())
        shape = _StepShape(cache.compile_config, rows, cache.capacity, block.dtype, block.device)
        step = self._steps_by_shape.get(shape)
        if step is not None:
            return self._run_and_count(step, model, ids, positions, blocks)
        try:
            step = _CompiledStep(shape, self.traits)
            logits = self._run_and_count(step, model, ids, positions, blocks)
        except UnsupportedModel:
            if not self.traits.grouped_kv:
                raise
            # torch cannot trace what the model does with the proxies: retry with plain tensors.
            step = _CompiledStep(shape, self.traits._replace(grouped_kv=False))
            logits = self._run_and_count(step, model, ids, positions, blocks)
        self._steps_by_shape[shape] = step
        return logits

    def _run_and_count(
        self,
        step: _CompiledStep,
        model: Any,
        ids: Tensor,
        positions: Tensor,
        blocks: tuple[LayerBlocks, LayerBlocks],
    ) -> Tensor:
        """Run a step and count the graphs compiled for it; UnsupportedModel if it cannot be compiled."""
        import torch._dynamo as dynamo

        stats, start = dynamo.utils.counters["stats"], time.perf_counter()
        num_graphs_before = stats["unique_graphs"]
        # Beyond the recompile limit torch would silently run uncompiled, except with `fullgraph`.
        fail_at_limit = (
            nullcontext() if step.fullgraph else dynamo.config.patch(fail_on_recompile_limit_hit=True)
        )
        try:
            with fail_at_limit:
                logits = step(model, ids, positions, blocks)
        except dynamo.exc.FailOnRecompileLimitHit as error:
            raise UnsupportedModel(
                f"the step of {type(model).__name__} hit torch's recompile limit, because the model changed "
                "too often: do not change it, leave out `compile_config`, or raise "
                "`torch._dynamo.config.recompile_limit`"
            ) from error
        except dynamo.exc.TorchDynamoException as error:
            raise UnsupportedModel(
                f"the step of {type(model).__name__} cannot be compiled ({first_line(error)}): leave out "
                "`compile_config`, or try it with `fullgraph=False`"
            ) from error
        num_new_graphs = stats["unique_graphs"] - num_graphs_before
        if num_new_graphs:
            self.num_graphs += num_new_graphs
            self.compile_seconds += time.perf_counter() - start
        return logits


_STEPS_BY_MODEL: WeakKeyDictionary[PreTrainedModel, CompiledSteps] = WeakKeyDictionary()


def compiled_steps_of(model: PreTrainedModel, traits: ModelTraits) -> CompiledSteps:
    """The compiled steps of a model, shared by all calls for the lifetime of the model."""
    if reason := uncompilable_reason(model, traits):
        raise UnsupportedModel(f"{reason}, so its step cannot be compiled: leave out `compile_config`")
    mask_dtype = model.dtype if traits.attn_implementation == "eager" else None
    windows = tuple(traits.sliding_windows.items())
    step_traits = _StepTraits(windows, mask_dtype, traits.attn_implementation == "sdpa")
    steps = _STEPS_BY_MODEL.get(model)
    if steps is None or steps.traits != step_traits:  # the attention implementation can be changed
        steps = _STEPS_BY_MODEL[model] = CompiledSteps(step_traits)
    return steps


_STATIC_MARK = "_dynamo_static_input_type"  # set by torch on marked tensors


def _mark_static(*tensors: Tensor) -> None:
    """Mark tensors as static: a CUDA graph may write to them and need not copy them.

    Without a guard, other tensors can replace them without a recompilation.
    """
    import torch._dynamo as dynamo

    for tensor in tensors:
        dynamo.mark_static_address(tensor, guard=False)

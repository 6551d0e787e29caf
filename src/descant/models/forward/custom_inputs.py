"""Inputs and state of models that override `prepare_inputs_for_generation` or are recurrent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer

from descant.core.interfaces import ModelTraits
from descant.kv_cache.stores.recurrent_state import copy_state
from descant.models.forward.batches import ForwardBatch
from descant.models.forward.inputs import RequestInputs, RequestInputsMap
from descant.models.forward.traits import MODULE_STATE_ATTRS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["InputPreparer", "RecurrentStateHandler", "model_position_ids"]


# Cache arguments that `prepare_inputs_for_generation` takes under their own name; other models take the
# default name.
_PREPARE_CACHE_ARGUMENTS = ("past_key_values", "cache_params", "state")


# What layers that grow by concatenation replace as a whole.
_REPLACED_TENSORS = frozenset({"keys", "values", "indexer_keys"})


class InputPreparer:
    """Builds the inputs of one forward by the model's own `prepare_inputs_for_generation`.

    The rows of the forward have equal length. The model is passed whole rows, its cache and the inputs of the
    request, and selects from these. What it selects at the second forward is passed at every later one.
    """

    def __init__(self, model: PreTrainedModel, traits: ModelTraits, request_inputs: RequestInputsMap) -> None:
        self.model: Any = model
        self.traits, self._request_inputs = traits, request_inputs
        self._skips_position_ids = False  # the model computes positions in its forward

    def prepare_inputs(
        self, tokens: Tensor, batch: ForwardBatch, past: Any, requests: Sequence[int], more: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The arguments of a forward, from whole rows [N, L] of which the last `width` tokens are new."""
        is_first = batch.start == 0
        traits, extra = self.traits, self._request_inputs.get(requests[0])
        self._accept_update(extra, batch)
        request_kwargs = self._request_kwargs(extra, len(tokens), is_first)
        kwargs: dict[str, Any] = {**more, **request_kwargs, "use_cache": traits.cache_type != "none"}
        if past is not None:
            is_named = traits.cache_argument in _PREPARE_CACHE_ARGUMENTS
            kwargs[traits.cache_argument if is_named else "past_key_values"] = past
        mask = "decoder_attention_mask" if traits.is_encoder_decoder else "attention_mask"
        if mask in traits.input_names:
            kwargs[mask] = tokens.new_ones(len(tokens), batch.read_length)
        if traits.supports_position_ids:
            positions = self._position_ids(tokens, batch, requests, kwargs)
            if positions is not None:
                kwargs["position_ids"] = positions
        if traits.supports_logits_to_keep:
            kwargs["logits_to_keep"] = kwargs.get("logits_to_keep", 1)
        inputs: dict[str, Any] = self.model.prepare_inputs_for_generation(
            tokens,
            next_sequence_length=None if is_first else batch.width,
            is_first_iteration=is_first,
            **kwargs,
        )
        if extra is not None and not is_first and extra.step_kwargs is None:
            extra.step_kwargs = {
                name: value for name, value in request_kwargs.items() if inputs.get(name) is not None
            }
            extra.media, extra.per_token = {}, {}
        return inputs

    def update_model_kwargs(self, output: Any, batch: ForwardBatch, requests: Sequence[int]) -> None:
        """Update the request's inputs after a forward, by the model's own method; the next one uses them."""
        extra = self._request_inputs.get(requests[0])
        if extra is None or not (extra.step_kwargs or extra.media or extra.per_token):
            return
        kwargs = dict(
            self.model._update_model_kwargs_for_generation(
                output,
                self._request_kwargs(extra, 1, is_first=False),
                is_encoder_decoder=self.traits.is_encoder_decoder,
            )
        )
        for name in (self.traits.cache_argument, "encoder_outputs"):
            kwargs.pop(name, None)
        kwargs = {name: value[:1] if isinstance(value, Tensor) else value for name, value in kwargs.items()}
        extra.update = batch.start, batch.read_length, kwargs

    @staticmethod
    def _accept_update(extra: RequestInputs | None, batch: ForwardBatch) -> None:
        """Use the inputs that the last forward left, unless that forward is repeated: it was interrupted."""
        if extra is None or extra.update is None:
            return
        start, read_length, kwargs = extra.update
        extra.update = None
        if (start, read_length) == (batch.start, batch.read_length):
            return
        if extra.step_kwargs is None:
            extra.media = {name: value for name, value in kwargs.items() if name not in extra.per_token}
            extra.per_token = {name: kwargs[name][0] for name in extra.per_token if name in kwargs}
        else:
            extra.step_kwargs = kwargs

    def _request_kwargs(self, extra: RequestInputs | None, count: int, is_first: bool) -> dict[str, Any]:
        """The inputs of a request, expanded to its current number of rows."""
        if extra is None:
            return {}
        if extra.step_kwargs is not None:
            kwargs = dict(extra.step_kwargs)
        else:
            kwargs = {**extra.media, **{name: value[None] for name, value in extra.per_token.items()}}
        if is_first or count == 1:
            return kwargs
        return {
            name: value.expand(count, *value.shape[1:])
            if isinstance(value, Tensor) and len(value) == 1
            else value
            for name, value in kwargs.items()
        }

    def _position_ids(
        self, tokens: Tensor, batch: ForwardBatch, requests: Sequence[int], kwargs: Mapping[str, Any]
    ) -> Tensor | None:
        """The positions of whole rows [N, L], or [k, N, L] for multi-dimensional positions (M-RoPE)."""
        count, length = len(tokens), batch.read_length
        if self.traits.has_own_position_ids and batch.start == 0:
            position_ids = model_position_ids(self.model, self._request_inputs, tokens, requests, kwargs)
            self._skips_position_ids = position_ids is None
            return position_ids
        if self._skips_position_ids:
            return None
        positions = torch.arange(length, device=tokens.device).expand(count, length)
        deltas = self._request_inputs.position_deltas(requests)
        return positions if deltas is None else positions + deltas[..., None].to(positions.device)


def model_position_ids(
    model: Any,
    request_inputs: RequestInputsMap,
    tokens: Tensor,
    requests: Sequence[int],
    kwargs: Mapping[str, Any],
) -> Tensor | None:
    """Positions of new rows as the model computes them [k, N, L]; stores the offset of each request."""
    with preserve_rope_deltas(model):
        position_ids: Tensor | None = model._prepare_position_ids_for_generation(tokens, dict(kwargs))
    if position_ids is not None and position_ids.ndim == 3:
        mask = kwargs.get("attention_mask")
        lengths = [tokens.shape[1]] * len(tokens) if mask is None else mask.sum(1).tolist()
        for row, (request, length) in enumerate(zip(requests, lengths, strict=True)):
            request_inputs.set_position_delta(request, position_ids[:, row, length - 1] + 1 - length)
    return position_ids


@contextlib.contextmanager
def preserve_rope_deltas(model: Any) -> Iterator[None]:
    """Restore the `rope_deltas` that a model sets on its modules while it computes positions."""
    saved = [(module, module.rope_deltas) for module in model.modules() if "rope_deltas" in vars(module)]
    try:
        yield
    finally:
        for module, value in saved:
            module.rope_deltas = value


class RecurrentStateHandler:
    """State of recurrent models: a cache of their own class, or whatever they return.

    Some keep part of the state on their modules; it is set there for a forward and removed afterwards.
    """

    def __init__(self, model: PreTrainedModel, traits: ModelTraits) -> None:
        self.model: Any = model
        self.traits = traits
        self._module_attrs = [
            (module, name)
            for module in model.modules()
            for name in MODULE_STATE_ATTRS
            if name in vars(module)
        ]

    def new_state(self) -> Any:
        """The state before the first forward."""
        past: Any = None
        if self.model._supports_default_dynamic_cache():
            text = self.model.config.get_text_config(decoder=True)
            past = DynamicCache(config=text)
            if self.traits.is_encoder_decoder:
                past = EncoderDecoderCache(past, DynamicCache(config=text))
        return (past, [None] * len(self._module_attrs)) if self._module_attrs else past

    def model_cache(self, state: Any) -> Any:
        """The part of a state that the model takes as its cache argument."""
        return state[0] if self._module_attrs else state

    def writable_state(self, state: Any) -> Any:
        """A copy of a state for one forward, which writes to it: the state itself stays as it is."""
        return copy_state(state, _is_replaced)

    @contextlib.contextmanager
    def install_state(self, state: Any) -> Iterator[list[Any]]:
        """Set the module part of a state for one forward; the list then holds its new values."""
        new_values: list[Any] = []
        saved = [getattr(module, name) for module, name in self._module_attrs]
        try:
            for index, (module, name) in enumerate(self._module_attrs):
                setattr(module, name, state[1][index])
            yield new_values
            new_values += [getattr(module, name) for module, name in self._module_attrs]
        finally:
            for (module, name), value in zip(self._module_attrs, saved, strict=True):
                setattr(module, name, value)

    def next_state(self, output: Any, state: Any, module_values: list[Any]) -> Any:
        """The state after a forward: the cache that the model returned, else the one it wrote to."""
        past = output.get(self.traits.cache_argument) if hasattr(output, "get") else None
        past = self.model_cache(state) if past is None else past
        return (past, module_values) if self._module_attrs else past


def _is_replaced(owner: Any, name: str) -> bool:
    """Whether a cache layer replaces an attribute at every forward, and never writes to it."""
    return name in _REPLACED_TENSORS and isinstance(owner, DynamicLayer)

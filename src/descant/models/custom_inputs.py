"""Feeding a model that says by itself what it wants to be fed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

from descant.core.interfaces import ModelTraits
from descant.models.forward_batches import ForwardBatch
from descant.models.request_inputs import RequestInputs, RequestInputsMap
from descant.models.traits import MODULE_STATE_ATTRS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["InputPreparer", "RecurrentStateHandler", "model_position_ids"]


# The names under which a model is shown its past again; the others of old models go by the usual name.
_PREPARE_CACHE_ARGUMENTS = ("past_key_values", "cache_params", "state")


class InputPreparer:
    """The inputs of one forward of rows that stand level, by the model's own account.

    The model is shown the whole rows, what it remembers and what the request gave, and picks from these;
    what it picks again at the second forward is what it is given at every later one.
    """

    def __init__(self, model: PreTrainedModel, facts: ModelTraits, extras: RequestInputsMap) -> None:
        self.model: Any = model
        self.traits, self._request_inputs = facts, extras
        self._skips_position_ids = False  # whether the model has said that it counts positions while it reads

    def prepare_inputs(
        self, tokens: Tensor, batch: ForwardBatch, past: Any, requests: Sequence[int], more: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What to call the model with: whole rows [N, L] of which the last `width` are new."""
        first = batch.start == 0
        facts, extra = self.traits, self._request_inputs[requests[0]]
        given = self._request_kwargs(extra, len(tokens), first)
        asked: dict[str, Any] = {**more, **given, "use_cache": facts.cache_type != "none"}
        if past is not None:
            name = (
                facts.cache_argument
                if facts.cache_argument in _PREPARE_CACHE_ARGUMENTS
                else "past_key_values"
            )
            asked[name] = past
        mask = "decoder_attention_mask" if facts.is_encoder_decoder else "attention_mask"
        if mask in facts.input_names:
            asked[mask] = tokens.new_ones(len(tokens), batch.read_length)
        if facts.supports_position_ids:
            positions = self._position_ids(tokens, batch, requests, asked)
            if positions is not None:
                asked["position_ids"] = positions
        if facts.supports_logits_to_keep:
            asked["logits_to_keep"] = asked.get("logits_to_keep", 1)
        wanted: dict[str, Any] = self.model.prepare_inputs_for_generation(
            tokens,
            next_sequence_length=None if first else batch.width,
            is_first_iteration=first,
            **asked,
        )
        if extra is not None and not first and extra.step_kwargs is None:
            extra.step_kwargs = {name: value for name, value in given.items() if wanted.get(name) is not None}
            extra.media, extra.per_token = {}, {}
        return wanted

    def update_model_kwargs(self, answer: Any, requests: Sequence[int]) -> None:
        """Bring what lasts up to the tokens that were fed."""
        extra = self._request_inputs[requests[0]]
        if extra is None or not (extra.step_kwargs or extra.media or extra.per_token):
            return
        kept = self._request_kwargs(extra, 1, first=False)
        both = self.traits.is_encoder_decoder
        kept = dict(self.model._update_model_kwargs_for_generation(answer, kept, is_encoder_decoder=both))
        for name in (self.traits.cache_argument, "encoder_outputs"):
            kept.pop(name, None)
        kept = {name: value[:1] if isinstance(value, Tensor) else value for name, value in kept.items()}
        if extra.step_kwargs is None:
            extra.media = {name: value for name, value in kept.items() if name not in extra.per_token}
            extra.per_token = {name: kept[name][0] for name in extra.per_token if name in kept}
        else:
            extra.step_kwargs = kept

    def _request_kwargs(self, extra: RequestInputs | None, count: int, first: bool) -> dict[str, Any]:
        """What the request gave, for as many rows as it has by now."""
        if extra is None:
            return {}
        if extra.step_kwargs is not None:
            given = dict(extra.step_kwargs)
        else:
            given = {**extra.media, **{name: value[None] for name, value in extra.per_token.items()}}
        if first or count == 1:
            return given
        return {
            name: value.expand(count, *value.shape[1:])
            if isinstance(value, Tensor) and len(value) == 1
            else value
            for name, value in given.items()
        }

    def _position_ids(
        self, tokens: Tensor, batch: ForwardBatch, requests: Sequence[int], asked: Mapping[str, Any]
    ) -> Tensor | None:
        """The positions of the whole rows [N, L], or [k, N, L] where the model counts in several ways."""
        count, long = len(tokens), batch.read_length
        if self.traits.has_own_position_ids and batch.start == 0:
            found = model_position_ids(self.model, self._request_inputs, tokens, requests, asked)
            self._skips_position_ids = found is None
            return found
        if self._skips_position_ids:
            return None
        plain = torch.arange(long, device=tokens.device).expand(count, long)
        ahead = self._request_inputs.position_deltas(requests)
        return plain if ahead is None else plain + ahead[..., None].to(plain.device)


def model_position_ids(
    model: Any, extras: RequestInputsMap, tokens: Tensor, requests: Sequence[int], asked: Mapping[str, Any]
) -> Tensor | None:
    """Positions of fresh rows by the model's own count [k, N, L]; how far ahead each runs is noted."""
    with preserve_rope_deltas(model):
        found: Tensor | None = model._prepare_position_ids_for_generation(tokens, dict(asked))
    if found is not None and found.ndim == 3:
        present = asked.get("attention_mask")
        lengths = [tokens.shape[1]] * len(tokens) if present is None else present.sum(1).tolist()
        for line, (request, length) in enumerate(zip(requests, lengths, strict=True)):
            extras.set_position_delta(request, found[:, line, length - 1] + 1 - length)
    return found


@contextlib.contextmanager
def preserve_rope_deltas(model: Any) -> Iterator[None]:
    """Give a model back what it notes about a prompt on itself while it counts positions."""
    noted = [(module, module.rope_deltas) for module in model.modules() if "rope_deltas" in vars(module)]
    try:
        yield
    finally:
        for module, value in noted:
            module.rope_deltas = value


class RecurrentStateHandler:
    """What a model of whatever kind remembers: a cache of its own kind, or what it makes for itself.

    Some keep part of it on their modules; for the time of a forward it is put there, and taken off again.
    """

    def __init__(self, model: PreTrainedModel, facts: ModelTraits) -> None:
        self.model: Any = model
        self.traits = facts
        self._module_attrs = [
            (module, name)
            for module in model.modules()
            for name in MODULE_STATE_ATTRS
            if name in vars(module)
        ]

    def new_state(self) -> Any:
        """What a row begins with."""
        past: Any = None
        if self.model._supports_default_dynamic_cache():
            text = self.model.config.get_text_config(decoder=True)
            past = DynamicCache(config=text)
            if self.traits.is_encoder_decoder:
                past = EncoderDecoderCache(past, DynamicCache(config=text))
        return (past, [None] * len(self._module_attrs)) if self._module_attrs else past

    def model_cache(self, state: Any) -> Any:
        """The part of a state that the model is given."""
        return state[0] if self._module_attrs else state

    @contextlib.contextmanager
    def install_state(self, state: Any) -> Iterator[list[Any]]:
        """Have a state in place for one forward; what is on the modules afterwards is added to the list."""
        found: list[Any] = []
        before = [getattr(module, name) for module, name in self._module_attrs]
        try:
            for place, (module, name) in enumerate(self._module_attrs):
                setattr(module, name, state[1][place])
            yield found
            found += [getattr(module, name) for module, name in self._module_attrs]
        finally:
            for (module, name), value in zip(self._module_attrs, before, strict=True):
                setattr(module, name, value)

    def next_state(self, answer: Any, state: Any, found: list[Any]) -> Any:
        """The state after a forward: what the model returned, or what it was given and wrote to."""
        past = answer.get(self.traits.cache_argument) if hasattr(answer, "get") else None
        past = self.model_cache(state) if past is None else past
        return (past, found) if self._module_attrs else past

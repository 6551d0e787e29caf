"""Feeding a model that says by itself what it wants to be fed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

from descant.core.interfaces import Facts
from descant.models.forward_batches import Batch
from descant.models.request_inputs import Extra, Extras
from descant.models.traits import ON_MODULES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Asking", "State", "own_positions"]


# The names under which a model is shown its past again; the others of old models go by the usual name.
_NAMED = ("past_key_values", "cache_params", "state")


class Asking:
    """The inputs of one forward of rows that stand level, by the model's own account.

    The model is shown the whole rows, what it remembers and what the request gave, and picks from these;
    what it picks again at the second forward is what it is given at every later one.
    """

    def __init__(self, model: PreTrainedModel, facts: Facts, extras: Extras) -> None:
        self.model: Any = model
        self.facts, self._extras = facts, extras
        self._uncounted = False  # whether the model has said that it counts positions while it reads

    def inputs(
        self, tokens: Tensor, batch: Batch, past: Any, requests: Sequence[int], more: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What to call the model with: whole rows [N, L] of which the last `width` are new."""
        first = batch.start == 0
        facts, extra = self.facts, self._extras[requests[0]]
        given = self._given(extra, len(tokens), first)
        asked: dict[str, Any] = {**more, **given, "use_cache": facts.memory != "none"}
        if past is not None:
            name = facts.past if facts.past in _NAMED else "past_key_values"
            asked[name] = past
        mask = "decoder_attention_mask" if facts.encoder_decoder else "attention_mask"
        if mask in facts.accepts:
            asked[mask] = tokens.new_ones(len(tokens), batch.stop)
        if facts.positions:
            positions = self._positions(tokens, batch, requests, asked)
            if positions is not None:
                asked["position_ids"] = positions
        if facts.keeps_logits:
            asked["logits_to_keep"] = asked.get("logits_to_keep", 1)
        wanted: dict[str, Any] = self.model.prepare_inputs_for_generation(
            tokens,
            next_sequence_length=None if first else batch.width,
            is_first_iteration=first,
            **asked,
        )
        if extra is not None and not first and extra.lasting is None:
            extra.lasting = {name: value for name, value in given.items() if wanted.get(name) is not None}
            extra.media, extra.marks = {}, {}
        return wanted

    def heard(self, answer: Any, requests: Sequence[int]) -> None:
        """Bring what lasts up to the tokens that were fed."""
        extra = self._extras[requests[0]]
        if extra is None or not (extra.lasting or extra.media or extra.marks):
            return
        kept = self._given(extra, 1, first=False)
        both = self.facts.encoder_decoder
        kept = dict(self.model._update_model_kwargs_for_generation(answer, kept, is_encoder_decoder=both))
        for name in (self.facts.past, "encoder_outputs"):
            kept.pop(name, None)
        kept = {name: value[:1] if isinstance(value, Tensor) else value for name, value in kept.items()}
        if extra.lasting is None:
            extra.media = {name: value for name, value in kept.items() if name not in extra.marks}
            extra.marks = {name: kept[name][0] for name in extra.marks if name in kept}
        else:
            extra.lasting = kept

    def _given(self, extra: Extra | None, count: int, first: bool) -> dict[str, Any]:
        """What the request gave, for as many rows as it has by now."""
        if extra is None:
            return {}
        if extra.lasting is not None:
            given = dict(extra.lasting)
        else:
            given = {**extra.media, **{name: value[None] for name, value in extra.marks.items()}}
        if first or count == 1:
            return given
        return {
            name: value.expand(count, *value.shape[1:])
            if isinstance(value, Tensor) and len(value) == 1
            else value
            for name, value in given.items()
        }

    def _positions(
        self, tokens: Tensor, batch: Batch, requests: Sequence[int], asked: Mapping[str, Any]
    ) -> Tensor | None:
        """The positions of the whole rows [N, L], or [k, N, L] where the model counts in several ways."""
        count, long = len(tokens), batch.stop
        if self.facts.places and batch.start == 0:
            found = own_positions(self.model, self._extras, tokens, requests, asked)
            self._uncounted = found is None
            return found
        if self._uncounted:
            return None
        plain = torch.arange(long, device=tokens.device).expand(count, long)
        ahead = self._extras.ahead(requests)
        return plain if ahead is None else plain + ahead[..., None].to(plain.device)


def own_positions(
    model: Any, extras: Extras, tokens: Tensor, requests: Sequence[int], asked: Mapping[str, Any]
) -> Tensor | None:
    """Positions of fresh rows by the model's own count [k, N, L]; how far ahead each runs is noted."""
    with untouched(model):
        found: Tensor | None = model._prepare_position_ids_for_generation(tokens, dict(asked))
    if found is not None and found.ndim == 3:
        present = asked.get("attention_mask")
        lengths = [tokens.shape[1]] * len(tokens) if present is None else present.sum(1).tolist()
        for line, (request, length) in enumerate(zip(requests, lengths, strict=True)):
            extras.placed(request, found[:, line, length - 1] + 1 - length)
    return found


@contextlib.contextmanager
def untouched(model: Any) -> Iterator[None]:
    """Give a model back what it notes about a prompt on itself while it counts positions."""
    noted = [(module, module.rope_deltas) for module in model.modules() if "rope_deltas" in vars(module)]
    try:
        yield
    finally:
        for module, value in noted:
            module.rope_deltas = value


class State:
    """What a model of whatever kind remembers: a cache of its own kind, or what it makes for itself.

    Some keep part of it on their modules; for the time of a forward it is put there, and taken off again.
    """

    def __init__(self, model: PreTrainedModel, facts: Facts) -> None:
        self.model: Any = model
        self.facts = facts
        self._places = [
            (module, name) for module in model.modules() for name in ON_MODULES if name in vars(module)
        ]

    def fresh(self) -> Any:
        """What a row begins with."""
        past: Any = None
        if self.model._supports_default_dynamic_cache():
            text = self.model.config.get_text_config(decoder=True)
            past = DynamicCache(config=text)
            if self.facts.encoder_decoder:
                past = EncoderDecoderCache(past, DynamicCache(config=text))
        return (past, [None] * len(self._places)) if self._places else past

    def past(self, state: Any) -> Any:
        """The part of a state that the model is given."""
        return state[0] if self._places else state

    @contextlib.contextmanager
    def around(self, state: Any) -> Iterator[list[Any]]:
        """Have a state in place for one forward; what is on the modules afterwards is added to the list."""
        found: list[Any] = []
        before = [getattr(module, name) for module, name in self._places]
        try:
            for place, (module, name) in enumerate(self._places):
                setattr(module, name, state[1][place])
            yield found
            found += [getattr(module, name) for module, name in self._places]
        finally:
            for (module, name), value in zip(self._places, before, strict=True):
                setattr(module, name, value)

    def after(self, answer: Any, state: Any, found: list[Any]) -> Any:
        """The state after a forward: what the model returned, or what it was given and wrote to."""
        past = answer.get(self.facts.past) if hasattr(answer, "get") else None
        past = self.past(state) if past is None else past
        return (past, found) if self._places else past

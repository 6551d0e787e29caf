"""Admission: what requests come to before they join a table, each checked by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from descant.config.generation_config import GenerationConfig
from descant.core.interfaces import Facts, Model
from descant.engine.drafter_factory import Assistance
from descant.engine.planner import Plan, drafted, plan
from descant.engine.request import (
    Request,
    beside,
    healed,
    prompt_of,
    refuse_uncallable,
    refuse_unguided,
    shortened,
)
from descant.errors import InputError
from descant.recipes.recipe import Recipe

__all__ = ["Admission", "Asked"]


class Asked(NamedTuple):
    """What a request comes to before it is admitted."""

    request: Request
    plan: Plan
    row: dict[str, Any]  # its row's parameters
    prompt: Tensor  # [L] what is read of its tokens
    offset: int  # positions before these that have no token
    inputs: Mapping[str, Any]

    @property
    def slots(self) -> int:
        """How many positions a row of it may come to, or one that is read beside it."""
        return int(self.row["limit"]) + max(self.offset, beside(self.request))


class Admission:
    """The way into a table of one model: `given` as the user has it, `model` as the loop runs it."""

    def __init__(self, given: Any, model: Model) -> None:
        self._given, self._model = given, model

    def planned(self, request: Request, facts: Facts) -> Plan:
        """What a request's config comes to."""
        config = request.generation_config
        if not request.merged:
            config = GenerationConfig.merge({}, config, _own_config(self._given))
        recipe = _part(request)
        given = Assistance(
            request.assistant_model,
            request.tokenizer,
            request.assistant_tokenizer,
            recipe if recipe is not None and recipe.kind == "drafter" else None,
        )
        return plan(config, facts, drafted(config, self._model, given), recipe)

    def asked(self, requests: Sequence[Request], facts: Facts) -> list[Asked]:
        """What requests come to; those alike share a plan."""
        plans: dict[tuple[int, ...], Plan] = {}
        asked = []
        for request in requests:
            known = plans.get(_sort(request))
            if known is None:
                known = plans[_sort(request)] = self.planned(request, facts)
            asked.append(_one(request, known, facts))
        return asked


def _one(request: Request, known: Plan, facts: Facts) -> Asked:
    """What one request comes to by its plan."""
    ids = _ids(request, facts.vocabulary)
    tail = healed(request, known.config, ids)
    embeds = request.inputs.get("inputs_embeds") if not facts.encoder_decoder else None
    offset = 0 if embeds is None else len(embeds) - len(ids)
    if not len(ids) + offset:
        raise InputError("prompt", "must have at least one token", request.prompt)
    if known.again and not len(ids):
        must = "must come with `input_ids` of at least the last token, which is fed again"
        raise InputError("inputs_embeds", must, embeds)
    row = known.row(prompt_of(request, ids, offset, tail), facts)
    count = 0 if tail is None else len(tail)
    cut = bool(count) and not facts.encoder_decoder
    inputs = shortened(request.inputs, count) if cut else request.inputs
    refuse_uncallable(request)
    refuse_unguided(request, known.wraps, facts, row["limit"] - len(ids))
    return Asked(request, known, row, ids[: len(ids) - count], offset, inputs)


def _ids(request: Request, vocabulary: int) -> Tensor:
    """A request's prompt, checked [L]."""
    try:
        ids = torch.as_tensor(request.prompt)
    except (TypeError, ValueError, RuntimeError):
        raise InputError("prompt", "must be a sequence of token ids", request.prompt) from None
    if ids.numel() == 0:
        return ids.long().reshape(-1)
    if ids.ndim != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise InputError("prompt", "must be one sequence of token ids", request.prompt)
    if not request.merged and (int(ids.min()) < 0 or int(ids.max()) >= vocabulary):
        raise InputError("prompt", f"must hold ids from 0 to {vocabulary - 1}", request.prompt)
    return ids.long()


def _sort(request: Request) -> tuple[int, ...]:
    """What tells requests apart that come to the same plan."""
    told = (request.generation_config, request.assistant_model, request.assistant_tokenizer, request.recipe)
    return tuple(map(id, told))


def _part(request: Request) -> Recipe | None:
    """A request's recipe, which must be a part of the loop."""
    if request.recipe is None:
        return None
    recipe = Recipe.of(request.recipe)
    if recipe.kind == "generate":
        must = "must be a part of the loop here, a function has a loop of its own"
        raise InputError("recipe", must, recipe, "use descant.generate")
    return recipe


def _own_config(model: Any) -> GenerationConfig | None:
    """The model's own generation config."""
    theirs = getattr(getattr(model, "model", model), "generation_config", None)
    theirs = getattr(model, "generation_config", theirs)
    if theirs is None or isinstance(theirs, GenerationConfig):
        return theirs
    return GenerationConfig.from_transformers(theirs)

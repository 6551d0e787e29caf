"""Admission: what requests come to before they join a table, each checked by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from descant.config.generation_config import GenerationConfig
from descant.core.interfaces import Model, ModelTraits
from descant.engine.drafter_factory import DraftInputs
from descant.engine.planner import DecodingPlan, drafter_spec, make_plan
from descant.engine.request import (
    Request,
    drop_last_tokens,
    healed_suffix,
    negative_prompt_excess,
    prompt_info,
    validate_callables,
    validate_negative_prompt,
)
from descant.errors import InputError
from descant.recipes.recipe import Recipe

__all__ = ["Admission", "ResolvedRequest"]


class ResolvedRequest(NamedTuple):
    """What a request comes to before it is admitted."""

    request: Request
    plan: DecodingPlan
    row_params: dict[str, Any]  # its row's parameters
    prompt: Tensor  # [L] what is read of its tokens
    offset: int  # positions before these that have no token
    inputs: Mapping[str, Any]

    @property
    def max_slots(self) -> int:
        """How many positions a row of it may come to, or one that is read beside it."""
        return int(self.row_params["max_length"]) + max(self.offset, negative_prompt_excess(self.request))


class Admission:
    """The way into a table of one model: `given` as the user has it, `model` as the loop runs it."""

    def __init__(self, given: Any, model: Model) -> None:
        self._user_model, self._model = given, model

    def make_plan(self, request: Request, facts: ModelTraits) -> DecodingPlan:
        """What a request's config comes to."""
        config = request.generation_config
        if not request.config_merged:
            config = GenerationConfig.merge({}, config, _model_generation_config(self._user_model))
        recipe = _engine_recipe(request)
        given = DraftInputs(
            request.assistant_model,
            request.tokenizer,
            request.assistant_tokenizer,
            recipe if recipe is not None and recipe.kind == "drafter" else None,
        )
        return make_plan(config, facts, drafter_spec(config, self._model, given), recipe)

    def resolve(self, requests: Sequence[Request], facts: ModelTraits) -> list[ResolvedRequest]:
        """What requests come to; those alike share a plan."""
        plans: dict[tuple[int, ...], DecodingPlan] = {}
        asked = []
        for request in requests:
            known = plans.get(_plan_key(request))
            if known is None:
                known = plans[_plan_key(request)] = self.make_plan(request, facts)
            asked.append(_resolve_one(request, known, facts))
        return asked


def _resolve_one(request: Request, known: DecodingPlan, facts: ModelTraits) -> ResolvedRequest:
    """What one request comes to by its plan."""
    ids = _checked_ids(request, facts.vocab_size)
    tail = healed_suffix(request, known.config, ids)
    embeds = request.inputs.get("inputs_embeds") if not facts.is_encoder_decoder else None
    offset = 0 if embeds is None else len(embeds) - len(ids)
    if not len(ids) + offset:
        raise InputError("prompt", "must have at least one token", request.prompt)
    if known.refeeds_last and not len(ids):
        must = "must come with `input_ids` of at least the last token, which is fed again"
        raise InputError("inputs_embeds", must, embeds)
    row = known.row_params(prompt_info(request, ids, offset, tail), facts)
    count = 0 if tail is None else len(tail)
    cut = bool(count) and not facts.is_encoder_decoder
    inputs = drop_last_tokens(request.inputs, count) if cut else request.inputs
    validate_callables(request)
    validate_negative_prompt(request, known.wrappers, facts, row["max_length"] - len(ids))
    return ResolvedRequest(request, known, row, ids[: len(ids) - count], offset, inputs)


def _checked_ids(request: Request, vocabulary: int) -> Tensor:
    """A request's prompt, checked [L]."""
    try:
        ids = torch.as_tensor(request.prompt)
    except (TypeError, ValueError, RuntimeError):
        raise InputError("prompt", "must be a sequence of token ids", request.prompt) from None
    if ids.numel() == 0:
        return ids.long().reshape(-1)
    if ids.ndim != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise InputError("prompt", "must be one sequence of token ids", request.prompt)
    if not request.config_merged and (int(ids.min()) < 0 or int(ids.max()) >= vocabulary):
        raise InputError("prompt", f"must hold ids from 0 to {vocabulary - 1}", request.prompt)
    return ids.long()


def _plan_key(request: Request) -> tuple[int, ...]:
    """What tells requests apart that come to the same plan."""
    told = (request.generation_config, request.assistant_model, request.assistant_tokenizer, request.recipe)
    return tuple(map(id, told))


def _engine_recipe(request: Request) -> Recipe | None:
    """A request's recipe, which must be a part of the loop."""
    if request.recipe is None:
        return None
    recipe = Recipe.from_object(request.recipe)
    if recipe.kind == "generate":
        must = "must be a part of the loop here, a function has a loop of its own"
        raise InputError("recipe", must, recipe, "use descant.generate")
    return recipe


def _model_generation_config(model: Any) -> GenerationConfig | None:
    """The model's own generation config."""
    theirs = getattr(getattr(model, "model", model), "generation_config", None)
    theirs = getattr(model, "generation_config", theirs)
    if theirs is None or isinstance(theirs, GenerationConfig):
        return theirs
    return GenerationConfig.from_transformers(theirs)

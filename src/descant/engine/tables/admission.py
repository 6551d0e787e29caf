"""Admission: from requests to resolved requests, each checked by itself before any joins the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from descant.config.generation_config import GenerationConfig
from descant.config.grammar_spec import GrammarSpec
from descant.core.interfaces import Model, ModelTraits
from descant.core.sampling_noise import MAX_SEED
from descant.decoding.guidance import NEGATIVE_PROMPT_KEY
from descant.decoding.processors.grammar import GRAMMAR_PARAM
from descant.engine.planning.drafter_factory import DraftInputs, drafter_spec
from descant.engine.planning.planner import DecodingPlan, PromptParams, make_plan
from descant.engine.request import (
    Request,
    compile_request_grammar,
    drop_last_tokens,
    healed_suffix,
    matcher_pool,
    prompt_info,
    validate_callables,
    validate_negative_prompt,
)
from descant.errors import ConfigError, InputError
from descant.models.wrapping.peft_adapters import ADAPTER_NAME_KEY
from descant.models.wrapping.wrapped_model import unwrap_model
from descant.recipes.recipe import Recipe


class ResolvedRequest(NamedTuple):
    """A request that has passed admission: its plan, its parameters, and its prompt as it will be fed."""

    request: Request
    plan: DecodingPlan
    prompt_params: PromptParams
    method_params: Mapping[str, Any]
    prompt: Tensor  # [L] the tokens to feed, without a healed suffix
    offset: int  # positions before these that have no token
    inputs: Mapping[str, Any]
    drawn_seed: int = -1  # that it was given because it has none; -1: it was not
    cached_tokens: int | None = None  # of its prompt when it was admitted; None: those that its row has

    @property
    def max_slots(self) -> int:
        """The most positions of one of its rows, or of its unconditional row."""
        negative = self.request.inputs.get(NEGATIVE_PROMPT_KEY)  # of its unconditional row
        excess = 0 if negative is None else len(negative) - len(self.request.prompt)
        return self.prompt_params.max_length + max(self.offset, excess)


class Admission:
    """Resolves requests for a model: `user_model` as it was passed, `model` behind the interface."""

    def __init__(self, user_model: Any, model: Model) -> None:
        self._user_model, self._model = user_model, model

    def _merged_config(self, request: Request) -> GenerationConfig:
        """The config of a request, with the model's defaults."""
        config = request.generation_config
        if request._call.config_merged:
            return config
        recipe = None if request.recipe is None else _engine_recipe(request)
        has_strategy = recipe is not None and recipe.kind == "strategy"
        defaults = _model_generation_config(self._user_model)
        return GenerationConfig.merge({}, config, defaults, has_strategy=has_strategy)

    def grammar(self, request: Request) -> GrammarSpec | None:
        """The grammar of a request."""
        given = request.generation_config.grammar
        if given is None and not request._call.config_merged:
            given = getattr(_model_generation_config(self._user_model), "grammar", None)
        assert given is None or isinstance(given, GrammarSpec)
        return given

    def compile_grammar(self, request: Request) -> Request:
        """The request with its grammar compiled; nothing of the session is read but the model's config."""
        spec = self.grammar(request)
        if spec is None or request._call.compiled_grammar is not None:
            return request
        config = self._merged_config(request)
        suffix = None
        if config.token_healing:
            suffix = healed_suffix(request, _checked_ids(request, self._model.traits.num_prompt_ids))
        return replace(
            request,
            _call=replace(request._call, compiled_grammar=compile_request_grammar(request, spec, suffix)),
        )

    def _check_adapter(self, name: Any) -> None:
        """Raise unless the model has this adapter."""
        check = getattr(self._model, "check_adapter", None)
        if check is None:
            must = "must be None for a model that is not of transformers, and for several models"
            raise InputError(ADAPTER_NAME_KEY, must, name, "leave it out")
        check(name)

    def make_plan(self, request: Request, traits: ModelTraits) -> DecodingPlan:
        """The plan of one request."""
        config = self._merged_config(request)
        if config.generation_kwargs and not request._call.config_merged:  # generate() passes these on itself
            must = "must hold only generation parameters in a Request"
            do = "pass the model's inputs as `inputs`"
            raise ConfigError("generation_kwargs", must, dict(config.generation_kwargs), do)
        recipe = None if request.recipe is None else _engine_recipe(request)
        inputs = DraftInputs(
            unwrap_model(request.assistant_model),
            request.tokenizer,
            request.assistant_tokenizer,
            recipe if recipe is not None and recipe.kind == "drafter" else None,
            has_strategy=recipe is not None and recipe.kind == "strategy",
        )
        return make_plan(config, traits, drafter_spec(config, self._model, inputs), recipe)

    def resolve(self, requests: Sequence[Request], traits: ModelTraits) -> list[ResolvedRequest]:
        """The resolved requests; those with the same config and models share a plan."""
        plans: dict[tuple[int, ...], DecodingPlan] = {}
        resolved = []
        # Of a model whose other inputs have room for so many positions.
        max_length: Callable[[Mapping[str, Any]], int | None] | None = getattr(
            self._model, "max_request_length", None
        )
        for request in requests:
            if request.adapter_name is not None:
                self._check_adapter(request.adapter_name)
            owners = request.generation_config, request.assistant_model, request.assistant_tokenizer
            key = tuple(map(id, (*owners, request.recipe)))
            if key not in plans:
                plans[key] = self.make_plan(request, traits)
            if traits.config_inputs:
                request = _with_config_inputs(request, plans[key].config, traits)
            limit = None if max_length is None else max_length(request.inputs)
            resolved.append(_resolve_one(request, plans[key], traits, limit))
        return resolved


def _with_config_inputs(request: Request, config: GenerationConfig, traits: ModelTraits) -> Request:
    """A request with the inputs that its generation config holds; its own come first."""
    found = {name: config.extra[name] for name in traits.config_inputs & config.extra.keys()}
    return replace(request, inputs={**found, **request.inputs}) if found else request


def _resolve_one(
    request: Request, plan: DecodingPlan, traits: ModelTraits, limit: int | None = None
) -> ResolvedRequest:
    """One request by its plan; its inputs have room for `limit` tokens, prompt included."""
    if not isinstance(request.cache_salt, bytes):
        raise InputError("cache_salt", "must be bytes", request.cache_salt)
    if request.prompt_logprobs is not None:
        do = "send it to a descant.AsyncEngine"
        raise InputError("prompt_logprobs", "must be None in a session", request.prompt_logprobs, do)
    ids = _checked_ids(request, traits.num_prompt_ids)
    length = ids.shape[0]
    suffix = healed_suffix(request, ids) if plan.config.token_healing else None
    embeds = request.inputs.get("inputs_embeds") if not traits.is_encoder_decoder else None
    offset = 0 if embeds is None else len(embeds) - length
    if not length + offset:
        raise InputError("prompt", "must have at least one token", request.prompt)
    if plan.max_rewind != 0 and not length:  # the last token of a row may be fed again
        must = "must come with `input_ids` of at least the last token, which is fed again"
        raise InputError("inputs_embeds", must, embeds)
    if limit is not None and limit <= length:
        name = traits.main_input_name
        must = f"must be shorter than `{name}`, which has {limit} positions"
        raise InputError("prompt", must, f"{length} tokens", "shorten it")
    info = replace(prompt_info(request, ids, offset, suffix), max_length=limit)
    prompt_params, method_params = plan.prompt_params(info, traits), plan.row_method_params(info)
    if plan.config.suffix_lookup_shared:
        method_params["suffix_lookup_salt"] = request.cache_salt, request.adapter_name
    if plan.config.grammar is not None:
        method_params[GRAMMAR_PARAM] = matcher_pool(request, plan.config, suffix)
    num_healed = 0 if suffix is None else len(suffix)
    inputs = request.inputs
    if request.adapter_name is not None:
        inputs = {**inputs, ADAPTER_NAME_KEY: request.adapter_name}
    if num_healed and not traits.is_encoder_decoder:
        inputs = drop_last_tokens(inputs, num_healed)
    if request.logits_processor or request.stopping_criteria:
        validate_callables(request)
    if "guidance" in plan.wrappers or NEGATIVE_PROMPT_KEY in request.inputs:
        validate_negative_prompt(request, plan.wrappers, traits, prompt_params.max_length - length)
    prompt = ids[: length - num_healed] if num_healed else ids
    return ResolvedRequest(request, plan, prompt_params, method_params, prompt, offset, inputs)


def with_drawn_seed(one: ResolvedRequest) -> ResolvedRequest:
    """A request that waits, with a seed of its own if it is random and has none.

    It is drawn when the request arrives: what it draws must not depend on when it is its turn.
    """
    if one.plan.params.seed >= 0:
        return one
    processors = [*(spec.processor for _, spec in one.plan.processors), *one.request.logits_processor]
    is_random = one.plan.config.do_sample or any(getattr(part, "is_random", False) for part in processors)
    return one._replace(drawn_seed=draw_seed()) if is_random else one


def draw_seed() -> int:
    """A seed by torch's generator."""
    return int(torch.randint(MAX_SEED, ()))


def _checked_ids(request: Request, vocab_size: int) -> Tensor:
    """A request's prompt, checked [L]."""
    try:
        ids = torch.as_tensor(request.prompt)
    except (TypeError, ValueError, RuntimeError):
        raise InputError("prompt", "must be a sequence of token ids", request.prompt) from None
    if ids.numel() == 0:
        return ids.long().reshape(-1)
    if ids.ndim != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise InputError("prompt", "must be one sequence of token ids", request.prompt)
    if not request._call.config_merged and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
        raise InputError("prompt", f"must hold ids from 0 to {vocab_size - 1}", request.prompt)
    return ids.long()


def _engine_recipe(request: Request) -> Recipe:
    """A request's recipe, which must not be a function with its own loop."""
    recipe = Recipe.from_object(request.recipe)
    if recipe.kind == "generate":
        must = "must be a strategy, drafter, processor or wrapper here, not a function with its own loop"
        raise InputError("recipe", must, recipe, "use descant.generate")
    return recipe


def _model_generation_config(model: Any) -> GenerationConfig | None:
    """The generation config that a user's model carries, wherever it keeps it."""
    config = getattr(getattr(model, "model", model), "generation_config", None)
    config = getattr(model, "generation_config", config)
    if config is None or isinstance(config, GenerationConfig):
        return config
    return GenerationConfig.from_transformers(config)

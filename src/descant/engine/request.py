"""A request: one prompt and how to continue it, as it is given and as admission has resolved it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from descant.config.generation_config import GenerationConfig
from descant.config.grammar_spec import GrammarSpec
from descant.core.context import PromptInfo
from descant.core.interfaces import Model, ModelTraits
from descant.core.sampling_noise import MAX_SEED
from descant.decoding.grammars.backend import CompiledGrammar, MatcherPool
from descant.decoding.grammars.compiler import compile_grammar, compiler_of
from descant.decoding.guidance import NEGATIVE_PROMPT_KEY
from descant.decoding.processors.base import as_id_list
from descant.decoding.processors.grammar import GRAMMAR_PARAM
from descant.decoding.processors.lengths import THOUGHT_PARAM
from descant.decoding.stopping import Criterion, RegexStop
from descant.engine.planning.drafter_factory import DRAFT_FIELDS, DraftInputs, drafter_spec
from descant.engine.planning.planner import DecodingPlan, PromptParams, make_plan
from descant.engine.planning.thought import budget_tokens, thought_tracker
from descant.errors import ConfigError, InputError
from descant.models.forward.inputs import is_per_token
from descant.models.wrapping.peft_adapters import ADAPTER_NAME_KEY
from descant.models.wrapping.wrapped_model import unwrap_model
from descant.recipes.recipe import Recipe
from descant.tokenization.regions import ThoughtTracker
from descant.tokenization.stop_strings import PhraseMatcher, StopStringMatcher
from descant.tokenization.token_bytes import TokenBytes
from descant.tokenization.token_healing import HealedSuffix


@dataclass(frozen=True, eq=False, kw_only=True)
class CallPlace:
    """The place of a request in the call that makes it, and what that call has resolved already."""

    prompt_index: int = 0  # the index of its prompt, for `prefix_allowed_tokens_fn`
    padded_width: int = 0  # of the padded prompts; user processors get ids of that width
    counted_width: int = 0  # width that counts as its prompt in `max_length` and `min_length`; 0: its own
    batch_row: int = 0  # the index of its first sequence among the rows of the call
    batch_size: int = 0  # the number of these rows; 0: it is a call of its own
    noise_row: int = -1  # its row of torch's noise; -1: it draws from its own stream
    config_merged: bool = False  # whether the config is merged with the model's own
    healed_suffix: HealedSuffix | None = None  # that token healing removes; None: unknown
    compiled_grammar: CompiledGrammar | None = None  # of the config's `grammar`; None: not compiled


_NO_CALL: Final = CallPlace()
MERGED: Final = CallPlace(config_merged=True)  # of requests that are made one by one


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt and how to continue it.

    `prompt` holds the token ids (of the decoder, for encoder-decoder models; empty where the prompt is
    given as `inputs["inputs_embeds"]` alone). `inputs` holds the model's other inputs: `inputs_embeds`, an
    encoder's `input_ids` and `attention_mask`, `token_type_ids` and the like without a batch dimension;
    media (`pixel_values`, `input_features`) as their processor returns them for this request alone.
    `past_key_values` holds the keys and values of the prompt's first tokens, which are not fed again; it is
    not modified.
    """

    prompt: Tensor | Sequence[int]
    generation_config: GenerationConfig = field(default_factory=GenerationConfig)
    inputs: Mapping[str, Any] = field(default_factory=dict)
    logits_processor: Sequence[Any] = ()
    stopping_criteria: Sequence[Criterion] = ()
    tokenizer: Any = None  # for texts of the config: `stop_strings`, `grammar`, token healing and the like
    assistant_model: Any = None  # a draft model
    assistant_tokenizer: Any = None  # the draft model's tokenizer, if it is not `tokenizer`
    past_key_values: Any = None  # a `CachedRow`, or a cache of one row
    return_past_key_values: bool = False  # whether `Finished.past_key_values` holds its sequences' KV
    recipe: Any = None  # a `Recipe` other than a function, or a class of one of its interfaces
    prompt_logprobs: int | None = None  # alternatives of each prompt token; of an `AsyncEngine`
    priority: int = 0  # of a session with a scheduler: lower is sooner
    deadline: float | None = None  # seconds from its admission, after which it fails; with a scheduler
    cache_salt: bytes = b""  # only requests with the same salt share cached prefixes and suffixes
    adapter_name: str | None = None  # of PEFT; None: the active one, "__base__": none
    _call: CallPlace = field(default_factory=lambda: _NO_CALL, repr=False)


class TextMatchers(NamedTuple):
    """A request's texts in terms of tokens."""

    stop_strings: StopStringMatcher | None
    stop_regex: RegexStop | None
    sequence_breakers: list[int] | None
    banned_phrases: PhraseMatcher | None = None

    def row_params(self) -> dict[str, Any]:
        """Those that are parameters of the row."""
        params = {"phrase_matcher": self.banned_phrases, "dry_sequence_breakers": self.sequence_breakers}
        return {name: value for name, value in params.items() if value is not None}


TEXT_FIELDS: Final = ("stop_strings", "stop_regex", "dry_multiplier", "banned_phrases")


def build_text_matchers(request: Request, config: GenerationConfig) -> TextMatchers:
    """The matchers of a request's texts by its tokenizer, or an InputError if it has none."""
    breakers = config.dry_sequence_breakers if config.dry_multiplier else None
    breaker_texts = [part for part in breakers or () if isinstance(part, str)]
    texts = {
        "stop_strings": config.stop_strings,
        "stop_regex": config.stop_regex,
        "dry_sequence_breakers": breaker_texts,
        "banned_phrases": config.banned_phrases,
    }
    first = next((name for name, value in texts.items() if value), None)
    if first is None:
        return TextMatchers(None, None, None)
    if request.tokenizer is None:
        raise InputError("tokenizer", f"must be given with `{first}`", None, "pass the model's tokenizer")
    strings = _as_strings(config.stop_strings)
    vocabulary = TokenBytes.from_tokenizer(request.tokenizer)
    breaker_ids = None
    if breaker_texts:
        parts = [text.encode() for text in breaker_texts]
        breaker_ids = [int(part) for part in breakers or () if not isinstance(part, str)]
        breaker_ids += [
            token for token, text in enumerate(vocabulary.bytes) if any(part in text for part in parts)
        ]
    return TextMatchers(
        StopStringMatcher.from_tokenizer(request.tokenizer, strings) if strings else None,
        RegexStop(re.compile(config.stop_regex), vocabulary) if config.stop_regex else None,
        breaker_ids,
        PhraseMatcher.from_tokenizer(request.tokenizer, _as_strings(config.banned_phrases))
        if config.banned_phrases
        else None,
    )


def _as_strings(value: str | Sequence[str] | None) -> tuple[str, ...]:
    """One string or several as a tuple."""
    return (value,) if isinstance(value, str) else tuple(value or ())


def healed_suffix(request: Request, ids: Tensor) -> HealedSuffix:
    """The tokens that token healing removes from the end of a prompt."""
    if request._call.healed_suffix is not None:
        return request._call.healed_suffix
    if request.tokenizer is None:
        do = "pass the model's tokenizer"
        raise InputError("tokenizer", "must be given with `token_healing`", None, do)
    return HealedSuffix.from_prompt(request.tokenizer, ids.tolist())


def matcher_pool(
    request: Request,
    config: GenerationConfig,
    suffix: HealedSuffix | None,
    thought: ThoughtTracker | None = None,
) -> MatcherPool:
    """The matchers of a request's grammar, which its text follows behind its prompt and its thought."""
    assert isinstance(config.grammar, GrammarSpec)
    grammar = request._call.compiled_grammar
    prefix = b"" if suffix is None else suffix.text
    if grammar is None or not compiler_of(request.tokenizer).owns(grammar, config.grammar, prefix):
        grammar = compile_request_grammar(request, config.grammar, suffix)
    ends = as_id_list(config.eos_token_id)
    if not ends:
        do = "set it, a grammar ends a row with it"
        raise ConfigError(("eos_token_id", "grammar"), "must be given with `grammar`", None, do)
    num_bits = 32 * grammar.backend.mask_width
    if min(ends) >= num_bits:
        must = f"must be a token of the tokenizer, which has {num_bits} at most, with `grammar`"
        raise ConfigError(("eos_token_id", "grammar"), must, ends)
    special = TokenBytes.from_tokenizer(request.tokenizer).special_ids
    stops = [token for token in as_id_list(config.stop_token_ids) if token in special]
    return MatcherPool(grammar, ends + stops, thought)


def compile_request_grammar(
    request: Request, spec: GrammarSpec, suffix: HealedSuffix | None = None
) -> CompiledGrammar:
    """The compiled grammar of a request, behind what token healing generates again."""
    if request.tokenizer is None:
        raise InputError("tokenizer", "must be given with `grammar`", None, "pass the model's tokenizer")
    return compile_grammar(spec, request.tokenizer, b"" if suffix is None else suffix.text)


def drop_last_tokens(inputs: Mapping[str, Any], count: int) -> dict[str, Any]:
    """The inputs of a decoder-only model without the entries of the last `count` tokens."""
    return {
        name: value[: len(value) - count]
        if name == "inputs_embeds" or is_per_token(name, getattr(value, "ndim", 0))
        else value
        for name, value in inputs.items()
    }


def prompt_info(request: Request, ids: Tensor, offset: int, suffix: HealedSuffix | None = None) -> PromptInfo:
    """The facts of a prompt on which the parameters of its row may depend."""

    def source_ids() -> list[int]:
        source = request.inputs.get("input_ids")
        if source is None:
            return [int(token) for token in ids.tolist()]
        mask = request.inputs.get("attention_mask")
        valid = source if mask is None else source[mask.bool()]
        return [int(token) for token in valid.tolist()]

    length = ids.shape[0]
    return PromptInfo(
        length,
        offset,
        request._call.padded_width,
        request._call.prompt_index,
        source_ids,
        suffix,
        padding=max(0, request._call.counted_width - length - offset),
    )


def validate_negative_prompt(
    request: Request, wrappers: Sequence[str], traits: ModelTraits, max_new: int
) -> None:
    """Raise for a negative prompt without guidance, or one that leaves no room for `max_new` tokens."""
    given = request.inputs.get("negative_prompt_ids")
    if given is None:
        if "guidance" in wrappers and not len(request.prompt):
            must = "must be given with `guidance_scale` where the prompt has no tokens"
            raise InputError("negative_prompt_ids", must, None)
        return
    if "guidance" not in wrappers:
        do = "set guidance_scale, or leave it out"
        raise InputError("negative_prompt_ids", "has no use without `guidance_scale`", given, do)
    ids = [int(token) for token in given]
    if not ids or min(ids) < 0 or max(ids) >= traits.vocab_size:
        raise InputError("negative_prompt_ids", f"must hold ids from 0 to {traits.vocab_size - 1}", given)
    # The last token is never fed.
    if traits.max_positions is not None and len(ids) + max_new - 1 > traits.max_positions:
        must = f"must leave room for {max_new} new tokens, the model has {traits.max_positions} positions"
        do = "shorten it or lower max_new_tokens"
        raise InputError("negative_prompt_ids", must, f"{len(ids)} tokens", do)


def validate_callables(request: Request) -> None:
    """Raise for processors and criteria that cannot be called."""
    for processor in request.logits_processor:
        if not callable(processor) and not hasattr(processor, "process"):
            raise InputError("logits_processor", "must hold callables", processor)
    for criterion in request.stopping_criteria:
        if not callable(criterion):
            raise InputError("stopping_criteria", "must hold callables", criterion)


# ------------------------------------------------------------------------ admission


class ResolvedRequest(NamedTuple):
    """A request that has passed admission: its plan, its parameters, and its prompt as it will be fed."""

    request: Request
    plan: DecodingPlan
    prompt_params: PromptParams
    method_params: Mapping[str, Any]
    prompt: Tensor  # [L] the tokens to feed, without a healed suffix
    offset: int  # positions before these that have no token
    inputs: Mapping[str, Any]
    # Whether it uses keys and values of others, gives its own away, or has a say in how its prompt is fed.
    uses_prefix_reuse: bool = False
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

    def __init__(self, user_model: Any, model: Model, has_prefix_cache: bool = False) -> None:
        self._user_model, self._model, self._has_prefix_cache = user_model, model, has_prefix_cache

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
        has_own = (
            request.assistant_model is not None
            or request.assistant_tokenizer is not None
            or recipe is not None
        )
        drafts = None
        if has_own or not config.given.isdisjoint(DRAFT_FIELDS):
            inputs = DraftInputs(
                unwrap_model(request.assistant_model),
                request.tokenizer,
                request.assistant_tokenizer,
                recipe if recipe is not None and recipe.kind == "drafter" else None,
                has_strategy=recipe is not None and recipe.kind == "strategy",
            )
            drafts = drafter_spec(config, self._model, inputs)
        return make_plan(config, traits, drafts, recipe)

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
            resolved.append(_resolve_one(request, plans[key], traits, limit, self._has_prefix_cache))
        return resolved


def _with_config_inputs(request: Request, config: GenerationConfig, traits: ModelTraits) -> Request:
    """A request with the inputs that its generation config holds; its own come first."""
    found = {name: config.extra[name] for name in traits.config_inputs & config.extra.keys()}
    return replace(request, inputs={**found, **request.inputs}) if found else request


def _resolve_one(
    request: Request, plan: DecodingPlan, traits: ModelTraits, limit: int | None, has_prefix_cache: bool
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
    if plan.strategy.traits.max_rewind != 0 and not length:  # the last token of a row may be fed again
        must = "must come with `input_ids` of at least the last token, which is fed again"
        raise InputError("inputs_embeds", must, embeds)
    if plan.strategy.traits.max_rewind != 0 and traits.cache_type == "recurrent":
        fed_once = sorted(request.inputs.keys() - {NEGATIVE_PROMPT_KEY, *traits.positioned_inputs})
        if fed_once and not traits.is_encoder_decoder:
            must = "must be None with a method that takes tokens back: the prompt may be read again"
            raise InputError(fed_once[0], must, request.inputs[fed_once[0]], "leave one of them out")
    if limit is not None and limit <= length:
        name = traits.main_input_name
        must = f"must be shorter than `{name}`, which has {limit} positions"
        raise InputError("prompt", must, f"{length} tokens", "shorten it")
    info = replace(prompt_info(request, ids, offset, suffix), max_length=limit)
    prompt_params, method_params = plan.prompt_params(info, traits), plan.row_method_params(info)
    if plan.config.suffix_lookup_shared:
        method_params["suffix_lookup_salt"] = request.cache_salt, request.adapter_name
    if plan.config.grammar is not None or "thinking_budget" in method_params:
        method_params |= _text_params(request, plan.config, ids, suffix)
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
    uses_prefix_reuse = (
        has_prefix_cache
        or request.past_key_values is not None
        or request.return_past_key_values
        or len(request.inputs) > 0
        or plan.config.use_cache is False
        or plan.prefill_chunk_size is not None
    )
    return ResolvedRequest(
        request, plan, prompt_params, method_params, prompt, offset, inputs, uses_prefix_reuse
    )


def _text_params(
    request: Request, config: GenerationConfig, ids: Tensor, suffix: HealedSuffix | None
) -> dict[str, Any]:
    """The row parameters of a request's grammar and of its thought."""
    params: dict[str, Any] = {}
    thought = thought_tracker(request.tokenizer, config, ids.tolist(), num_healed=len(suffix or ()))
    if config.grammar is not None:
        params[GRAMMAR_PARAM] = matcher_pool(request, config, suffix, thought)
    if config.thinking_budget is not None:
        params["thinking_end"] = budget_tokens(request.tokenizer, config, thought)
        if thought is not None:
            params[THOUGHT_PARAM] = thought
    return params


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

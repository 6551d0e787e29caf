"""From a config to what runs: the strategy, processors, wrappers and row parameters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from operator import itemgetter
from typing import Any, Final

from descant.config.generation_config import DEFAULT_NEW_TOKENS, GenerationConfig
from descant.config.watermarking_config import BaseWatermarkingConfig, as_watermarking_config
from descant.core.context import PromptInfo
from descant.core.interfaces import (
    ModelTraits,
    NoiseSource,
    RankGroup,
    RowCache,
    StopCondition,
    Strategy,
    StrategyTraits,
)
from descant.decoding.constraints import ConstraintListState, parse_force_words
from descant.decoding.guidance import ClassifierFreeGuidance, DoLa, early_layers
from descant.decoding.pipeline import (
    BACKTRACK_MASK,
    PROCESSOR_SPECS,
    ProcessorSpec,
    end_token_ids,
    is_set,
    processor_order,
)
from descant.decoding.processors.allowed_sequences import AllowedSequences
from descant.decoding.processors.base import as_id_list
from descant.decoding.strategies.backtracking import BannedPhraseSampling
from descant.decoding.strategies.beams.beam import BeamSearch, BeamSettings
from descant.decoding.strategies.beams.constrained import ConstrainedBeamSearch
from descant.decoding.strategies.contrastive import ContrastiveSearch, LowMemoryContrastiveSearch
from descant.decoding.strategies.sampling import Sampling
from descant.decoding.strategies.speculative import SpeculativeSampling
from descant.decoding.watermark.keys import warn_if_public
from descant.engine.planning.cache_factory import CACHE_FIELD, choose_cache
from descant.engine.planning.drafter_factory import DrafterSpec
from descant.errors import ConfigError
from descant.models.model_adapter import as_model
from descant.models.transformers_model import new_cache
from descant.recipes.recipe import Recipe

__all__ = [
    "WRAPPERS",
    "DecodingPlan",
    "PlanParams",
    "PromptParams",
    "RowIds",
    "WrapperSpec",
    "as_model",
    "choose_cache",
    "make_plan",
    "new_cache",
    "pad_token_id",
    "validate_cache",
]


StrategyFactory = Callable[[NoiseSource, StopCondition, RankGroup | None], Strategy]


@dataclass(frozen=True)
class StrategyChoice:
    """A strategy to be built: requests with equal keys share one."""

    name: str
    make: StrategyFactory
    traits: StrategyTraits
    settings: tuple[Any, ...] = ()  # equal on all ranks
    local_settings: tuple[Any, ...] = ()  # ids of objects, which differ between ranks
    requested_by: str | None = None  # what selects it: a config field or "a drafter"; None: the default
    rewind_field: str | None = None  # the argument because of which it takes tokens back
    num_candidates: int = 1  # rows that each row becomes while its next token is chosen
    row_params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[Any, ...]:
        """The key that identifies it in this process."""
        return (self.name, self.settings, self.local_settings)

    @property
    def rank_key(self) -> tuple[Any, ...]:
        """The key that identifies it on all ranks."""
        return (self.name, self.settings)


@dataclass(frozen=True)
class WrapperSpec:
    """A wrapper, when a config enables it, and the parameters of the rows that use it."""

    name: str
    make: Callable[[Any], Any]  # returns a Wrapper
    is_enabled: Callable[[GenerationConfig], bool]
    row_params: Callable[[GenerationConfig, ModelTraits], dict[str, Any]]


def _dola_params(config: GenerationConfig, traits: ModelTraits) -> dict[str, Any]:
    assert config.dola_layers is not None
    if traits.is_encoder_decoder or not traits.has_lm_head:
        reason = "an encoder" if traits.is_encoder_decoder else "no output embeddings of its own"
        must = f"is not supported for a model with {reason}"
        raise ConfigError("dola_layers", must, config.dola_layers, "leave it out")
    return {"early_layers": early_layers(config.dola_layers, traits)}


def _guidance_params(config: GenerationConfig, traits: ModelTraits) -> dict[str, Any]:
    if traits.is_encoder_decoder:
        must = "is not supported for a model with an encoder, whose prompt is not in the decoder"
        raise ConfigError("guidance_scale", must, config.guidance_scale, "leave it out")
    return {"uses_guidance": 1, "guidance_scale": float(config.guidance_scale or 0.0)}


# The innermost wrapper first.
WRAPPERS: Final[Mapping[str, WrapperSpec]] = {
    "dola": WrapperSpec("DoLa", DoLa, is_set("dola_layers"), _dola_params),
    "guidance": WrapperSpec(
        "guidance", ClassifierFreeGuidance, is_set("guidance_scale", 1.0), _guidance_params
    ),
}


@dataclass(frozen=True, kw_only=True)
class PlanParams:
    """Row parameters that follow from the config: equal for all requests of a plan."""

    eos_token_ids: list[int]
    stop_token_ids: list[int]
    end_token_ids: list[int]  # both of the above
    pad_token_id: int
    do_sample: int  # 0 or 1
    num_sequences: int  # rows that a prompt becomes after its prefill, without beams
    seed: int  # -1: none given
    early_stopping: int  # 0: False, 1: True, 2: "never"
    length_penalty: float
    min_tokens_to_keep: int  # by filters, so that enough candidates remain
    logprobs: int  # alternatives to record per token; -1: no log-probabilities
    logprobs_support: int  # 0 or 1


_PLAN_FIELDS: Final = frozenset(entry.name for entry in fields(PlanParams))


@dataclass(frozen=True, kw_only=True)
class PromptParams:
    """Row parameters that follow from the prompt."""

    max_length: int  # tokens, prompt included
    last_length: int  # the length of a row before its last choice
    begin_index: int  # length at which the first new token is chosen
    padded_width: int  # width of the padded prompts of its call
    prompt_index: int  # index of the prompt in its call
    deadline: float  # monotonic seconds; inf: none


@dataclass(frozen=True, kw_only=True)
class RowIds:
    """Row parameters that admission assigns: ids of shared objects, and where the row draws its noise."""

    strategy_id: int
    processor_chain_id: int
    criteria_id: int  # -1 here and below: none
    stop_strings_id: int
    stop_regex_id: int
    seed: int  # -1: it draws from torch's generator
    noise_row: int  # its first row of torch's noise
    has_side_inputs: int  # 1: inputs besides tokens, so the prompt is prefilled before anything is drafted
    processor_seed: int | None = None  # for random processors; None: it has none
    batch_id: int = -1  # the call that it belongs to, for user code that keeps state by row
    batch_row: int = 0  # the index of its first sequence among the rows of that call
    batch_size: int = 1  # the number of these rows; 1: it is shown as it is


@dataclass(frozen=True)
class DecodingPlan:
    """The strategy, processors, wrappers and row parameters of all requests of one config on a model."""

    config: GenerationConfig
    strategy: StrategyChoice
    processors: tuple[tuple[int, ProcessorSpec], ...]  # each with its position in the order
    order: tuple[str, ...]  # the names of all processors, the user's own among them
    params: PlanParams
    method_params: Mapping[str, Any]  # row parameters of the strategy, wrappers, drafter and recipe
    wrappers: tuple[str, ...] = ()  # names of the model wrappers that its rows use
    recipe: Recipe | None = None

    @property
    def base_params(self) -> dict[str, Any]:
        """The row parameters that do not depend on the prompt."""
        return {**vars(self.params), **self.method_params}

    @property
    def needs_full_prefill(self) -> bool:
        """Whether the whole prompt must be fed in one forward, also where a prefix of it is cached."""
        return self.strategy.traits.needs_prompt_states

    @property
    def forks(self) -> bool:
        """Whether one prompt becomes several rows."""
        return self.num_rows > 1 or self.strategy.traits.forks

    @cached_property
    def num_rows(self) -> int:
        """The most rows of a request between steps."""
        own = int(self.method_params.get("max_rows", 1))  # of a recipe
        return max(self.config.num_beams, self.params.num_sequences, own)

    @property
    def num_fed_rows(self) -> int:
        """The most rows that a step feeds for a request, unconditional ones included."""
        rows = self.num_rows * self.strategy.num_candidates
        return rows * 2 if "guidance" in self.wrappers else rows

    @cached_property
    def has_open_count(self) -> bool:
        """Whether a recipe forks its rows at any step, so that it says how many sequences there are."""
        return self.recipe is not None and self.recipe.forks(self.config)

    @property
    def is_final_at_end(self) -> bool:
        """Whether its tokens are certain only at its end, but for those that all its sequences share."""
        return self.config.num_beams > 1 or self.has_open_count

    def shared_positions(self, length: int) -> int:
        """The positions of a prompt of that length that its rows share, once for each row."""
        if self.num_rows == 1 and not self.strategy.traits.forks:
            return 0
        return max(self.num_rows * self.strategy.num_candidates, 2) * length

    @cached_property
    def prefill_chunk_size(self) -> int | None:
        """Positions per prefill forward; None: the whole prompt. A model's own default is ignored."""
        config = self.config
        return None if config.source("prefill_chunk_size") == "model" else config.prefill_chunk_size

    def row_params(self, prompt: PromptInfo, traits: ModelTraits) -> dict[str, Any]:
        """The parameters of a row with that prompt, without those that admission assigns."""
        own = self.prompt_params(prompt, traits)
        return {
            **vars(self.params),
            **vars(own),
            **self.row_method_params(prompt),
        }

    def prompt_params(self, prompt: PromptInfo, traits: ModelTraits) -> PromptParams:
        """The engine's parameters of a row with that prompt."""
        config, length = self.config, prompt.length
        max_length = resolve_max_length(config, prompt, traits)
        return PromptParams(
            max_length=max_length,
            last_length=max_length - 1,
            begin_index=length + 1 if length == 1 and config.forced_bos_token_id is not None else length,
            padded_width=prompt.padded_width or length,
            prompt_index=prompt.prompt_index,
            deadline=float("inf") if config.max_time is None else time.monotonic() + config.max_time,
        )

    def row_method_params(self, prompt: PromptInfo) -> dict[str, Any]:
        """The method parameters of a row with that prompt, those of its processors included."""
        params = dict(self.method_params)
        for _, spec in self.processors:
            params |= spec.processor.params_from_config(self.config, prompt)
        if prompt.healed_suffix is not None and "min_new_tokens" in params:
            # The tokens that replace a healed suffix do not count as new.
            params["min_new_tokens"] += len(prompt.healed_suffix)
        return params


def make_plan(
    config: GenerationConfig,
    traits: ModelTraits,
    drafts: DrafterSpec | None = None,
    recipe: Recipe | None = None,
) -> DecodingPlan:
    """The plan of a merged config and a recipe on a model, or a ConfigError that names the field."""
    check_config(config, traits)
    strategy = choose_strategy(config, drafts, recipe)
    if strategy.num_candidates > traits.vocab_size:  # `top_k` may be larger than the vocabulary
        strategy = replace(strategy, num_candidates=traits.vocab_size)
    wrappers: tuple[str, ...] = ()
    values: dict[str, Any] = {}
    for name, wrapper in WRAPPERS.items():
        if wrapper.is_enabled(config):
            wrappers += (name,)
            values |= wrapper.row_params(config, traits)
    if drafts is not None:
        values |= drafts.row_params
    values |= strategy.row_params
    if config.low_memory:
        values["low_memory"] = 1
    if recipe is not None:
        values |= recipe.row_params(config)
        wrappers += (recipe.row_flag,) if recipe.kind == "wrapper" else ()
    params = _plan_params(config)
    if overridden := _PLAN_FIELDS & values.keys():
        params = replace(params, **{name: values.pop(name) for name in overridden})
    order = processor_order(config)
    positions = [(order.index(spec.name), spec) for spec in _enabled_processors(config, recipe)]
    plan = DecodingPlan(
        config,
        strategy,
        tuple(sorted(positions, key=itemgetter(0))),
        order,
        params,
        values,
        wrappers,
        recipe,
    )
    if recipe is not None and strategy.traits.max_rewind != 0 and not traits.reads_again:
        raise ConfigError("recipe", _NOT_READ_AGAIN, recipe, "leave it out")
    return plan


def _plan_params(config: GenerationConfig) -> PlanParams:
    eos, stops = as_id_list(config.eos_token_id), as_id_list(config.stop_token_ids)
    num_logprobs = config.logprobs
    return PlanParams(
        eos_token_ids=eos,
        stop_token_ids=stops,
        end_token_ids=[*eos, *stops],
        pad_token_id=pad_token_id(config),
        do_sample=int(config.do_sample),
        num_sequences=config.num_return_sequences if config.num_beams == 1 else 1,
        seed=-1 if config.seed is None else config.seed,
        early_stopping={False: 0, True: 1, "never": 2}[config.early_stopping],
        length_penalty=float(config.length_penalty),
        min_tokens_to_keep=len(eos) + 1 if config.num_beams > 1 else 1,
        logprobs=-1 if num_logprobs is None else num_logprobs,
        logprobs_support=int(num_logprobs is not None and config.logprobs_support),
    )


def _enabled_processors(config: GenerationConfig, recipe: Recipe | None) -> list[ProcessorSpec]:
    """The processors that a config enables, and the backtrack mask where a recipe's strategy uses it."""
    uses_mask = (
        recipe is not None and recipe.kind == "strategy" and "masked_tokens" in recipe.strategy_columns
    )
    # No default enables a processor, but for those of sampling.
    samples, given = config.do_sample, config.given
    enabled = [
        spec for spec in PROCESSOR_SPECS if (samples or spec.fields[0] in given) and spec.is_enabled(config)
    ]
    if uses_mask and not any(spec.name == BACKTRACK_MASK for spec in enabled):
        enabled.append(next(spec for spec in PROCESSOR_SPECS if spec.name == BACKTRACK_MASK))
    return enabled


def validate_cache(plan: DecodingPlan, cache: RowCache, name: str | None, num_slots: int) -> None:
    """Raise for a plan that cannot run on the cache of its table, which was requested by that name."""
    config, kind = plan.config, name or type(cache).__name__
    rewind, limit = plan.strategy.traits.max_rewind, cache.max_rewind
    if limit is not None and (rewind is None or rewind > limit):
        field = plan.strategy.rewind_field or "recipe"
        value = plan.recipe if field == "recipe" else getattr(config, field)
        must = f"takes tokens back, which the {kind} cache cannot: it has evicted what came before"
        raise ConfigError((field, CACHE_FIELD), must, value, "use another cache")
    if cache.capacity is not None and num_slots > cache.capacity:
        must = f"must leave room: the {kind} cache has {cache.capacity} positions"
        raise ConfigError("max_new_tokens", must, f"{num_slots} in all", "lower it or make the cache larger")


def pad_token_id(config: GenerationConfig) -> int:
    """The token after a row's end: the pad token, else the first end token, else 0."""
    if config.pad_token_id is not None:
        return int(config.pad_token_id)
    return next(iter(as_id_list(config.eos_token_id)), 0)


# ------------------------------------------------------------------------ strategies
def choose_strategy(
    config: GenerationConfig, drafts: DrafterSpec | None = None, recipe: Recipe | None = None
) -> StrategyChoice:
    """The strategy of a recipe, or else of a config."""
    choice = _config_strategy(config, drafts)
    if recipe is None or recipe.kind != "strategy":
        return choice
    if choice.requested_by is not None:
        name = choice.requested_by
        shown = f"`{name}`" if "_" in name else name
        must = f"must be None with {shown}: there can be only one strategy"
        raise ConfigError(("recipe", name), must, recipe, "leave one of them out")
    return StrategyChoice(
        "recipe",
        recipe.build,
        # It is not known whether a recipe feeds tokens that it rejects.
        replace(recipe.strategy_traits, feeds_rejected_tokens=True),
        (recipe.name,),
        recipe.key,
        requested_by="recipe",
        rewind_field="recipe",
        row_params=choice.row_params,
    )


def _config_strategy(config: GenerationConfig, drafts: DrafterSpec | None) -> StrategyChoice:
    if config.num_beams > 1:
        return _beam_strategy(config)
    if config.banned_phrases:
        traits, by = BannedPhraseSampling.traits, "banned_phrases"
        return StrategyChoice("backtracking", BannedPhraseSampling, traits, requested_by=by, rewind_field=by)
    if is_contrastive(config):
        return _contrastive_strategy(config)
    if drafts is not None:
        make_drafter = drafts.make_drafter
        return StrategyChoice(
            "speculative",
            lambda noise, *rest: SpeculativeSampling(make_drafter(noise), noise, *rest),
            SpeculativeSampling.traits,
            drafts.key[:1],
            drafts.key[1:],
            requested_by="a drafter",
        )
    return StrategyChoice("sampling", Sampling, Sampling.traits)


def strategy_name(config: GenerationConfig) -> str:
    """The name of a config's strategy."""
    if config.num_beams == 1:
        single = "sampling" if config.do_sample else "greedy search"
        single += " with backtracking" if config.banned_phrases else ""
        return f"contrastive search, {config.top_k} candidates" if is_contrastive(config) else single
    kind = "beam sampling" if config.do_sample else "beam search"
    kind = f"constrained {kind}" if is_constrained(config) else kind
    groups = f" in {config.num_beam_groups} groups" if config.num_beam_groups > 1 else ""
    return f"{kind}, {config.num_beams} beams{groups}"


def _beam_strategy(config: GenerationConfig) -> StrategyChoice:
    # Enough candidates that `num_beams` remain when the best choices of every beam are all end tokens.
    num_candidates = max(2, 1 + len(end_token_ids(config)))
    settings = BeamSettings(config.num_beams, config.num_beam_groups, num_candidates, config.do_sample)
    constrained = is_constrained(config)
    kind = ConstrainedBeamSearch if constrained else BeamSearch
    return StrategyChoice(
        "constrained" if constrained else "beam",
        partial(kind, settings),
        kind.traits,
        tuple(settings),
        requested_by="num_beams",
        row_params={"constraint_state": _constraint_state(config)} if constrained else {},
    )


def _contrastive_strategy(config: GenerationConfig) -> StrategyChoice:
    low_memory = bool(config.low_memory)
    kind = LowMemoryContrastiveSearch if low_memory else ContrastiveSearch
    return StrategyChoice(
        "low-memory contrastive" if low_memory else "contrastive",
        kind,
        kind.traits,
        requested_by="penalty_alpha",
        rewind_field="low_memory" if low_memory else None,
        num_candidates=1 if low_memory else config.top_k,
        row_params={"penalty_alpha": config.penalty_alpha, "top_k": config.top_k},
    )


def is_constrained(config: GenerationConfig) -> bool:
    """Whether a config has constraints."""
    return config.constraints is not None or config.force_words_ids is not None


def is_contrastive(config: GenerationConfig) -> bool:
    """Whether a config selects contrastive search."""
    return bool(config.penalty_alpha) and config.top_k > 1


def _constraint_state(config: GenerationConfig) -> ConstraintListState:
    """A config's constraints, none of them met."""
    words = parse_force_words(config.force_words_ids) if config.force_words_ids else ()
    constraints = [*(config.constraints or ()), *words]
    return ConstraintListState(constraints, config.ordered_constraints, config.constraint_gap)


_NOT_READ_AGAIN: Final = (
    "takes tokens back, so it needs a model that reads a text at once as it does token by token"
)

# Counts beyond these would exhaust memory.
_MAX_COUNTS: Final = {
    "num_beams": 2**14, "num_return_sequences": 2**16, "max_new_tokens": 2**31, "max_length": 2**31,
}  # fmt: skip

# Fields with token ids that must be in the vocabulary, since they are chosen or used as an index.
_TOKEN_FIELDS: Final = frozenset({
    "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "logit_bias",
    "sequence_bias", "bad_words_ids", "force_words_ids", "thinking_end", "no_timestamps_token_id",
})  # fmt: skip


def check_config(config: GenerationConfig, traits: ModelTraits) -> None:
    """Raise a ConfigError for a config that cannot run on a model with these traits."""
    given = config.given
    if not given.isdisjoint(_TOKEN_FIELDS):
        _check_token_ids(config, traits)
    allowed = config.prefix_allowed_tokens_fn
    if isinstance(allowed, AllowedSequences) and allowed.min_vocab_size > traits.vocab_size:
        must = f"must name tokens below {traits.vocab_size}, the vocabulary"
        raise ConfigError("prefix_allowed_tokens_fn", must, allowed.min_vocab_size - 1)
    for name, limit in _MAX_COUNTS.items():
        value = getattr(config, name) if name in given else None
        if value is not None and value > limit:
            raise ConfigError(name, f"must be <= {limit}", value, "lower it")
    if config.logprobs is not None and config.logprobs > traits.vocab_size:
        raise ConfigError("logprobs", f"must be <= {traits.vocab_size}", config.logprobs, "lower it")
    if traits.cache_type == "recurrent":
        _check_rewindable(config, traits)
    if config.watermarking_config is not None:
        _check_watermark(config, as_watermarking_config(config.watermarking_config))
    if config.forced_decoder_ids:
        _check_forced_tokens(config, traits)


def resolve_max_length(config: GenerationConfig, prompt: PromptInfo, traits: ModelTraits) -> int:
    """The most tokens that a row may have, prompt included."""
    length, offset = prompt.length, prompt.offset
    if prompt.max_length is not None and not has_own_length(config):
        name, limit = "max_length", prompt.max_length
    elif config.max_new_tokens is not None:
        name, limit = "max_new_tokens", length + config.max_new_tokens
    elif "max_length" in config.given:
        name, limit = "max_length", config.max_length - offset - prompt.padding
        if limit <= length:
            must = f"must be > the {length + offset + prompt.padding} tokens of the prompt"
            raise ConfigError("max_length", must, config.max_length, "raise it or set max_new_tokens")
    else:
        name, limit = "max_length", length + DEFAULT_NEW_TOKENS
        if traits.context_length is not None:
            limit = min(limit, max(traits.context_length - offset, length + 1))
    if prompt.max_length is not None:
        limit = min(limit, prompt.max_length)
    # The last token is never fed, except by contrastive search, which ranks it.
    excess = 0 if traits.max_positions is None else offset + limit - traits.max_positions
    if excess > 1 or (excess == 1 and is_contrastive(config)):
        reason = f"the model has {traits.max_positions} positions and the prompt takes {length + offset}"
        do = "lower it or shorten the prompt"
        raise ConfigError(name, f"must leave room: {reason}", getattr(config, name), do)
    by_new_tokens = config.min_new_tokens is not None
    taken = length + offset + prompt.padding
    min_new = config.min_new_tokens if by_new_tokens else (config.min_length or 0) - taken
    if min_new is not None and min_new > limit - length:
        name = "min_new_tokens" if by_new_tokens else "min_length"
        must = f"must not ask for more than the {limit - length} new tokens allowed"
        raise ConfigError(name, must, getattr(config, name), "lower it or raise max_new_tokens")
    return limit


def has_own_length(config: GenerationConfig) -> bool:
    """Whether a length was set for the request, and not only in the model's config."""
    return any(config.source(name) in ("call", "argument") for name in ("max_new_tokens", "max_length"))


def _check_token_ids(config: GenerationConfig, traits: ModelTraits) -> None:
    """Raise for token ids outside the vocabulary, and if all tokens are suppressed."""
    size = traits.vocab_size
    for name in sorted(_TOKEN_FIELDS & config.given):
        unknown = [token for token in _iter_token_ids(getattr(config, name)) if not 0 <= token < size]
        if unknown:
            raise ConfigError(name, f"must name tokens below {size}, the vocabulary", unknown[0])
    if config.suppress_tokens and len(set(as_id_list(config.suppress_tokens))) >= size:
        raise ConfigError("suppress_tokens", "must leave at least one token", config.suppress_tokens)


def _check_forced_tokens(config: GenerationConfig, traits: ModelTraits) -> None:
    """Raise for pairs of `forced_decoder_ids` without effect: an index in the prompt, an unknown token."""
    for index, token in config.forced_decoder_ids or ():
        if index is None or index < 1:
            must = "must have indices from 1 on, the first new token"
            raise ConfigError("forced_decoder_ids", must, index)
        if token is not None and token >= traits.vocab_size:
            must = f"must name tokens below {traits.vocab_size}, the vocabulary"
            raise ConfigError("forced_decoder_ids", must, token)


def _iter_token_ids(value: Any) -> Iterator[int]:
    """Every token id in a field's value."""
    if isinstance(value, Mapping | tuple | list):
        for part in value:  # the keys of a mapping
            yield from _iter_token_ids(part)
    elif value is not None:
        yield int(value)


def _check_rewindable(config: GenerationConfig, traits: ModelTraits) -> None:
    """Raise for a method that takes tokens back, on a recurrent model that cannot go on from what is left."""
    if config.low_memory and is_contrastive(config):
        must = "needs a model that can drop a token from its cache, this one has a recurrent state"
        raise ConfigError(("low_memory", "penalty_alpha"), must, True, "leave it out")
    if config.banned_phrases and not traits.reads_again:
        raise ConfigError("banned_phrases", _NOT_READ_AGAIN, config.banned_phrases, "use bad_words_ids")


def _check_watermark(config: GenerationConfig, settings: BaseWatermarkingConfig) -> None:
    """Raise for a watermark that the method cannot carry; warn about a public key."""
    if settings.scheme == "gumbel" and (not config.do_sample or config.num_beams > 1):
        must = "replaces the sampling noise (Gumbel), and so needs do_sample=True and num_beams=1"
        do = "sample, or use a WatermarkingConfig"
        raise ConfigError("watermarking_config", must, settings, do)
    warn_if_public(settings)

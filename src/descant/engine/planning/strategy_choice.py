"""Checks of a config against a model's traits, before anything is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from descant.config.generation_config import DEFAULT_NEW_TOKENS, GenerationConfig
from descant.config.watermarking_config import BaseWatermarkingConfig, as_watermarking_config
from descant.core.context import PromptInfo
from descant.core.interfaces import (
    ModelTraits,
    NoiseSource,
    RankGroup,
    StopCondition,
    Strategy,
    StrategyTraits,
)
from descant.decoding.constraints import ConstraintListState, parse_force_words
from descant.decoding.pipeline import end_token_ids
from descant.decoding.processors.allowed_sequences import AllowedSequences
from descant.decoding.processors.base import as_id_list
from descant.decoding.strategies.backtracking import BannedPhraseSampling
from descant.decoding.strategies.beams.beam import BeamSearch, BeamSettings
from descant.decoding.strategies.beams.constrained import ConstrainedBeamSearch
from descant.decoding.strategies.contrastive import ContrastiveSearch, LowMemoryContrastiveSearch
from descant.decoding.strategies.sampling import Sampling
from descant.decoding.strategies.speculative import SpeculativeSampling
from descant.decoding.watermark.keys import warn_if_public
from descant.engine.planning.drafter_factory import DrafterSpec
from descant.errors import ConfigError
from descant.recipes.recipe import Recipe

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
        _check_rewindable(config)
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


def _check_rewindable(config: GenerationConfig) -> None:
    """Raise for a method that takes tokens back, on a model with a recurrent state."""
    if config.low_memory and is_contrastive(config):
        must = "needs a model that can drop a token from its cache, this one has a recurrent state"
        raise ConfigError(("low_memory", "penalty_alpha"), must, True, "leave it out")
    if config.banned_phrases:
        must = "needs a model that can drop tokens from its cache, this one has a recurrent state"
        raise ConfigError("banned_phrases", must, config.banned_phrases, "use bad_words_ids")


def _check_watermark(config: GenerationConfig, settings: BaseWatermarkingConfig) -> None:
    """Raise for a watermark that the method cannot carry; warn about a public key."""
    if settings.scheme == "gumbel" and (not config.do_sample or config.num_beams > 1):
        must = "replaces the sampling noise (Gumbel), and so needs do_sample=True and num_beams=1"
        do = "sample, or use a WatermarkingConfig"
        raise ConfigError("watermarking_config", must, settings, do)
    warn_if_public(settings)

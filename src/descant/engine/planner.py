"""From a config to what runs: the strategy, the stages, the wrappers, the stops. The only factory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from descant.config.generation_config import GenerationConfig
from descant.core.context import PromptInfo
from descant.core.interfaces import (
    Model,
    ModelTraits,
    NoiseSource,
    RankGroup,
    RowCache,
    StopCondition,
    Strategy,
)
from descant.decoding.constraints import ConstraintListState, parse_force_words
from descant.decoding.guidance.arithmetic import JointModel, LogitArithmetic
from descant.decoding.guidance.cfg import ClassifierFreeGuidance
from descant.decoding.guidance.dola import DoLa, early_layers
from descant.decoding.processors import AllowedSequences
from descant.decoding.processors.pipeline import (
    BACKTRACK_MASK,
    CUSTOM,
    PROCESSOR_SPECS,
    ProcessorSpec,
    as_id_list,
    end_token_ids,
    is_set,
    processor_order,
)
from descant.decoding.strategies.banned_phrases import BannedPhraseSampling
from descant.decoding.strategies.beams.beam import BeamSearch, BeamShape
from descant.decoding.strategies.beams.constrained import ConstrainedBeamSearch
from descant.decoding.strategies.contrastive import ContrastiveSearch, LowMemoryContrastiveSearch
from descant.decoding.strategies.sampling import Sampling
from descant.decoding.strategies.speculative import SpeculativeSampling
from descant.decoding.watermark.schemes import as_watermarking_config
from descant.decoding.watermark.schemes.keys import warn_if_public
from descant.engine.cache_factory import CACHE_FIELD as CACHE
from descant.engine.cache_factory import CacheRequest, build_cache, cache_name, default_cache
from descant.engine.drafter_factory import DrafterSpec, DraftInputs, ModelFactory, make_drafter_spec
from descant.errors import ConfigError, UnsupportedModel
from descant.kv_cache.dense import DenseStore
from descant.kv_cache.multi_model import MultiModelCache
from descant.kv_cache.recurrent_state import RecurrentStateCache
from descant.models.transformers_model import TransformersModel
from descant.models.whisper import is_whisper
from descant.recipes.recipe import Recipe

__all__ = [
    "DEFAULT_NEW_TOKENS",
    "WRAPPERS",
    "DecodingPlan",
    "as_model",
    "choose_cache",
    "drafter_spec",
    "is_constrained",
    "is_contrastive",
    "make_plan",
    "new_cache",
    "new_cache_for",
    "pad_token_id",
    "validate_cache",
]

DEFAULT_NEW_TOKENS: Final = 20

_MAX_COUNTS: Final = {
    "num_beams": 2**14, "num_return_sequences": 2**16, "max_new_tokens": 2**31, "max_length": 2**31,
}  # fmt: skip

# Fields that name tokens which the model must know, since they are chosen or looked up.
_TOKEN_FIELDS: Final = (
    "forced_bos_token_id",
    "forced_eos_token_id",
    "suppress_tokens",
    "begin_suppress_tokens",
    "logit_bias",
    "sequence_bias",
    "bad_words_ids",
    "force_words_ids",
    "thinking_end",
    "no_timestamps_token_id",
)


@dataclass(frozen=True)
class DecodingPlan:
    """What a config comes to on a model: a strategy and its key, which stages, and every row's parameters."""

    config: GenerationConfig
    strategy_key: tuple[Any, ...]  # requests of one key share a strategy
    make_strategy: Callable[[NoiseSource, StopCondition, RankGroup | None], Strategy]
    processors: tuple[tuple[int, ProcessorSpec], ...]  # its stages, each with its place in the order
    custom_position: int  # the place of the user's own processors
    base_params: Mapping[str, Any]
    wrappers: tuple[str, ...] = ()  # which wrappers the model needs
    recipe: Recipe | None = None  # somebody else's part in it

    @property
    def rank_key(self) -> tuple[Any, ...]:
        """The key as far as other processes can have the same: who guesses is an object of this one."""
        return (
            self.strategy_key[:2] if self.strategy_key[0] in ("speculative", "recipe") else self.strategy_key
        )

    @property
    def max_rewind(self) -> int | None:
        """How many tokens its rows may take back at once; None: any number."""
        if self.strategy_key[0] == "recipe" and self.recipe is not None:
            return None if getattr(self.recipe.make, "needs_rewind", False) else 0
        return {"rewinding": None, "sequential": 1}.get(self.strategy_key[0], 0)

    @property
    def forks(self) -> bool:
        """Whether one prompt becomes several rows."""
        return self.base_params["num_sequences"] > 1 or self.strategy_key[0] in (
            "beam",
            "constrained",
            "contrastive",
        )

    @property
    def refeeds_last(self) -> bool:
        """Whether its rows' last tokens are fed again, so that they must have one."""
        return self.max_rewind != 0

    def row_params(self, prompt: PromptInfo, facts: ModelTraits) -> dict[str, Any]:
        """The parameters of a row with that prompt."""
        config, length = self.config, prompt.length
        begins = length + 1 if length == 1 and config.forced_bos_token_id is not None else length
        params = {
            **self.base_params,
            "max_length": (limit := _max_length(config, prompt, facts)),
            "last_length": limit - 1,  # a row of this length has its last choice before it
            "begin_index": begins,
            "padded_width": prompt.padded_width or length,
            "prompt_index": prompt.prompt_index,
            "deadline": float("inf") if config.max_time is None else time.monotonic() + config.max_time,
        }
        for _, stage in self.processors:
            params |= stage.processor.params_from_config(config, prompt)
        if prompt.healed_suffix is not None and "min_new_tokens" in params:
            params["min_new_tokens"] += len(prompt.healed_suffix)  # what is said again is not new
        return params


@dataclass(frozen=True)
class WrapperSpec:
    """A wrapper with when a config calls for it, and the parameters that its rows then have."""

    name: str
    make: Callable[[Any], Any]  # of a Wrapper
    is_enabled: Callable[[GenerationConfig], bool]
    row_params: Callable[[GenerationConfig, ModelTraits], dict[str, Any]]


def _dola_params(config: GenerationConfig, facts: ModelTraits) -> dict[str, Any]:
    assert config.dola_layers is not None
    if facts.is_encoder_decoder or not facts.has_lm_head:
        lacks = "an encoder" if facts.is_encoder_decoder else "no output embeddings of its own"
        do = "leave it out"
        raise ConfigError("dola_layers", f"has no meaning for a model with {lacks}", config.dola_layers, do)
    return {"early_layers": early_layers(config.dola_layers, facts)}


def _check_rewindable(config: GenerationConfig, facts: ModelTraits) -> None:
    """Raise for what takes tokens back, on a model that cannot forget."""
    if config.low_memory and is_contrastive(config) and facts.cache_type == "recurrent":
        must = "needs a model that can forget a token, this one remembers more than keys and values"
        raise ConfigError(("low_memory", "penalty_alpha"), must, True, "leave it out")
    if config.banned_phrases and facts.cache_type == "recurrent":
        must = "needs a model that can forget tokens, this one remembers more than keys and values"
        raise ConfigError("banned_phrases", must, config.banned_phrases, "use bad_words_ids")


def _check_watermark(config: GenerationConfig) -> None:
    """Raise for a mark that the method cannot carry, and warn of a key that everybody knows."""
    if config.watermarking_config is None:
        return
    settings = as_watermarking_config(config.watermarking_config)
    if settings.scheme == "gumbel" and (not config.do_sample or config.num_beams > 1):
        must = "marks by chance (Gumbel), and so needs do_sample=True and num_beams=1"
        do = "sample, or use a WatermarkingConfig"
        raise ConfigError("watermarking_config", must, settings, do)
    warn_if_public(settings)


def _guidance_params(config: GenerationConfig, facts: ModelTraits) -> dict[str, Any]:
    if facts.is_encoder_decoder:
        must = "has no meaning for a model with an encoder, whose prompt is not in the decoder"
        raise ConfigError("guidance_scale", must, config.guidance_scale, "leave it out")
    return {"uses_guidance": 1, "guidance_scale": float(config.guidance_scale or 0.0)}


# What changes the distribution, the innermost first. One line a wrapper.
WRAPPERS: Final[Mapping[str, WrapperSpec]] = {
    "dola": WrapperSpec("DoLa", DoLa, is_set("dola_layers"), _dola_params),
    "guidance": WrapperSpec(
        "guidance", ClassifierFreeGuidance, is_set("guidance_scale", 1.0), _guidance_params
    ),
}


def as_model(model: Any, states: Sequence[str] = ()) -> Any:
    """The model behind the Model port; what already offers the port is used as it is."""
    if hasattr(model, "traits"):
        return model
    if isinstance(model, LogitArithmetic):
        # A port for each session, since it holds requests; states are the first model's.
        parts = [as_model(one, states if place == 0 else ()) for place, one in enumerate(model.models)]
        return JointModel(
            model, parts, lambda parts: MultiModelCache([new_cache_for(part) for part in parts])
        )
    # Here, not above: it brings transformers' models along, which whoever has one has loaded already.
    from descant.models.custom_generate import as_custom_generate

    if not is_whisper(model) and as_custom_generate(model) is not None:
        kind = type(model).__name__
        raise UnsupportedModel(f"{kind} prepares prompts in a generate() of its own: use descant.generate")
    return TransformersModel(model, states)


def new_cache(facts: ModelTraits) -> RowCache:
    """An empty cache of the kind that a model can use."""
    return RecurrentStateCache(facts.cache_argument) if facts.cache_type == "recurrent" else DenseStore()


def new_cache_for(model: Model) -> RowCache:
    """An empty cache for a model: what it makes itself, or one of the kind that it can use."""
    own = getattr(model, "new_cache", None)
    cache: RowCache = new_cache(model.traits) if own is None else own()
    return cache


def choose_cache(model: Any, configs: Sequence[GenerationConfig], slots: int, shared: int) -> RowCache:
    """The cache of a table: what the first config names, or what suits rows that come to share so much.

    `slots` is how many positions the longest row may come to.
    """
    want = CacheRequest(model, configs[0], slots)
    named = cache_name(configs[0])
    if hasattr(model, "new_cache"):
        if named not in (None, "dynamic") and configs[0].source(CACHE) != "model":
            raise ConfigError(CACHE, "is for one model, not for several", named, "leave it out")
        return new_cache_for(model)
    return default_cache(want, shared) if named is None else build_cache(want)


def validate_cache(known: DecodingPlan, cache: RowCache, named: str | None, slots: int) -> None:
    """Raise for a request that cannot work on the cache of its table, which was asked for by that name."""
    config, kind = known.config, type(cache).__name__
    wanted = cache_name(config)
    if wanted not in (None, named) and config.source(CACHE) != "model":
        its = f"the {named} one" if named is not None else f"a {kind}"
        do = "leave it out, or use a session of its own"
        raise ConfigError(CACHE, f"must be that of its table, {its}", wanted, do)
    back, limit = known.max_rewind, getattr(cache, "max_rewind", None)
    if limit is not None and (back is None or back > limit):
        must = f"takes tokens back, which the {named or kind} cache cannot: it has forgotten what came before"
        raise ConfigError((_rewind_field(known), CACHE), must, _rewind_value(known), "use another cache")
    room = getattr(cache, "capacity", None)
    if room is not None and slots > room:
        must = f"must leave room: the {named or kind} cache has {room} positions"
        raise ConfigError("max_new_tokens", must, f"{slots} in all", "lower it or make the cache larger")


def drafter_spec(config: GenerationConfig, model: Any, given: DraftInputs) -> DrafterSpec | None:
    """What guesses ahead for a config on a model, if anything does."""
    return make_drafter_spec(config, model, given, ModelFactory(as_model, new_cache_for))


def make_plan(
    config: GenerationConfig,
    facts: ModelTraits,
    drafts: DrafterSpec | None = None,
    recipe: Recipe | None = None,
) -> DecodingPlan:
    """What a merged config and a recipe's part come to on a model, or a ConfigError that names the field."""
    eos = as_id_list(config.eos_token_id)
    _check_token_ids(config, facts)
    _check_counts(config, facts)
    _check_rewindable(config, facts)
    _check_watermark(config)
    key, build = _choose_strategy(config, len(end_token_ids(config)), drafts)
    if recipe is not None and recipe.kind == "strategy":
        _check_one_strategy(key, recipe)
        key, build = recipe.key, recipe.build
    values = {
        "eos_token_ids": eos,
        "stop_token_ids": as_id_list(config.stop_token_ids),
        "end_token_ids": end_token_ids(config),
        "pad_token_id": pad_token_id(config),
        "do_sample": int(config.do_sample),
        "num_sequences": config.num_return_sequences if config.num_beams == 1 else 1,
        "seed": -1 if config.seed is None else config.seed,
        "early_stopping": {False: 0, True: 1, "never": 2}[config.early_stopping],
        "length_penalty": float(config.length_penalty),
        "min_tokens_to_keep": len(eos) + 1 if config.num_beams > 1 else 1,
        "logprobs": -1 if config.logprobs is None else config.logprobs,
    }
    order = processor_order(config)
    masks = (
        key[0] == "recipe" and recipe is not None and "masked_tokens" in getattr(recipe.make, "columns", ())
    )
    stages = [
        one for one in PROCESSOR_SPECS if one.is_enabled(config) or (masks and one.name == BACKTRACK_MASK)
    ]
    chain = tuple((order.index(stage.name), stage) for stage in stages)
    wraps = tuple(name for name, wrap in WRAPPERS.items() if wrap.is_enabled(config))
    for name in wraps:
        values |= WRAPPERS[name].row_params(config, facts)
    if drafts is not None:
        values |= drafts.row_params
    if key[0] == "constrained":
        values |= {"constraint_state": _constraint_state(config)}
    if config.low_memory:
        values |= {"low_memory": 1}
    if is_contrastive(config):
        values |= {"penalty_alpha": config.penalty_alpha, "top_k": config.top_k}
    if recipe is not None:
        values |= recipe.row_params(config)
        wraps += (recipe.row_flag,) if recipe.kind == "wrapper" else ()
    made = DecodingPlan(config, key, build, chain, order.index(CUSTOM), values, wraps, recipe)
    if key[0] == "recipe" and made.max_rewind != 0 and facts.cache_type == "recurrent":
        must = "takes tokens back, which needs a model that remembers keys and values alone"
        raise ConfigError("recipe", must, recipe, "leave it out")
    return made


def _check_one_strategy(key: tuple[Any, ...], recipe: Recipe) -> None:
    """Raise where a config asks for another strategy than a recipe's."""
    asks = {
        "beam": "num_beams", "constrained": "num_beams", "rewinding": "banned_phrases",
        "contrastive": "penalty_alpha", "sequential": "penalty_alpha", "speculative": "a drafter",
    }.get(key[0])  # fmt: skip
    if asks is not None:
        what = f"`{asks}`" if "_" in asks else asks
        must = f"must be None with {what}, since a strategy takes the place of another"
        raise ConfigError(("recipe", asks), must, recipe, "leave one of them out")


def _rewind_field(known: DecodingPlan) -> str:
    """The parameter by which a plan takes tokens back."""
    return {"recipe": "recipe", "rewinding": "banned_phrases"}.get(known.strategy_key[0], "low_memory")


def _rewind_value(known: DecodingPlan) -> Any:
    """Its value."""
    return known.recipe if known.strategy_key[0] == "recipe" else getattr(known.config, _rewind_field(known))


def _choose_strategy(
    config: GenerationConfig, ends: int, drafts: DrafterSpec | None = None
) -> tuple[tuple[Any, ...], Callable[[NoiseSource, StopCondition, RankGroup | None], Strategy]]:
    """The strategy of a config: one line a method."""
    if config.num_beams > 1:
        # Enough candidates that as many as there are beams remain when every beam's best choices all end it.
        shape = BeamShape(config.num_beams, config.num_beam_groups, max(2, 1 + ends), config.do_sample)
        if is_constrained(config):
            return ("constrained", *shape), partial(ConstrainedBeamSearch, shape)
        return ("beam", *shape), partial(BeamSearch, shape)
    if config.banned_phrases:
        return ("rewinding",), BannedPhraseSampling
    if is_contrastive(config):
        if config.low_memory:
            return ("sequential",), LowMemoryContrastiveSearch
        return ("contrastive",), ContrastiveSearch
    if drafts is not None:
        guess = drafts.make_drafter
        return ("speculative", *drafts.key), lambda noise, *others: SpeculativeSampling(
            guess(noise), noise, *others
        )
    return ("sampling",), Sampling


def is_constrained(config: GenerationConfig) -> bool:
    """Whether a config has constraints."""
    return config.constraints is not None or config.force_words_ids is not None


def _constraint_state(config: GenerationConfig) -> ConstraintListState:
    """A config's constraints, none of them met."""
    words = parse_force_words(config.force_words_ids) if config.force_words_ids else ()
    constraints = [*(config.constraints or ()), *words]
    return ConstraintListState(constraints, config.ordered_constraints, config.constraint_gap)


def is_contrastive(config: GenerationConfig) -> bool:
    """Whether a config asks for contrastive search."""
    return bool(config.penalty_alpha) and config.top_k > 1


def _max_length(config: GenerationConfig, prompt: PromptInfo, facts: ModelTraits) -> int:
    """How many tokens a row may have, prompt included."""
    length, offset = prompt.length, prompt.offset
    if config.max_new_tokens is not None:
        name, limit = "max_new_tokens", length + config.max_new_tokens
    elif "max_length" in config.given:
        name, limit = "max_length", config.max_length - offset
        if limit <= length:
            must = f"must be > the {length + offset} tokens of the prompt"
            raise ConfigError("max_length", must, config.max_length, "raise it or set max_new_tokens")
    else:
        name, limit = "max_length", length + DEFAULT_NEW_TOKENS
        if facts.context_length is not None:
            limit = min(limit, max(facts.context_length - offset, length + 1))
    # The last token is never fed, unless it has to be ranked: the table of positions may be one shorter.
    if (
        facts.max_positions is not None
        and offset + limit - (not is_contrastive(config)) > facts.max_positions
    ):
        most = f"the model has {facts.max_positions} positions and the prompt takes {length + offset}"
        raise ConfigError(
            name, f"must leave room: {most}", getattr(config, name), "lower it or shorten the prompt"
        )
    least = (
        config.min_new_tokens
        if config.min_new_tokens is not None
        else (config.min_length or 0) - length - offset
    )
    if least > limit - length:
        name = "min_new_tokens" if config.min_new_tokens is not None else "min_length"
        must = f"must not ask for more than the {limit - length} new tokens allowed"
        raise ConfigError(name, must, getattr(config, name), "lower it or raise max_new_tokens")
    return limit


def _check_counts(config: GenerationConfig, facts: ModelTraits) -> None:
    """Raise for counts that no memory can hold, rather than run out of it."""
    for name, most in {**_MAX_COUNTS, "logprobs": facts.vocab_size}.items():
        value = getattr(config, name)
        if value is not None and value > most:
            raise ConfigError(name, f"must be <= {most}", value, "lower it")


def _check_token_ids(config: GenerationConfig, facts: ModelTraits) -> None:
    """Raise for tokens that the model does not have, and for a ban that leaves none."""
    for name in _TOKEN_FIELDS:
        unknown = [
            token for token in _iter_token_ids(getattr(config, name)) if not 0 <= token < facts.vocab_size
        ]
        if unknown:
            raise ConfigError(name, f"must name tokens below {facts.vocab_size}, the vocabulary", unknown[0])
    allowed = config.prefix_allowed_tokens_fn
    if isinstance(allowed, AllowedSequences) and allowed.min_vocab_size > facts.vocab_size:
        must = f"must name tokens below {facts.vocab_size}, the vocabulary"
        raise ConfigError("prefix_allowed_tokens_fn", must, allowed.min_vocab_size - 1)
    if len(set(as_id_list(config.suppress_tokens))) >= facts.vocab_size:
        raise ConfigError("suppress_tokens", "must leave at least one token", config.suppress_tokens)


def pad_token_id(config: GenerationConfig) -> int:
    """What fills the place after a row's end: the pad token, else the first end token, else 0."""
    if config.pad_token_id is not None:
        return int(config.pad_token_id)
    return next(iter(as_id_list(config.eos_token_id)), 0)


def _iter_token_ids(value: Any) -> Iterator[int]:
    """Every token id that a field's value names."""
    if isinstance(value, Mapping | tuple | list):
        for part in value:  # the keys of a mapping
            yield from _iter_token_ids(part)
    elif value is not None:
        yield int(value)

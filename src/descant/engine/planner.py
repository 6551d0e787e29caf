"""From a config to what runs: the strategy, the stages, the wrappers, the stops. The only factory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from descant.config.generation_config import GenerationConfig
from descant.core.context import Prompt
from descant.core.interfaces import Cache, Facts, Model, Noise, Peers, Stop, Strategy
from descant.decoding.constraints import ConstraintListState, forced
from descant.decoding.guidance.arithmetic import Arithmetic, Joint
from descant.decoding.guidance.cfg import Guidance
from descant.decoding.guidance.dola import DoLa, early_layers
from descant.decoding.processors import AllowedSequences
from descant.decoding.processors.pipeline import (
    CUSTOM,
    REWOUND,
    STAGES,
    Stage,
    ends_of,
    ids_of,
    ordered,
    set_to,
)
from descant.decoding.strategies.banned_phrases import Banning
from descant.decoding.strategies.beams.beam import Beam, Shape
from descant.decoding.strategies.beams.constrained import Constrained
from descant.decoding.strategies.contrastive import Contrastive, Sequential
from descant.decoding.strategies.sampling import Sampling
from descant.decoding.strategies.speculative import Speculative
from descant.decoding.watermark.schemes import settings_of
from descant.decoding.watermark.schemes.keys import warn_if_public
from descant.engine.cache_factory import NAME as CACHE
from descant.engine.cache_factory import Wanted, kind_of, made, suiting
from descant.engine.drafter_factory import Assistance, Drafting, Factory, drafting
from descant.errors import ConfigError, UnsupportedModel
from descant.kv_cache.dense import DenseCache
from descant.kv_cache.multi_model import SeveralCaches
from descant.kv_cache.recurrent_state import ObjectCache
from descant.models.transformers_model import TransformersModel
from descant.models.whisper import hears
from descant.recipes.recipe import Recipe

__all__ = [
    "DEFAULT_NEW_TOKENS",
    "WRAPS",
    "Plan",
    "adapt",
    "cache_of",
    "constrains",
    "contrasts",
    "drafted",
    "new_cache",
    "pad_of",
    "plan",
    "refuse_cache",
    "table_cache",
]

DEFAULT_NEW_TOKENS: Final = 20

_MOST: Final = {
    "num_beams": 2**14, "num_return_sequences": 2**16, "max_new_tokens": 2**31, "max_length": 2**31,
}  # fmt: skip

# Fields that name tokens which the model must know, since they are chosen or looked up.
_KNOWN_TOKENS: Final = (
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
class Plan:
    """What a config comes to on a model: a strategy and its key, which stages, and every row's parameters."""

    config: GenerationConfig
    key: tuple[Any, ...]  # requests of one key share a strategy
    build: Callable[[Noise, Stop, Peers | None], Strategy]
    chain: tuple[tuple[int, Stage], ...]  # its stages, each with its place in the order
    custom: int  # the place of the user's own processors
    values: Mapping[str, Any]
    wraps: tuple[str, ...] = ()  # which wrappers the model needs
    recipe: Recipe | None = None  # somebody else's part in it

    @property
    def shape(self) -> tuple[Any, ...]:
        """The key as far as other processes can have the same: who guesses is an object of this one."""
        return self.key[:2] if self.key[0] in ("speculative", "recipe") else self.key

    @property
    def back(self) -> int | None:
        """How many tokens its rows may take back at once; None: any number."""
        if self.key[0] == "recipe" and self.recipe is not None:
            return None if getattr(self.recipe.make, "rewinds", False) else 0
        return {"rewinding": None, "sequential": 1}.get(self.key[0], 0)

    @property
    def forks(self) -> bool:
        """Whether one prompt becomes several rows."""
        return self.values["copies"] > 1 or self.key[0] in ("beam", "constrained", "contrastive")

    @property
    def again(self) -> bool:
        """Whether its rows' last tokens are fed again, so that they must have one."""
        return self.back != 0

    def row(self, prompt: Prompt, facts: Facts) -> dict[str, Any]:
        """The parameters of a row with that prompt."""
        config, length = self.config, prompt.length
        begins = length + 1 if length == 1 and config.forced_bos_token_id is not None else length
        params = {
            **self.values,
            "limit": (limit := _limit(config, prompt, facts)),
            "last": limit - 1,  # a row of this length has its last choice before it
            "begin_index": begins,
            "width": prompt.width or length,
            "batch": prompt.batch,
            "deadline": float("inf") if config.max_time is None else time.monotonic() + config.max_time,
        }
        for _, stage in self.chain:
            params |= stage.processor.columns(config, prompt)
        if prompt.tail is not None and "min_new_tokens" in params:
            params["min_new_tokens"] += len(prompt.tail)  # what is said again is not new
        return params


@dataclass(frozen=True)
class Wrap:
    """A wrapper with when a config calls for it, and the parameters that its rows then have."""

    name: str
    build: Callable[[Any], Any]  # of a Wrapper
    wanted: Callable[[GenerationConfig], bool]
    values: Callable[[GenerationConfig, Facts], dict[str, Any]]


def _dola(config: GenerationConfig, facts: Facts) -> dict[str, Any]:
    assert config.dola_layers is not None
    if facts.encoder_decoder or not facts.head:
        lacks = "an encoder" if facts.encoder_decoder else "no output embeddings of its own"
        do = "leave it out"
        raise ConfigError("dola_layers", f"has no meaning for a model with {lacks}", config.dola_layers, do)
    return {"early_layers": early_layers(config.dola_layers, facts)}


def _refuse_unrewound(config: GenerationConfig, facts: Facts) -> None:
    """Raise for what takes tokens back, on a model that cannot forget."""
    if config.low_memory and contrasts(config) and facts.memory == "own":
        must = "needs a model that can forget a token, this one remembers more than keys and values"
        raise ConfigError(("low_memory", "penalty_alpha"), must, True, "leave it out")
    if config.banned_phrases and facts.memory == "own":
        must = "needs a model that can forget tokens, this one remembers more than keys and values"
        raise ConfigError("banned_phrases", must, config.banned_phrases, "use bad_words_ids")


def _refuse_unmarked(config: GenerationConfig) -> None:
    """Raise for a mark that the method cannot carry, and warn of a key that everybody knows."""
    if config.watermarking_config is None:
        return
    settings = settings_of(config.watermarking_config)
    if settings.scheme == "gumbel" and (not config.do_sample or config.num_beams > 1):
        must = "marks by chance (Gumbel), and so needs do_sample=True and num_beams=1"
        do = "sample, or use a WatermarkingConfig"
        raise ConfigError("watermarking_config", must, settings, do)
    warn_if_public(settings)


def _guided(config: GenerationConfig, facts: Facts) -> dict[str, Any]:
    if facts.encoder_decoder:
        must = "has no meaning for a model with an encoder, whose prompt is not in the decoder"
        raise ConfigError("guidance_scale", must, config.guidance_scale, "leave it out")
    return {"guided": 1, "guidance_scale": float(config.guidance_scale or 0.0)}


# What changes the distribution, the innermost first. One line a wrapper.
WRAPS: Final[Mapping[str, Wrap]] = {
    "dola": Wrap("DoLa", DoLa, set_to("dola_layers"), _dola),
    "guidance": Wrap("guidance", Guidance, set_to("guidance_scale", 1.0), _guided),
}


def adapt(model: Any, states: Sequence[str] = ()) -> Any:
    """The model behind the Model port; what already offers the port is used as it is."""
    if hasattr(model, "facts"):
        return model
    if isinstance(model, Arithmetic):
        # A port for each session, since it holds requests; states are the first model's.
        parts = [adapt(one, states if place == 0 else ()) for place, one in enumerate(model.models)]
        return Joint(model, parts, lambda parts: SeveralCaches([cache_of(part) for part in parts]))
    # Here, not above: it brings transformers' models along, which whoever has one has loaded already.
    from descant.models.custom_generate import outer_of

    if not hears(model) and outer_of(model) is not None:
        kind = type(model).__name__
        raise UnsupportedModel(f"{kind} prepares prompts in a generate() of its own: use descant.generate")
    return TransformersModel(model, states)


def new_cache(facts: Facts) -> Cache:
    """An empty cache of the kind that a model can use."""
    return ObjectCache(facts.past) if facts.memory == "own" else DenseCache()


def cache_of(model: Model) -> Cache:
    """An empty cache for a model: what it makes itself, or one of the kind that it can use."""
    own = getattr(model, "new_cache", None)
    cache: Cache = new_cache(model.facts) if own is None else own()
    return cache


def table_cache(model: Any, configs: Sequence[GenerationConfig], slots: int, shared: int) -> Cache:
    """The cache of a table: what the first config names, or what suits rows that come to share so much.

    `slots` is how many positions the longest row may come to.
    """
    want = Wanted(model, configs[0], slots)
    named = kind_of(configs[0])
    if hasattr(model, "new_cache"):
        if named not in (None, "dynamic") and configs[0].source(CACHE) != "model":
            raise ConfigError(CACHE, "is for one model, not for several", named, "leave it out")
        return cache_of(model)
    return suiting(want, shared) if named is None else made(want)


def refuse_cache(known: Plan, cache: Cache, named: str | None, slots: int) -> None:
    """Raise for a request that cannot work on the cache of its table, which was asked for by that name."""
    config, kind = known.config, type(cache).__name__
    wanted = kind_of(config)
    if wanted not in (None, named) and config.source(CACHE) != "model":
        its = f"the {named} one" if named is not None else f"a {kind}"
        do = "leave it out, or use a session of its own"
        raise ConfigError(CACHE, f"must be that of its table, {its}", wanted, do)
    back, limit = known.back, getattr(cache, "rewind", None)
    if limit is not None and (back is None or back > limit):
        must = f"takes tokens back, which the {named or kind} cache cannot: it has forgotten what came before"
        raise ConfigError((_rewinding(known), CACHE), must, _rewinder(known), "use another cache")
    room = getattr(cache, "capacity", None)
    if room is not None and slots > room:
        must = f"must leave room: the {named or kind} cache has {room} positions"
        raise ConfigError("max_new_tokens", must, f"{slots} in all", "lower it or make the cache larger")


def drafted(config: GenerationConfig, model: Any, given: Assistance) -> Drafting | None:
    """What guesses ahead for a config on a model, if anything does."""
    return drafting(config, model, given, Factory(adapt, cache_of))


def plan(
    config: GenerationConfig, facts: Facts, drafts: Drafting | None = None, recipe: Recipe | None = None
) -> Plan:
    """What a merged config and a recipe's part come to on a model, or a ConfigError that names the field."""
    eos = ids_of(config.eos_token_id)
    _refuse_strangers(config, facts)
    _refuse_immense(config, facts)
    _refuse_unrewound(config, facts)
    _refuse_unmarked(config)
    key, build = _strategy(config, len(ends_of(config)), drafts)
    if recipe is not None and recipe.kind == "strategy":
        _refuse_chosen(key, recipe)
        key, build = recipe.key, recipe.build
    values = {
        "eos": eos,
        "stop_ids": ids_of(config.stop_token_ids),
        "ends": ends_of(config),
        "pad": pad_of(config),
        "do_sample": int(config.do_sample),
        "copies": config.num_return_sequences if config.num_beams == 1 else 1,
        "seed": -1 if config.seed is None else config.seed,
        "early_stopping": {False: 0, True: 1, "never": 2}[config.early_stopping],
        "length_penalty": float(config.length_penalty),
        "min_tokens_to_keep": len(eos) + 1 if config.num_beams > 1 else 1,
        "logprobs": -1 if config.logprobs is None else config.logprobs,
    }
    order = ordered(config)
    masks = key[0] == "recipe" and recipe is not None and "masked" in getattr(recipe.make, "columns", ())
    stages = [one for one in STAGES if one.wanted(config) or (masks and one.name == REWOUND)]
    chain = tuple((order.index(stage.name), stage) for stage in stages)
    wraps = tuple(name for name, wrap in WRAPS.items() if wrap.wanted(config))
    for name in wraps:
        values |= WRAPS[name].values(config, facts)
    if drafts is not None:
        values |= drafts.values
    if key[0] == "constrained":
        values |= {"demands": _demands(config)}
    if config.low_memory:
        values |= {"low_memory": 1}
    if contrasts(config):
        values |= {"penalty_alpha": config.penalty_alpha, "top_k": config.top_k}
    if recipe is not None:
        values |= recipe.values(config)
        wraps += (recipe.mark,) if recipe.kind == "wrapper" else ()
    made = Plan(config, key, build, chain, order.index(CUSTOM), values, wraps, recipe)
    if key[0] == "recipe" and made.back != 0 and facts.memory == "own":
        must = "takes tokens back, which needs a model that remembers keys and values alone"
        raise ConfigError("recipe", must, recipe, "leave it out")
    return made


def _refuse_chosen(key: tuple[Any, ...], recipe: Recipe) -> None:
    """Raise where a config asks for another strategy than a recipe's."""
    asks = {
        "beam": "num_beams", "constrained": "num_beams", "rewinding": "banned_phrases",
        "contrastive": "penalty_alpha", "sequential": "penalty_alpha", "speculative": "a drafter",
    }.get(key[0])  # fmt: skip
    if asks is not None:
        what = f"`{asks}`" if "_" in asks else asks
        must = f"must be None with {what}, since a strategy takes the place of another"
        raise ConfigError(("recipe", asks), must, recipe, "leave one of them out")


def _rewinding(known: Plan) -> str:
    """The parameter by which a plan takes tokens back."""
    return {"recipe": "recipe", "rewinding": "banned_phrases"}.get(known.key[0], "low_memory")


def _rewinder(known: Plan) -> Any:
    """Its value."""
    return known.recipe if known.key[0] == "recipe" else getattr(known.config, _rewinding(known))


def _strategy(
    config: GenerationConfig, ends: int, drafts: Drafting | None = None
) -> tuple[tuple[Any, ...], Callable[[Noise, Stop, Peers | None], Strategy]]:
    """The strategy of a config: one line a method."""
    if config.num_beams > 1:
        # Enough candidates that as many as there are beams remain when every beam's best choices all end it.
        shape = Shape(config.num_beams, config.num_beam_groups, max(2, 1 + ends), config.do_sample)
        if constrains(config):
            return ("constrained", *shape), partial(Constrained, shape)
        return ("beam", *shape), partial(Beam, shape)
    if config.banned_phrases:
        return ("rewinding",), Banning
    if contrasts(config):
        if config.low_memory:
            return ("sequential",), Sequential
        return ("contrastive",), Contrastive
    if drafts is not None:
        guess = drafts.build
        return ("speculative", *drafts.key), lambda noise, *others: Speculative(guess(noise), noise, *others)
    return ("sampling",), Sampling


def constrains(config: GenerationConfig) -> bool:
    """Whether a config has constraints."""
    return config.constraints is not None or config.force_words_ids is not None


def _demands(config: GenerationConfig) -> ConstraintListState:
    """A config's constraints, none of them met."""
    words = forced(config.force_words_ids) if config.force_words_ids else ()
    constraints = [*(config.constraints or ()), *words]
    return ConstraintListState(constraints, config.ordered_constraints, config.constraint_gap)


def contrasts(config: GenerationConfig) -> bool:
    """Whether a config asks for contrastive search."""
    return bool(config.penalty_alpha) and config.top_k > 1


def _limit(config: GenerationConfig, prompt: Prompt, facts: Facts) -> int:
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
        if facts.context is not None:
            limit = min(limit, max(facts.context - offset, length + 1))
    # The last token is never fed, unless it has to be ranked: the table of positions may be one shorter.
    if facts.table is not None and offset + limit - (not contrasts(config)) > facts.table:
        most = f"the model has {facts.table} positions and the prompt takes {length + offset}"
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


def _refuse_immense(config: GenerationConfig, facts: Facts) -> None:
    """Raise for counts that no memory can hold, rather than run out of it."""
    for name, most in {**_MOST, "logprobs": facts.vocabulary}.items():
        value = getattr(config, name)
        if value is not None and value > most:
            raise ConfigError(name, f"must be <= {most}", value, "lower it")


def _refuse_strangers(config: GenerationConfig, facts: Facts) -> None:
    """Raise for tokens that the model does not have, and for a ban that leaves none."""
    for name in _KNOWN_TOKENS:
        unknown = [token for token in _flat(getattr(config, name)) if not 0 <= token < facts.vocabulary]
        if unknown:
            raise ConfigError(name, f"must name tokens below {facts.vocabulary}, the vocabulary", unknown[0])
    allowed = config.prefix_allowed_tokens_fn
    if isinstance(allowed, AllowedSequences) and allowed.size > facts.vocabulary:
        must = f"must name tokens below {facts.vocabulary}, the vocabulary"
        raise ConfigError("prefix_allowed_tokens_fn", must, allowed.size - 1)
    if len(set(ids_of(config.suppress_tokens))) >= facts.vocabulary:
        raise ConfigError("suppress_tokens", "must leave at least one token", config.suppress_tokens)


def pad_of(config: GenerationConfig) -> int:
    """What fills the place after a row's end: the pad token, else the first end token, else 0."""
    if config.pad_token_id is not None:
        return int(config.pad_token_id)
    return next(iter(ids_of(config.eos_token_id)), 0)


def _flat(value: Any) -> Iterator[int]:
    """Every token id that a field's value names."""
    if isinstance(value, Mapping | tuple | list):
        for part in value:  # the keys of a mapping
            yield from _flat(part)
    elif value is not None:
        yield int(value)

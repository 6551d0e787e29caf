"""From a config to what runs: the strategy, the processors in order, the stops. The only factory."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from descant.adapters.outer import outer_of
from descant.adapters.speech import hears
from descant.adapters.transformers import TransformersModel
from descant.assistance import Assistance, Drafting, Factory, drafting, guessing
from descant.cache.dense import DenseCache
from descant.cache.objects import ObjectCache
from descant.cache.several import SeveralCaches
from descant.config import FIELDS, GenerationConfig, register_explainer
from descant.constraints import ConstraintListState, forced
from descant.context import Prompt
from descant.errors import ConfigError, UnsupportedModel
from descant.guidance.arithmetic import Arithmetic, Joint
from descant.guidance.cfg import Guidance
from descant.guidance.dola import DoLa, early_layers
from descant.marking import settings_of
from descant.marking.keys import warn_if_public
from descant.memory import NAME as CACHE
from descant.memory import Wanted, kind_of, made, suiting
from descant.ports import Cache, Facts, Model, Noise, Peers, Stop, Strategy
from descant.processors import (
    AdaptivePLogitsWarper,
    AllowedSequences,
    AllowedSequencesLogitsProcessor,
    DRYLogitsProcessor,
    DynamicTemperatureLogitsWarper,
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    FrequencyPenaltyLogitsProcessor,
    GumbelWatermarkLogitsProcessor,
    HammingDiversityLogitsProcessor,
    HealingLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitBiasLogitsProcessor,
    LogitNormalization,
    LogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    MirostatLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PLessLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    PresencePenaltyLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    RewoundLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    ThinkingBudgetLogitsProcessor,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopNSigmaLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    WatermarkLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
    XTCLogitsWarper,
)
from descant.strategies.beams.beam import Beam, Shape
from descant.strategies.beams.constrained import Constrained
from descant.strategies.contrastive import Contrastive, Sequential
from descant.strategies.rewinding import Rewinding
from descant.strategies.sampling import Sampling
from descant.strategies.speculative import Speculative

__all__ = [
    "CUSTOM",
    "ORDER",
    "SAMPLERS",
    "STAGES",
    "Plan",
    "Stage",
    "adapt",
    "drafted",
    "new_cache",
    "ordered",
    "pad_of",
    "plan",
    "refuse_cache",
    "table_cache",
]

DEFAULT_NEW_TOKENS: Final = 20


@dataclass(frozen=True)
class Stage:
    """A processor with the config fields that call for it (its name first), and when they do."""

    processor: LogitsProcessor
    fields: tuple[str, ...]
    wanted: Callable[[GenerationConfig], bool]

    @property
    def name(self) -> str:
        """What `processor_order` calls it."""
        return self.fields[0]


def _stage(
    kind: type[LogitsProcessor], field: str, wanted: Callable[[GenerationConfig], bool], *others: str
) -> Stage:
    return Stage(kind.bare(), (field, *others), wanted)


def _set(name: str, *neutral: Any) -> Callable[[GenerationConfig], bool]:
    """Whether a field is set to something that does something."""
    return lambda config: getattr(config, name) not in (None, *neutral)


def _before_end(name: str) -> Callable[[GenerationConfig], bool]:
    """Whether a field keeps rows from an end that they could otherwise choose."""
    return lambda config: bool(getattr(config, name)) and bool(_ends(config))


def _decays(config: GenerationConfig) -> bool:
    """Whether an end token's score grows; further stop tokens are left alone."""
    return config.exponential_decay_length_penalty is not None and bool(_ids(config.eos_token_id))


def _has_sequences(config: GenerationConfig) -> bool:
    """Whether what may follow is a compiled set of sequences."""
    return isinstance(config.prefix_allowed_tokens_fn, AllowedSequences)


def _asks_function(config: GenerationConfig) -> bool:
    """Whether what may follow is for a function to say."""
    return config.prefix_allowed_tokens_fn is not None and not _has_sequences(config)


def _drawn(name: str, *neutral: Any) -> Callable[[GenerationConfig], bool]:
    """The same as `_set`, of a field that only sampling reads."""
    return lambda config: config.do_sample and getattr(config, name) not in (None, *neutral)


def _marks(scheme: str) -> Callable[[GenerationConfig], bool]:
    """Whether what is written is to be marked, by that scheme."""

    def wanted(config: GenerationConfig) -> bool:
        given = config.watermarking_config
        return given is not None and settings_of(given).scheme == scheme

    return wanted


def _warmed(config: GenerationConfig) -> bool:
    """Whether a fixed temperature is asked for, not one that follows the entropy."""
    return config.do_sample and config.temperature != 1.0 and not config.dynamic_temperature_range


# The documented order: rules, then the user's own processors, then samplers. One line a processor.
RULES: Final[tuple[Stage, ...]] = (
    _stage(LogitBiasLogitsProcessor, "logit_bias", _set("logit_bias")),
    _stage(SequenceBiasLogitsProcessor, "sequence_bias", _set("sequence_bias")),
    _stage(HammingDiversityLogitsProcessor, "diversity_penalty", _set("diversity_penalty", 0.0)),
    _stage(
        EncoderRepetitionPenaltyLogitsProcessor,
        "encoder_repetition_penalty",
        _set("encoder_repetition_penalty", 1.0),
    ),
    _stage(RepetitionPenaltyLogitsProcessor, "repetition_penalty", _set("repetition_penalty", 1.0)),
    _stage(PresencePenaltyLogitsProcessor, "presence_penalty", _set("presence_penalty", 0.0)),
    _stage(FrequencyPenaltyLogitsProcessor, "frequency_penalty", _set("frequency_penalty", 0.0)),
    _stage(DRYLogitsProcessor, "dry_multiplier", _set("dry_multiplier", 0.0)),
    _stage(NoRepeatNGramLogitsProcessor, "no_repeat_ngram_size", _set("no_repeat_ngram_size", 0)),
    _stage(
        EncoderNoRepeatNGramLogitsProcessor,
        "encoder_no_repeat_ngram_size",
        _set("encoder_no_repeat_ngram_size", 0),
    ),
    _stage(NoBadWordsLogitsProcessor, "bad_words_ids", _set("bad_words_ids")),
    _stage(RewoundLogitsProcessor, "banned_phrases", _set("banned_phrases", ())),
    _stage(MinLengthLogitsProcessor, "min_length", _before_end("min_length")),
    _stage(MinNewTokensLengthLogitsProcessor, "min_new_tokens", _before_end("min_new_tokens")),
    _stage(PrefixConstrainedLogitsProcessor, "prefix_allowed_tokens_fn", _asks_function),
    _stage(AllowedSequencesLogitsProcessor, "prefix_allowed_tokens_fn", _has_sequences),
    _stage(HealingLogitsProcessor, "token_healing", _set("token_healing", False)),
    _stage(ForcedBOSTokenLogitsProcessor, "forced_bos_token_id", _set("forced_bos_token_id")),
    _stage(ForcedEOSTokenLogitsProcessor, "forced_eos_token_id", _set("forced_eos_token_id")),
    _stage(InfNanRemoveLogitsProcessor, "remove_invalid_values", _set("remove_invalid_values", False)),
    _stage(
        ExponentialDecayLengthPenalty,
        "exponential_decay_length_penalty",
        _decays,
    ),
    _stage(SuppressTokensLogitsProcessor, "suppress_tokens", _set("suppress_tokens", ())),
    _stage(SuppressTokensAtBeginLogitsProcessor, "begin_suppress_tokens", _set("begin_suppress_tokens", ())),
    _stage(WhisperTimeStampLogitsProcessor, "return_timestamps", _set("return_timestamps", False)),
    _stage(ThinkingBudgetLogitsProcessor, "thinking_budget", _set("thinking_budget"), "thinking_end"),
)
SAMPLERS: Final[tuple[Stage, ...]] = (
    _stage(TemperatureLogitsWarper, "temperature", _warmed),
    _stage(
        DynamicTemperatureLogitsWarper, "dynamic_temperature_range", _drawn("dynamic_temperature_range", 0.0)
    ),
    _stage(TopNSigmaLogitsWarper, "top_n_sigma", _drawn("top_n_sigma")),
    _stage(TopHLogitsWarper, "top_h", _drawn("top_h")),
    _stage(TopKLogitsWarper, "top_k", _drawn("top_k", 0)),
    _stage(TopPLogitsWarper, "top_p", _drawn("top_p", 1.0)),
    _stage(MinPLogitsWarper, "min_p", _drawn("min_p")),
    _stage(TypicalLogitsWarper, "typical_p", _drawn("typical_p", 1.0)),
    _stage(EpsilonLogitsWarper, "epsilon_cutoff", _drawn("epsilon_cutoff", 0.0)),
    _stage(EtaLogitsWarper, "eta_cutoff", _drawn("eta_cutoff", 0.0)),
    _stage(PLessLogitsWarper, "p_less", _drawn("p_less", False)),
    _stage(XTCLogitsWarper, "xtc_probability", _drawn("xtc_probability", 0.0)),
    _stage(MirostatLogitsWarper, "mirostat_tau", _drawn("mirostat_tau")),
    _stage(AdaptivePLogitsWarper, "adaptive_p_target", _drawn("adaptive_p_target")),
    _stage(WatermarkLogitsProcessor, "watermarking_config", _marks("green list")),
    _stage(SynthIDTextWatermarkLogitsProcessor, "watermarking_config", _marks("synthid")),
    _stage(GumbelWatermarkLogitsProcessor, "watermarking_config", _marks("gumbel")),
    _stage(LogitNormalization, "renormalize_logits", _set("renormalize_logits", False)),
)
STAGES: Final = (*RULES, *SAMPLERS)
CUSTOM: Final = "custom"  # what `processor_order` calls the user's own, which stand between the two
ORDER: Final = tuple(
    dict.fromkeys((*(stage.name for stage in RULES), CUSTOM, *(stage.name for stage in SAMPLERS)))
)

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

    @property
    def shape(self) -> tuple[Any, ...]:
        """The key as far as other processes can have the same: who guesses is an object of this one."""
        return self.key[:2] if self.key[0] == "speculative" else self.key

    @property
    def forks(self) -> bool:
        """Whether one prompt becomes several rows."""
        return self.values["copies"] > 1 or self.key[0] in ("beam", "constrained", "contrastive")

    @property
    def again(self) -> bool:
        """Whether its rows' last tokens are fed again, so that they must have one."""
        return self.key[0] in ("sequential", "rewinding")

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
    "dola": Wrap("DoLa", DoLa, _set("dola_layers"), _dola),
    "guidance": Wrap("guidance", Guidance, _set("guidance_scale", 1.0), _guided),
}


def adapt(model: Any, states: Sequence[str] = ()) -> Any:
    """The model behind the Model port; what already offers the port is used as it is."""
    if hasattr(model, "facts"):
        return model
    if isinstance(model, Arithmetic):
        # A port for each session, since it holds requests; states are the first model's.
        parts = [adapt(one, states if place == 0 else ()) for place, one in enumerate(model.models)]
        return Joint(model, parts, lambda parts: SeveralCaches([cache_of(part) for part in parts]))
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
    back = {"rewinding": None, "sequential": 1}.get(known.key[0], 0)
    limit = getattr(cache, "rewind", None)
    if limit is not None and (back is None or back > limit):
        field = "banned_phrases" if known.key[0] == "rewinding" else "low_memory"
        must = f"takes tokens back, which the {named or kind} cache cannot: it has forgotten what came before"
        raise ConfigError((field, CACHE), must, getattr(config, field), "use another cache")
    room = getattr(cache, "capacity", None)
    if room is not None and slots > room:
        must = f"must leave room: the {named or kind} cache has {room} positions"
        raise ConfigError("max_new_tokens", must, f"{slots} in all", "lower it or make the cache larger")


def drafted(config: GenerationConfig, model: Any, given: Assistance) -> Drafting | None:
    """What guesses ahead for a config on a model, if anything does."""
    return drafting(config, model, given, Factory(adapt, cache_of))


def plan(config: GenerationConfig, facts: Facts, drafts: Drafting | None = None) -> Plan:
    """What a merged config comes to on a model, or a ConfigError that names the field."""
    eos = _ids(config.eos_token_id)
    _refuse_strangers(config, facts)
    _refuse_immense(config, facts)
    _refuse_unrewound(config, facts)
    _refuse_unmarked(config)
    key, build = _strategy(config, len(_ends(config)), drafts)
    values = {
        "eos": eos,
        "stop_ids": _ids(config.stop_token_ids),
        "ends": _ends(config),
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
    chain = tuple((order.index(stage.name), stage) for stage in STAGES if stage.wanted(config))
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
    return Plan(config, key, build, chain, order.index(CUSTOM), values, wraps)


def ordered(config: GenerationConfig) -> tuple[str, ...]:
    """The names of all stages in the order in which a config wants them."""
    wanted = config.processor_order
    if wanted is None:
        return ORDER
    for name in wanted:
        if name not in ORDER:
            close = difflib.get_close_matches(name, ORDER, n=1)
            do = f"did you mean `{close[0]}`?" if close else f"choose from {', '.join(ORDER)}"
            raise ConfigError("processor_order", "must name fields that call for a processor", name, do)
    # Those named take each other's places, everybody else stays.
    turn = iter(wanted)
    return tuple(next(turn) if name in wanted else name for name in ORDER)


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
        return ("rewinding",), Rewinding
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
    if len(set(_ids(config.suppress_tokens))) >= facts.vocabulary:
        raise ConfigError("suppress_tokens", "must leave at least one token", config.suppress_tokens)


def pad_of(config: GenerationConfig) -> int:
    """What fills the place after a row's end: the pad token, else the first end token, else 0."""
    if config.pad_token_id is not None:
        return int(config.pad_token_id)
    return next(iter(_ids(config.eos_token_id)), 0)


def _ends(config: GenerationConfig) -> list[int]:
    """Every token that ends a row."""
    return [*_ids(config.eos_token_id), *_ids(config.stop_token_ids)]


def _flat(value: Any) -> Iterator[int]:
    """Every token id that a field's value names."""
    if isinstance(value, Mapping | tuple | list):
        for part in value:  # the keys of a mapping
            yield from _flat(part)
    elif value is not None:
        yield int(value)


def _ids(value: int | Sequence[int] | None) -> list[int]:
    """Token ids as a list, whether none, one or several were given."""
    if value is None:
        return []
    return [int(value)] if isinstance(value, int) else [int(one) for one in value]


def explained(config: GenerationConfig, model: object = None) -> str:
    """What a config would run on a model, and where each of its values comes from."""
    if model is not None:
        theirs = getattr(model, "generation_config", None)
        merged = GenerationConfig.merge(
            {}, config, None if theirs is None else GenerationConfig.from_transformers(theirs)
        )
        target = adapt(model)
        made = plan(merged, target.facts, drafted(merged, target, Assistance()))
    else:
        merged = GenerationConfig.merge({}, config)
        made = None
    order = ordered(merged)
    stages = sorted(
        (stage for stage in STAGES if stage.wanted(merged)), key=lambda one: order.index(one.name)
    )
    lines = [f"strategy    {_named(merged)}"]
    around = [wrap.name for wrap in WRAPS.values() if wrap.wanted(merged)]
    if around:
        lines.append("model       " + ", ".join(f"with {name}" for name in around))
    guesses = guessing(merged)
    lines += [f"guesses     {guesses}"] if guesses else []
    lines.append("processors  " + (", ".join(type(stage.processor).__name__ for stage in stages) or "none"))
    lines.append("stops       " + ", ".join(_stops(merged)))
    if made is not None:
        lines.append(f"padding     token {made.values['pad']}")
    lines.append("values")
    shown = [name for name in FIELDS if name in merged.given]
    width = max((len(name) for name in shown), default=0)
    lines += [f"  {name:<{width}}  {getattr(merged, name)!r}  ({merged.source(name)})" for name in shown]
    lines += [
        f"  {name:<{width}}  {value!r}  (set aside: no use in this mode)"
        for name, value in merged.unused.items()
    ]
    return "\n".join(lines)


def _named(config: GenerationConfig) -> str:
    """The strategy of a config in words."""
    if config.num_beams == 1:
        single = "sampling" if config.do_sample else "greedy search"
        return f"contrastive search, {config.top_k} candidates" if contrasts(config) else single
    kind = "beam sampling" if config.do_sample else "beam search"
    kind = f"constrained {kind}" if constrains(config) else kind
    groups = f" in {config.num_beam_groups} groups" if config.num_beam_groups > 1 else ""
    return f"{kind}, {config.num_beams} beams{groups}"


def _stops(config: GenerationConfig) -> list[str]:
    stops = []
    if config.max_new_tokens is not None:
        stops.append(f"{config.max_new_tokens} new tokens")
    elif "max_length" in config.given:
        stops.append(f"{config.max_length} tokens, prompt included")
    else:
        stops.append(f"{DEFAULT_NEW_TOKENS} new tokens (default)")
    stops += [f"end token {token}" for token in _ends(config)]
    texts = (config.stop_strings,) if isinstance(config.stop_strings, str) else config.stop_strings or ()
    stops += [f"text {text!r}" for text in texts]
    stops += [f"text matching {config.stop_regex!r}"] if config.stop_regex is not None else []
    if config.max_time is not None:
        stops.append(f"{config.max_time} s")
    return stops


register_explainer(explained)

"""The stages: which processors a config calls for, and in which order they stand. One line a processor."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from descant.config.generation_config import GenerationConfig
from descant.decoding.processors import (
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
from descant.decoding.watermark.schemes import settings_of
from descant.errors import ConfigError

__all__ = [
    "CUSTOM",
    "ORDER",
    "REWOUND",
    "RULES",
    "SAMPLERS",
    "STAGES",
    "Stage",
    "ends_of",
    "ids_of",
    "ordered",
    "set_to",
]


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


def set_to(name: str, *neutral: Any) -> Callable[[GenerationConfig], bool]:
    """Whether a field is set to something that does something."""
    return lambda config: getattr(config, name) not in (None, *neutral)


def _before_end(name: str) -> Callable[[GenerationConfig], bool]:
    """Whether a field keeps rows from an end that they could otherwise choose."""
    return lambda config: bool(getattr(config, name)) and bool(ends_of(config))


def _decays(config: GenerationConfig) -> bool:
    """Whether an end token's score grows; further stop tokens are left alone."""
    return config.exponential_decay_length_penalty is not None and bool(ids_of(config.eos_token_id))


def _has_sequences(config: GenerationConfig) -> bool:
    """Whether what may follow is a compiled set of sequences."""
    return isinstance(config.prefix_allowed_tokens_fn, AllowedSequences)


def _asks_function(config: GenerationConfig) -> bool:
    """Whether what may follow is for a function to say."""
    return config.prefix_allowed_tokens_fn is not None and not _has_sequences(config)


def _drawn(name: str, *neutral: Any) -> Callable[[GenerationConfig], bool]:
    """The same as `set_to`, of a field that only sampling reads."""
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
    _stage(LogitBiasLogitsProcessor, "logit_bias", set_to("logit_bias")),
    _stage(SequenceBiasLogitsProcessor, "sequence_bias", set_to("sequence_bias")),
    _stage(HammingDiversityLogitsProcessor, "diversity_penalty", set_to("diversity_penalty", 0.0)),
    _stage(
        EncoderRepetitionPenaltyLogitsProcessor,
        "encoder_repetition_penalty",
        set_to("encoder_repetition_penalty", 1.0),
    ),
    _stage(RepetitionPenaltyLogitsProcessor, "repetition_penalty", set_to("repetition_penalty", 1.0)),
    _stage(PresencePenaltyLogitsProcessor, "presence_penalty", set_to("presence_penalty", 0.0)),
    _stage(FrequencyPenaltyLogitsProcessor, "frequency_penalty", set_to("frequency_penalty", 0.0)),
    _stage(DRYLogitsProcessor, "dry_multiplier", set_to("dry_multiplier", 0.0)),
    _stage(NoRepeatNGramLogitsProcessor, "no_repeat_ngram_size", set_to("no_repeat_ngram_size", 0)),
    _stage(
        EncoderNoRepeatNGramLogitsProcessor,
        "encoder_no_repeat_ngram_size",
        set_to("encoder_no_repeat_ngram_size", 0),
    ),
    _stage(NoBadWordsLogitsProcessor, "bad_words_ids", set_to("bad_words_ids")),
    _stage(RewoundLogitsProcessor, "banned_phrases", set_to("banned_phrases", ())),
    _stage(MinLengthLogitsProcessor, "min_length", _before_end("min_length")),
    _stage(MinNewTokensLengthLogitsProcessor, "min_new_tokens", _before_end("min_new_tokens")),
    _stage(PrefixConstrainedLogitsProcessor, "prefix_allowed_tokens_fn", _asks_function),
    _stage(AllowedSequencesLogitsProcessor, "prefix_allowed_tokens_fn", _has_sequences),
    _stage(HealingLogitsProcessor, "token_healing", set_to("token_healing", False)),
    _stage(ForcedBOSTokenLogitsProcessor, "forced_bos_token_id", set_to("forced_bos_token_id")),
    _stage(ForcedEOSTokenLogitsProcessor, "forced_eos_token_id", set_to("forced_eos_token_id")),
    _stage(InfNanRemoveLogitsProcessor, "remove_invalid_values", set_to("remove_invalid_values", False)),
    _stage(
        ExponentialDecayLengthPenalty,
        "exponential_decay_length_penalty",
        _decays,
    ),
    _stage(SuppressTokensLogitsProcessor, "suppress_tokens", set_to("suppress_tokens", ())),
    _stage(
        SuppressTokensAtBeginLogitsProcessor, "begin_suppress_tokens", set_to("begin_suppress_tokens", ())
    ),
    _stage(WhisperTimeStampLogitsProcessor, "return_timestamps", set_to("return_timestamps", False)),
    _stage(ThinkingBudgetLogitsProcessor, "thinking_budget", set_to("thinking_budget"), "thinking_end"),
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
    _stage(LogitNormalization, "renormalize_logits", set_to("renormalize_logits", False)),
)
STAGES: Final = (*RULES, *SAMPLERS)
REWOUND: Final = "banned_phrases"  # the stage of what takes tokens back, a recipe's strategy too
CUSTOM: Final = "custom"  # what `processor_order` calls the user's own, which stand between the two
ORDER: Final = tuple(
    dict.fromkeys((*(stage.name for stage in RULES), CUSTOM, *(stage.name for stage in SAMPLERS)))
)


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


def ends_of(config: GenerationConfig) -> list[int]:
    """Every token that ends a row."""
    return [*ids_of(config.eos_token_id), *ids_of(config.stop_token_ids)]


def ids_of(value: int | Sequence[int] | None) -> list[int]:
    """Token ids as a list, whether none, one or several were given."""
    if value is None:
        return []
    return [int(value)] if isinstance(value, int) else [int(one) for one in value]

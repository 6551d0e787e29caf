"""The processor pipeline: which processors a config enables, and their order."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from descant.config.generation_config import GenerationConfig
from descant.decoding.processors import (
    AdaptivePLogitsWarper,
    AllowedSequences,
    AllowedSequencesLogitsProcessor,
    BacktrackMaskProcessor,
    DRYLogitsProcessor,
    DynamicTemperatureLogitsWarper,
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    ForceTokensLogitsProcessor,
    FrequencyPenaltyLogitsProcessor,
    GrammarLogitsProcessor,
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
from descant.decoding.processors.base import as_id_list
from descant.decoding.watermark.schemes import as_watermarking_config
from descant.errors import ConfigError

__all__ = [
    "BACKTRACK_MASK",
    "CUSTOM",
    "DEFAULT_ORDER",
    "LOGITS_PROCESSORS",
    "LOGITS_WARPERS",
    "PROCESSOR_SPECS",
    "ProcessorSpec",
    "end_token_ids",
    "is_set",
    "processor_order",
]


@dataclass(frozen=True)
class ProcessorSpec:
    """A processor, the config fields that belong to it (its name first), and when it is enabled."""

    processor: LogitsProcessor
    fields: tuple[str, ...]
    is_enabled: Callable[[GenerationConfig], bool]

    @property
    def name(self) -> str:
        """The processor's name in `processor_order`."""
        return self.fields[0]


def _make_spec(
    processor_class: type[LogitsProcessor],
    field: str,
    is_enabled: Callable[[GenerationConfig], bool],
    *other_fields: str,
) -> ProcessorSpec:
    return ProcessorSpec(processor_class.make_unbound(), (field, *other_fields), is_enabled)


def is_set(name: str, *neutral: Any) -> Callable[[GenerationConfig], bool]:
    """Predicate: the field is neither None nor a neutral value."""
    return lambda config: getattr(config, name) not in (None, *neutral)


def _is_min_length_set(name: str) -> Callable[[GenerationConfig], bool]:
    """Predicate: the minimum length is set and there are end tokens to mask."""
    return lambda config: bool(getattr(config, name)) and bool(end_token_ids(config))


def _has_decay_penalty(config: GenerationConfig) -> bool:
    """Whether the length penalty applies; it affects `eos_token_id`, not `stop_token_ids`."""
    return config.exponential_decay_length_penalty is not None and bool(as_id_list(config.eos_token_id))


def _has_allowed_sequences(config: GenerationConfig) -> bool:
    """Whether the allowed tokens come from a compiled `AllowedSequences`."""
    return isinstance(config.prefix_allowed_tokens_fn, AllowedSequences)


def _has_forced_tokens(config: GenerationConfig) -> bool:
    """Whether any token is forced; a pair without a token leaves its index open."""
    return any(token is not None for _, token in config.forced_decoder_ids or ())


def _has_prefix_fn(config: GenerationConfig) -> bool:
    """Whether the allowed tokens come from a user's function."""
    return config.prefix_allowed_tokens_fn is not None and not _has_allowed_sequences(config)


def _is_set_for_sampling(name: str, *neutral: Any) -> Callable[[GenerationConfig], bool]:
    """Like `is_set`, for fields that only apply to sampling."""
    return lambda config: config.do_sample and getattr(config, name) not in (None, *neutral)


def _uses_watermark(scheme: str) -> Callable[[GenerationConfig], bool]:
    """Predicate: the config's watermark uses this scheme."""

    def is_enabled(config: GenerationConfig) -> bool:
        settings = config.watermarking_config
        return settings is not None and as_watermarking_config(settings).scheme == scheme

    return is_enabled


def _has_fixed_temperature(config: GenerationConfig) -> bool:
    """Whether a fixed temperature is set, not one that follows the entropy."""
    return config.do_sample and config.temperature != 1.0 and not config.dynamic_temperature_range


# transformers' documented order: processors, then the user's own, then warpers.
LOGITS_PROCESSORS: Final[tuple[ProcessorSpec, ...]] = (
    _make_spec(LogitBiasLogitsProcessor, "logit_bias", is_set("logit_bias")),
    _make_spec(SequenceBiasLogitsProcessor, "sequence_bias", is_set("sequence_bias")),
    _make_spec(HammingDiversityLogitsProcessor, "diversity_penalty", is_set("diversity_penalty", 0.0)),
    _make_spec(
        EncoderRepetitionPenaltyLogitsProcessor,
        "encoder_repetition_penalty",
        is_set("encoder_repetition_penalty", 1.0),
    ),
    _make_spec(RepetitionPenaltyLogitsProcessor, "repetition_penalty", is_set("repetition_penalty", 1.0)),
    _make_spec(PresencePenaltyLogitsProcessor, "presence_penalty", is_set("presence_penalty", 0.0)),
    _make_spec(FrequencyPenaltyLogitsProcessor, "frequency_penalty", is_set("frequency_penalty", 0.0)),
    _make_spec(DRYLogitsProcessor, "dry_multiplier", is_set("dry_multiplier", 0.0)),
    _make_spec(NoRepeatNGramLogitsProcessor, "no_repeat_ngram_size", is_set("no_repeat_ngram_size", 0)),
    _make_spec(
        EncoderNoRepeatNGramLogitsProcessor,
        "encoder_no_repeat_ngram_size",
        is_set("encoder_no_repeat_ngram_size", 0),
    ),
    _make_spec(NoBadWordsLogitsProcessor, "bad_words_ids", is_set("bad_words_ids")),
    _make_spec(BacktrackMaskProcessor, "banned_phrases", is_set("banned_phrases", ())),
    _make_spec(MinLengthLogitsProcessor, "min_length", _is_min_length_set("min_length")),
    _make_spec(MinNewTokensLengthLogitsProcessor, "min_new_tokens", _is_min_length_set("min_new_tokens")),
    _make_spec(PrefixConstrainedLogitsProcessor, "prefix_allowed_tokens_fn", _has_prefix_fn),
    _make_spec(AllowedSequencesLogitsProcessor, "prefix_allowed_tokens_fn", _has_allowed_sequences),
    _make_spec(HealingLogitsProcessor, "token_healing", is_set("token_healing", False)),
    _make_spec(ForcedBOSTokenLogitsProcessor, "forced_bos_token_id", is_set("forced_bos_token_id")),
    _make_spec(ForcedEOSTokenLogitsProcessor, "forced_eos_token_id", is_set("forced_eos_token_id")),
    _make_spec(InfNanRemoveLogitsProcessor, "remove_invalid_values", is_set("remove_invalid_values", False)),
    _make_spec(
        ExponentialDecayLengthPenalty,
        "exponential_decay_length_penalty",
        _has_decay_penalty,
    ),
    _make_spec(SuppressTokensLogitsProcessor, "suppress_tokens", is_set("suppress_tokens", ())),
    _make_spec(
        SuppressTokensAtBeginLogitsProcessor, "begin_suppress_tokens", is_set("begin_suppress_tokens", ())
    ),
    _make_spec(ForceTokensLogitsProcessor, "forced_decoder_ids", _has_forced_tokens),
    _make_spec(WhisperTimeStampLogitsProcessor, "return_timestamps", is_set("return_timestamps", False)),
    _make_spec(ThinkingBudgetLogitsProcessor, "thinking_budget", is_set("thinking_budget"), "thinking_end"),
    # Before all that keeps the most likely, the user's own included: these then keep permitted ones.
    _make_spec(GrammarLogitsProcessor, "grammar", is_set("grammar")),
)
LOGITS_WARPERS: Final[tuple[ProcessorSpec, ...]] = (
    _make_spec(TemperatureLogitsWarper, "temperature", _has_fixed_temperature),
    _make_spec(
        DynamicTemperatureLogitsWarper,
        "dynamic_temperature_range",
        _is_set_for_sampling("dynamic_temperature_range", 0.0),
    ),
    _make_spec(TopNSigmaLogitsWarper, "top_n_sigma", _is_set_for_sampling("top_n_sigma")),
    _make_spec(TopHLogitsWarper, "top_h", _is_set_for_sampling("top_h")),
    _make_spec(TopKLogitsWarper, "top_k", _is_set_for_sampling("top_k", 0)),
    _make_spec(TopPLogitsWarper, "top_p", _is_set_for_sampling("top_p", 1.0)),
    _make_spec(MinPLogitsWarper, "min_p", _is_set_for_sampling("min_p")),
    _make_spec(TypicalLogitsWarper, "typical_p", _is_set_for_sampling("typical_p", 1.0)),
    _make_spec(EpsilonLogitsWarper, "epsilon_cutoff", _is_set_for_sampling("epsilon_cutoff", 0.0)),
    _make_spec(EtaLogitsWarper, "eta_cutoff", _is_set_for_sampling("eta_cutoff", 0.0)),
    _make_spec(PLessLogitsWarper, "p_less", _is_set_for_sampling("p_less", False)),
    _make_spec(XTCLogitsWarper, "xtc_probability", _is_set_for_sampling("xtc_probability", 0.0)),
    _make_spec(MirostatLogitsWarper, "mirostat_tau", _is_set_for_sampling("mirostat_tau")),
    _make_spec(AdaptivePLogitsWarper, "adaptive_p_target", _is_set_for_sampling("adaptive_p_target")),
    _make_spec(WatermarkLogitsProcessor, "watermarking_config", _uses_watermark("green list")),
    _make_spec(SynthIDTextWatermarkLogitsProcessor, "watermarking_config", _uses_watermark("synthid")),
    _make_spec(GumbelWatermarkLogitsProcessor, "watermarking_config", _uses_watermark("gumbel")),
    _make_spec(LogitNormalization, "renormalize_logits", is_set("renormalize_logits", False)),
)
PROCESSOR_SPECS: Final = (*LOGITS_PROCESSORS, *LOGITS_WARPERS)
BACKTRACK_MASK: Final = "banned_phrases"  # processor of strategies that backtrack, also those of recipes
CUSTOM: Final = "custom"  # name of the user's own processors in `processor_order`
DEFAULT_ORDER: Final = tuple(
    dict.fromkeys(
        (
            *(spec.name for spec in LOGITS_PROCESSORS),
            CUSTOM,
            *(spec.name for spec in LOGITS_WARPERS),
        )
    )
)


def processor_order(config: GenerationConfig) -> tuple[str, ...]:
    """Return the names of all processors in the order of a config."""
    order = config.processor_order
    if order is None:
        return DEFAULT_ORDER
    for name in order:
        if name not in DEFAULT_ORDER:
            close = difflib.get_close_matches(name, DEFAULT_ORDER, n=1)
            do = f"did you mean `{close[0]}`?" if close else f"choose from {', '.join(DEFAULT_ORDER)}"
            raise ConfigError("processor_order", "must name fields that call for a processor", name, do)
    # The named processors permute among their own slots, all others stay.
    ordered = iter(order)
    return tuple(next(ordered) if name in order else name for name in DEFAULT_ORDER)


def end_token_ids(config: GenerationConfig) -> list[int]:
    """Return every token that ends a row."""
    return [*as_id_list(config.eos_token_id), *as_id_list(config.stop_token_ids)]

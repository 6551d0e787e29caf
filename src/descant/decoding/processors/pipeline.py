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
    "as_id_list",
    "end_token_ids",
    "is_set",
    "processor_order",
]


@dataclass(frozen=True)
class ProcessorSpec:
    """A processor with the config fields that call for it (its name first), and when they do."""

    processor: LogitsProcessor
    fields: tuple[str, ...]
    is_enabled: Callable[[GenerationConfig], bool]

    @property
    def name(self) -> str:
        """What `processor_order` calls it."""
        return self.fields[0]


def _make_spec(
    kind: type[LogitsProcessor], field: str, wanted: Callable[[GenerationConfig], bool], *others: str
) -> ProcessorSpec:
    return ProcessorSpec(kind.make_unbound(), (field, *others), wanted)


def is_set(name: str, *neutral: Any) -> Callable[[GenerationConfig], bool]:
    """Whether a field is set to something that does something."""
    return lambda config: getattr(config, name) not in (None, *neutral)


def _is_min_length_set(name: str) -> Callable[[GenerationConfig], bool]:
    """Whether a field keeps rows from an end that they could otherwise choose."""
    return lambda config: bool(getattr(config, name)) and bool(end_token_ids(config))


def _has_decay_penalty(config: GenerationConfig) -> bool:
    """Whether an end token's score grows; further stop tokens are left alone."""
    return config.exponential_decay_length_penalty is not None and bool(as_id_list(config.eos_token_id))


def _has_allowed_sequences(config: GenerationConfig) -> bool:
    """Whether what may follow is a compiled set of sequences."""
    return isinstance(config.prefix_allowed_tokens_fn, AllowedSequences)


def _has_prefix_fn(config: GenerationConfig) -> bool:
    """Whether what may follow is for a function to say."""
    return config.prefix_allowed_tokens_fn is not None and not _has_allowed_sequences(config)


def _is_set_for_sampling(name: str, *neutral: Any) -> Callable[[GenerationConfig], bool]:
    """The same as `set_to`, of a field that only sampling reads."""
    return lambda config: config.do_sample and getattr(config, name) not in (None, *neutral)


def _uses_watermark(scheme: str) -> Callable[[GenerationConfig], bool]:
    """Whether what is written is to be marked, by that scheme."""

    def wanted(config: GenerationConfig) -> bool:
        given = config.watermarking_config
        return given is not None and as_watermarking_config(given).scheme == scheme

    return wanted


def _has_fixed_temperature(config: GenerationConfig) -> bool:
    """Whether a fixed temperature is asked for, not one that follows the entropy."""
    return config.do_sample and config.temperature != 1.0 and not config.dynamic_temperature_range


# The documented order: rules, then the user's own processors, then samplers. One line a processor.
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
    _make_spec(WhisperTimeStampLogitsProcessor, "return_timestamps", is_set("return_timestamps", False)),
    _make_spec(ThinkingBudgetLogitsProcessor, "thinking_budget", is_set("thinking_budget"), "thinking_end"),
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
BACKTRACK_MASK: Final = "banned_phrases"  # the stage of what takes tokens back, a recipe's strategy too
CUSTOM: Final = "custom"  # what `processor_order` calls the user's own, which stand between the two
DEFAULT_ORDER: Final = tuple(
    dict.fromkeys(
        (*(stage.name for stage in LOGITS_PROCESSORS), CUSTOM, *(stage.name for stage in LOGITS_WARPERS))
    )
)


def processor_order(config: GenerationConfig) -> tuple[str, ...]:
    """The names of all stages in the order in which a config wants them."""
    wanted = config.processor_order
    if wanted is None:
        return DEFAULT_ORDER
    for name in wanted:
        if name not in DEFAULT_ORDER:
            close = difflib.get_close_matches(name, DEFAULT_ORDER, n=1)
            do = f"did you mean `{close[0]}`?" if close else f"choose from {', '.join(DEFAULT_ORDER)}"
            raise ConfigError("processor_order", "must name fields that call for a processor", name, do)
    # Those named take each other's places, everybody else stays.
    turn = iter(wanted)
    return tuple(next(turn) if name in wanted else name for name in DEFAULT_ORDER)


def end_token_ids(config: GenerationConfig) -> list[int]:
    """Every token that ends a row."""
    return [*as_id_list(config.eos_token_id), *as_id_list(config.stop_token_ids)]


def as_id_list(value: int | Sequence[int] | None) -> list[int]:
    """Token ids as a list, whether none, one or several were given."""
    if value is None:
        return []
    return [int(value)] if isinstance(value, int) else [int(one) for one in value]

"""The processor pipeline: which processors a config enables, and their order."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from descant.config.generation_config import GenerationConfig
from descant.config.watermarking_config import as_watermarking_config
from descant.decoding.processors.allowed_sequences import AllowedSequences, AllowedSequencesLogitsProcessor
from descant.decoding.processors.bans import (
    BacktrackMaskProcessor,
    EncoderNoRepeatNGramLogitsProcessor,
    LogitBiasLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)
from descant.decoding.processors.base import LogitsProcessor, as_id_list
from descant.decoding.processors.filters import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from descant.decoding.processors.grammar import GrammarLogitsProcessor, HealingLogitsProcessor
from descant.decoding.processors.guidance import HammingDiversityLogitsProcessor
from descant.decoding.processors.lengths import (
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    ForceTokensLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    ThinkingBudgetLogitsProcessor,
)
from descant.decoding.processors.penalties import (
    DRYLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    FrequencyPenaltyLogitsProcessor,
    PresencePenaltyLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)
from descant.decoding.processors.speech import WhisperTimeStampLogitsProcessor
from descant.decoding.processors.truncation import (
    AdaptivePLogitsWarper,
    DynamicTemperatureLogitsWarper,
    MirostatLogitsWarper,
    PLessLogitsWarper,
    TopHLogitsWarper,
    TopNSigmaLogitsWarper,
    XTCLogitsWarper,
)
from descant.decoding.watermark.green_list import WatermarkLogitsProcessor
from descant.decoding.watermark.gumbel import GumbelWatermarkLogitsProcessor
from descant.decoding.watermark.synthid import SynthIDTextWatermarkLogitsProcessor
from descant.errors import ConfigError


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


def _spec(
    processor_class: type[LogitsProcessor],
    field: str,
    *neutral: Any,
    when: Callable[[GenerationConfig], bool] | None = None,
    others: tuple[str, ...] = (),
) -> ProcessorSpec:
    """The spec of a processor that runs `when` a config says so, by default if its field is set."""
    return ProcessorSpec(processor_class.make_unbound(), (field, *others), when or is_set(field, *neutral))


def _warper(processor_class: type[LogitsProcessor], field: str, *neutral: Any) -> ProcessorSpec:
    """The spec of a processor that runs if its field is set, for sampling only."""
    is_enabled = is_set(field, *neutral)
    return _spec(processor_class, field, when=lambda config: config.do_sample and is_enabled(config))


def is_set(name: str, *neutral: Any) -> Callable[[GenerationConfig], bool]:
    """Predicate: the field is neither None nor a neutral value."""
    return lambda config: getattr(config, name) not in (None, *neutral)


def _has_minimum(name: str) -> Callable[[GenerationConfig], bool]:
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
    _spec(LogitBiasLogitsProcessor, "logit_bias"),
    _spec(SequenceBiasLogitsProcessor, "sequence_bias"),
    _spec(HammingDiversityLogitsProcessor, "diversity_penalty", 0.0),
    _spec(EncoderRepetitionPenaltyLogitsProcessor, "encoder_repetition_penalty", 1.0),
    _spec(RepetitionPenaltyLogitsProcessor, "repetition_penalty", 1.0),
    _spec(PresencePenaltyLogitsProcessor, "presence_penalty", 0.0),
    _spec(FrequencyPenaltyLogitsProcessor, "frequency_penalty", 0.0),
    _spec(DRYLogitsProcessor, "dry_multiplier", 0.0),
    _spec(NoRepeatNGramLogitsProcessor, "no_repeat_ngram_size", 0),
    _spec(EncoderNoRepeatNGramLogitsProcessor, "encoder_no_repeat_ngram_size", 0),
    _spec(NoBadWordsLogitsProcessor, "bad_words_ids"),
    _spec(BacktrackMaskProcessor, "banned_phrases", ()),
    _spec(MinLengthLogitsProcessor, "min_length", when=_has_minimum("min_length")),
    _spec(MinNewTokensLengthLogitsProcessor, "min_new_tokens", when=_has_minimum("min_new_tokens")),
    _spec(PrefixConstrainedLogitsProcessor, "prefix_allowed_tokens_fn", when=_has_prefix_fn),
    _spec(AllowedSequencesLogitsProcessor, "prefix_allowed_tokens_fn", when=_has_allowed_sequences),
    _spec(HealingLogitsProcessor, "token_healing", False),
    _spec(ForcedBOSTokenLogitsProcessor, "forced_bos_token_id"),
    _spec(ForcedEOSTokenLogitsProcessor, "forced_eos_token_id"),
    _spec(InfNanRemoveLogitsProcessor, "remove_invalid_values", False),
    _spec(ExponentialDecayLengthPenalty, "exponential_decay_length_penalty", when=_has_decay_penalty),
    _spec(SuppressTokensLogitsProcessor, "suppress_tokens", ()),
    _spec(SuppressTokensAtBeginLogitsProcessor, "begin_suppress_tokens", ()),
    _spec(ForceTokensLogitsProcessor, "forced_decoder_ids", when=_has_forced_tokens),
    _spec(WhisperTimeStampLogitsProcessor, "return_timestamps", False),
    _spec(ThinkingBudgetLogitsProcessor, "thinking_budget", others=("thinking_end",)),
    # Before all that keeps the most likely, the user's own included: these then keep permitted ones.
    _spec(GrammarLogitsProcessor, "grammar"),
)
LOGITS_WARPERS: Final[tuple[ProcessorSpec, ...]] = (
    _spec(TemperatureLogitsWarper, "temperature", when=_has_fixed_temperature),
    _warper(DynamicTemperatureLogitsWarper, "dynamic_temperature_range", 0.0),
    _warper(TopNSigmaLogitsWarper, "top_n_sigma"),
    _warper(TopHLogitsWarper, "top_h"),
    _warper(TopKLogitsWarper, "top_k", 0),
    _warper(TopPLogitsWarper, "top_p", 1.0),
    _warper(MinPLogitsWarper, "min_p"),
    _warper(TypicalLogitsWarper, "typical_p", 1.0),
    _warper(EpsilonLogitsWarper, "epsilon_cutoff", 0.0),
    _warper(EtaLogitsWarper, "eta_cutoff", 0.0),
    _warper(PLessLogitsWarper, "p_less", False),
    _warper(XTCLogitsWarper, "xtc_probability", 0.0),
    _warper(MirostatLogitsWarper, "mirostat_tau"),
    _warper(AdaptivePLogitsWarper, "adaptive_p_target"),
    _spec(WatermarkLogitsProcessor, "watermarking_config", when=_uses_watermark("green list")),
    _spec(SynthIDTextWatermarkLogitsProcessor, "watermarking_config", when=_uses_watermark("synthid")),
    _spec(GumbelWatermarkLogitsProcessor, "watermarking_config", when=_uses_watermark("gumbel")),
    _spec(LogitNormalization, "renormalize_logits", False),
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

"""Logits processors and warpers, one module per family."""

from descant.decoding.processors.adaptive_warpers import AdaptivePLogitsWarper, MirostatLogitsWarper
from descant.decoding.processors.allowed_sequences import AllowedSequences, AllowedSequencesLogitsProcessor
from descant.decoding.processors.backtracking import BacktrackMaskProcessor
from descant.decoding.processors.bans import (
    EncoderNoRepeatNGramLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)
from descant.decoding.processors.base import (
    BoundProcessor,
    CallableProcessor,
    LogitsProcessor,
    LogitsProcessorList,
    as_processor,
)
from descant.decoding.processors.biases import LogitBiasLogitsProcessor, SequenceBiasLogitsProcessor
from descant.decoding.processors.diversity import HammingDiversityLogitsProcessor
from descant.decoding.processors.dynamic_temperature import DynamicTemperatureLogitsWarper
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
from descant.decoding.processors.grammar import GrammarLogitsProcessor
from descant.decoding.processors.green_list import WatermarkLogitsProcessor
from descant.decoding.processors.guidance import (
    ClassifierFreeGuidanceLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from descant.decoding.processors.gumbel import GumbelWatermarkLogitsProcessor
from descant.decoding.processors.lengths import (
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    ForceTokensLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
)
from descant.decoding.processors.penalties import (
    EncoderRepetitionPenaltyLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)
from descant.decoding.processors.repetition import (
    DRYLogitsProcessor,
    FrequencyPenaltyLogitsProcessor,
    PresencePenaltyLogitsProcessor,
)
from descant.decoding.processors.speech import (
    AlternatingCodebooksLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)
from descant.decoding.processors.synthid import SynthIDTextWatermarkLogitsProcessor
from descant.decoding.processors.thinking_budget import ThinkingBudgetLogitsProcessor
from descant.decoding.processors.token_healing import HealingLogitsProcessor
from descant.decoding.processors.truncation import (
    PLessLogitsWarper,
    TopHLogitsWarper,
    TopNSigmaLogitsWarper,
    XTCLogitsWarper,
)
from descant.decoding.processors.watermark_factory import make_watermark_processor
from descant.decoding.watermark.schemes import BaseWatermarkingConfig

# `BaseWatermarkingConfig.construct_processor` needs the processors, which import the settings.
BaseWatermarkingConfig.processor_factory = make_watermark_processor

__all__ = [
    "AdaptivePLogitsWarper",
    "AllowedSequences",
    "AllowedSequencesLogitsProcessor",
    "AlternatingCodebooksLogitsProcessor",
    "BacktrackMaskProcessor",
    "BoundProcessor",
    "CallableProcessor",
    "ClassifierFreeGuidanceLogitsProcessor",
    "DRYLogitsProcessor",
    "DynamicTemperatureLogitsWarper",
    "EncoderNoRepeatNGramLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "ExponentialDecayLengthPenalty",
    "ForceTokensLogitsProcessor",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "FrequencyPenaltyLogitsProcessor",
    "GrammarLogitsProcessor",
    "GumbelWatermarkLogitsProcessor",
    "HammingDiversityLogitsProcessor",
    "HealingLogitsProcessor",
    "InfNanRemoveLogitsProcessor",
    "LogitBiasLogitsProcessor",
    "LogitNormalization",
    "LogitsProcessor",
    "LogitsProcessorList",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "MinPLogitsWarper",
    "MirostatLogitsWarper",
    "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "PLessLogitsWarper",
    "PrefixConstrainedLogitsProcessor",
    "PresencePenaltyLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
    "SuppressTokensLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
    "TemperatureLogitsWarper",
    "ThinkingBudgetLogitsProcessor",
    "TopHLogitsWarper",
    "TopKLogitsWarper",
    "TopNSigmaLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "WatermarkLogitsProcessor",
    "WhisperTimeStampLogitsProcessor",
    "XTCLogitsWarper",
    "as_processor",
]

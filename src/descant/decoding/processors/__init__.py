"""Processors: what reshapes logits."""

from descant.decoding.processors.backtracking import RewoundLogitsProcessor
from descant.decoding.processors.bans import (
    EncoderNoRepeatNGramLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)
from descant.decoding.processors.base import (
    FixedProcessor,
    ForeignProcessor,
    LogitsProcessor,
    LogitsProcessorList,
    behind_the_port,
)
from descant.decoding.processors.biases import LogitBiasLogitsProcessor, SequenceBiasLogitsProcessor
from descant.decoding.processors.diversity import HammingDiversityLogitsProcessor
from descant.decoding.processors.feedback import AdaptivePLogitsWarper, MirostatLogitsWarper
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
from descant.decoding.processors.sequences import AllowedSequences, AllowedSequencesLogitsProcessor
from descant.decoding.processors.speech import (
    AlternatingCodebooksLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)
from descant.decoding.processors.synthid import SynthIDTextWatermarkLogitsProcessor
from descant.decoding.processors.temperatures import DynamicTemperatureLogitsWarper
from descant.decoding.processors.thinking import ThinkingBudgetLogitsProcessor
from descant.decoding.processors.token_healing import HealingLogitsProcessor
from descant.decoding.processors.truncation import (
    PLessLogitsWarper,
    TopHLogitsWarper,
    TopNSigmaLogitsWarper,
    XTCLogitsWarper,
)

__all__ = [
    "AdaptivePLogitsWarper",
    "AllowedSequences",
    "AllowedSequencesLogitsProcessor",
    "AlternatingCodebooksLogitsProcessor",
    "ClassifierFreeGuidanceLogitsProcessor",
    "DRYLogitsProcessor",
    "DynamicTemperatureLogitsWarper",
    "EncoderNoRepeatNGramLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "ExponentialDecayLengthPenalty",
    "FixedProcessor",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "ForeignProcessor",
    "FrequencyPenaltyLogitsProcessor",
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
    "RewoundLogitsProcessor",
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
    "behind_the_port",
]

"""Processors: what reshapes logits."""

from descant.processors.bans import (
    EncoderNoRepeatNGramLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)
from descant.processors.base import (
    FixedProcessor,
    ForeignProcessor,
    LogitsProcessor,
    LogitsProcessorList,
    behind_the_port,
)
from descant.processors.biases import LogitBiasLogitsProcessor, SequenceBiasLogitsProcessor
from descant.processors.diversity import HammingDiversityLogitsProcessor
from descant.processors.feedback import AdaptivePLogitsWarper, MirostatLogitsWarper
from descant.processors.filters import (
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
from descant.processors.green import WatermarkLogitsProcessor
from descant.processors.guidance import (
    ClassifierFreeGuidanceLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from descant.processors.gumbel import GumbelWatermarkLogitsProcessor
from descant.processors.healing import HealingLogitsProcessor
from descant.processors.lengths import (
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
)
from descant.processors.penalties import (
    EncoderRepetitionPenaltyLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)
from descant.processors.repetition import (
    DRYLogitsProcessor,
    FrequencyPenaltyLogitsProcessor,
    PresencePenaltyLogitsProcessor,
)
from descant.processors.rewinding import RewoundLogitsProcessor
from descant.processors.sequences import AllowedSequences, AllowedSequencesLogitsProcessor
from descant.processors.speech import AlternatingCodebooksLogitsProcessor, WhisperTimeStampLogitsProcessor
from descant.processors.synthid import SynthIDTextWatermarkLogitsProcessor
from descant.processors.temperatures import DynamicTemperatureLogitsWarper
from descant.processors.thinking import ThinkingBudgetLogitsProcessor
from descant.processors.truncation import (
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

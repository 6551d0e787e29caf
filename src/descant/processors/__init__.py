"""Processors: what reshapes logits."""

from descant.processors.bans import SuppressTokensAtBeginLogitsProcessor, SuppressTokensLogitsProcessor
from descant.processors.base import (
    FixedProcessor,
    ForeignProcessor,
    LogitsProcessor,
    LogitsProcessorList,
    UserProcessors,
)
from descant.processors.filters import (
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from descant.processors.lengths import (
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
)
from descant.processors.penalties import RepetitionPenaltyLogitsProcessor

__all__ = [
    "FixedProcessor",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "ForeignProcessor",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "LogitsProcessor",
    "LogitsProcessorList",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "MinPLogitsWarper",
    "RepetitionPenaltyLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
    "SuppressTokensLogitsProcessor",
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "UserProcessors",
]

"""Descant: every way to decode a language model, in one exact loop."""

from descant.config import GenerationConfig
from descant.errors import (
    ConfigError,
    DescantError,
    InputError,
    MissingExtra,
    NotInThisVersion,
    RowError,
    UnsupportedModel,
)
from descant.generate import attach, compute_transition_scores, detach, generate
from descant.outputs import (
    GenerateBeamDecoderOnlyOutput,
    GenerateBeamEncoderDecoderOutput,
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
)
from descant.processors import (
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from descant.session import Event, Failed, Finished, Request, Session, Tokens
from descant.step import Hypothesis

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "DescantError",
    "Event",
    "Failed",
    "Finished",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "GenerateBeamDecoderOnlyOutput",
    "GenerateBeamEncoderDecoderOutput",
    "GenerateDecoderOnlyOutput",
    "GenerateEncoderDecoderOutput",
    "GenerationConfig",
    "Hypothesis",
    "InfNanRemoveLogitsProcessor",
    "InputError",
    "LogitNormalization",
    "LogitsProcessor",
    "LogitsProcessorList",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "MinPLogitsWarper",
    "MissingExtra",
    "NotInThisVersion",
    "RepetitionPenaltyLogitsProcessor",
    "Request",
    "RowError",
    "Session",
    "SuppressTokensAtBeginLogitsProcessor",
    "SuppressTokensLogitsProcessor",
    "TemperatureLogitsWarper",
    "Tokens",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "UnsupportedModel",
    "attach",
    "compute_transition_scores",
    "detach",
    "generate",
]

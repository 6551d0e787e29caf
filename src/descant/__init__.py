"""Descant: every way to decode a language model, in one exact loop."""

import typing as _typing

from descant.api.estimate import Estimate, estimate
from descant.api.generate import generate
from descant.api.mixin import GenerationMixin, attach, compute_transition_scores, detach
from descant.api.outputs import (
    GenerateBeamDecoderOnlyOutput,
    GenerateBeamEncoderDecoderOutput,
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
)
from descant.api.prefill import PromptCache, load_cache, prefill
from descant.api.stream import Stream, StreamEvent, stream
from descant.api.streamers import AsyncTextIteratorStreamer, BaseStreamer, TextIteratorStreamer, TextStreamer
from descant.api.text_output import Completion, TextOutput
from descant.config.compile_config import CompileConfig
from descant.config.generation_config import GenerationConfig
from descant.config.generation_mode import GenerationMode
from descant.core.records import Hypothesis, Logprobs, Speculation
from descant.decoding.constraints import (
    Constraint,
    ConstraintListState,
    DisjunctiveConstraint,
    PhrasalConstraint,
)
from descant.decoding.grammars.tool_calls import ToolCall, parse_tool_calls
from descant.decoding.guidance.arithmetic import ContrastiveDecoding, DExperts, ProxyTuning
from descant.decoding.processors import (
    AdaptivePLogitsWarper,
    AllowedSequences,
    AllowedSequencesLogitsProcessor,
    AlternatingCodebooksLogitsProcessor,
    ClassifierFreeGuidanceLogitsProcessor,
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
    GrammarLogitsProcessor,
    GumbelWatermarkLogitsProcessor,
    HammingDiversityLogitsProcessor,
    HealingLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitBiasLogitsProcessor,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
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
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    WatermarkLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
    XTCLogitsWarper,
)
from descant.decoding.stopping.criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopRegexCriteria,
    StopStringCriteria,
    validate_stopping_criteria,
)
from descant.decoding.strategies.beams.scorers import (
    BeamScorer,
    BeamSearchScorer,
    ConstrainedBeamSearchScorer,
)
from descant.decoding.watermark import (
    Detection,
    Detector,
    PublicKeyWarning,
    SynthIDTextWatermarkDetector,
    WatermarkDetector,
    WatermarkDetectorOutput,
)
from descant.decoding.watermark.schemes import (
    GumbelWatermarkingConfig,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from descant.engine.async_engine import AsyncEngine
from descant.engine.events import AgreedTokens, NewToken, TokenLogprobs, TraceRecords
from descant.engine.explain import explain_config as _explain_config
from descant.engine.fallback_engine import FallbackEngine
from descant.engine.scheduling.config import SchedulerConfig
from descant.engine.session import Event, Failed, Finished, Report, Request, Session, Tokens
from descant.engine.vllm.vllm_engine import VLLM
from descant.errors import (
    ChangedRecipe,
    ConfigError,
    ConstraintError,
    DeadlineExceeded,
    DescantError,
    EngineClosed,
    EngineFull,
    HubError,
    InputError,
    MissingExtra,
    MissingRequirements,
    NotEnoughMemory,
    NotInThisVersion,
    RankError,
    RecipeError,
    RowError,
    SessionBusy,
    TraceError,
    UnsupportedModel,
    UntrustedRecipe,
    WorkerFailed,
)
from descant.kv_cache.cached_row import CachedRow
from descant.kv_cache.prefix_cache import PrefixCache, PrefixReport
from descant.models.compiled_layers import CompiledLayers
from descant.models.hf_caches.exports import (
    Cache,
    CacheConfig,
    DynamicCache,
    EncoderDecoderCache,
    H2OCache,
    HQQQuantizedCache,
    HybridCache,
    MambaCache,
    OffloadedCache,
    OffloadedStaticCache,
    PagedCache,
    QuantizedCache,
    QuantizedCacheConfig,
    QuantoQuantizedCache,
    SinkCache,
    SlidingWindowCache,
    SnapKVCache,
    StaticCache,
    StaticCacheConfig,
)
from descant.models.layer_compilation import compile_layers
from descant.models.prepacked_weights import PrepackedWeights, prepack_weights
from descant.recipes.loading import load_recipe, trust_recipe
from descant.recipes.recipe import Recipe
from descant.recipes.share import push_recipe
from descant.trace.trace import Trace
from descant.trace.tracer import Tracer

if _typing.TYPE_CHECKING:
    from descant.models.bayesian_detector import BayesianDetectorConfig, BayesianDetectorModel

__version__ = "0.1.0"

# The engine implements `GenerationConfig.explain`; only this module imports both packages.
GenerationConfig.explainer = _explain_config

__all__ = [
    "VLLM",
    "AdaptivePLogitsWarper",
    "AgreedTokens",
    "AllowedSequences",
    "AllowedSequencesLogitsProcessor",
    "AlternatingCodebooksLogitsProcessor",
    "AsyncEngine",
    "AsyncTextIteratorStreamer",
    "BaseStreamer",
    "BayesianDetectorConfig",
    "BayesianDetectorModel",
    "BeamScorer",
    "BeamSearchScorer",
    "Cache",
    "CacheConfig",
    "CachedRow",
    "ChangedRecipe",
    "ClassifierFreeGuidanceLogitsProcessor",
    "CompileConfig",
    "CompiledLayers",
    "Completion",
    "ConfigError",
    "ConstrainedBeamSearchScorer",
    "Constraint",
    "ConstraintError",
    "ConstraintListState",
    "ContrastiveDecoding",
    "DExperts",
    "DRYLogitsProcessor",
    "DeadlineExceeded",
    "DescantError",
    "Detection",
    "Detector",
    "DisjunctiveConstraint",
    "DynamicCache",
    "DynamicTemperatureLogitsWarper",
    "EncoderDecoderCache",
    "EncoderNoRepeatNGramLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "EngineClosed",
    "EngineFull",
    "EosTokenCriteria",
    "EpsilonLogitsWarper",
    "Estimate",
    "EtaLogitsWarper",
    "Event",
    "ExponentialDecayLengthPenalty",
    "Failed",
    "FallbackEngine",
    "Finished",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "FrequencyPenaltyLogitsProcessor",
    "GenerateBeamDecoderOnlyOutput",
    "GenerateBeamEncoderDecoderOutput",
    "GenerateDecoderOnlyOutput",
    "GenerateEncoderDecoderOutput",
    "GenerationConfig",
    "GenerationMixin",
    "GenerationMode",
    "GrammarLogitsProcessor",
    "GumbelWatermarkLogitsProcessor",
    "GumbelWatermarkingConfig",
    "H2OCache",
    "HQQQuantizedCache",
    "HammingDiversityLogitsProcessor",
    "HealingLogitsProcessor",
    "HubError",
    "HybridCache",
    "Hypothesis",
    "InfNanRemoveLogitsProcessor",
    "InputError",
    "LogitBiasLogitsProcessor",
    "LogitNormalization",
    "LogitsProcessor",
    "LogitsProcessorList",
    "Logprobs",
    "MambaCache",
    "MaxLengthCriteria",
    "MaxTimeCriteria",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "MinPLogitsWarper",
    "MirostatLogitsWarper",
    "MissingExtra",
    "MissingRequirements",
    "NewToken",
    "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "NotEnoughMemory",
    "NotInThisVersion",
    "OffloadedCache",
    "OffloadedStaticCache",
    "PLessLogitsWarper",
    "PagedCache",
    "PhrasalConstraint",
    "PrefixCache",
    "PrefixConstrainedLogitsProcessor",
    "PrefixReport",
    "PrepackedWeights",
    "PresencePenaltyLogitsProcessor",
    "PromptCache",
    "ProxyTuning",
    "PublicKeyWarning",
    "QuantizedCache",
    "QuantizedCacheConfig",
    "QuantoQuantizedCache",
    "RankError",
    "Recipe",
    "RecipeError",
    "RepetitionPenaltyLogitsProcessor",
    "Report",
    "Request",
    "RowError",
    "SchedulerConfig",
    "SequenceBiasLogitsProcessor",
    "Session",
    "SessionBusy",
    "SinkCache",
    "SlidingWindowCache",
    "SnapKVCache",
    "Speculation",
    "StaticCache",
    "StaticCacheConfig",
    "StopRegexCriteria",
    "StopStringCriteria",
    "StoppingCriteria",
    "StoppingCriteriaList",
    "Stream",
    "StreamEvent",
    "SuppressTokensAtBeginLogitsProcessor",
    "SuppressTokensLogitsProcessor",
    "SynthIDTextWatermarkDetector",
    "SynthIDTextWatermarkLogitsProcessor",
    "SynthIDTextWatermarkingConfig",
    "TemperatureLogitsWarper",
    "TextIteratorStreamer",
    "TextOutput",
    "TextStreamer",
    "ThinkingBudgetLogitsProcessor",
    "TokenLogprobs",
    "Tokens",
    "ToolCall",
    "TopHLogitsWarper",
    "TopKLogitsWarper",
    "TopNSigmaLogitsWarper",
    "TopPLogitsWarper",
    "Trace",
    "TraceError",
    "TraceRecords",
    "Tracer",
    "TypicalLogitsWarper",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "UnsupportedModel",
    "UntrustedRecipe",
    "WatermarkDetector",
    "WatermarkDetectorOutput",
    "WatermarkLogitsProcessor",
    "WatermarkingConfig",
    "WhisperTimeStampLogitsProcessor",
    "WorkerFailed",
    "XTCLogitsWarper",
    "attach",
    "compile_layers",
    "compute_transition_scores",
    "detach",
    "estimate",
    "generate",
    "load_cache",
    "load_recipe",
    "parse_tool_calls",
    "prefill",
    "prepack_weights",
    "push_recipe",
    "stream",
    "trust_recipe",
    "validate_stopping_criteria",
]


def __getattr__(name: str) -> _typing.Any:
    """Load the detector models on first use: their base classes in transformers take seconds to import."""
    if name in ("BayesianDetectorConfig", "BayesianDetectorModel"):
        from descant.models import bayesian_detector

        return getattr(bayesian_detector, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """All public names, lazily loaded ones included."""
    return sorted({*globals(), *__all__})

"""The public names of Descant, each once: `__init__.py` reads them here and imports a name at its first use.

One line is one name, written `from MODULE import NAME as NAME`.
"""

from descant.api.compat.mixin import GenerationMixin as GenerationMixin
from descant.api.compat.mixin import attach as attach
from descant.api.compat.mixin import compute_transition_scores as compute_transition_scores
from descant.api.compat.mixin import detach as detach
from descant.api.compat.streamers import AsyncTextIteratorStreamer as AsyncTextIteratorStreamer
from descant.api.compat.streamers import BaseStreamer as BaseStreamer
from descant.api.compat.streamers import TextIteratorStreamer as TextIteratorStreamer
from descant.api.compat.streamers import TextStreamer as TextStreamer
from descant.api.estimate import Estimate as Estimate
from descant.api.estimate import estimate as estimate
from descant.api.generate import generate as generate
from descant.api.prefill import PromptCache as PromptCache
from descant.api.prefill import load_cache as load_cache
from descant.api.prefill import prefill as prefill
from descant.api.score import ScoringLimits as ScoringLimits
from descant.api.score import TextScore as TextScore
from descant.api.score import label_probabilities as label_probabilities
from descant.api.score import score as score
from descant.api.score import score_documents as score_documents
from descant.api.sound import SoundRequest as SoundRequest
from descant.api.sound import sound_request as sound_request
from descant.api.stream import Stream as Stream
from descant.api.stream import StreamEvent as StreamEvent
from descant.api.stream import stream as stream
from descant.api.text_output import Completion as Completion
from descant.api.text_output import TextOutput as TextOutput
from descant.config.cache_config import CacheConfig as CacheConfig
from descant.config.cache_config import QuantizedCacheConfig as QuantizedCacheConfig
from descant.config.cache_config import StaticCacheConfig as StaticCacheConfig
from descant.config.compile_config import CompileConfig as CompileConfig
from descant.config.generation_config import GenerationConfig as GenerationConfig
from descant.config.registry import GenerationMode as GenerationMode
from descant.core.records import Hypothesis as Hypothesis
from descant.core.records import Logprobs as Logprobs
from descant.core.records import Speculation as Speculation
from descant.core.records import Support as Support
from descant.decoding.constraints import Constraint as Constraint
from descant.decoding.constraints import ConstraintListState as ConstraintListState
from descant.decoding.constraints import DisjunctiveConstraint as DisjunctiveConstraint
from descant.decoding.constraints import PhrasalConstraint as PhrasalConstraint
from descant.decoding.grammars.json_schema import parse_tool_calls as parse_tool_calls
from descant.decoding.guidance import ContrastiveDecoding as ContrastiveDecoding
from descant.decoding.guidance import DExperts as DExperts
from descant.decoding.guidance import ProxyTuning as ProxyTuning
from descant.decoding.processors.allowed_sequences import AllowedSequences as AllowedSequences
from descant.decoding.processors.allowed_sequences import (
    AllowedSequencesLogitsProcessor as AllowedSequencesLogitsProcessor,
)
from descant.decoding.processors.bans import (
    EncoderNoRepeatNGramLogitsProcessor as EncoderNoRepeatNGramLogitsProcessor,
)
from descant.decoding.processors.bans import LogitBiasLogitsProcessor as LogitBiasLogitsProcessor
from descant.decoding.processors.bans import NoBadWordsLogitsProcessor as NoBadWordsLogitsProcessor
from descant.decoding.processors.bans import NoRepeatNGramLogitsProcessor as NoRepeatNGramLogitsProcessor
from descant.decoding.processors.bans import (
    PrefixConstrainedLogitsProcessor as PrefixConstrainedLogitsProcessor,
)
from descant.decoding.processors.bans import SequenceBiasLogitsProcessor as SequenceBiasLogitsProcessor
from descant.decoding.processors.bans import (
    SuppressTokensAtBeginLogitsProcessor as SuppressTokensAtBeginLogitsProcessor,
)
from descant.decoding.processors.bans import SuppressTokensLogitsProcessor as SuppressTokensLogitsProcessor
from descant.decoding.processors.base import LogitsProcessor as LogitsProcessor
from descant.decoding.processors.base import LogitsProcessorList as LogitsProcessorList
from descant.decoding.processors.filters import EpsilonLogitsWarper as EpsilonLogitsWarper
from descant.decoding.processors.filters import EtaLogitsWarper as EtaLogitsWarper
from descant.decoding.processors.filters import InfNanRemoveLogitsProcessor as InfNanRemoveLogitsProcessor
from descant.decoding.processors.filters import LogitNormalization as LogitNormalization
from descant.decoding.processors.filters import MinPLogitsWarper as MinPLogitsWarper
from descant.decoding.processors.filters import TemperatureLogitsWarper as TemperatureLogitsWarper
from descant.decoding.processors.filters import TopKLogitsWarper as TopKLogitsWarper
from descant.decoding.processors.filters import TopPLogitsWarper as TopPLogitsWarper
from descant.decoding.processors.filters import TypicalLogitsWarper as TypicalLogitsWarper
from descant.decoding.processors.grammar import GrammarLogitsProcessor as GrammarLogitsProcessor
from descant.decoding.processors.grammar import HealingLogitsProcessor as HealingLogitsProcessor
from descant.decoding.processors.guidance import (
    ClassifierFreeGuidanceLogitsProcessor as ClassifierFreeGuidanceLogitsProcessor,
)
from descant.decoding.processors.guidance import (
    HammingDiversityLogitsProcessor as HammingDiversityLogitsProcessor,
)
from descant.decoding.processors.guidance import (
    UnbatchedClassifierFreeGuidanceLogitsProcessor as UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from descant.decoding.processors.lengths import ExponentialDecayLengthPenalty as ExponentialDecayLengthPenalty
from descant.decoding.processors.lengths import ForcedBOSTokenLogitsProcessor as ForcedBOSTokenLogitsProcessor
from descant.decoding.processors.lengths import ForcedEOSTokenLogitsProcessor as ForcedEOSTokenLogitsProcessor
from descant.decoding.processors.lengths import MinLengthLogitsProcessor as MinLengthLogitsProcessor
from descant.decoding.processors.lengths import (
    MinNewTokensLengthLogitsProcessor as MinNewTokensLengthLogitsProcessor,
)
from descant.decoding.processors.lengths import (
    ThinkingBudgetLogitsProcessor as ThinkingBudgetLogitsProcessor,
)
from descant.decoding.processors.penalties import DRYLogitsProcessor as DRYLogitsProcessor
from descant.decoding.processors.penalties import (
    EncoderRepetitionPenaltyLogitsProcessor as EncoderRepetitionPenaltyLogitsProcessor,
)
from descant.decoding.processors.penalties import (
    FrequencyPenaltyLogitsProcessor as FrequencyPenaltyLogitsProcessor,
)
from descant.decoding.processors.penalties import (
    PresencePenaltyLogitsProcessor as PresencePenaltyLogitsProcessor,
)
from descant.decoding.processors.penalties import (
    RepetitionPenaltyLogitsProcessor as RepetitionPenaltyLogitsProcessor,
)
from descant.decoding.processors.speech import (
    AlternatingCodebooksLogitsProcessor as AlternatingCodebooksLogitsProcessor,
)
from descant.decoding.processors.speech import (
    WhisperTimeStampLogitsProcessor as WhisperTimeStampLogitsProcessor,
)
from descant.decoding.processors.truncation import AdaptivePLogitsWarper as AdaptivePLogitsWarper
from descant.decoding.processors.truncation import (
    DynamicTemperatureLogitsWarper as DynamicTemperatureLogitsWarper,
)
from descant.decoding.processors.truncation import MirostatLogitsWarper as MirostatLogitsWarper
from descant.decoding.processors.truncation import PLessLogitsWarper as PLessLogitsWarper
from descant.decoding.processors.truncation import TopHLogitsWarper as TopHLogitsWarper
from descant.decoding.processors.truncation import TopNSigmaLogitsWarper as TopNSigmaLogitsWarper
from descant.decoding.processors.truncation import XTCLogitsWarper as XTCLogitsWarper
from descant.decoding.stopping import EosTokenCriteria as EosTokenCriteria
from descant.decoding.stopping import MaxLengthCriteria as MaxLengthCriteria
from descant.decoding.stopping import MaxTimeCriteria as MaxTimeCriteria
from descant.decoding.stopping import StoppingCriteria as StoppingCriteria
from descant.decoding.stopping import StoppingCriteriaList as StoppingCriteriaList
from descant.decoding.stopping import StopRegexCriteria as StopRegexCriteria
from descant.decoding.stopping import StopStringCriteria as StopStringCriteria
from descant.decoding.stopping import validate_stopping_criteria as validate_stopping_criteria
from descant.decoding.strategies.beams.scorers import BeamScorer as BeamScorer
from descant.decoding.strategies.beams.scorers import BeamSearchScorer as BeamSearchScorer
from descant.decoding.strategies.beams.scorers import (
    ConstrainedBeamSearchScorer as ConstrainedBeamSearchScorer,
)
from descant.decoding.watermark.detection import Detection as Detection
from descant.decoding.watermark.detection import Detector as Detector
from descant.decoding.watermark.detection import GumbelWatermarkingConfig as GumbelWatermarkingConfig
from descant.decoding.watermark.detection import (
    SynthIDTextWatermarkingConfig as SynthIDTextWatermarkingConfig,
)
from descant.decoding.watermark.detection import WatermarkingConfig as WatermarkingConfig
from descant.decoding.watermark.green_list import WatermarkDetector as WatermarkDetector
from descant.decoding.watermark.green_list import WatermarkDetectorOutput as WatermarkDetectorOutput
from descant.decoding.watermark.green_list import WatermarkLogitsProcessor as WatermarkLogitsProcessor
from descant.decoding.watermark.gumbel import GumbelWatermarkLogitsProcessor as GumbelWatermarkLogitsProcessor
from descant.decoding.watermark.keys import PublicKeyWarning as PublicKeyWarning
from descant.decoding.watermark.synthid import SynthIDTextWatermarkDetector as SynthIDTextWatermarkDetector
from descant.decoding.watermark.synthid import (
    SynthIDTextWatermarkLogitsProcessor as SynthIDTextWatermarkLogitsProcessor,
)
from descant.engine.protocol import AgreedTokens as AgreedTokens
from descant.engine.protocol import NewToken as NewToken
from descant.engine.protocol import TokenLogprobs as TokenLogprobs
from descant.engine.protocol import TraceRecords as TraceRecords
from descant.engine.replay import replay_logprobs as replay_logprobs
from descant.engine.scheduling.config import SchedulerConfig as SchedulerConfig
from descant.engine.serving.async_engine import AsyncEngine as AsyncEngine
from descant.engine.serving.fallback_engine import FallbackEngine as FallbackEngine
from descant.engine.session import Event as Event
from descant.engine.session import Failed as Failed
from descant.engine.session import Finished as Finished
from descant.engine.session import Report as Report
from descant.engine.session import Request as Request
from descant.engine.session import Session as Session
from descant.engine.session import Tokens as Tokens
from descant.engine.vllm.vllm_engine import VLLM as VLLM
from descant.errors import ChangedRecipe as ChangedRecipe
from descant.errors import ConfigError as ConfigError
from descant.errors import ConstraintError as ConstraintError
from descant.errors import DeadlineExceeded as DeadlineExceeded
from descant.errors import DescantError as DescantError
from descant.errors import EngineClosed as EngineClosed
from descant.errors import EngineFull as EngineFull
from descant.errors import HubError as HubError
from descant.errors import InputError as InputError
from descant.errors import MissingExtra as MissingExtra
from descant.errors import MissingRequirements as MissingRequirements
from descant.errors import NotEnoughMemory as NotEnoughMemory
from descant.errors import NotInThisVersion as NotInThisVersion
from descant.errors import RankError as RankError
from descant.errors import RecipeError as RecipeError
from descant.errors import RowError as RowError
from descant.errors import SessionBusy as SessionBusy
from descant.errors import TraceError as TraceError
from descant.errors import UnsupportedModel as UnsupportedModel
from descant.errors import UntrustedRecipe as UntrustedRecipe
from descant.errors import WorkerFailed as WorkerFailed
from descant.kv_cache.prefix_cache import PrefixCache as PrefixCache
from descant.kv_cache.prefix_cache import PrefixReport as PrefixReport
from descant.kv_cache.row_views import CachedRow as CachedRow
from descant.models.bayesian_detector import BayesianDetectorConfig as BayesianDetectorConfig
from descant.models.bayesian_detector import BayesianDetectorModel as BayesianDetectorModel
from descant.models.compat.generate_outputs import (
    GenerateBeamDecoderOnlyOutput as GenerateBeamDecoderOnlyOutput,
)
from descant.models.compat.generate_outputs import (
    GenerateBeamEncoderDecoderOutput as GenerateBeamEncoderDecoderOutput,
)
from descant.models.compat.generate_outputs import GenerateDecoderOnlyOutput as GenerateDecoderOnlyOutput
from descant.models.compat.generate_outputs import (
    GenerateEncoderDecoderOutput as GenerateEncoderDecoderOutput,
)
from descant.models.compat.hf_caches.base import Cache as Cache
from descant.models.compat.hf_caches.convert import EncoderDecoderCache as EncoderDecoderCache
from descant.models.compat.hf_caches.dynamic import DynamicCache as DynamicCache
from descant.models.compat.hf_caches.dynamic import H2OCache as H2OCache
from descant.models.compat.hf_caches.dynamic import HQQQuantizedCache as HQQQuantizedCache
from descant.models.compat.hf_caches.dynamic import OffloadedCache as OffloadedCache
from descant.models.compat.hf_caches.dynamic import PagedCache as PagedCache
from descant.models.compat.hf_caches.dynamic import QuantizedCache as QuantizedCache
from descant.models.compat.hf_caches.dynamic import QuantoQuantizedCache as QuantoQuantizedCache
from descant.models.compat.hf_caches.dynamic import SinkCache as SinkCache
from descant.models.compat.hf_caches.dynamic import SnapKVCache as SnapKVCache
from descant.models.compat.hf_caches.recurrent import MambaCache as MambaCache
from descant.models.compat.hf_caches.sized import HybridCache as HybridCache
from descant.models.compat.hf_caches.sized import OffloadedStaticCache as OffloadedStaticCache
from descant.models.compat.hf_caches.sized import SlidingWindowCache as SlidingWindowCache
from descant.models.compat.hf_caches.sized import StaticCache as StaticCache
from descant.models.fast.compiled_layers import CompiledLayers as CompiledLayers
from descant.models.fast.products import PrepackedWeights as PrepackedWeights
from descant.models.fast.products import prepack_weights as prepack_weights
from descant.models.fast_paths import compile_layers as compile_layers
from descant.models.wrapping.fingerprint import weights_changed as weights_changed
from descant.recipes.loading import load_recipe as load_recipe
from descant.recipes.loading import push_recipe as push_recipe
from descant.recipes.loading import trust_recipe as trust_recipe
from descant.recipes.recipe import Recipe as Recipe
from descant.tokenization.regions import ResponsePart as ResponsePart
from descant.tokenization.response_syntax import ToolCall as ToolCall
from descant.trace.trace import Trace as Trace
from descant.trace.tracer import Tracer as Tracer

__version__: str

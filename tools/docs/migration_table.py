"""The replacement of each name of transformers 4.52 that 5 removed, for tools/docs/migration.py.

`before` runs on transformers 4.52.4 and `after` here, both after `SETUP`; only code that needs TensorFlow or
Flax does not run. Without `after` there is no replacement, and `note` gives the reason.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Row(NamedTuple):
    """One name: its use before, and its replacement here."""

    before: str
    after: str
    note: str = ""


# The same tiny models for both versions.
SETUP: Final = """
import torch, transformers
from transformers import generation
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    pad_token_id=0, eos_token_id=1,
)
model = transformers.LlamaForCausalLM(config).eval()
windowed = transformers.Gemma2Config(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, head_dim=8, sliding_window=16,
)
recurrent = transformers.MambaConfig(vocab_size=32, hidden_size=16, state_size=4, num_hidden_layers=2)
ids = torch.tensor([[5, 6, 7]])
scores = torch.zeros(1, 32)
more = {"max_new_tokens": 4}
"""

CONSTRAINTS: Final = {
    "Constraint": Row(
        "class Rhyme(transformers.Constraint): ...",
        "class Rhyme(descant.Constraint): ...",
        "the same methods",
    ),
    "PhrasalConstraint": Row("transformers.PhrasalConstraint([5, 6])", "descant.PhrasalConstraint([5, 6])"),
    "DisjunctiveConstraint": Row(
        "transformers.DisjunctiveConstraint([[5], [6, 7]])", "descant.DisjunctiveConstraint([[5], [6, 7]])"
    ),
    "ConstraintListState": Row(
        "transformers.ConstraintListState([transformers.PhrasalConstraint([5, 6])])",
        "descant.ConstraintListState([descant.PhrasalConstraint([5, 6])])",
    ),
    "DisjunctiveTrie": Row(
        "generation.beam_constraints.DisjunctiveTrie([[5], [6, 7]])",
        "descant.AllowedSequences([[5], [6, 7]], eos_token_id=1)",
        "a trie of any size, with its own field: `prefix_allowed_tokens_fn`",
    ),
}

_BATCH = "batch_size=1, num_beams=2, device=torch.device('cpu')"

BEAMS: Final = {
    "BeamScorer": Row(
        "class Mine(transformers.BeamScorer): ...",
        "class Mine(descant.BeamScorer): ...",
        "`process` and `finalize`",
    ),
    "BeamSearchScorer": Row(
        f"transformers.BeamSearchScorer({_BATCH})", f"descant.BeamSearchScorer({_BATCH})"
    ),
    "ConstrainedBeamSearchScorer": Row(
        f"transformers.ConstrainedBeamSearchScorer({_BATCH}, "
        "constraints=[transformers.PhrasalConstraint([5])])",
        f"descant.ConstrainedBeamSearchScorer({_BATCH}, constraints=[descant.PhrasalConstraint([5])])",
    ),
    "BeamHypotheses": Row(
        "generation.BeamHypotheses(num_beams=2, length_penalty=1.0, early_stopping=False)",
        "descant.Hypothesis(tokens=[5, 6], reason='length')",
        "a scorer has its own list; `Finished.hypotheses` of a session has such objects, best first",
    ),
    "HammingDiversityLogitsProcessor": Row(
        "transformers.HammingDiversityLogitsProcessor(diversity_penalty=1.0, num_beams=2, num_beam_groups=2)",
        "descant.HammingDiversityLogitsProcessor(diversity_penalty=1.0, num_beams=2, num_beam_groups=2)",
        "or the fields `num_beam_groups` and `diversity_penalty`",
    ),
}

_METHODS = ("GreedySearch", "Sample", "ContrastiveSearch", "BeamSearch", "BeamSample")
_KINDS = ("DecoderOnly", "EncoderDecoder")


def _output(method: str, kind: str) -> str:
    return f"Generate{'Beam' if method.startswith('Beam') else ''}{kind}Output"


OUTPUTS: Final = {
    f"{method}{kind}Output": Row(
        f"generation.{method}{kind}Output(sequences=ids)", f"descant.{_output(method, kind)}(sequences=ids)"
    )
    for method in _METHODS
    for kind in _KINDS
} | {
    f"{method}Output": Row(
        f"generation.utils.{method}Output",
        f"descant.{_output(method, _KINDS[0])} | descant.{_output(method, _KINDS[1])}",
        "a union of types",
    )
    for method in _METHODS
}

_BITS = "nbits=4, axis_key=0, axis_value=0"

CACHES: Final = {
    "CacheConfig": Row("transformers.CacheConfig", "descant.CacheConfig"),
    "QuantizedCacheConfig": Row(
        "transformers.QuantizedCacheConfig(nbits=4)", "descant.QuantizedCacheConfig(nbits=4)"
    ),
    "StaticCacheConfig": Row(
        "transformers.cache_utils.StaticCacheConfig(batch_size=1, max_cache_len=64)",
        "descant.StaticCacheConfig(batch_size=1, max_cache_len=64)",
    ),
    "QuantoQuantizedCache": Row(
        "transformers.QuantoQuantizedCache(transformers.QuantizedCacheConfig(nbits=4))",
        "descant.QuantoQuantizedCache(descant.QuantizedCacheConfig(nbits=4))",
        "needs the extra `quanto`",
    ),
    "HQQQuantizedCache": Row(
        f"transformers.HQQQuantizedCache(transformers.QuantizedCacheConfig(backend='HQQ', {_BITS}))",
        f"descant.HQQQuantizedCache(descant.QuantizedCacheConfig(backend='HQQ', {_BITS}))",
        "needs the extra `hqq`",
    ),
    "SinkCache": Row(
        "transformers.SinkCache(window_length=16, num_sink_tokens=4)",
        "descant.SinkCache(window_length=16, num_sink_tokens=4)",
        'or `cache_implementation="sink"`',
    ),
    "SlidingWindowCache": Row(
        "transformers.SlidingWindowCache(windowed, 1, 64)", "descant.SlidingWindowCache(windowed, 1, 64)"
    ),
    "HybridCache": Row("transformers.HybridCache(windowed, 1, 64)", "descant.HybridCache(windowed, 1, 64)"),
    "HybridChunkedCache": Row(
        "transformers.cache_utils.HybridChunkedCache(windowed, 1, 64)",
        "descant.HybridCache(windowed, 1, 64)",
        'one class for both; the name `"hybrid_chunked"` means `"hybrid"`',
    ),
    "OffloadedHybridCache": Row(
        'transformers.GenerationConfig(cache_implementation="offloaded_hybrid")',
        'descant.GenerationConfig(cache_implementation="offloaded_hybrid")',
        "no separate class; the name is accepted, and uses the offloaded cache",
    ),
    "OffloadedCache": Row(
        "transformers.OffloadedCache  # needs CUDA", "descant.OffloadedCache()", "on any device"
    ),
    "OffloadedStaticCache": Row(
        "transformers.OffloadedStaticCache  # needs CUDA",
        "descant.OffloadedStaticCache(config, 1, 64)",
        "on any device",
    ),
    "MambaCache": Row("transformers.MambaCache(recurrent, 1)", "descant.MambaCache(recurrent, 1)"),
    "CACHE_CONFIG_MAPPING": Row(
        'generation.configuration_utils.CACHE_CONFIG_MAPPING["quantized"]',
        "descant.QuantizedCacheConfig",
        "no table; use the two classes",
    ),
    "QUANT_BACKEND_CLASSES_MAPPING": Row(
        'generation.configuration_utils.QUANT_BACKEND_CLASSES_MAPPING["quanto"]',
        "descant.QuantoQuantizedCache",
        "no table; use the two classes",
    ),
    "NEED_SETUP_CACHE_CLASSES_MAPPING": Row(
        'generation.configuration_utils.NEED_SETUP_CACHE_CLASSES_MAPPING["static"]',
        "descant.StaticCache",
        "no table; use the classes by name",
    ),
}

INNER: Final = {
    "stack_model_outputs": Row(
        "generation.utils.stack_model_outputs",
        "",
        "internal to contrastive search with `low_memory`; no replacement",
    ),
}

METHODS: Final = {
    "_contrastive_search": Row(
        "model.generate(ids, penalty_alpha=0.6, top_k=4, **more)",
        "descant.generate(model, ids, penalty_alpha=0.6, top_k=4, **more)",
    ),
    "_dola_decoding": Row(
        'model.generate(ids, dola_layers="low", **more)',
        'descant.generate(model, ids, dola_layers="low", **more)',
    ),
    "_group_beam_search": Row(
        "model.generate(ids, num_beams=4, num_beam_groups=2, diversity_penalty=1.0, **more)",
        "descant.generate(model, ids, num_beams=4, num_beam_groups=2, diversity_penalty=1.0, **more)",
    ),
    "_constrained_beam_search": Row(
        "model.generate(ids, num_beams=4, force_words_ids=[[9]], **more)",
        "descant.generate(model, ids, num_beams=4, force_words_ids=[[9]], **more)",
    ),
    "_prefill_chunking": Row(
        "model.generate(ids, prefill_chunk_size=2, **more)",
        "descant.generate(model, ids, prefill_chunk_size=2, **more)",
    ),
    "_get_cache": Row(
        'model.generate(ids, cache_implementation="static", **more)',
        'descant.generate(model, ids, cache_implementation="static", **more)',
    ),
    "_reorder_cache": Row(
        "model.generate(ids, num_beams=2, **more)",
        "descant.generate(model, ids, num_beams=2, **more)",
        "models need no method for it: caches reorder their rows",
    ),
    "_temporary_reorder_cache": Row(
        "model.generate(ids, num_beams=2, **more)",
        "descant.generate(model, ids, num_beams=2, **more)",
        "the same",
    ),
    "_validate_assistant": Row(
        "model.generate(ids, assistant_model=model, **more)",
        "descant.generate(model, ids, assistant_model=model, **more)",
        "any tokenizer, any batch",
    ),
    "_prepare_encoder_decoder_kwargs_for_generation": Row("", "", "internal input preparation"),
    "_cache_dependant_input_preparation": Row("", "", "internal input preparation"),
    "_cache_dependant_input_preparation_exporting": Row("", "", "internal input preparation, for export"),
    "_get_initial_cache_position": Row("", "", "internal input preparation; positions are those of the rows"),
    "_get_layer_device_map_for_cache_init": Row(
        "", "", "internal; a cache takes the device of each layer from its tensors"
    ),
}

CACHE_METHODS: Final = {
    "from_legacy_cache": Row(
        "transformers.DynamicCache.from_legacy_cache(((torch.ones(1, 1, 2, 4),) * 2,))",
        "descant.DynamicCache.from_legacy_cache(((torch.ones(1, 1, 2, 4),) * 2,))",
    ),
    "to_legacy_cache": Row(
        "transformers.DynamicCache().to_legacy_cache()", "descant.DynamicCache().to_legacy_cache()"
    ),
    "batch_split": Row(
        "transformers.DynamicCache([(torch.ones(2, 1, 2, 4),) * 2]).batch_split(2, 1)",
        "descant.DynamicCache([(torch.ones(2, 1, 2, 4),) * 2]).batch_split(2, 1)",
    ),
    "from_batch_splits": Row(
        "transformers.DynamicCache.from_batch_splits([transformers.DynamicCache()])",
        "descant.DynamicCache.from_batch_splits([descant.DynamicCache()])",
    ),
    "get_max_cache_shape": Row(
        "transformers.StaticCache(config, 1, 64).get_max_cache_shape()",
        "descant.StaticCache(config, 1, 64).get_max_cache_shape()",
    ),
    "seen_tokens": Row("transformers.DynamicCache().seen_tokens", "descant.DynamicCache().seen_tokens"),
    "get_usable_length": Row(
        "transformers.DynamicCache().get_usable_length(1)",
        "descant.DynamicCache().get_seq_length()",
        "the same number for caches without eviction",
    ),
    "prefetch_layer": Row(
        "transformers.OffloadedCache.prefetch_layer", "descant.OffloadedCache.prefetch_layer"
    ),
    "evict_previous_layer": Row(
        "transformers.OffloadedCache.evict_previous_layer", "descant.OffloadedCache.evict_previous_layer"
    ),
    "initialise_cache_layer": Row(
        "transformers.cache_utils.HybridChunkedCache.initialise_cache_layer",
        "",
        "internal: the first write allocates a cache",
    ),
    "update_ssm_state": Row(
        "transformers.MambaCache.update_ssm_state", "descant.MambaCache.update_ssm_state"
    ),
    **{
        name: Row(
            f"transformers.QuantizedCacheConfig(nbits=4).{name}",
            f"descant.QuantizedCacheConfig(nbits=4).{name}",
        )
        for name in ("from_dict", "to_dict", "to_json_file", "to_json_string", "validate")
    },
    "cache_implementation": Row(
        "transformers.cache_utils.StaticCacheConfig(1, 64).cache_implementation",
        "descant.StaticCacheConfig(1, 64).cache_implementation",
    ),
}

FIELDS: Final = {
    "return_legacy_cache": Row(
        "model.generate(ids, return_dict_in_generate=True, return_legacy_cache=True, **more)",
        "descant.generate(model, ids, return_dict_in_generate=True, return_legacy_cache=True, **more)",
    ),
    "forced_decoder_ids": Row(
        "transformers.GenerationConfig(forced_decoder_ids=[[1, 9]])",
        "descant.generate(model, ids, forced_decoder_ids=[[1, 9]], **more)",
        "index 1 is the first new token; 4.52 refuses it in a call, and Whisper takes `language` and `task`",
    ),
    "generation_kwargs": Row(
        "transformers.GenerationConfig(generation_kwargs={'num_beams': 2})",
        "descant.generate(model, ids, generation_kwargs={'num_beams': 2}, **more)",
        "4.52 reads it nowhere; here its entries are arguments of the call, as documented",
    ),
    "use_model_defaults": Row(
        "model.generate(ids, use_model_defaults=True, **more)",
        "descant.generate(model, ids, use_model_defaults=True, **more)",
        "an argument, True by default; with False a given config takes only special tokens from the model",
    ),
}

# Names of TensorFlow and Flax without their prefix, if not in a table above, and their replacement.
TENSORS: Final = {
    "ForcedBOSTokenLogitsProcessor": "descant.ForcedBOSTokenLogitsProcessor(bos_token_id=2)",
    "ForcedEOSTokenLogitsProcessor": "descant.ForcedEOSTokenLogitsProcessor(max_length=9, eos_token_id=1)",
    "ForceTokensLogitsProcessor": "descant.PrefixConstrainedLogitsProcessor(lambda row, seen: [9], 1)",
    "LogitsProcessor": "descant.LogitsProcessor",
    "LogitsProcessorList": "descant.LogitsProcessorList()",
    "LogitsWarper": "descant.LogitsProcessor",
    "MinLengthLogitsProcessor": "descant.MinLengthLogitsProcessor(min_length=4, eos_token_id=1)",
    "NoBadWordsLogitsProcessor": "descant.NoBadWordsLogitsProcessor([[9]], eos_token_id=1)",
    "NoRepeatNGramLogitsProcessor": "descant.NoRepeatNGramLogitsProcessor(2)",
    "RepetitionPenaltyLogitsProcessor": "descant.RepetitionPenaltyLogitsProcessor(1.2)",
    "SuppressTokensAtBeginLogitsProcessor": "descant.SuppressTokensAtBeginLogitsProcessor([9], 3)",
    "SuppressTokensLogitsProcessor": "descant.SuppressTokensLogitsProcessor([9])",
    "TemperatureLogitsWarper": "descant.TemperatureLogitsWarper(0.7)",
    "TopKLogitsWarper": "descant.TopKLogitsWarper(5)",
    "TopPLogitsWarper": "descant.TopPLogitsWarper(0.9)",
    "WhisperTimeStampLogitsProcessor": "descant.WhisperTimeStampLogitsProcessor",
    "GenerationMixin": "descant.generate(model, ids, **more)",
    "GenerateOutput": "descant.GenerateDecoderOnlyOutput(sequences=ids)",
    "GreedySearchOutput": "descant.GenerateDecoderOnlyOutput(sequences=ids)",
    "SampleOutput": "descant.GenerateDecoderOnlyOutput(sequences=ids)",
    "ContrastiveSearchOutput": "descant.GenerateDecoderOnlyOutput(sequences=ids)",
    "BeamSearchOutput": "descant.GenerateBeamDecoderOnlyOutput(sequences=ids)",
    "BeamSampleOutput": "descant.GenerateBeamDecoderOnlyOutput(sequences=ids)",
    # The states of Flax's loops between steps.
    "GreedyState": "descant.Session(model)",
    "SampleState": "descant.Session(model)",
    "BeamSearchState": "descant.Session(model)",
    # Internal functions of TensorFlow's loop.
    "sample_without_replacement": "",
    "scatter_values_on_batch_indices": "",
}

# Names that both versions have, and Descant does not.
KEPT: Final = {
    "CandidateGenerator": Row(
        "generation.CandidateGenerator",
        "descant.parts.Drafter",
        "an interface: `commit` follows the rows, `draft` proposes tokens; batched",
    ),
    "AssistedCandidateGenerator": Row(
        "model.generate(ids, assistant_model=model, **more)",
        "descant.generate(model, ids, assistant_model=model, **more)",
    ),
    "EarlyExitCandidateGenerator": Row(
        "model.generate(ids, assistant_early_exit=1, **more)",
        "descant.generate(model, ids, assistant_early_exit=1, **more)",
    ),
    "PromptLookupCandidateGenerator": Row(
        "model.generate(ids, prompt_lookup_num_tokens=2, **more)",
        "descant.generate(model, ids, prompt_lookup_num_tokens=2, **more)",
    ),
    "ConfidenceCriteria": Row(
        "generation.ConfidenceCriteria(0.4)",
        "descant.GenerationConfig(assistant_confidence_threshold=0.4)",
        "a config field of speculation",
    ),
    "BaseWatermarkingConfig": Row(
        "isinstance(transformers.WatermarkingConfig(), generation.BaseWatermarkingConfig)",
        "isinstance(descant.WatermarkingConfig(hashing_key=7), descant.WatermarkingConfig)",
        "three config classes without a public base",
    ),
}

# Names that transformers 5 has beyond 4.52, and Descant does not.
NEWER: Final = {
    "ContinuousMixin": Row(
        "model.generate_batch([[5, 6, 7]], generation_config=transformers.GenerationConfig(**more))",
        "descant.Session(model).admit(descant.Request([5, 6, 7], descant.GenerationConfig(**more)))",
        "requests join and leave at any step, with any method",
    ),
    "ContinuousBatchingManager": Row(
        "generation.ContinuousBatchingManager",
        "descant.Session(model)",
        "the caller runs the steps; `descant.AsyncEngine(model)` has a thread of its own",
    ),
    "ContinuousBatchingConfig": Row(
        "transformers.ContinuousBatchingConfig()",
        "descant.Session(model, prefix_cache=descant.PrefixCache())",
        "options of the session",
    ),
    "Scheduler": Row(
        "generation.Scheduler",
        "descant.Session(model, scheduler=descant.SchedulerConfig())",
        "see [Sessions](sessions.md#a-scheduler)",
    ),
    "FIFOScheduler": Row(
        "generation.FIFOScheduler",
        "descant.Session(model, scheduler=descant.SchedulerConfig())",
        "requests of equal priority run in the order of their arrival",
    ),
    "PrefillFirstScheduler": Row(
        "generation.PrefillFirstScheduler", "", "prompts are read in chunks beside the rows that decode"
    ),
    "DFlashTokenCandidateGenerator": Row(
        "generation.DFlashTokenCandidateGenerator",
        "descant.parts.Drafter",
        "not included; can be written as a drafter",
    ),
    "TextDiffusionStreamer": Row(
        "generation.TextDiffusionStreamer",
        "",
        "for diffusion models, which Descant does not run",
    ),
}

NEWER_FIELDS: Final = {
    "max_cache_len": Row(
        'model.generate(ids, cache_implementation="static", max_cache_len=64, **more)',
        'descant.generate(model, ids, cache_implementation="static", '
        'cache_config={"max_cache_len": 64}, **more)',
    ),
    "assistant_ensemble_weight": Row("", "", "drafts never change the output"),
    "speculation_type": Row(
        "", "", "the given arguments select it: `assistant_model`, `prompt_lookup_num_tokens`, ..."
    ),
    "use_mtp": Row("", "", "multi-token prediction heads are not used"),
    "continuous_batching_config": Row("", "descant.Session(model)", "see above"),
}

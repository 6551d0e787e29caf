"""Every processor treats each row independently and modifies no input."""

import itertools
from types import SimpleNamespace

import pytest
import torch

import descant
import descant as processors
from descant.config.watermarking_config import (
    GumbelWatermarkingConfig,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from descant.decoding.pipeline import PROCESSOR_SPECS
from descant.decoding.processors.base import LogitsProcessor
from descant.testing import check_processor

DRY = {"dry_base": 1.75}
SPOKEN = {"begin_index": 2, "eos_token_ids": [10]}


def biased(words, biases):
    return {
        "sequence_bias_ids": words,
        "sequence_bias_sizes": [len(word) for word in words],
        "sequence_bias": biases,
    }


KEEP, MORE = {"min_tokens_to_keep": 1}, {"min_tokens_to_keep": 4}
# Parameters of lines that share a batch: the columns the loop gives a processor.
PARAMS = {
    "WatermarkLogitsProcessor": [
        {"watermark": WatermarkingConfig(hashing_key=5)},
        {"watermark": WatermarkingConfig(0.5, 3.0, 77, "selfhash", 3)},
    ],
    "SynthIDTextWatermarkLogitsProcessor": [
        {"watermark": SynthIDTextWatermarkingConfig(3, (5, 9))},
        {"watermark": SynthIDTextWatermarkingConfig(2, (7,), 3, 1, 1000, skip_first_ngram_calls=True)},
    ],
    "GumbelWatermarkLogitsProcessor": [
        {"watermark": GumbelWatermarkingConfig(9, 1, 4)},
        {"watermark": GumbelWatermarkingConfig(9, 2), "processor_seed": 7},
    ],
    "AllowedSequencesLogitsProcessor": [
        {"allowed_sequences": processors.AllowedSequences([[3, 4], [3], [5, 6, 7]], 2)},
        {"allowed_sequences": processors.AllowedSequences([*itertools.product(range(3, 23), repeat=2)], 2)},
    ],
    "RepetitionPenaltyLogitsProcessor": [{"repetition_penalty": 1.3}, {"repetition_penalty": 0.5}],
    "MinLengthLogitsProcessor": [
        {"min_length": 4, "end_token_ids": [2, 3]},
        {"min_length": 8, "end_token_ids": [5]},
    ],
    "MinNewTokensLengthLogitsProcessor": [
        {"min_new_tokens": 3, "end_token_ids": [2]},
        {"min_new_tokens": 1, "end_token_ids": [2, 5]},
    ],
    "ForcedBOSTokenLogitsProcessor": [{"forced_bos_token_id": 4}, {"forced_bos_token_id": 6}],
    "ForcedEOSTokenLogitsProcessor": [
        {"max_length": 4, "forced_eos_token_id": [2, 3]},
        {"max_length": 6, "forced_eos_token_id": [5]},
    ],
    "InfNanRemoveLogitsProcessor": [{}],
    "SuppressTokensLogitsProcessor": [{"suppress_tokens": [1, 2, 3]}, {"suppress_tokens": [4]}],
    "SuppressTokensAtBeginLogitsProcessor": [
        {"begin_suppress_tokens": [1, 2], "begin_index": 3},
        {"begin_suppress_tokens": [4], "begin_index": 1},
    ],
    "TemperatureLogitsWarper": [{"temperature": 0.7}, {"temperature": 1.9}],
    "TopKLogitsWarper": [{"top_k": 3, **KEEP}, {"top_k": 40, **KEEP}, {"top_k": 1, **MORE}],
    "TopPLogitsWarper": [{"tail_mass": 0.1, **KEEP}, {"tail_mass": 0.6, **KEEP}, {"tail_mass": 1.0, **MORE}],
    "MinPLogitsWarper": [{"min_p": 0.1, **KEEP}, {"min_p": 0.5, **KEEP}, {"min_p": 1.0, **MORE}],
    "LogitNormalization": [{}],
    "PresencePenaltyLogitsProcessor": [{"presence_penalty": 0.7}, {"presence_penalty": -1.5}],
    "FrequencyPenaltyLogitsProcessor": [{"frequency_penalty": 0.7}, {"frequency_penalty": -1.5}],
    "DRYLogitsProcessor": [
        {**DRY, "dry_multiplier": 0.8, "dry_allowed_length": 1, "dry_range": 0, "dry_sequence_breakers": []},
        {**DRY, "dry_multiplier": 2.0, "dry_allowed_length": 2, "dry_range": 5, "dry_sequence_breakers": [1]},
    ],
    "TopNSigmaLogitsWarper": [{"top_n_sigma": 1.0, **KEEP}, {"top_n_sigma": 0.2, **MORE}],
    "TopHLogitsWarper": [{"top_h": 0.4, **KEEP}, {"top_h": 1.0, **KEEP}, {"top_h": 0.05, **MORE}],
    "PLessLogitsWarper": [{**KEEP}, {**MORE}],
    "XTCLogitsWarper": [
        {"xtc_probability": 0.5, "xtc_threshold": 0.1, "processor_seed": 3, **KEEP},
        {"xtc_probability": 1.0, "xtc_threshold": 0.02, "processor_seed": 4, **MORE},
    ],
    "MirostatLogitsWarper": [
        {"mirostat_tau": 1.0, "mirostat_eta": 0.1, **KEEP},
        {"mirostat_tau": 0.2, "mirostat_eta": 0.5, **MORE},
    ],
    "AdaptivePLogitsWarper": [
        {"adaptive_p_target": 0.4, "adaptive_p_decay": 0.9},
        {"adaptive_p_target": 0.1, "adaptive_p_decay": 0.0},
    ],
    "DynamicTemperatureLogitsWarper": [
        {"temperature": 1.0, "dynamic_temperature_range": 0.5, "dynamic_temperature_exponent": 1.0},
        {"temperature": 0.6, "dynamic_temperature_range": 0.6, "dynamic_temperature_exponent": 2.0},
    ],
    "ThinkingBudgetLogitsProcessor": [
        {"thinking_budget": 2, "thinking_start": [], "thinking_end": [4]},
        {"thinking_budget": 1, "thinking_start": [3], "thinking_end": [4, 5, 6]},
    ],
    "TypicalLogitsWarper": [{"typical_p": 0.4, **KEEP}, {"typical_p": 0.1, **MORE}],
    "EpsilonLogitsWarper": [{"epsilon_cutoff": 0.01, **KEEP}, {"epsilon_cutoff": 0.9, **MORE}],
    "EtaLogitsWarper": [{"eta_cutoff": 0.2, **KEEP}, {"eta_cutoff": 0.9, **MORE}],
    "NoRepeatNGramLogitsProcessor": [
        {"no_repeat_ngram_size": 1, "no_repeat_ngram_window": 0},
        {"no_repeat_ngram_size": 2, "no_repeat_ngram_window": 0},
        {"no_repeat_ngram_size": 1, "no_repeat_ngram_window": 3},
    ],
    "EncoderNoRepeatNGramLogitsProcessor": [
        {"encoder_no_repeat_ngram_size": 1, "source_ids": [4, 5, 6]},
        {"encoder_no_repeat_ngram_size": 2, "source_ids": [*range(23), *range(0, 23, 2)]},
    ],
    "EncoderRepetitionPenaltyLogitsProcessor": [
        {"encoder_penalty": 0.5, "source_ids": [4, 5, 6]},
        {"encoder_penalty": 1.5, "source_ids": [1]},
    ],
    "SequenceBiasLogitsProcessor": [
        biased([[3], [4, 5], [4, 5, 6]], [1.5, -2.0, 3.0]),
        biased([[7]], [-4.0]),
        biased([[token, 9] for token in range(23)], [float(token) for token in range(23)]),
    ],
    "LogitBiasLogitsProcessor": [
        {"logit_bias_ids": [1, 2], "logit_bias": [3.0, -100.0]},
        {"logit_bias_ids": [5], "logit_bias": [0.5]},
    ],
    "NoBadWordsLogitsProcessor": [
        {"bad_words_ids": [[3], [4, 5], [4, 5, 6]], "bad_words_sizes": [1, 2, 3]},
        {"bad_words_ids": [[token, 9] for token in range(23)], "bad_words_sizes": [2] * 23},
    ],
    "PrefixConstrainedLogitsProcessor": [
        {"prefix_allowed_tokens_fn": lambda batch, ids: [batch, int(ids.sum()) % 23], "prompt_index": 0},
        {"prefix_allowed_tokens_fn": lambda batch, ids: [len(ids), 3], "prompt_index": 1},
    ],
    "ExponentialDecayLengthPenalty": [
        {"decay_start": 3, "decay_factor": 1.5, "decay_residual": 0.0, "eos_token_ids": [2, 3]},
        {"decay_start": 5, "decay_factor": 2.0, "decay_residual": 0.0, "eos_token_ids": [4]},
    ],
    "WhisperTimeStampLogitsProcessor": [
        {**SPOKEN, "no_timestamps_token_id": 11, "max_initial_timestamp_index": 2, "detect_timestamps": 1},
        {**SPOKEN, "no_timestamps_token_id": 15, "max_initial_timestamp_index": -1, "detect_timestamps": 0},
    ],
    "AlternatingCodebooksLogitsProcessor": [
        {"input_start_len": 2, "semantic_vocab_size": 5, "codebook_size": 8},
        {"input_start_len": 1, "semantic_vocab_size": 0, "codebook_size": 12},
    ],
}  # fmt: skip

# Those whose parameters by hand are not the ones of a table.
BY_HAND = [
    processors.WatermarkLogitsProcessor(20, "cpu", hashing_key=5),
    processors.SynthIDTextWatermarkLogitsProcessor(3, (5, 9), 2**16, 0, 64, "cpu"),
    processors.GumbelWatermarkLogitsProcessor(5, 2),
    processors.AllowedSequencesLogitsProcessor(processors.AllowedSequences([[3, 4], [3]], 2)),
    processors.XTCLogitsWarper(1.0, 0.05),  # surely, for by hand it draws from torch's generator
    processors.MirostatLogitsWarper(1.5),
    processors.ThinkingBudgetLogitsProcessor(2, [4, 5]),
    processors.EncoderRepetitionPenaltyLogitsProcessor(1.5, torch.tensor([[4, 5, 6]])),
    processors.PrefixConstrainedLogitsProcessor(lambda batch, ids: [3, len(ids)], 1),
    processors.ExponentialDecayLengthPenalty((1, 1.5), [2, 3], 2),
    processors.WhisperTimeStampLogitsProcessor(
        SimpleNamespace(no_timestamps_token_id=11, eos_token_id=10), 2
    ),
]
ELSEWHERE = {
    "ClassifierFreeGuidanceLogitsProcessor",  # its answer has half the lines: by hand only
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",  # runs a model: by hand only
    "GrammarLogitsProcessor",  # needs a tokenizer: see test_grammars
    "HammingDiversityLogitsProcessor",  # needs earlier groups: see its unit tests
    "HealingLogitsProcessor",  # needs a shortened prompt: see its unit tests
}
# Part of a strategy, and behind a field alone: see their unit tests.
INSIDE = {"BacktrackMaskProcessor", "ForceTokensLogitsProcessor"}


def test_every_processor_is_tried():
    public = {
        name
        for name in dir(descant)
        if isinstance(getattr(descant, name), type)
        and issubclass(getattr(descant, name), LogitsProcessor)
        and getattr(descant, name) is not LogitsProcessor
    }
    assert set(PARAMS) == public - ELSEWHERE
    assert {type(stage.processor).__name__ for stage in PROCESSOR_SPECS} <= public | INSIDE


EXAMPLES = [8, pytest.param(40, marks=pytest.mark.slow)]


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("name", PARAMS)
def test_a_processor_with_a_column_of_parameters(name, examples):
    check_processor(getattr(descant, name).make_unbound(), PARAMS[name], examples=examples)


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("processor", BY_HAND, ids=lambda one: type(one).__name__)
def test_a_processor_made_by_hand(processor, examples):
    check_processor(processor, examples=examples)


def test_a_users_own_function():
    check_processor(lambda ids, scores: scores - scores.logsumexp(-1, keepdim=True))


# ------------------------------------------------------------------- the law itself can fail
class _Neighbourly:
    def process(self, context, scores):
        return scores - scores.nan_to_num(0.0, 0.0, 0.0).mean()


class _Destructive:
    def process(self, context, scores):
        return scores.mul_(0.5)


class _Rubbish:
    """Counts tokens beyond a row's end."""

    def process(self, context, scores):
        return scores + context._tokens.sum(1, keepdim=True)


class _Placed:
    def process(self, context, scores):
        return scores + torch.arange(len(scores))[:, None]


class _Counting:
    calls = 0

    def process(self, context, scores):
        self.calls += 1
        return scores + self.calls


class _Narrow:
    def process(self, context, scores):
        return scores[:, :-1]


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (_Neighbourly(), "differ"),
        (_Destructive(), "changed `scores` in place"),
        (_Rubbish(), "differ"),
        (_Placed(), "differ"),
        (_Counting(), "two results"),
        (_Narrow(), "the result is"),
    ],
)
def test_a_processor_that_breaks_the_law_is_found(broken, words):
    with pytest.raises(AssertionError, match=words):
        check_processor(broken)

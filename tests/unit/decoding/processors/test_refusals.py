"""Wrong arguments of processors: each is refused by its name."""

from __future__ import annotations

import math
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

import descant as made
from descant.errors import ConfigError, InputError
from tests.support import pretrained

IDS, MASK = torch.tensor([[1, 2, 3]]), torch.tensor([[0, 1, 1]])
ONE, LOW = torch.tensor([[1]]), torch.zeros(1, 5)


class Call:
    """The arguments of a processor, with positions and names."""

    def __init__(self, *given, **named):
        self.given, self.named = given, named


def grammar(spec, **named):
    tokenizer = AutoTokenizer.from_pretrained(pretrained.folder("smollm2"))
    return made.GrammarLogitsProcessor(spec, tokenizer, **named)


def green(**given):
    return made.WatermarkLogitsProcessor(**{"vocab_size": 61, "device": "cpu", "hashing_key": 5, **given})


def unbatched(*arguments):
    return made.UnbatchedClassifierFreeGuidanceLogitsProcessor(*arguments)


def encoder_ngrams(size):
    return made.EncoderNoRepeatNGramLogitsProcessor(size, ONE)


def encoder_penalty(penalty):
    return made.EncoderRepetitionPenaltyLogitsProcessor(penalty, ONE)


# What is made, with which arguments (one, or a call's), and the words of the error.
REFUSED = [
    (made.MirostatLogitsWarper, 0.0, "mirostat_tau"),
    (made.MirostatLogitsWarper, Call(1.0, -1.0), "mirostat_eta"),
    (made.MirostatLogitsWarper, Call(1.0, min_tokens_to_keep=0), "min_tokens_to_keep"),
    (made.AdaptivePLogitsWarper, 1.5, "adaptive_p_target"),
    (made.AdaptivePLogitsWarper, Call(0.5, 1.0), "adaptive_p_decay"),
    (made.DynamicTemperatureLogitsWarper, Call(0.0, 1.0), "temperature"),
    (made.DynamicTemperatureLogitsWarper, Call(1.0, -1.0), "dynamic_temperature_range"),
    (made.DynamicTemperatureLogitsWarper, Call(1.0, 1.0, -1.0), "dynamic_temperature_exponent"),
    (made.PresencePenaltyLogitsProcessor, 2.5, "presence_penalty"),
    (made.FrequencyPenaltyLogitsProcessor, -3, "frequency_penalty"),
    (made.FrequencyPenaltyLogitsProcessor, Call(1, prompt_length=-1), "prompt_length"),
    (made.DRYLogitsProcessor, -1.0, "dry_multiplier"),
    (made.DRYLogitsProcessor, Call(1.0, 0.5), "dry_base"),
    (made.DRYLogitsProcessor, Call(1.0, 2.0, 0), "dry_allowed_length"),
    (made.DRYLogitsProcessor, Call(1.0, dry_range=-1), "dry_range"),
    (made.ThinkingBudgetLogitsProcessor, Call(-1, [1]), "thinking_budget"),
    (made.ThinkingBudgetLogitsProcessor, Call(1, []), "thinking_end"),
    (made.ThinkingBudgetLogitsProcessor, Call(1, [1], prompt_length=-1), "prompt_length"),
    (made.TopNSigmaLogitsWarper, 0.0, "top_n_sigma"),
    (made.TopNSigmaLogitsWarper, math.nan, "top_n_sigma"),
    (made.TopHLogitsWarper, 0, "top_h"),
    (made.TopHLogitsWarper, 1.1, "top_h"),
    (made.PLessLogitsWarper, Call(min_tokens_to_keep=0), "min_tokens_to_keep"),
    (made.XTCLogitsWarper, 1.1, "xtc_probability"),
    (made.XTCLogitsWarper, Call(0.5, -0.1), "xtc_threshold"),
    *(
        (kind, Call(0.5, min_tokens_to_keep=0), "`min_tokens_to_keep` must be an integer")
        for kind in (
            made.TopPLogitsWarper, made.MinPLogitsWarper, made.TypicalLogitsWarper,
            made.EpsilonLogitsWarper, made.EtaLogitsWarper,
        )
    ),
    *(
        (kind, value, "`(mass|epsilon)` must be")
        for kind, value in product(
            (made.TypicalLogitsWarper, made.EpsilonLogitsWarper, made.EtaLogitsWarper),
            (0.0, 1.0, -0.1, "0.5", math.nan, True),
        )
    ),
    (made.GumbelWatermarkLogitsProcessor, -1, "`key`"),
    (made.GumbelWatermarkLogitsProcessor, 1.5, "`key`"),
    (made.GumbelWatermarkLogitsProcessor, Call(1, context_width=0), "`context_width`"),
    (made.GumbelWatermarkLogitsProcessor, Call(1, nonce=-1), "`nonce`"),
    (made.GumbelWatermarkLogitsProcessor, Call(1, nonces=0), "`nonces`"),
    (made.GumbelWatermarkLogitsProcessor, Call(1, prompt_length=-1), "`prompt_length`"),
    (green, Call(greenlist_ratio=1.0), "greenlist_ratio"),
    (green, Call(greenlist_ratio=0.001), "greenlist_ratio"),
    (green, Call(bias="much"), "bias"),
    (green, Call(hashing_key=0), "hashing_key"),
    (green, Call(seeding_scheme="righthash"), "seeding_scheme"),
    (green, Call(context_width=0), "context_width"),
    (green, Call(vocab_size=1), "vocab_size"),
    (green, Call(vocab_size=7.0), "vocab_size"),
    (green, Call(device="toaster"), "toaster"),
    (green(), Call(ONE, torch.zeros(1, 60)), "vocab_size"),
    *(
        (made.ExponentialDecayLengthPenalty, Call(pair, 1, 0), "exponential_decay_length_penalty` must be")
        for pair in (None, 3, (1,), (1, 2, 3), (-1, 1.5), (1.5, 1.5), (1, -2.0), (1, "a"))
    ),
    (made.WhisperTimeStampLogitsProcessor, SimpleNamespace(eos_token_id=3),
     "`no_timestamps_token_id` must be an integer"),
    (made.WhisperTimeStampLogitsProcessor, SimpleNamespace(no_timestamps_token_id=3),
     "`generate_config` must have an `eos_token_id`"),
    (made.AlternatingCodebooksLogitsProcessor, Call(0, 3, -1), "`codebook_size` must be an integer"),
    (made.AlternatingCodebooksLogitsProcessor, Call(-1, 3, 2), "`input_start_len` must be an integer"),
    *(
        (kind, value, "`penalty` must be")
        for kind, value in product(
            (made.RepetitionPenaltyLogitsProcessor, encoder_penalty), (0, -1.0, "2", None, True)
        )
    ),
    *(
        (made.EncoderRepetitionPenaltyLogitsProcessor, Call(1.5, ids), "encoder_input_ids` must be token ids")
        for ids in (torch.zeros(1, 2, 3), torch.tensor([0.5]), torch.zeros(0, 3), torch.tensor(3))
    ),
    *(
        (kind, size, "ngram_size` must be an integer")
        for kind in (made.NoRepeatNGramLogitsProcessor, encoder_ngrams)
        for size in (0, -1, 1.5, True, None)
    ),
    *(
        (made.NoBadWordsLogitsProcessor, words, r"`bad_words_ids` must (be a list|contain)")
        for words in ([], [[]], [3], [["a"]], [[-1]], [[1.5]], [[True]], "ab", None)
    ),
    (made.NoBadWordsLogitsProcessor([[1, 5]]), Call(ONE, LOW), "`bad_words_ids` must have token ids below 5"),
    (made.PrefixConstrainedLogitsProcessor, Call([1, 2], 1), "must be a function"),
    *(
        (made.SequenceBiasLogitsProcessor, given, "`sequence_bias` must")
        for given in (
            {}, [], None, 3, {(): 1.0}, {(1,): "a"}, {(1,): math.nan}, {(1,): True}, {(-1,): 1.0},
            {("a",): 1.0}, {1: 1.0}, [[1, 2]], [[[1]]], [[[1], 1.0, 2.0]], [1.0], "ab",
        )
    ),
    *(
        (made.LogitBiasLogitsProcessor, given, "`logit_bias` must")
        for given in ({}, None, [1], {1: "a"}, {1: math.nan}, {-1: 1.0}, {1.5: 1.0}, {"5": 1.0})
    ),
    *(
        (kind(given), Call(ONE, LOW), f"`{name}` must have token ids below 5, the vocabulary size, got 5")
        for kind, given, name in (
            (made.SequenceBiasLogitsProcessor, {(1, 5): 1.0}, "sequence_bias"),
            (made.SequenceBiasLogitsProcessor, {(5, 1): 1.0}, "sequence_bias"),
            (made.LogitBiasLogitsProcessor, {5: 1.0}, "logit_bias"),
        )
    ),
    (made.HammingDiversityLogitsProcessor, Call(0.0, 4, 2), "`diversity_penalty` must be > 0"),
    (made.HammingDiversityLogitsProcessor, Call(-1.0, 4, 2), "`diversity_penalty` must be"),
    (made.HammingDiversityLogitsProcessor, Call("1", 4, 2), "`diversity_penalty` must be"),
    (made.HammingDiversityLogitsProcessor, Call(1.0, 1, 2), "`num_beams` must be"),
    (made.HammingDiversityLogitsProcessor, Call(1.0, 4.0, 2), "`num_beams` must be"),
    (made.HammingDiversityLogitsProcessor, Call(1.0, 4, 1), "`num_beam_groups` must be"),
    (made.HammingDiversityLogitsProcessor, Call(1.0, 4, 5),
     "`num_beam_groups` must be an integer between 2 and 4"),
    (grammar, {}, "exactly one of json_schema"),
    (grammar, Call({"regex": "a"}, eos_token_id=[]), "`eos_token_id` must be at least one token id"),
    (made.HealingLogitsProcessor, Call(b"x", 1),
     r"`healed_suffix` must be a HealedSuffix, got b'x': create it with HealedSuffix\.from_prompt"),
    *(
        (made.ClassifierFreeGuidanceLogitsProcessor, scale, "`guidance_scale` must be")
        for scale in (1, 1.0, 0.5, "3", None, True)
    ),
    (unbatched, Call("2", len), "`guidance_scale` must be a number"),
    (unbatched, Call(math.nan, len), "`guidance_scale` must be a number"),
    (unbatched, Call(math.inf, len), "`guidance_scale` must be finite"),
    (unbatched, Call(2.0, None), "`model` must be a callable model"),
    (unbatched, Call(2.0, len, [1, 2]), "`unconditional_ids` must be token ids"),
    (unbatched, Call(2.0, len, IDS[0]), "`unconditional_ids` must be token ids"),
    (unbatched, Call(2.0, len, IDS.float()), "`unconditional_ids` must be token ids"),
    (unbatched, Call(2.0, len, None, MASK), "`unconditional_ids` must be given"),
    (unbatched, Call(2.0, len, IDS, MASK[:, 1:]), "`unconditional_attention_mask` must be a mask of shape"),
    *(
        (unbatched, Call(2.0, len, IDS, torch.tensor([mask])), "must mask padding on the left only")
        for mask in ([1, 1, 0], [1, 0, 1], [0, 0, 0])
    ),
    (made.AllowedSequencesLogitsProcessor, Call([[1, 2]]),
     "`allowed_sequences` must be an AllowedSequences"),
    (made.AllowedSequencesLogitsProcessor, Call(made.AllowedSequences([[1]], 0), -1),
     "`prompt_length` must be an integer"),
    (made.AllowedSequencesLogitsProcessor(made.AllowedSequences([[30]], 0), 2),
     Call(torch.zeros(1, 2).long(), torch.zeros(1, 8)),
     r"`allowed_sequences` must have token ids below 8, .* got 30"),
    (made.AllowedSequencesLogitsProcessor(made.AllowedSequences([[30]], 0), 2),
     Call(torch.zeros(1, 1).long(), torch.zeros(1, 40)),
     "`input_ids` must start with the 2 tokens of the prompt"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "given", "words"), REFUSED)
def test_wrong_arguments_are_refused_by_name(make, given, words):
    call = given if isinstance(given, Call) else Call(given)
    error = RuntimeError if words == "toaster" else (ConfigError, InputError)
    with pytest.raises(error, match=words):
        make(*call.given, **call.named)

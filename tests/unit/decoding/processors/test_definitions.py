"""Processors against their definitions: rows of different length, each with parameters of its own."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import descant as made
from descant import GenerationConfig
from descant.core.context import PromptInfo
from tests.unit.decoding.processors.reference import chance_scores, context, entropy, softmax, spoil

NEVER = -math.inf
Params = dict[str, Any]


def banned(line, tokens):
    return [NEVER if token in tokens else score for token, score in enumerate(line)]


def sequence(rng, vocabulary, longest=4):
    return [rng.randrange(vocabulary) for _ in range(rng.randint(1, longest))]


def columns(kind, prompt=0, source=(), **fields):
    """The parameters that a config gives a row."""
    info = PromptInfo(prompt, source_ids=lambda: list(source))
    return kind.params_from_config(GenerationConfig(**fields), info)


# ------------------------------------------------------------------------ bans and biases
def ngrams(row, prompt, line, no_repeat_ngram_size, no_repeat_ngram_window):
    first = max(0, len(row) - no_repeat_ngram_window) if no_repeat_ngram_window else 0
    return banned(line, repeated(row, row[first:], no_repeat_ngram_size))


def source_ngrams(row, prompt, line, encoder_no_repeat_ngram_size, source_ids):
    return banned(line, repeated(row, source_ids, encoder_no_repeat_ngram_size))


def repeated(row, source, size):
    """What would repeat an n-gram of a source, one comparison at a time."""
    if len(row) < size - 1:
        return []
    begun = row[len(row) - size + 1 :]
    places = range(len(source) - size + 1)
    return [source[at + size - 1] for at in places if source[at : at + size - 1] == begun]


def completed(row, words):
    """Which of the sequences one more token completes."""
    return [
        word
        for word in words
        if len(row) >= len(word) - 1 and list(row[len(row) - len(word) + 1 :]) == list(word[:-1])
    ]


def bad_words(row, prompt, line, bad_words_ids, bad_words_sizes):
    return banned(line, [word[-1] for word in completed(row, bad_words_ids)])


def sequence_bias(row, prompt, line, sequence_bias_ids, sequence_bias_sizes, sequence_bias):
    line = list(line)
    biases = {tuple(word): bias for word, bias in zip(sequence_bias_ids, sequence_bias, strict=True)}
    for word in completed(row, biases):
        line[word[-1]] += biases[word]
    return line


def logit_bias(row, prompt, line, logit_bias_ids, logit_bias):
    biases = dict(zip(logit_bias_ids, logit_bias, strict=True))
    return [score + biases.get(token, 0.0) for token, score in enumerate(line)]


# ------------------------------------------------------------------------ penalties
def penalised(line, tokens, penalty):
    """Each token once, however often it occurs."""
    return [
        score if token not in tokens else score * penalty if score < 0 else score / penalty
        for token, score in enumerate(line)
    ]


def presence(row, prompt, line, presence_penalty):
    return [score - presence_penalty if token in row[prompt:] else score for token, score in enumerate(line)]


def frequency(row, prompt, line, frequency_penalty):
    return [score - frequency_penalty * row[prompt:].count(token) for token, score in enumerate(line)]


def dry(row, prompt, line, dry_multiplier, dry_base, dry_allowed_length, dry_range, dry_sequence_breakers):
    row = row[-dry_range:] if dry_range else row
    line = list(line)
    for token in range(len(line)):
        longest = 0
        for end in range(len(row) - 1):  # row[end] is matched with the last token, row[end + 1] follows
            if row[end + 1] != token or token in dry_sequence_breakers:
                continue
            match = 0
            while match <= end and row[end - match] == row[len(row) - 1 - match]:
                if row[end - match] in dry_sequence_breakers:
                    break
                match += 1
            longest = max(longest, match)
        if longest and longest >= dry_allowed_length:
            line[token] -= dry_multiplier * dry_base ** (longest - dry_allowed_length)
    return line


def dry_params(rng, vocabulary):
    return {
        "dry_multiplier": rng.choice([0.8, rng.uniform(0, 5)]),
        "dry_base": rng.choice([1.75, 1.0, rng.uniform(1, 3)]),
        "dry_allowed_length": rng.randint(1, 5),
        "dry_range": rng.choice([0, 0, rng.randint(1, 30), 1000]),
        "dry_sequence_breakers": rng.sample(range(vocabulary + 2), rng.randint(0, min(3, vocabulary))),
    }


# ------------------------------------------------------------------------ lengths and temperatures
def decay(row, prompt, line, decay_start, decay_factor, decay_residual, eos_token_ids):
    late = len(row) - decay_start
    return [
        score + abs(score) * (decay_factor**late - 1)
        if late > 0 and token in eos_token_ids and score > NEVER
        else score
        for token, score in enumerate(line)
    ]


def decay_params(rng, vocabulary, prompt):
    pair = rng.randint(0, 4), rng.uniform(0.8, 1.6)
    ends = {"eos_token_ids": rng.sample(range(vocabulary), rng.randint(1, min(3, vocabulary)))}
    given = columns(made.ExponentialDecayLengthPenalty, prompt, exponential_decay_length_penalty=pair)
    assert (given["decay_start"], given["decay_factor"]) == (pair[0] + prompt, pair[1])
    return {**given, **ends}


def thinking(row, prompt, line, thinking_budget, thinking_start, thinking_end):
    token = closing(row, prompt, thinking_budget, thinking_start, thinking_end)
    return list(line) if token is None else [0.0 if at == token else NEVER for at in range(len(line))]


def closing(row, prompt, budget, start, end):
    """The token that must come next, or None."""
    begin = None if start else prompt
    for at in range(len(row)):
        if start and row[at : at + len(start)] == start:
            begin = at + len(start)
    if begin is None:
        return None
    thought = row[begin:]
    if len(thought) < budget or any(thought[at : at + len(end)] == end for at in range(len(thought))):
        return None
    written = [part for part in range(1, len(end)) if thought[-part:] == end[:part]]
    return end[max(written, default=0)]


def thinking_params(rng, vocabulary):
    return {
        "thinking_budget": rng.choice([0, 1, rng.randint(0, 8)]),
        "thinking_start": [rng.randrange(vocabulary) for _ in range(rng.choice([0, 1, 1, 2, 3]))],
        "thinking_end": [rng.randrange(vocabulary) for _ in range(rng.choice([1, 1, 2, 3, 4]))],
    }


def temperature(row, prompt, line, temperature, dynamic_temperature_range, dynamic_temperature_exponent):
    """None where the temperature itself is close to nothing, of which float32 knows little."""
    possible = sum(score > NEVER for score in line)
    if possible < 2:
        return list(line) if temperature > 1e-2 else None
    low = max(0.0, temperature - dynamic_temperature_range)
    high = temperature + dynamic_temperature_range
    share = min(1.0, entropy(softmax(line)) / math.log(possible))
    heat = low + (high - low) * share**dynamic_temperature_exponent
    return [score / heat for score in line] if heat > 1e-2 else None


def temperature_params(rng):
    middle = rng.choice([1.0, rng.uniform(0.2, 2)])
    return {
        "temperature": middle,
        "dynamic_temperature_range": rng.choice([0.0, middle / 2, middle, rng.uniform(0, 3)]),
        "dynamic_temperature_exponent": rng.choice([1.0, 0.0, 0.5, rng.uniform(0, 3)]),
    }


# ------------------------------------------------------------------------ the table
class Definition(NamedTuple):
    """A processor, its definition, and parameters for a row by (rng, vocabulary, prompt length)."""

    kind: type[Any]
    slow: Callable[..., list[float] | None]
    draw: Callable[[random.Random, int, int], Params]
    tolerance: float = 0.0


DEFINITIONS = {
    "n-grams": Definition(
        made.NoRepeatNGramLogitsProcessor,
        ngrams,
        lambda rng, size, prompt: {
            "no_repeat_ngram_size": rng.randint(1, 5),
            "no_repeat_ngram_window": rng.choice([0, 2, 4, 7, 99]),
        },
    ),
    "n-grams of a source": Definition(
        made.EncoderNoRepeatNGramLogitsProcessor,
        source_ngrams,
        lambda rng, size, prompt: columns(
            made.EncoderNoRepeatNGramLogitsProcessor,
            source=[rng.randrange(min(3, size)) for _ in range(rng.randint(0, 9))],
            encoder_no_repeat_ngram_size=rng.randint(1, 4),
        ),
    ),
    "bad words": Definition(
        made.NoBadWordsLogitsProcessor,
        bad_words,
        lambda rng, size, prompt: columns(
            made.NoBadWordsLogitsProcessor,
            bad_words_ids=[sequence(rng, min(3, size)) for _ in range(rng.randint(1, 4))],
        ),
    ),
    "biases of sequences": Definition(
        made.SequenceBiasLogitsProcessor,
        sequence_bias,
        lambda rng, size, prompt: columns(
            made.SequenceBiasLogitsProcessor,
            sequence_bias={
                tuple(sequence(rng, min(3, size))): float(rng.randint(-8, 8))
                for _ in range(rng.randint(1, 6))
            },
        ),
        1e-6,
    ),
    "biases of tokens": Definition(
        made.LogitBiasLogitsProcessor,
        logit_bias,
        lambda rng, size, prompt: columns(
            made.LogitBiasLogitsProcessor,
            logit_bias={rng.randrange(size): rng.choice([2.5, -50.0, -100.0, 1e-3]) for _ in range(3)},
        ),
        1e-6,
    ),
    "repetition": Definition(
        made.RepetitionPenaltyLogitsProcessor,
        lambda row, prompt, line, repetition_penalty: penalised(line, row, repetition_penalty),
        lambda rng, size, prompt: {"repetition_penalty": rng.uniform(0.3, 3.0)},
        1e-6,
    ),
    "repetition of a source": Definition(
        made.EncoderRepetitionPenaltyLogitsProcessor,
        lambda row, prompt, line, encoder_penalty, source_ids: penalised(line, source_ids, encoder_penalty),
        lambda rng, size, prompt: columns(
            made.EncoderRepetitionPenaltyLogitsProcessor,
            source=[rng.randrange(size) for _ in range(rng.randint(0, 6))],
            encoder_repetition_penalty=rng.uniform(0.3, 3.0),
        ),
        1e-6,
    ),
    "presence": Definition(
        made.PresencePenaltyLogitsProcessor,
        presence,
        lambda rng, size, prompt: {"presence_penalty": rng.choice([rng.uniform(-2, 2), 0.0, 1.5])},
        1e-5,
    ),
    "frequency": Definition(
        made.FrequencyPenaltyLogitsProcessor,
        frequency,
        lambda rng, size, prompt: {"frequency_penalty": rng.choice([rng.uniform(-2, 2), 0.0, 1.5])},
        1e-5,
    ),
    "dry": Definition(made.DRYLogitsProcessor, dry, lambda rng, size, prompt: dry_params(rng, size), 1e-5),
    "decay": Definition(made.ExponentialDecayLengthPenalty, decay, decay_params, 1e-6),
    "thinking": Definition(
        made.ThinkingBudgetLogitsProcessor, thinking, lambda rng, size, prompt: thinking_params(rng, size)
    ),
    "dynamic temperature": Definition(
        made.DynamicTemperatureLogitsWarper, temperature, lambda rng, *_: temperature_params(rng), 1e-3
    ),
}


def chance_row(rng, vocabulary, longest=24):
    """Tokens of a few sorts, some of the row copied from before, so that there is much to match."""
    row = [rng.randrange(min(vocabulary, rng.choice([1, 2, 3, 64]))) for _ in range(rng.randint(0, longest))]
    if len(row) > 4 and rng.random() < 0.5:
        start = rng.randrange(len(row) // 2)
        row = row + row[start : start + rng.randint(1, len(row))]
    return row


@pytest.mark.parametrize("name", DEFINITIONS)
def test_every_line_is_what_the_definition_says(name):
    kind, slow, draw, tolerance = DEFINITIONS[name]
    rng, tried, asked, changed = random.Random(name), 0, 0, 0
    for _ in range(200):
        vocabulary, count = rng.choice([2, 3, 5, 9, 64]), rng.randint(2, 9)
        rows = [chance_row(rng, vocabulary) for _ in range(count)]
        rows[0] = rows[0] or [1]
        prompts = [rng.randint(0, len(row)) for row in rows]
        params = [draw(rng, vocabulary, prompt) for prompt in prompts]
        lines = [chance_scores(rng, vocabulary) for _ in rows]
        given, nan = spoil(rng, torch.tensor(lines))
        before = given.clone()
        found = kind.make_unbound().process(context(rng, rows, prompts, params), given)
        assert torch.equal(given.nan_to_num(7.0), before.nan_to_num(7.0))
        for at, (row, line) in enumerate(zip(rows, lines, strict=True)):
            wanted = slow(row, prompts[at], line, **params[at])
            tried += 1
            if wanted is None or (at == nan and wanted == line):
                continue
            asked, changed = asked + 1, changed + (wanted != line)
            if at != nan or name == "thinking":
                near = {"rtol": tolerance, "atol": min(tolerance, 1e-4)}
                torch.testing.assert_close(found[at], torch.tensor(wanted), **near)
    assert asked > 0.7 * tried
    assert changed > 150

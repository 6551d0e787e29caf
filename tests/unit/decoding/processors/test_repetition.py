"""Presence, frequency and DRY penalties against versions that count token by token."""

from __future__ import annotations

import random

import pytest
import torch

from descant.decoding.processors.penalties import (
    DRYLogitsProcessor,
    FrequencyPenaltyLogitsProcessor,
    PresencePenaltyLogitsProcessor,
)
from descant.errors import InputError
from tests.unit.decoding.processors.reference import chance_scores, context, drafted, spoil

KINDS = {
    "presence": PresencePenaltyLogitsProcessor,
    "frequency": FrequencyPenaltyLogitsProcessor,
    "dry": DRYLogitsProcessor,
}


# -------------------------------------------------------------------------- the slow versions
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


SLOW = {"presence": presence, "frequency": frequency, "dry": dry}


def chance_params(rng, name, vocabulary):
    if name != "dry":
        return {f"{name}_penalty": rng.choice([rng.uniform(-2, 2), 0.0, 1.5])}
    return {
        "dry_multiplier": rng.choice([0.8, rng.uniform(0, 5)]),
        "dry_base": rng.choice([1.75, 1.0, rng.uniform(1, 3)]),
        "dry_allowed_length": rng.randint(1, 5),
        "dry_range": rng.choice([0, 0, rng.randint(1, 30), 1000]),
        "dry_sequence_breakers": rng.sample(range(vocabulary + 2), rng.randint(0, min(3, vocabulary))),
    }


def chance_row(rng, vocabulary, longest):
    """Tokens of a few sorts, some of the row copied from before, so that there is much to match."""
    row = [rng.randrange(min(vocabulary, rng.choice([1, 2, 3, 64]))) for _ in range(rng.randint(0, longest))]
    if len(row) > 4 and rng.random() < 0.5:
        start = rng.randrange(len(row) // 2)
        row = row + row[start : start + rng.randint(1, len(row))]
    return row


@pytest.mark.parametrize("name", KINDS)
def test_penalties_equal_the_slow_ones(name):
    rng, moved = random.Random(name), 0
    for _ in range(250):
        vocabulary, count = rng.choice([1, 2, 3, 5, 9, 64]), rng.randint(1, 12)
        rows = [chance_row(rng, vocabulary, 24) for _ in range(count)]
        prompts = [rng.randint(0, len(row)) for row in rows]
        params = [chance_params(rng, name, vocabulary) for _ in rows]
        lines = [chance_scores(rng, vocabulary) for _ in rows]
        given, nan = spoil(rng, torch.tensor(lines))
        found = KINDS[name].make_unbound().process(context(rng, rows, prompts, params), given)
        for at, row in enumerate(rows):
            if at != nan:
                wanted = SLOW[name](row, prompts[at], lines[at], **params[at])
                torch.testing.assert_close(found[at], torch.tensor(wanted), rtol=1e-5, atol=1e-5)
                moved += wanted != lines[at]
    assert moved > 250


@pytest.mark.parametrize("name", KINDS)
def test_lines_of_drafts_count_the_drafts_before_them(name):
    rng = random.Random(f"{name} drafts")
    for _ in range(60):
        vocabulary, count, width = rng.choice([2, 3, 9]), rng.randint(1, 5), rng.randint(1, 3)
        rows = [[rng.randrange(vocabulary), *chance_row(rng, vocabulary, 12)] for _ in range(count)]
        prompts = [rng.randint(0, len(row)) for row in rows]
        params = [chance_params(rng, name, vocabulary) for _ in rows]
        drafts = [[rng.randrange(vocabulary) for _ in range(width)] for _ in rows]
        lines = [chance_scores(rng, vocabulary) for _ in range(count * (width + 1))]
        found = (
            KINDS[name]
            .make_unbound()
            .process(drafted(rng, rows, prompts, params, drafts), torch.tensor(lines))
        )
        for at, line in enumerate(lines):
            row, so_far = divmod(at, width + 1)
            wanted = SLOW[name](rows[row] + drafts[row][:so_far], prompts[row], line, **params[row])
            torch.testing.assert_close(found[at], torch.tensor(wanted), rtol=1e-5, atol=1e-5)


def test_by_hand():
    ids, scores = torch.tensor([[1, 1, 2, 1, 1]]), torch.zeros(1, 4)
    assert PresencePenaltyLogitsProcessor(0.5)(ids, scores).tolist() == [[0.0, -0.5, -0.5, 0.0]]
    assert PresencePenaltyLogitsProcessor(0.5, prompt_length=3)(ids, scores).tolist() == [
        [0.0, -0.5, 0.0, 0.0]
    ]
    assert FrequencyPenaltyLogitsProcessor(0.5, prompt_length=1)(ids, scores).tolist() == [
        [0.0, -1.5, -0.5, 0.0]
    ]
    # "1 1" came before, then 2: a match of two. After one 1 of it came 1: a match of one.
    assert DRYLogitsProcessor(3.0)(ids, scores).tolist() == [[0.0, 0.0, -3.0, 0.0]]
    assert DRYLogitsProcessor(3.0, 2.0, 1)(ids, scores).tolist() == [[0.0, -3.0, -6.0, 0.0]]
    assert DRYLogitsProcessor(3.0, 2.0, 1, dry_range=2)(ids, scores).tolist() == [[0.0, -3.0, 0.0, 0.0]]
    assert DRYLogitsProcessor(3.0, 2.0, 1, 0, [2])(ids, scores).tolist() == [[0.0, -3.0, 0.0, 0.0]]
    assert DRYLogitsProcessor(3.0, 2.0, 1, 0, [1])(ids, scores).tolist() == [[0.0, 0.0, 0.0, 0.0]]


def test_a_loop_of_any_length_keeps_the_scores_finite():
    found = DRYLogitsProcessor(0.8)(torch.full((1, 3000), 1), torch.tensor([[0.0, 5.0]]))
    assert found.isfinite().all()
    assert found[0, 0] == 0.0
    assert found[0, 1] < -1e20
    found = DRYLogitsProcessor(0.0)(torch.full((1, 3000), 1), torch.tensor([[0.0, 5.0]]))
    assert found.tolist() == [[0.0, 5.0]]


def test_a_row_without_tokens_is_left_alone():
    scores = torch.randn(2, 5)
    for processor in (
        PresencePenaltyLogitsProcessor(1.0),
        FrequencyPenaltyLogitsProcessor(1.0),
        DRYLogitsProcessor(1.0),
    ):
        for width in (0, 1):
            found = processor(torch.zeros(2, width, dtype=torch.long)[:, :width], scores)
            if width == 0 or isinstance(processor, DRYLogitsProcessor):
                assert torch.equal(found, scores)
            assert found is not scores


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: PresencePenaltyLogitsProcessor(2.5), "presence_penalty"),
        (lambda: FrequencyPenaltyLogitsProcessor(-3), "frequency_penalty"),
        (lambda: FrequencyPenaltyLogitsProcessor(1, prompt_length=-1), "prompt_length"),
        (lambda: DRYLogitsProcessor(-1.0), "dry_multiplier"),
        (lambda: DRYLogitsProcessor(1.0, 0.5), "dry_base"),
        (lambda: DRYLogitsProcessor(1.0, 2.0, 0), "dry_allowed_length"),
        (lambda: DRYLogitsProcessor(1.0, dry_range=-1), "dry_range"),
    ],
)
def test_odd_arguments_are_refused_by_name(make, name):
    with pytest.raises(InputError, match=name):
        make()

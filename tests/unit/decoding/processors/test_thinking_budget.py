"""The thinking budget against a version that reads the row from its beginning."""

from __future__ import annotations

import random

import pytest
import torch

from descant.decoding.processors.lengths import ThinkingBudgetLogitsProcessor
from descant.errors import InputError
from tests.unit.decoding.processors.reference import chance_scores, context, drafted, spoil


def slow(row, prompt, thinking_budget, thinking_start, thinking_end):
    """The token that must come next, or None."""
    begin = None if thinking_start else prompt
    for at in range(len(row)):
        if thinking_start and row[at : at + len(thinking_start)] == thinking_start:
            begin = at + len(thinking_start)
    if begin is None:
        return None
    thought = row[begin:]
    for at in range(len(thought)):
        if thought[at : at + len(thinking_end)] == thinking_end:
            return None
    if len(thought) < thinking_budget:
        return None
    written = 0
    for part in range(1, len(thinking_end)):
        if len(thought) >= part and thought[-part:] == thinking_end[:part]:
            written = part
    return thinking_end[written]


def chance_params(rng, vocabulary):
    return {
        "thinking_budget": rng.choice([0, 1, rng.randint(0, 8)]),
        "thinking_start": [rng.randrange(vocabulary) for _ in range(rng.choice([0, 1, 1, 2, 3]))],
        "thinking_end": [rng.randrange(vocabulary) for _ in range(rng.choice([1, 1, 2, 3, 4]))],
    }


def check(found, line, token):
    if token is None:
        assert found.tolist() == line
    else:
        assert found.tolist() == [0.0 if at == token else -torch.inf for at in range(len(line))]


def test_what_is_forced_is_what_the_slow_one_forces():
    rng, forced, free = random.Random(1), 0, 0
    for _ in range(500):
        vocabulary, count = rng.choice([1, 2, 3, 6]), rng.randint(1, 12)
        rows = [[rng.randrange(vocabulary) for _ in range(rng.randint(0, 14))] for _ in range(count)]
        prompts = [rng.randint(0, len(row)) for row in rows]
        params = [chance_params(rng, vocabulary) for _ in rows]
        lines = [chance_scores(rng, vocabulary) for _ in rows]
        given, nan = spoil(rng, torch.tensor(lines))
        found = ThinkingBudgetLogitsProcessor.make_unbound().process(
            context(rng, rows, prompts, params), given
        )
        for at, row in enumerate(rows):
            token = slow(row, prompts[at], **params[at])
            forced, free = forced + (token is not None), free + (token is None)
            if at != nan or token is not None:
                check(found[at], lines[at], token)
    assert forced > 500
    assert free > 500


def test_lines_of_drafts_count_the_drafts_before_them():
    rng = random.Random(2)
    for _ in range(100):
        vocabulary, count, width = rng.choice([2, 3]), rng.randint(1, 5), rng.randint(1, 3)
        rows = [[rng.randrange(vocabulary) for _ in range(rng.randint(1, 8))] for _ in range(count)]
        prompts = [rng.randint(0, len(row)) for row in rows]
        params = [chance_params(rng, vocabulary) for _ in rows]
        drafts = [[rng.randrange(vocabulary) for _ in range(width)] for _ in rows]
        lines = [chance_scores(rng, vocabulary) for _ in range(count * (width + 1))]
        found = ThinkingBudgetLogitsProcessor.make_unbound().process(
            drafted(rng, rows, prompts, params, drafts), torch.tensor(lines)
        )
        for at, line in enumerate(lines):
            row, so_far = divmod(at, width + 1)
            token = slow(rows[row] + drafts[row][:so_far], prompts[row], **params[row])
            check(found[at], line, token)


def generate_row(processor, row, choices):
    """A row that goes on with the choices, but for what is forced."""
    row, forced = list(row), []
    for token in choices:
        scores = processor(torch.tensor([row], dtype=torch.long), torch.zeros(1, 10))[0]
        if scores.isinf().any():
            token = int(scores.argmax())
            forced.append(token)
        row.append(token)
    return row, forced


def test_a_thought_is_closed_and_not_opened_again():
    processor = ThinkingBudgetLogitsProcessor(3, [7, 8, 7, 9], [5, 6])
    row, forced = generate_row(processor, [1, 5, 6], [1] * 12)
    assert row == [1, 5, 6, 1, 1, 1, 7, 8, 7, 9, 1, 1, 1, 1, 1]
    assert forced == [7, 8, 7, 9]
    # It had begun to close by itself: only the rest is forced.
    row, forced = generate_row(processor, [1, 5, 6], [1, 7, 8, 1, 1, 1])
    assert (row[3:], forced) == ([1, 7, 8, 7, 9, 1], [7, 9])
    row, forced = generate_row(processor, [5, 6], [7, 8, 7, 8, 1, 1, 1])
    assert (row[2:], forced) == ([7, 8, 7, 9, 1, 1, 1], [9])
    # What it ends with may be the beginning of the end twice over: of 7 8 7 8, the last 7 8 count.
    row, forced = generate_row(
        ThinkingBudgetLogitsProcessor(4, [7, 8, 7, 9], [5, 6]), [5, 6], [7, 8, 7, 8, 1, 1, 1]
    )
    assert (row[2:], forced) == ([7, 8, 7, 8, 7, 9, 1], [7, 9])
    # Closed in time: nothing is forced. A second thought has a budget of its own.
    row, forced = generate_row(processor, [5, 6, 7, 8, 7, 9], [1, 1, 1, 1, 5, 6, 1, 1, 1, 1, 1, 1, 1])
    assert (row[12:], forced) == ([1, 1, 1, 7, 8, 7, 9], [7, 8, 7, 9])


def test_without_a_start_everything_generated_is_thought():
    processor = ThinkingBudgetLogitsProcessor(2, 9, prompt_length=3)
    row, forced = generate_row(processor, [9, 9, 9], [1] * 5)
    assert (row[3:], forced) == ([1, 1, 9, 1, 1], [9])
    assert generate_row(ThinkingBudgetLogitsProcessor(0, 9), [], [1, 1, 1]) == ([9, 1, 1], [9])


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: ThinkingBudgetLogitsProcessor(-1, [1]), "thinking_budget"),
        (lambda: ThinkingBudgetLogitsProcessor(1, []), "thinking_end"),
        (lambda: ThinkingBudgetLogitsProcessor(1, [1], prompt_length=-1), "prompt_length"),
    ],
)
def test_odd_arguments_are_refused_by_name(make, name):
    with pytest.raises(InputError, match=name):
        make()

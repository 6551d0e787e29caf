"""Prompt lookup against a search by hand, row by row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from descant.core.context import RowParams, columns_from_rows
from descant.core.rows import Rows
from descant.decoding.speculative.lookup import PromptLookup
from tests.unit.decoding.speculative.rig import copied

GARBAGE = 77  # after the final tokens; must never be matched or copied


def rows_of(texts, params):
    length = torch.tensor([len(text) for text in texts])
    tokens = torch.full((len(texts), int(length.max()) + 2), GARBAGE)
    for line, text in enumerate(texts):
        tokens[line, : len(text)] = torch.tensor(text, dtype=torch.long)
    zeros, numbers = torch.zeros_like(length), torch.arange(len(texts))
    columns = {"params": RowParams(columns_from_rows(params))}
    return Rows(tokens, length, zeros, zeros.clone(), length.clone(), numbers, zeros.clone(), columns)


def drafted(rows, most):
    """What is tried for each row, after the promises of a proposal have been looked at."""
    most = torch.tensor(most)
    return copied(PromptLookup().draft(rows, most, None), rows, most)


def searched(text, gram, most):
    """The longest of at most `gram` tokens that occurred before, the latest time, and what followed."""
    for size in range(min(gram, len(text) - 1), 0, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[-size:]:
                copied = list(text)
                while len(copied) < len(text) + most:
                    copied.append(copied[end + len(copied) - len(text)])
                return copied[len(text) :]
    return []


@st.composite
def batches(draw):
    letters = draw(st.integers(1, 4))
    row = st.tuples(
        st.lists(st.integers(0, letters - 1), max_size=14),
        st.integers(0, 6),
        st.sampled_from([-1, 1, 2, 3, 6]),
        st.sampled_from([-1, 1, 2, 3, 5, 20]),
    )
    return draw(st.lists(row, min_size=1, max_size=6))


@given(batches())
@example([([], 3, 3, 2), ([1], 3, 3, 2), ([1, 1], 3, 3, 2)])
@example([([1, 2, 1, 2, 1], 6, 6, 2), ([1, 2, 3], 6, 6, 2)])
def test_a_batch_is_drafted_as_its_rows_are_by_hand(batch):
    texts, most, wanted, gram = zip(*batch, strict=True)
    params = [
        {"prompt_lookup_num_tokens": a, "max_matching_ngram_size": b}
        for a, b in zip(wanted, gram, strict=True)
    ]
    rows = rows_of(texts, params)
    before = rows.tokens.clone()
    expected = [
        searched(text, 2 if size < 0 else size, max(0, min(room, want))) for text, room, want, size in batch
    ]
    assert drafted(rows, list(most)) == expected
    assert torch.equal(rows.tokens, before)


@pytest.mark.parametrize(
    ("text", "gram", "expected"),
    [
        ([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], 2, [4, 9, 1, 2, 4]),  # the latest, and on into what was copied
        ([1, 2, 5, 7, 2, 6, 8, 1, 2], 2, [5, 7, 2, 6, 8]),  # two tokens before one, though that is later
        ([1, 2, 5, 7, 2, 6, 8, 1, 2], 1, [6, 8, 1, 2, 6]),
        ([3, 1, 2, 5, 4, 1, 2, 6, 3, 1, 2], 3, [5, 4, 1, 2, 6]),  # three before two
        ([4, 7, 7], 2, [7, 7, 7, 7, 7]),
        ([1, 2, 3, 4], 2, []),
    ],
)
def test_which_occurrence_is_copied(text, gram, expected):
    rows = rows_of([text], [{"prompt_lookup_num_tokens": 5, "max_matching_ngram_size": gram}])
    assert drafted(rows, [8]) == [expected]


def test_two_tokens_are_matched_by_default():
    text = [3, 1, 2, 5, 4, 1, 2, 6, 3, 1, 2]
    assert drafted(rows_of([text], [{"prompt_lookup_num_tokens": 2}]), [8]) == [[6, 3]]


def test_rows_that_do_not_use_it_and_rows_without_room_try_nothing():
    text = [1, 2, 1, 2]
    none = {"pad_token_id": 0}
    uses = {"pad_token_id": 0, "prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 2}
    assert drafted(rows_of([text, text, text], [uses, none, uses]), [3, 3, 0]) == [[1, 2, 1], [], []]
    assert drafted(rows_of([text], [none]), [3]) == [[1, 2, 1]]  # no limit given: as many as allowed
    assert drafted(rows_of([text], [uses]), [0]) == [[]]
    assert drafted(rows_of([text, [5]], [none, uses]), [3, 3]) == [[], []]
    empty = rows_of([text], [uses]).take(torch.tensor([], dtype=torch.long))
    assert PromptLookup().draft(empty, torch.tensor([], dtype=torch.long), None).drafts is None

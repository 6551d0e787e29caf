"""A processor whose state is a Column: Python values that fork, move and roll back with their rows."""

from __future__ import annotations

from types import MappingProxyType

import pytest
import torch

import descant
from descant.parts import LogitsProcessor

PROMPTS = torch.tensor([[3, 9, 4, 3, 9], [5, 5, 7, 5, 5], [1, 2, 3, 1, 2]])
METHODS = {
    "greedy": {},
    "sampling": {"do_sample": True, "seed": 7},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "beam sampling": {"num_beams": 3, "do_sample": True, "seed": 7},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
}


class TokenSets:
    """A column with one set of tokens per row."""

    is_per_request = False

    def __init__(self, sets):
        self.sets = list(sets)

    def take(self, parents):
        return TokenSets(self.sets[row] for row in parents.tolist())

    def cat(self, other):
        return TokenSets([*self.sets, *other.sets])


class EachTokenOnce(LogitsProcessor):
    """Bans the tokens that the row has generated already; it reads them from its state only."""

    state = MappingProxyType({"generated_tokens": TokenSets([frozenset()])})

    def process(self, context, scores):
        scores = scores.clone()
        for line, tokens in enumerate(context.state_column("generated_tokens").sets):
            scores[line, sorted(tokens)] = -torch.inf
        return scores

    def advance(self, context, before, after, tokens):
        sets = context.state_column("generated_tokens").sets
        return {
            "generated_tokens": TokenSets(old | {new} for old, new in zip(sets, tokens.tolist(), strict=True))
        }


def each_token_once(input_ids, scores):
    """The same without a state."""
    return scores.scatter(1, input_ids[:, PROMPTS.shape[1] :], -torch.inf)


@pytest.mark.parametrize("method", METHODS)
def test_a_column_state_follows_its_row(tiny, method):
    model = tiny("llama").model
    given = dict(max_new_tokens=10, eos_token_id=None, pad_token_id=0, **METHODS[method])
    found, expected = (
        descant.generate(model, PROMPTS, logits_processor=[one], **given)
        for one in (EachTokenOnce(), each_token_once)
    )
    assert found.tolist() == expected.tolist()
    assert all(len(set(row)) == len(row) for row in found[:, PROMPTS.shape[1] :].tolist())

"""A pool of matchers answers for any text as a new matcher does: forks, rewinds and drafts need no word."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from descant.decoding.grammars.backend import MatcherPool
from tests.support.grammar_texts import BACKENDS, compiled, masks
from tests.support.json_tokenizer import tokenizer

END = 2
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "n"],
    "additionalProperties": False,
}
WHOLE = ['{"name": "abba", "n": 12}', '{"name": "x", "n": 7}', '{"name": "", "n": 0}', '{"nope": 1}', "oh"]


def texts() -> st.SearchStrategy[list[int]]:
    """Beginnings of texts, in the language and out of it."""
    encoded = [tokenizer().encode(text) for text in WHOLE]
    return st.tuples(st.sampled_from(encoded), st.integers(0, 14)).map(lambda pair: pair[0][: pair[1]])


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=25, deadline=None)
@given(steps=st.lists(st.lists(texts(), min_size=1, max_size=6), min_size=1, max_size=6))
def test_a_pool_equals_new_matchers(backend, steps):
    grammar = compiled(tokenizer(), backend, json_schema=SCHEMA)
    pool = MatcherPool(grammar, [END])
    for lines in steps:
        together = masks(pool, lines)
        for text, permitted in zip(lines, together, strict=True):
            alone = masks(MatcherPool(grammar, [END]), [text])[0]
            assert np.array_equal(alone, permitted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_pools_of_one_call_do_not_share_positions(backend):
    grammar = compiled(tokenizer(), backend, json_schema=SCHEMA)
    first, second = MatcherPool(grammar, [END]), MatcherPool(grammar, [0, END])
    text = tokenizer().encode(WHOLE[1])
    assert masks(first, [text])[0].nonzero()[0].tolist() == [END]
    assert masks(second, [text])[0].nonzero()[0].tolist() == [0, END]
    assert masks(first, [text[:3]])[0].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_forced_tokens_spell_what_must_follow(backend):
    grammar = compiled(tokenizer(), backend, json_schema=SCHEMA)
    matcher = grammar.new_matcher()
    vocabulary = grammar.backend.vocabulary.tokens
    forced = matcher.forced_tokens()
    text = b"".join(vocabulary[token] for token in forced)
    assert text
    assert b'{"name": "'.startswith(text)
    assert matcher.accept(forced) == len(forced)
    matcher.rollback(len(forced))
    whole = tokenizer().encode(WHOLE[1])
    assert matcher.accept(whole) == len(whole)
    assert matcher.is_complete()
    assert matcher.is_final()
    assert matcher.forced_tokens() == []
    matcher.rollback(1)
    assert not matcher.is_complete()
    assert not matcher.is_final()

"""What the masks of a backend permit: only texts of the language, and all of them where it is small."""

import json
import random
import re

import jsonschema
import pytest

from descant.decoding.grammars.backend import MatcherPool
from descant.errors import ConfigError
from tests.support.grammar_texts import BACKENDS, compiled, masks, random_text
from tests.support.json_tokenizer import tokenizer
from tests.support.schema_cases import schemas

END = 2


@pytest.mark.ci_cases("0-llguidance", "0-xgrammar")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("part", range(6))
def test_random_texts_of_300_schemas_are_valid(backend, part):
    cases = schemas(300, plain=backend == "xgrammar")[part::6]
    ended = 0
    for index, schema in enumerate(cases):
        pool = MatcherPool(compiled(tokenizer(), backend, json_schema=schema), [END])
        for draw in range(2):
            text, reason = random_text(pool, random.Random(f"{index} {draw}"), END)
            assert reason != "dead", (schema, text)
            if reason == "end":
                ended += 1
                # xgrammar 0.2.8 permits overlong UTF-8 in a string; a detokenizer replaces it.
                decoded = text.decode(errors="replace" if backend == "xgrammar" else "strict")
                jsonschema.validate(json.loads(decoded), schema)
    assert ended >= 1.8 * len(cases)


def test_a_schema_that_xgrammar_does_not_enforce_is_refused_by_name():
    cases = {
        "uniqueItems": {"type": "array", "uniqueItems": True},
        "minimum": {"type": "number", "minimum": 0.5},
        "maxLength": {"maxLength": 3},
        "pattern": {"type": "string", "pattern": "a+"},
        "properties": {"properties": {"a": {}}},
        "required": {"type": "object", "required": ["a"]},
        "allOf": {"allOf": [{"type": "string"}]},
        "type` beside `anyOf": {"type": "string", "anyOf": [{"minLength": 1}]},
        "$ref": {"$ref": "https://example.com/schema"},
        "maxItems` with a fraction": {"type": "array", "maxItems": 2.5},
    }
    for name, schema in cases.items():
        with pytest.raises(ConfigError, match=re.escape(f"`{name}")) as caught:
            compiled(tokenizer(), "xgrammar", json_schema={"type": "object", "properties": {"x": schema}})
        assert caught.value.field == "grammar"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"type": "string"}},
        {"type": "array", "contains": {"type": "integer"}},
        {"if": {"type": "string"}, "then": {"maxLength": 3}},
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        {"oneOf": [{"type": "integer", "minimum": 1}, {"type": "integer", "maximum": 3}]},
        {"$ref": "#/$defs/none"},
        False,
    ],
)
def test_what_no_backend_enforces_is_refused(backend, schema):
    with pytest.raises(ConfigError, match="`grammar` must be a grammar that"):
        compiled(tokenizer(), backend, json_schema=schema)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("grammar", ["root ::= root", "root ::= a\na ::= b\nb ::= a"])
def test_a_grammar_without_texts_is_refused(backend, grammar):
    with pytest.raises(ConfigError, match="no text matches it"):
        compiled(tokenizer(), backend, grammar=grammar)


def test_one_of_with_options_that_exclude_each_other_is_any_of():
    options = [
        {"type": "string", "maxLength": 2},
        {"type": "integer", "minimum": 0, "maximum": 9},
        {"const": None},
        {"enum": [True]},
    ]
    schema = {"oneOf": options}
    for backend in BACKENDS:
        pool = MatcherPool(compiled(tokenizer(), backend, json_schema=schema), [END])
        for draw in range(8):
            text, reason = random_text(pool, random.Random(draw), END)
            assert reason == "end"
            jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_choice_permits_exactly_the_tokens_that_lead_to_one(backend):
    choices = ["abc", "ab", "name: true", "b", "é"]
    pool = MatcherPool(compiled(tokenizer(), backend, choice=choices), [END])
    vocabulary = pool.grammar.backend.vocabulary.tokens
    for text in (b"", b"a", b"ab", b"na", b"name: ", b"\xc3"):
        ids = list(text.decode(errors="replace").encode()) and [
            vocabulary.index(bytes([one])) for one in text
        ]
        permitted = masks(pool, [ids])[0]
        rests = [one.encode()[len(text) :] for one in choices if one.encode().startswith(text)]
        expected = {
            index for index, one in enumerate(vocabulary) if one and any(r.startswith(one) for r in rests)
        }
        expected |= {END} if b"" in rests else set()
        given = {index for index in range(len(vocabulary)) if permitted[index]}
        # Where one text must follow, llguidance permits only the tokenizer's own spelling of it.
        assert given == expected or (len(rests) == 1 and len(given) == 1 and given < expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pattern", ["[ab]{2,3}c?", "(x|yz)+", "\\d{1,3}(\\.\\d{2})?", "a*b"])
def test_random_texts_of_a_regex_match_it(backend, pattern):
    pool = MatcherPool(compiled(tokenizer(), backend, regex=pattern), [END])
    ended = 0
    for draw in range(12):
        text, reason = random_text(pool, random.Random(draw), END, 60)
        if reason == "end":
            ended += 1
            assert re.fullmatch(pattern, text.decode())
    assert ended >= 8


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "grammar",
    ['root ::= "(" root ")" | "x"', 'start: "(" start ")" | "x"'],
    ids=["ebnf", "lark"],
)
def test_a_context_free_grammar(backend, grammar):
    pool = MatcherPool(compiled(tokenizer(), backend, grammar=grammar), [END])
    for draw in range(6):
        text, reason = random_text(pool, random.Random(draw), END, 60)
        if reason == "end":
            assert text.count(b"(") == text.count(b")")
            assert text.strip(b"()") == b"x"


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_json_is_an_object(backend):
    pool = MatcherPool(compiled(tokenizer(), backend, json=True), [END])
    vocabulary = pool.grammar.backend.vocabulary.tokens
    first = {vocabulary[index] for index in masks(pool, [[]])[0].nonzero()[0]}
    assert first <= {b"{", b'{"', b"{}"}
    assert b"{" in first


@pytest.mark.parametrize("backend", BACKENDS)
def test_special_tokens_are_never_text(backend):
    """A special token inside of a JSON string would be dropped when the text is decoded."""
    pool = MatcherPool(compiled(tokenizer(), backend, json_schema={"type": "string"}), [END])
    inside = tokenizer().encode('"ab')
    permitted = masks(pool, [[], inside])
    assert not permitted[:, :3].any()
    complete = masks(pool, [[*inside, tokenizer().encode('"')[0]]])[0]
    assert complete[END]
    assert not complete[:2].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_control_characters_are_escaped_or_refused(backend):
    """xgrammar 0.2.8 permits raw control characters in a string with `maxLength`."""
    for schema in ({"type": "string"}, {"type": "string", "maxLength": 5}):
        pool = MatcherPool(compiled(tokenizer(), backend, json_schema=schema), [END])
        vocabulary = pool.grammar.backend.vocabulary.tokens
        permitted = masks(pool, [tokenizer().encode('"a')])[0]
        control = [index for index, text in enumerate(vocabulary) if text and min(text) < 0x20]
        assert control
        assert not permitted[control].any()

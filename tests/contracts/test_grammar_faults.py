"""Faults of one grammar stay with its request, and what a library would misread is refused."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

import descant
from descant import ConfigError, GenerationConfig, Request
from descant.config.generation_config import FIELDS
from descant.decoding.grammars.backend import MatcherPool
from descant.decoding.grammars.compiler import GrammarCompiler, compile_grammar
from descant.engine.request import CallPlace
from descant.models.loading.tiny_llama import toy
from tests.support.grammar_texts import BACKENDS, compiled, masks
from tests.support.json_tokenizer import tokenizer

EOS = 2
# Every rule of 300 may begin with the same letter: the parser's items exceed a bound of llguidance.
BOMB = "start: s\ns: " + " | ".join(f'"a" x{index}' for index in range(300)) + "\n"
BOMB += "\n".join(f'x{index}: "a" x{index} | s "b{index}"' for index in range(300))


def request(grammar: dict[str, Any] | None, **config: Any) -> Request:
    given = {} if grammar is None else {"grammar": grammar}
    settings = GenerationConfig(max_new_tokens=12, eos_token_id=EOS, pad_token_id=0, **given, **config)
    return Request([5, 6, 40], settings, tokenizer=tokenizer())


@pytest.mark.parametrize("drafts", [False, True])
def test_a_bound_that_one_grammar_exceeds_fails_its_request_alone(drafts):
    session = descant.Session(toy(len(tokenizer())))
    session.admit(
        request({"grammar": BOMB, "backend": "llguidance", "drafts": drafts}),
        request({"regex": "[0-9]{6}", "drafts": drafts}),
        request(None),
    )
    events = {event.request: event for event in session.drain() if not isinstance(event, descant.Tokens)}
    assert isinstance(events[0], descant.Failed)
    assert "`grammar` must stay within the bounds of llguidance" in str(events[0].error)
    assert isinstance(events[1], descant.Finished)
    text = tokenizer().decode(events[1].hypotheses[0].tokens.tolist(), skip_special_tokens=True)
    assert text.isdigit()
    assert isinstance(events[2], descant.Finished)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_beyond_the_tokenizer_are_never_permitted(backend):
    """xgrammar leaves the bits behind the last token set."""
    model = toy(len(tokenizer()) + 40, seed=3)
    session = descant.Session(model)
    wide = request({"regex": "[^a]*", "backend": backend}, do_sample=True, seed=2, temperature=5.0)
    session.admit(wide)
    for event in session.drain():
        if isinstance(event, descant.Finished):
            assert max(event.hypotheses[0].tokens.tolist()) < len(tokenizer())
    pool = MatcherPool(compiled(tokenizer(), backend, regex="[^a]*"), [EOS])
    assert masks(pool, [[]]).shape[1] == len(tokenizer())


def one_of(*options):
    return {"json_schema": {"oneOf": [*options]}}


CONSTANTS = [{"required": ["a"], "properties": {"a": {"const": one}}} for one in (1, 2)]
WHOLE = {"type": "object", "required": ["a"]}
REFUSED = [  # backends, schema, message
    # The options are not objects only.
    *(
        (BACKENDS, one_of(*({**one, **types} for one in CONSTANTS)), "exclude each other")
        for types in ({}, {"type": ["object", "null"]}, {"type": "string"})
    ),
    # xgrammar ignores what stands beside constants.
    *(
        (("xgrammar",), {"json_schema": schema}, "`grammar` must be a grammar that xgrammar")
        for schema in ({"type": "string", "enum": ["a", 1]}, {"type": "string", "const": 1}, {"anyOf": []})
    ),
    # Keywords have values of other types.
    (BACKENDS, one_of({"type": "object", "required": 5}, WHOLE), "`grammar` must be"),
    (BACKENDS, one_of({"type": 5}, WHOLE), "`grammar` must be"),
    (BACKENDS, one_of({"type": [{}]}, WHOLE), "`grammar` must be"),
    (BACKENDS, one_of({"type": "object", "properties": []}, WHOLE), "`grammar` must be"),
]


@pytest.mark.parametrize(
    ("backend", "schema", "message"),
    [(backend, schema, message) for backends, schema, message in REFUSED for backend in backends],
)
def test_a_schema_that_would_be_misread_is_refused(backend, schema, message):
    with pytest.raises(ConfigError, match=message):
        compiled(tokenizer(), backend, **schema)


def test_a_regex_is_not_read_by_another_library():
    with pytest.raises(ConfigError, match="that llguidance can enforce"):
        compiled(tokenizer(), regex=r"\Aa\Z")
    for pattern in (r"\Aa\Z", "a^b", "a$b", r"\q", "[[:alpha:]]", "[a-z&&[^b]]"):
        with pytest.raises(ConfigError, match="in a regular expression"):
            compiled(tokenizer(), "xgrammar", regex=pattern)
    assert compiled(tokenizer(), "xgrammar", regex=r"^\d+\.\w[^a]\$$")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("text", ["\U0001f600 yes", "a\x7f", 'q"\\', "é\n"])
def test_a_choice_of_any_characters(backend, text):
    pool = MatcherPool(compiled(tokenizer(), backend, choice=[text]), [EOS])
    assert masks(pool, [tokenizer().encode(text)])[0].nonzero()[0].tolist() == [EOS]


def test_large_integers_are_exact():
    number = 1234567890123456789
    with pytest.raises(ConfigError, match="not exact"):
        compiled(tokenizer(), "llguidance", json_schema={"enum": [number]})
    pool = MatcherPool(compiled(tokenizer(), json_schema={"enum": [number]}), [EOS])
    assert pool.grammar.backend.name == "xgrammar"
    assert masks(pool, [tokenizer().encode(str(number))])[0][EOS]


@pytest.mark.parametrize("backend", BACKENDS)
def test_references_of_a_tool_count_from_its_parameters(backend):
    parameters = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "alias": {"$ref": "#/properties/name"}},
        "required": ["name", "alias"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    pool = MatcherPool(compiled(tokenizer(), backend, tools=tools, tool_choice="required"), [EOS])
    text = '<tool_call>\n{"name": "f", "arguments": {"name": "x", "alias": "bo"}}\n</tool_call>'
    assert masks(pool, [tokenizer().encode(text)])[0][EOS]


def test_threads_compile_side_by_side():
    compiler, failures = GrammarCompiler(tokenizer()), []

    def work(number: int) -> None:
        for index in range(6):
            try:
                spec = FIELDS["grammar"].parse(
                    {"regex": f"a{{{number + 1}}}b{{{index + 1}}}", "backend": "xgrammar"}
                )
                compiler.compile(spec)
            except Exception as error:
                failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert compiler.num_compilations == 24


def test_lone_surrogates_are_refused():
    with pytest.raises(ConfigError, match="lone surrogates"):
        GenerationConfig(grammar={"regex": "a|\ud800"})


def test_a_compiled_grammar_must_be_that_of_its_request():
    no = compile_grammar(FIELDS["grammar"].parse({"choice": ["no"]}), tokenizer())
    session = descant.Session(toy(len(tokenizer())))
    session.admit(replace(request({"choice": ["yes"]}), _call=CallPlace(compiled_grammar=no)))
    (finished,) = [event for event in session.drain() if isinstance(event, descant.Finished)]
    assert tokenizer().decode(finished.hypotheses[0].tokens.tolist(), skip_special_tokens=True) == "yes"


def test_an_end_token_beyond_the_tokenizer_is_refused():
    session = descant.Session(toy(500))
    refused = session.supports(replace(request({"regex": "a"}), generation_config=GenerationConfig(
        grammar={"regex": "a"}, eos_token_id=400, max_new_tokens=4)))  # fmt: skip
    assert "`eos_token_id` must be a token of the tokenizer" in str(refused)


def test_a_plain_tokenizer_of_tokenizers_works():
    """Its `encode` returns an object with `ids`, and special tokens are no spelling of a text."""
    plain = tokenizer().backend_tokenizer
    session = descant.Session(toy(len(tokenizer())))
    session.admit(replace(request({"choice": ["name: true", "ab"]}), tokenizer=plain))
    (finished,) = [event for event in session.drain() if isinstance(event, descant.Finished)]
    text = tokenizer().decode(finished.hypotheses[0].tokens.tolist(), skip_special_tokens=True)
    assert text in ("name: true", "ab")


def test_an_engine_names_a_bad_prompt_beside_a_grammar():
    with (
        descant.AsyncEngine(toy(len(tokenizer()))) as engine,
        pytest.raises(descant.InputError, match="`prompt`"),
    ):
        engine.submit(replace(request({"regex": "a"}), prompt="text"))

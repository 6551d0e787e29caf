"""The `grammar` field: what it accepts, in which form it is kept, and what it refuses."""

import dataclasses
import json

import pytest

from descant import ConfigError, GenerationConfig

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}


@dataclasses.dataclass
class Person:
    """A person."""

    name: str
    age: int = 3


@pytest.mark.parametrize(
    "grammar",
    [
        {"json_schema": SCHEMA},
        {"json_schema": True},
        {"json": True, "backend": "xgrammar"},
        {"regex": "a+"},
        {"choice": ["a", "b"], "drafts": False},
        {"grammar": 'root ::= "a"'},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
    ],
)
def test_a_grammar_is_plain_data_that_round_trips(grammar):
    config = GenerationConfig(grammar=grammar, max_new_tokens=9)
    again = GenerationConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert hash(again) == hash(config)
    assert json.loads(config.grammar.text).items() >= grammar.items()


def test_the_order_of_properties_counts():
    other = {**SCHEMA, "properties": dict(reversed(SCHEMA["properties"].items()))}
    first, second = (GenerationConfig(grammar={"json_schema": one}) for one in (SCHEMA, other))
    assert first != second
    assert first.grammar == GenerationConfig(grammar={"json_schema": json.dumps(SCHEMA)}).grammar
    assert first.grammar == {"json_schema": SCHEMA}


def test_options_are_not_content():
    plain, options = (
        GenerationConfig(grammar={"regex": "a", **more}).grammar for more in ({}, {"drafts": False})
    )
    assert plain.content == options.content
    assert plain != options
    assert (plain.backend, plain.drafts, options.drafts) == ("auto", True, False)


def test_types_become_schemas():
    pydantic = pytest.importorskip("pydantic")

    class City(pydantic.BaseModel):
        name: str

    for kind, required in ((Person, ["name"]), (City, ["name"])):
        schema = GenerationConfig(grammar={"json_schema": kind}).grammar["json_schema"]
        assert list(schema["required"]) == required
        assert schema["additionalProperties"] is False
    with pytest.raises(ConfigError, match="is a pydantic model or a dataclass"):
        GenerationConfig(grammar={"json_schema": int})


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("a+", "must be a dict with one of"),
        ({}, "exactly one of"),
        ({"regex": "a", "json": True}, "exactly one of"),
        ({"regex": "a", "flags": 1}, "no other keys than"),
        ({"regex": ""}, "`regex` is a text"),
        ({"regex": "a\0"}, "without null characters"),
        ({"json": False}, "`json` is True"),
        ({"json_schema": "{"}, "is JSON, if it is a text"),
        ({"json_schema": 3}, "is a schema"),
        ({"json_schema": {"a": float("nan")}}, "plain data"),
        ({"json_schema": {"a": object()}}, "plain data"),
        ({"choice": []}, "a list of texts"),
        ({"choice": "ab"}, "a list of texts"),
        ({"choice": 5}, "a list of texts"),
        ({"tools": 5}, "`tools` are a list of functions"),
        ({"choice": ["a", ""]}, "a list of texts"),
        ({"choice": [str(one) for one in range(10_001)]}, "at most 10000 texts"),
        ({"regex": "a", "backend": "outlines"}, "`backend` is one of"),
        ({"regex": "a", "drafts": 1}, "`drafts` is True or False"),
        ({"regex": "a" * (1 << 20)}, "at most 1048576 bytes"),
    ],
)
def test_what_is_refused(grammar, message):
    with pytest.raises(ConfigError, match=message):
        GenerationConfig(grammar=grammar)


def test_deep_nesting_is_refused_without_recursion():
    schema = {"type": "integer"}
    for _ in range(50_000):
        schema = {"items": schema}
    with pytest.raises(ConfigError, match="at most 100 levels"):
        GenerationConfig(grammar={"json_schema": schema})


@pytest.mark.parametrize("name", ["forced_bos_token_id", "forced_eos_token_id"])
def test_what_forces_tokens_is_refused(name):
    with pytest.raises(ConfigError, match=f"cannot be combined with `{name}`"):
        GenerationConfig.merge({}, GenerationConfig(grammar={"regex": "a"}, **{name: 3}))

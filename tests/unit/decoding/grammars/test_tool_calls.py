"""Tool calls: their grammar in free text, and reading them back."""

import json
import time

import pytest

from descant.config.generation_config import FIELDS
from descant.decoding.grammars.backend import MatcherPool
from descant.decoding.grammars.json_schema import CALL_BEGIN, CALL_END, ToolCall, parse_tool_calls
from tests.support.grammar_texts import BACKENDS, compiled, masks
from tests.support.json_tokenizer import tokenizer

END = 2


def tool(name, **properties):
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [tool("now"), tool("get", n={"type": "integer", "minimum": 0, "maximum": 9})]
CALL = CALL_BEGIN + '{"name": "get", "arguments": {"n": 7}}' + CALL_END


def ends_after(pool, text):
    """Whether a text is in the language so far, and whether the row may end after it."""
    matcher, is_valid = pool.move(_ids(text))
    return is_valid, is_valid and matcher.is_complete()


def _ids(text):
    import numpy as np

    return np.array(tokenizer().encode(text))


@pytest.mark.parametrize("backend", BACKENDS)
def test_free_text_until_a_call_begins(backend):
    pool = MatcherPool(compiled(tokenizer(), backend, tools=TOOLS), [END])
    assert ends_after(pool, "Let me see.") == (True, True)
    assert ends_after(pool, "a < b") == (True, True)
    assert ends_after(pool, "First " + CALL_BEGIN + '{"na') == (True, False)
    assert ends_after(pool, "First " + CALL) == (True, True)
    assert ends_after(pool, "First " + CALL + " then " + CALL + " done") == (True, True)
    assert ends_after(pool, CALL_BEGIN + '{"name": "other"')[0] is False
    assert ends_after(pool, CALL_BEGIN + '{"name": "get", "arguments": {"n": 12')[0] is False


@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_or_an_answer_that_matches_a_schema(backend):
    answer = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
    pool = MatcherPool(compiled(tokenizer(), backend, tools=TOOLS, answer=answer), [END])
    assert ends_after(pool, '{"n": 7}') == (True, True)
    assert ends_after(pool, CALL) == (True, True)
    assert ends_after(pool, CALL + "\n" + CALL) == (True, True)
    assert ends_after(pool, '{"n": "a')[0] is False
    assert ends_after(pool, "Let")[0] is False
    assert ends_after(pool, CALL + '{"n"')[0] is False
    assert ends_after(pool, CALL_BEGIN + '{"name": "get", "arguments": {"n": 12')[0] is False


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_function_without_parameters_has_no_arguments(backend):
    tools = [{"type": "function", "function": {"name": "now"}}]
    pool = MatcherPool(compiled(tokenizer(), backend, tools=tools, tool_choice="required"), [END])
    assert ends_after(pool, CALL_BEGIN + '{"name": "now", "arguments": {}}' + CALL_END) == (True, True)
    assert ends_after(pool, CALL_BEGIN + '{"name": "now", "arguments": {"a')[0] is False


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get"}}])
def test_a_required_call_comes_at_once_and_alone(backend, choice):
    pool = MatcherPool(compiled(tokenizer(), backend, tools=TOOLS, tool_choice=choice), [END])
    assert ends_after(pool, CALL) == (True, True)
    assert ends_after(pool, "Let")[0] is False
    assert ends_after(pool, CALL + " ")[0] is False
    assert ends_after(pool, CALL.replace("get", "now").replace('"n": 7', ""))[0] is (choice == "required")
    assert masks(pool, [_ids(CALL).tolist()])[0].nonzero()[0].tolist() == [END]


def test_reading_calls():
    text, calls = parse_tool_calls("One. " + CALL + " Two. " + CALL.replace("7", "8"))
    assert text == "One.  Two."
    assert calls == [ToolCall("get", {"n": 7}), ToolCall("get", {"n": 8})]
    assert parse_tool_calls("nothing") == ("nothing", [])
    assert parse_tool_calls("a" + CALL[:-3]) == ("a" + CALL[:-3], [])
    broken = CALL_BEGIN + "{no json" + CALL_END
    assert parse_tool_calls(broken + CALL) == ((broken), [ToolCall("get", {"n": 7})])
    for body in ('["get"]', '{"name": 3}', '{"name": "get", "arguments": [1]}', "[" * 100_000):
        assert parse_tool_calls(CALL_BEGIN + body + CALL_END)[1] == []


def test_references_of_parameters_are_resolved():
    parameters = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/digit"}},
        "required": ["x"],
        "additionalProperties": False,
        "$defs": {"digit": {"enum": [1, 2]}},
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    for backend in BACKENDS:
        pool = MatcherPool(compiled(tokenizer(), backend, tools=tools, tool_choice="required"), [END])
        call = json.dumps({"name": "f", "arguments": {"x": 2}})
        assert ends_after(pool, CALL_BEGIN + call + CALL_END) == (True, True)


@pytest.mark.parametrize(
    "text", [CALL_BEGIN * 20_000, CALL * 5_000, CALL_END * 20_000, (CALL_BEGIN + "{") * 9_000 + CALL_END]
)
def test_reading_hostile_text_takes_linear_time(text):
    """CVE-2025-48887: vLLM's parser of tool calls took exponential time on nested brackets."""
    began = time.process_time()
    parse_tool_calls(text)
    assert time.process_time() - began < 2


def test_the_config_refuses_tools_without_names():
    for tools in ([], [{"type": "function"}], [TOOLS[0], TOOLS[0]], "now", [{"function": {"name": ""}}]):
        with pytest.raises(ValueError, match="`grammar` must be a dict whose `tools`"):
            FIELDS["grammar"].parse({"tools": tools})
    with pytest.raises(ValueError, match="names one of now, get"):
        FIELDS["grammar"].parse({"tools": TOOLS, "tool_choice": {"function": {"name": "none"}}})

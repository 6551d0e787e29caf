"""Tool calls in generated text: what is parsed, and what stays text."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoTokenizer

from descant import GrammarLogitsProcessor, ToolCall, parse_tool_calls
from tests.support import pretrained

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
ADD = ToolCall("add", {"a": 1, "b": [2]})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ("", [])),
        ("No calls.", ("No calls.", [])),
        (CALL, ("", [ADD])),
        (f"First. {CALL}\nThen.", ("First. \nThen.", [ADD])),
        (CALL + CALL, ("", [ADD, ADD])),
        ('<tool_call>\n{"name": "now"}\n</tool_call>', ("", [ToolCall("now", {})])),
    ],
)
def test_calls_are_taken_out_of_the_text(text, expected):
    assert parse_tool_calls(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        CALL[:-5],
        "<tool_call>\nnot JSON\n</tool_call>",
        '<tool_call>\n["add"]\n</tool_call>',
        '<tool_call>\n{"name": 3}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>',
        "<tool_call>\n" + "[" * 100_000 + "\n</tool_call>",
    ],
)
def test_what_is_no_call_stays_in_the_text(text):
    assert parse_tool_calls(text) == (text.strip(), [])
    kept, calls = parse_tool_calls(f"{CALL}{text}")
    assert (kept, calls) == (text.strip(), [ADD])


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_a_function_without_parameters_has_no_arguments(backend):
    tokenizer = AutoTokenizer.from_pretrained(pretrained.folder("smollm2"))
    tools = [{"type": "function", "function": {"name": "now"}}]
    grammar = {"tools": tools, "tool_choice": "required", "backend": backend}
    begun = tokenizer.encode('<tool_call>\n{"name": "now", "arguments": {')
    scores = GrammarLogitsProcessor(grammar, tokenizer)(torch.tensor([begun]), torch.zeros(1, len(tokenizer)))
    permitted = tokenizer.batch_decode(scores[0].isfinite().nonzero())
    assert permitted
    assert all(text.startswith("}") for text in permitted)

"""Tool calls of a growing text: any split gives what the whole text gives."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from descant.decoding.grammars.json_schema import CALL_BEGIN, CALL_END, parse_tool_calls
from descant.serve.routes.chat import ToolCallStream

CALL = CALL_BEGIN + json.dumps({"name": "f", "arguments": {"x": 1}}) + CALL_END
PIECES = st.sampled_from(
    [CALL, CALL_BEGIN, CALL_END, "{}", "<tool", "_call>", "\n", " ", "a", "text", "</tool_call>", "é"]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES, max_size=8), st.data())
def test_any_split_gives_the_same_content_and_calls(pieces, data):
    text = "".join(pieces)
    stream, content, calls = ToolCallStream(), "", []
    start = 0
    while start < len(text):
        size = data.draw(st.integers(1, 9))
        more, found = stream.put(text[start : start + size])
        content, start = content + more, start + size
        calls += found
    content += stream.end()
    assert (content, calls) == parse_tool_calls(text)
    assert stream.num_calls == len(calls)


def test_content_before_a_call_comes_at_once():
    stream = ToolCallStream()
    assert stream.put("I look it up.\n") == ("I look it up.", [])
    assert stream.put("<tool") == ("", [])
    assert stream.put("s are fine") == ("\n<tools are fine", [])

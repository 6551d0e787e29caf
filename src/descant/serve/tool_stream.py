"""Tool calls in a text as it grows: what is content, and which calls are complete."""

from __future__ import annotations

import secrets
from typing import Any

from descant.decoding.grammars.tool_calls import CALL_BEGIN, CALL_END, ToolCall, parse_tool_calls
from descant.serve.json_response import encode_json

__all__ = ["ToolCallStream", "tool_call_json"]


class ToolCallStream:
    """Splits a text into content and calls; joined, they are those of `parse_tool_calls`."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._pending = ""  # may be the beginning of a call
        self._space = ""  # white space behind the content, which only further content releases
        self._has_content = False

    def put(self, text: str) -> tuple[str, list[ToolCall]]:
        """The content and the calls that a further text completes."""
        text = self._pending + text
        content: list[str] = []
        calls: list[ToolCall] = []
        while (begin := text.find(CALL_BEGIN)) >= 0 and (end := text.find(CALL_END, begin)) >= 0:
            after = end + len(CALL_END)
            begin = text.rfind(CALL_BEGIN, 0, end)  # a call contains no other
            found = parse_tool_calls(text[begin:after])[1]
            content.append(text[: begin if found else after])
            calls += found
            text = text[after:]
        keep = _partial_suffix(text, CALL_BEGIN) if begin < 0 else len(text) - begin
        content.append(text[: len(text) - keep])
        self._pending = text[len(text) - keep :]
        self.num_calls += len(calls)
        return self._release("".join(content)), calls

    def end(self) -> str:
        """The content that was held back."""
        pending, self._pending = self._pending, ""
        return self._release(pending)

    def _release(self, content: str) -> str:
        """Content without the white space at the ends of the whole."""
        content = self._space + content
        if not self._has_content:
            content = content.lstrip()
        released = content.rstrip()
        self._space = content[len(released) :]
        self._has_content = self._has_content or bool(released)
        return released


def _partial_suffix(text: str, tag: str) -> int:
    """The length of the longest end of a text that begins a tag."""
    return next((size for size in range(min(len(tag), len(text)), 0, -1) if text.endswith(tag[:size])), 0)


def tool_call_json(call: ToolCall, index: int | None = None) -> dict[str, Any]:
    """A call in OpenAI's form; with its index in a stream."""
    # Not as ASCII, and with lone surrogates escaped, so that the text can be encoded.
    arguments = encode_json(call.arguments).decode()
    function = {"name": call.name, "arguments": arguments}
    one = {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
    return one if index is None else {"index": index, **one}

"""Tool calls as a grammar: free text, and calls between two tags."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from descant.config.fields import thaw
from descant.config.grammar_spec import GrammarSpec
from descant.decoding.grammars.json_schema import map_subschemas

__all__ = ["CALL_BEGIN", "CALL_END", "ToolCall", "ToolGrammar", "parse_tool_calls"]

# The tags of Hermes' format, which the chat templates of SmolLM2, Qwen and others use.
CALL_BEGIN: Final = "<tool_call>\n"
CALL_END: Final = "\n</tool_call>"
_NO_PARAMETERS: Final = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolGrammar(NamedTuple):
    """What the calls of a request may be."""

    schemas: tuple[Mapping[str, Any], ...]  # of the JSON between the tags, one for each tool
    is_required: bool  # exactly one call and no text, else any number of calls in free text

    @classmethod
    def from_spec(cls, spec: GrammarSpec) -> ToolGrammar:
        """The grammar of a spec with `tools`."""
        choice, functions = spec["tool_choice"], [thaw(tool["function"]) for tool in spec["tools"]]
        if isinstance(choice, Mapping):
            name = choice["function"]["name"]
            functions = [one for one in functions if one["name"] == name]
        return cls(tuple(_call_schema(one) for one in functions), choice != "auto")


class ToolCall(NamedTuple):
    """A call in generated text."""

    name: str
    arguments: Mapping[str, Any]


def _call_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a call of one function."""
    parameters = dict(map_subschemas(function.get("parameters") or _NO_PARAMETERS, _moved_reference))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    for name in ("$defs", "definitions"):  # references count from the root
        if name in parameters:
            schema[name] = parameters.pop(name)
    return schema


def _moved_reference(part: dict[str, Any]) -> dict[str, Any]:
    """A schema whose reference counts from the root of the call, not of the parameters."""
    reference = part.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#"):
        return part
    if reference.startswith(("#/$defs/", "#/definitions/")):  # these move to the root
        return part
    return {**part, "$ref": "#/properties/arguments" + reference[1:]}


def parse_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """The text without its calls, and the calls; a call that is cut off or no JSON stays in the text."""
    calls: list[ToolCall] = []
    kept: list[str] = []
    start = 0  # of what is not read yet
    while (end := text.find(CALL_END, start)) >= 0:
        # The last tag before it: JSON has no line break in a string, so that no call contains another.
        begin = text.rfind(CALL_BEGIN, start, end)
        call = None if begin < 0 else _parse_call(text[begin + len(CALL_BEGIN) : end])
        after = end + len(CALL_END)
        kept.append(text[start : after if call is None else begin])
        calls += [] if call is None else [call]
        start = after
    return "".join((*kept, text[start:])).strip(), calls


def _finite_number(text: str) -> float:
    """A number of a call; one that no float holds would become infinite, which is no JSON."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def _parse_call(body: str) -> ToolCall | None:
    try:
        call = json.loads(body, parse_float=_finite_number, parse_constant=_finite_number)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    return ToolCall(call["name"], arguments) if isinstance(arguments, dict) else None

"""The fields of OpenAI's API that stand for a grammar: response formats and tools."""

from __future__ import annotations

from typing import Any

from descant.serve.api_errors import ApiError
from descant.serve.schema.chat import ChatBody, ResponseFormat

__all__ = ["format_grammar", "grammar_of"]


def grammar_of(body: ChatBody) -> dict[str, Any] | None:
    """The grammar of a body's response format or tools; None: its text is free."""
    grammar = format_grammar(body.response_format)
    tools = _tool_grammar(body)
    if grammar is not None and tools is not None:
        message = "`tools` must not be combined with a `response_format`: set `tool_choice` to `none`"
        raise ApiError(400, message, param="response_format", code="invalid_value")
    return grammar if tools is None else tools


def format_grammar(form: ResponseFormat | None) -> dict[str, Any] | None:
    """The grammar of a response format."""
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"json_schema": {"type": "object"}}
    if form.json_schema is None:
        message = "`response_format.json_schema` must be given with the type `json_schema`"
        raise ApiError(400, message, param="response_format", code="missing_required_parameter")
    return {"json_schema": form.json_schema.schema_}


def _tool_grammar(body: ChatBody) -> dict[str, Any] | None:
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            message = "`tool_choice` has no use without `tools`"
            raise ApiError(400, message, param="tool_choice", code="invalid_value")
        return None
    if choice == "none":
        return None
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools]
    plain = choice if choice is None or isinstance(choice, str) else choice.model_dump()
    return {"tools": tools, "tool_choice": plain or "auto"}

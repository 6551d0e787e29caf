"""The body of `/v1/responses`, and the conversation it stands for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from descant.serve.http.errors import ApiError
from descant.serve.schema.bodies import Body, ChatBody, GenerationBody, Items, TextPart, parse_body

__all__ = ["ResponsesBody"]


class InputMessage(Body):
    """A message of the input."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Items[TextPart]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class InputCall(Body):
    """A call that the model has made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class InputCallOutput(Body):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Items[TextPart]
    id: str | None = None
    status: str | None = None


class InputReasoning(Body):
    """A thought of another model, which is not shown to this one."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["reasoning"]


_ITEMS: Final = ("message", "function_call", "function_call_output", "reasoning")


def _item_type(item: Any) -> Any:
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCallOutput, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")],
    Discriminator(
        _item_type,
        custom_error_type="item_type",
        custom_error_message=f"must be an object whose type is one of {', '.join(_ITEMS)}. Leave others out",
    ),
]


class ResponseTool(Body):
    """A function that may be called."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseToolChoice(Body):
    """A tool that must be called."""

    type: Literal["function"]
    name: str


class TextFormat(Body):
    """What the answer must be."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class ReasoningOptions(Body):
    """Hints for models that think."""

    effort: str | None = None  # a variable of the chat template
    summary: None = None  # there are no summaries


class TextOptions(Body):
    """Options of the answer's text."""

    format: TextFormat | None = None
    verbosity: str | None = None  # a variable of the chat template


class ResponsesBody(GenerationBody):
    """A conversation to continue; nothing of it is stored."""

    model_config = ConfigDict(extra="allow")

    input: str | Items[InputItem]
    n: Literal[1] = 1
    # The answer has no place for these.
    return_token_ids: Literal[False] = False
    trace: Literal[False] = False
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    text: TextOptions | None = None
    tools: Items[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool = True
    top_logprobs: int | None = Field(None, ge=0, le=20)
    include: Items[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    reasoning: ReasoningOptions | None = None
    store: Literal[False] = False
    background: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"

    @property
    def field_names(self) -> dict[str, str]:
        """The fields of this body by the names that errors of the engine and of chats have for them."""
        length = "max_output_tokens"
        chat = {"max_tokens": length, "max_new_tokens": length, "response_format": "text"}
        return {**chat, "reasoning_effort": "reasoning", "verbosity": "text", **super().field_names}

    def as_chat(self) -> ChatBody:
        """The same request for `/v1/chat/completions`."""
        own = set(type(self).model_fields) - set(GenerationBody.model_fields)
        shared = self.model_dump(exclude=own | {"stream_options"}, exclude_none=True, exclude_unset=True)
        data: dict[str, Any] = {**shared, "messages": list(self._messages())}
        if self.max_output_tokens is not None:
            data["max_completion_tokens"] = self.max_output_tokens
        if self.reasoning is not None and self.reasoning.effort is not None:
            data["reasoning_effort"] = self.reasoning.effort
        if self.text is not None and self.text.verbosity is not None:
            data["verbosity"] = self.text.verbosity
        if "message.output_text.logprobs" in (self.include or ()) or self.top_logprobs:
            data |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        if self.tools:
            data["tools"] = [
                {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
                for tool in self.tools
            ]
        if isinstance(self.tool_choice, ResponseToolChoice):
            data["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        elif self.tool_choice is not None:
            data["tool_choice"] = self.tool_choice
        data["parallel_tool_calls"] = self.parallel_tool_calls
        form = None if self.text is None else self.text.format
        if form is not None:
            data["response_format"] = _response_format(form)
        return parse_body(ChatBody, data)

    def _messages(self) -> Iterator[dict[str, Any]]:
        """The input as messages of a chat; neighbouring calls belong to one message."""
        if self.instructions is not None:
            yield {"role": "system", "content": self.instructions}
        if isinstance(self.input, str):
            yield {"role": "user", "content": self.input}
            return
        calls: list[dict[str, Any]] = []
        for item in self.input:
            if isinstance(item, InputCall):
                function = {"name": item.name, "arguments": item.arguments}
                calls.append({"id": item.call_id, "type": "function", "function": function})
                continue
            if isinstance(item, InputReasoning):
                continue
            if calls:
                yield {"role": "assistant", "content": "", "tool_calls": calls}
                calls = []
            if isinstance(item, InputCallOutput):
                yield {"role": "tool", "tool_call_id": item.call_id, "content": _plain_content(item.output)}
            else:
                yield {"role": item.role, "content": _plain_content(item.content)}
        if calls:
            yield {"role": "assistant", "content": "", "tool_calls": calls}


def _plain_content(content: str | list[TextPart]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.text or part.refusal for part in content)


def _response_format(form: TextFormat) -> dict[str, Any]:
    if form.type != "json_schema":
        return {"type": form.type}
    if form.schema_ is None:
        message = "`text.format.schema` must be given with the type `json_schema`"
        raise ApiError(400, message, param="text.format", code="missing_required_parameter")
    return {"type": "json_schema", "json_schema": {"name": form.name, "schema": form.schema_}}

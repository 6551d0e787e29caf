"""The body of `/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from descant.serve.api_errors import ApiError
from descant.serve.schema.common import Body, GenerationBody, Items

__all__ = ["ChatBody", "ChatMessage", "ResponseFormat", "Tool", "ToolChoice"]


_PART_TYPES: Final = ("text", "input_text", "output_text", "refusal")


def _check_part_type(kind: Any) -> Any:
    if kind in _PART_TYPES:
        return kind
    shown = str(kind)[:40]
    must = f"must be one of {', '.join(_PART_TYPES)}: this server takes no images, sounds and files"
    raise PydanticCustomError(
        "part_type", "{must}, got {got}. Leave the part out", {"must": must, "got": shown}
    )


class TextPart(Body):
    """A part of a message; hints of other services, such as `cache_control`, have no effect."""

    model_config = ConfigDict(extra="ignore")

    type: Annotated[
        Literal["text", "input_text", "output_text", "refusal"], BeforeValidator(_check_part_type)
    ]
    text: str = ""
    refusal: str = ""


class FunctionCall(Body):
    """The function of a tool call; its arguments are JSON text."""

    name: str
    arguments: str = "{}"


class MessageToolCall(Body):
    """A call that the assistant has made."""

    id: str = ""
    type: Literal["function"] = "function"
    index: int | None = None
    function: FunctionCall


class ChatMessage(Body):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[TextPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: Items[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    # Of answers, which clients send back; they are not shown to the model.
    id: str | None = None
    annotations: list[Any] | None = None
    provider_specific_fields: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        """Its content as one text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text or part.refusal for part in self.content or ())


class FunctionTool(Body):
    """A function that may be called."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool in OpenAI's form."""

    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Body):
    """The function of a tool choice."""

    name: str


class ToolChoice(Body):
    """A tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchemaFormat(Body):
    """A schema of the answer."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")


class ResponseFormat(Body):
    """What the answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class ChatBody(GenerationBody):
    """A conversation to continue."""

    model_config = ConfigDict(extra="allow")

    messages: Items[ChatMessage] = Field(min_length=1, max_length=4096)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=100)
    response_format: ResponseFormat | None = None
    tools: Items[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    functions: Annotated[list[Any], Field(max_length=0)] | None = None  # the old form of tools
    reasoning_effort: str | None = None  # a variable of the chat template
    verbosity: str | None = None  # another
    parallel_tool_calls: bool = True
    store: Literal[False] = False
    modalities: list[Literal["text"]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables of the chat template."""
        own = {"reasoning_effort": self.reasoning_effort, "verbosity": self.verbosity}
        given = {name: value for name, value in own.items() if value is not None}
        return {**given, **(self.chat_template_kwargs or {})}

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "`top_logprobs` has no use without `logprobs`", param="top_logprobs")
        if self.continue_final_message and "add_generation_prompt" in self.model_fields_set:
            message = "`add_generation_prompt` must not be given with `continue_final_message`"
            raise ApiError(400, message, param="add_generation_prompt", code="invalid_value")
        return self

    def parameters(self) -> dict[str, Any]:
        """The generation parameters of the declared fields, by their names in `GenerationConfig`."""
        values = super().parameters()
        if self.max_completion_tokens is not None:
            values["max_new_tokens"] = self.max_completion_tokens
        if self.logprobs:
            values["logprobs"] = self.top_logprobs or 0
        return values

"""`/v1/responses`, without storage: each request holds its whole conversation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from descant.serve.bodies import Body, ChatBody, GenerationBody, Items, TextPart, parse_body
from descant.serve.http.errors import ApiError, encode_json
from descant.serve.http.request import RequestState
from descant.serve.model.served_model import ServedModel
from descant.serve.routes.chat import ChatCall


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


class ReasoningPart(Body):
    """A text of a thought."""

    type: Literal["reasoning_text"]
    text: str


class InputReasoning(Body):
    """A thought of a past turn, which the chat template shows or not; without its text it has no effect."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["reasoning"]
    content: Items[ReasoningPart] | None = None


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


class AllowedResponseTools(Body):
    """A choice among some of the tools, of which the model sees all."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Items[ResponseToolChoice]


class TextFormat(Body):
    """The form of the answer."""

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
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | AllowedResponseTools | None = None
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
            data["tool_choice"] = _chat_tool(self.tool_choice)
        elif isinstance(self.tool_choice, AllowedResponseTools):
            tools = [_chat_tool(tool) for tool in self.tool_choice.tools]
            allowed = {"mode": self.tool_choice.mode, "tools": tools}
            data["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
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
        thought: dict[str, Any] = {}  # of the assistant's next message
        for item in self.input:
            if isinstance(item, InputCall):
                function = {"name": item.name, "arguments": item.arguments}
                calls.append({"id": item.call_id, "type": "function", "function": function})
                continue
            if calls:
                yield {"role": "assistant", "content": "", "tool_calls": calls, **thought}
                calls, thought = [], {}
            if isinstance(item, InputReasoning):
                text = "".join(part.text for part in item.content or ())
                thought = {"reasoning_content": text} if text else {}
            elif isinstance(item, InputCallOutput):
                yield {"role": "tool", "tool_call_id": item.call_id, "content": _plain_content(item.output)}
            else:
                own = thought if item.role == "assistant" else {}
                yield {"role": item.role, "content": _plain_content(item.content), **own}
                thought = {}
        if calls:
            yield {"role": "assistant", "content": "", "tool_calls": calls, **thought}


def _chat_tool(choice: ResponseToolChoice) -> dict[str, Any]:
    """A named tool in the form of chats."""
    return {"type": "function", "function": {"name": choice.name}}


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


@dataclass(frozen=True)
class _TextItem:
    """A kind of output item that has a text."""

    kind: str
    prefix: str  # of its id

    def part(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        """The text as a part of the item."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def json(self, item_id: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        """The item with its parts; without any it is in progress."""
        status = "completed" if content else "in_progress"
        own: dict[str, Any] = {"summary": []} if self.kind == "reasoning" else {"role": "assistant"}
        return {"type": self.kind, "id": item_id, **own, "status": status, "content": content}


MESSAGE_ITEM: Final = _TextItem("message", "msg_")
REASONING_ITEM: Final = _TextItem("reasoning", "rs_")


class ResponseCall(ChatCall):
    """A chat in the form of the Responses API: a reasoning item, a message item, an item for each call."""

    body_type = ResponsesBody
    id_prefix = "resp_"

    def __init__(self, model: ServedModel, state: RequestState, body: ResponsesBody) -> None:
        super().__init__(model, state, body.as_chat())
        self._body = body
        self._text: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._items: list[dict[str, Any]] = []  # of the output, in order
        self._open_item: _TextItem | None = None
        self._number = 0  # of the next event

    async def answer(self) -> dict[str, Any]:
        """The response without streaming."""
        async for _ in self.events():
            pass
        return self._response()

    async def events(self) -> AsyncIterator[bytes]:
        """The response as server-sent events."""
        await self.start()
        has_begun = False
        async with aclosing(self.pieces()) as pieces:  # type: ignore[type-var]
            async for _, piece in pieces:
                if not has_begun:
                    has_begun = True
                    for kind in ("response.created", "response.in_progress"):
                        yield self._event(kind, response=self._response("in_progress"))
                for event in self._piece_events(piece):
                    yield event
        for event in self._end_item():
            yield event
        response = self._response()
        yield self._event(f"response.{response['status']}", response=response)

    def error_event(self, error: ApiError) -> bytes:
        """An error after the first event."""
        return self._event("error", message=error.message, code=error.code, param=error.param)

    def _piece_events(self, piece: dict[str, Any]) -> Iterator[bytes]:
        """The events by what the answer has gained."""
        logprobs = piece.get("logprobs") or []
        if thought := piece.get("reasoning"):
            yield from self._begin_item(REASONING_ITEM)
            self._text.append(thought)
            yield self._event("response.reasoning_text.delta", **self._place(), delta=thought)
        if piece.get("content") or (logprobs and self._open_item is MESSAGE_ITEM):
            yield from self._begin_item(MESSAGE_ITEM)
            self._logprobs += logprobs
            text = piece.get("content", "")
            self._text.append(text)
            yield self._event("response.output_text.delta", **self._place(), delta=text, logprobs=logprobs)
        for call in piece.get("tool_calls", ()):
            yield from self._end_item()
            yield from self._call_events(call)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": len(self._items), "content_index": 0}

    @property
    def _item_id(self) -> str:
        """The id of the open item."""
        assert self._open_item is not None
        index = sum(item["type"] == self._open_item.kind for item in self._items)
        return f"{self._open_item.prefix}{self.state.id}{'_' * index}"  # a further one is another item

    def _begin_item(self, item: _TextItem) -> Iterator[bytes]:
        if self._open_item is item:
            return
        yield from self._end_item()
        self._open_item = item
        begun = item.json(self._item_id, [])
        yield self._event("response.output_item.added", output_index=len(self._items), item=begun)
        yield self._event("response.content_part.added", **self._place(), part=item.part("", []))

    def _end_item(self) -> Iterator[bytes]:
        item = self._open_item
        if item is None:
            return
        text, logprobs = "".join(self._text), self._logprobs
        part, extra = item.part(text, logprobs), {"logprobs": logprobs} if item is MESSAGE_ITEM else {}
        yield self._event(f"response.{part['type']}.done", **self._place(), text=text, **extra)
        yield self._event("response.content_part.done", **self._place(), part=part)
        ended = item.json(self._item_id, [part])
        yield self._event("response.output_item.done", output_index=len(self._items), item=ended)
        self._items.append(ended)
        self._text, self._logprobs, self._open_item = [], [], None

    def _call_events(self, call: dict[str, Any]) -> Iterator[bytes]:
        index, name = len(self._items), call["function"]["name"]
        arguments, item_id = call["function"]["arguments"], f"fc_{call['id'].removeprefix('call_')}"
        item = {"type": "function_call", "id": item_id, "call_id": call["id"], "name": name}
        begun = {**item, "arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=index, item=begun)
        place = {"item_id": item_id, "output_index": index}
        yield self._event("response.function_call_arguments.delta", **place, delta=arguments)
        yield self._event("response.function_call_arguments.done", **place, arguments=arguments, name=name)
        ended = {**item, "arguments": arguments, "status": "completed"}
        yield self._event("response.output_item.done", output_index=index, item=ended)
        self._items.append(ended)

    def _event(self, kind: str, **values: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._number, **values}
        self._number += 1
        text = encode_json(data)
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), text)

    def _response(self, status: str | None = None) -> dict[str, Any]:
        """The response object; without a status it has ended."""
        body = self._body
        is_cut = status is None and self.choices[0].finish_reason == "length"
        used = self.usage
        cached = used.get("prompt_tokens_details", {"cached_tokens": 0})
        usage = {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {**cached, "cache_write_tokens": 0},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": used.get("completion_tokens_details", {"reasoning_tokens": 0}),
            "total_tokens": used["total_tokens"],
        }
        given = body.model_dump(include={"tools", "tool_choice", "text"}, exclude_none=True, by_alias=True)
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status or ("incomplete" if is_cut else "completed"),
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.model.settings.model_name,
            "output": self._items,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "temperature": body.temperature,
            "text": given.get("text", {"format": {"type": "text"}}),
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": given.get("tools", []),
            "top_p": body.top_p,
            "truncation": body.truncation,
            "usage": usage if status is None else None,
            "metadata": body.metadata or {},
        }

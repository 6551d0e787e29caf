"""`/v1/responses`, without storage: each request holds its whole conversation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

from descant.serve.http.errors import ApiError, encode_json
from descant.serve.http.request import RequestState
from descant.serve.model.served_model import ServedModel
from descant.serve.routes.chat import ChatCall
from descant.serve.schema.responses import ResponsesBody

__all__ = ["ResponseCall"]


class ResponseCall(ChatCall):
    """A chat in the form of the Responses API: one message item, then an item for each call."""

    body_type = ResponsesBody
    id_prefix = "resp_"

    def __init__(self, model: ServedModel, state: RequestState, body: ResponsesBody) -> None:
        super().__init__(model, state, body.as_chat())
        self._body, self._message_id = body, f"msg_{state.id}"
        self._text: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._items: list[dict[str, Any]] = []  # of the output, in order
        self._has_message = False
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
        for event in self._end_message():
            yield event
        response = self._response()
        yield self._event(f"response.{response['status']}", response=response)

    def error_event(self, error: ApiError) -> bytes:
        """An error after the first event."""
        return self._event("error", message=error.message, code=error.code, param=error.param)

    def _piece_events(self, piece: dict[str, Any]) -> Iterator[bytes]:
        """The events by what the answer has gained."""
        logprobs = piece.get("logprobs") or []
        self._logprobs += logprobs
        if piece.get("content") or (logprobs and self._has_message):
            yield from self._begin_message()
            text = piece.get("content", "")
            self._text.append(text)
            yield self._event("response.output_text.delta", **self._place(), delta=text, logprobs=logprobs)
        for call in piece.get("tool_calls", ()):
            yield from self._end_message()
            yield from self._call_events(call)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._message_id, "output_index": len(self._items), "content_index": 0}

    def _begin_message(self) -> Iterator[bytes]:
        if self._has_message:
            return
        self._has_message = True
        item = self._message_item("in_progress", [])
        yield self._event("response.output_item.added", output_index=len(self._items), item=item)
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield self._event("response.content_part.added", **self._place(), part=part)

    def _end_message(self) -> Iterator[bytes]:
        if not self._has_message:
            return
        text, logprobs = "".join(self._text), self._logprobs
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
        yield self._event("response.output_text.done", **self._place(), text=text, logprobs=logprobs)
        yield self._event("response.content_part.done", **self._place(), part=part)
        item = self._message_item("completed", [part])
        yield self._event("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        self._message_id += "_"  # a further message would be another item
        self._text, self._logprobs, self._has_message = [], [], False

    def _message_item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "type": "message",
            "id": self._message_id,
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _call_events(self, call: dict[str, Any]) -> Iterator[bytes]:
        index, name = len(self._items), call["function"]["name"]
        arguments, number = call["function"]["arguments"], f"fc_{call['id'].removeprefix('call_')}"
        item = {"type": "function_call", "id": number, "call_id": call["id"], "name": name}
        begun = {**item, "arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=index, item=begun)
        place = {"item_id": number, "output_index": index}
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
            "output_tokens_details": {"reasoning_tokens": 0},
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

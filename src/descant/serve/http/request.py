"""One HTTP request: its state, its body, and its response as a stream of events."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope, Send

from descant.serve.http.errors import ApiError, api_error, in_words_of
from descant.serve.http.keys import ApiKey, RequestLease

_LARGE_BODY: Final = 64 * 2**10
_MAX_NESTING: Final = 128
BODY_SECONDS: Final = 60.0  # for the whole body of a request


@dataclass(eq=False)
class RequestState:
    """The state of one HTTP request."""

    id: str = field(default_factory=lambda: secrets.token_hex(12))
    began: float = field(default_factory=time.monotonic)
    key: ApiKey | None = None
    lease: RequestLease | None = None
    status: int = 0  # 0: no response has begun
    # Of the request, where an error would have another name for it.
    field_names: Mapping[str, str] = field(default_factory=dict)
    model_name: str | None = None  # that the client used, if it is one of the model's
    first_output_at: float | None = None  # when the first text came, as `began` is counted
    num_prompt_tokens: int = 0
    num_new_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    error_code: str | None = None
    prompt: Any = None  # only where the server logs prompts
    is_disconnected: bool = False
    failure: Exception | None = None  # an internal error, for the log

    @classmethod
    def of(cls, scope: Scope) -> RequestState:
        """The state of an ASGI scope."""
        state = scope["state"]["request"]
        assert isinstance(state, RequestState)
        return state

    @property
    def salt(self) -> bytes:
        """The salt that separates its key from others."""
        assert self.key is not None
        return self.key.salt

    def reserve(self, prompt_tokens: int, new_tokens: int) -> None:
        """Count a prompt, and reserve the tokens that it may use."""
        self.num_prompt_tokens += prompt_tokens
        if self.lease is not None:
            self.lease.reserve(prompt_tokens + new_tokens)

    def end(self) -> None:
        """Return what was reserved and not used."""
        if self.lease is not None:
            self.lease.end(self.num_prompt_tokens + self.num_new_tokens)


async def read_json(http: HttpRequest, max_bytes: int) -> Any:
    """The JSON value of a request's body."""
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Also keeps forms of other sites out, which a browser sends without asking the server.
        message = "the body must be JSON with the header `Content-Type: application/json`"
        raise ApiError(415, message, code="unsupported_media_type")
    body = await read_body(http.receive, http.headers.get("content-length"), max_bytes)
    # A large one takes a while, in which other requests go on.
    return _parse(body) if len(body) <= _LARGE_BODY else await asyncio.to_thread(_parse, body)


def _parse(body: bytes) -> Any:
    try:
        value = json.loads(body, parse_constant=_reject_constant)
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None
    except ValueError as error:
        shown = str(error) if isinstance(error, json.JSONDecodeError) else "it is not valid"
        raise ApiError(400, f"the body must be JSON: {shown}", code="invalid_json") from None
    _check_nesting(value)
    return value


def _check_nesting(value: Any) -> None:
    """Raise for a body nested so deeply that writing a part of it back would fail."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(_MAX_NESTING):
        parts = (part.values() if isinstance(part, dict) else part for part in level)
        level = [item for part in parts for item in part if isinstance(item, dict | list)]
        if not level:
            return
    raise ApiError(400, f"the body must be nested at most {_MAX_NESTING} levels deep", code="invalid_json")


async def read_body(receive: Receive, length: str | None, max_bytes: int) -> bytes:
    """The bytes of a body, or an error as soon as there are too many."""
    error = ApiError(413, f"the body must have at most {max_bytes} bytes", code="body_too_large")
    if length is not None and length.isdecimal() and int(length) > max_bytes:
        raise error
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _read_parts(receive, max_bytes, error)
    except TimeoutError:
        raise ApiError(408, "the body has not come in time", code="timeout") from None


async def _read_parts(receive: Receive, max_bytes: int, error: ApiError) -> bytes:
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(499, "the client has disconnected", code="disconnected")
        part = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise error
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number in JSON")


Result = TypeVar("Result")

_HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # of nginx: events must not wait for each other
}


class ClientDisconnected(Exception):
    """The client has closed the connection."""


async def until_disconnect(receive: Receive, work: Awaitable[Result]) -> Result:
    """The result of some work, which is cancelled when the client closes the connection.

    The body of the request must have been read.
    """
    task = asyncio.ensure_future(work)
    listener = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, listener}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnected
    finally:
        task.cancel()
        listener.cancel()
        # A cancelled task releases what it holds before the response ends.
        await asyncio.wait({task, listener})
        if not task.cancelled():
            task.exception()  # seen, so that asyncio does not report it
        # An error refers to this frame and the task to the error: without this it would stay for a while.
        del task, listener


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """A response of server-sent events.

    Nothing is sent before the first event, so that an error before it has a status of its own. An error
    after it is an event, and the stream ends without `[DONE]`.
    """

    def __init__(self, events: AsyncIterator[bytes], format_error: Callable[[ApiError], bytes]) -> None:
        self._events, self._format_error = events, format_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        await until_disconnect(receive, self._send_all(RequestState.of(scope), send))

    async def _send_all(self, state: RequestState, send: Send) -> None:
        async with aclosing(self._events) as events:  # type: ignore[type-var]
            try:
                async for event in events:
                    if not state.status:
                        await self._start(state, send)
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except Exception as error:
                if not state.status:
                    raise
                failure = in_words_of(api_error(error), state.field_names)
                state.error_code = failure.code
                event = self._format_error(failure)
                await send({"type": "http.response.body", "body": event, "more_body": True})
                if failure.status >= 500:
                    state.failure = error
        await send({"type": "http.response.body", "body": b""})

    async def _start(self, state: RequestState, send: Send) -> None:
        state.status = 200
        headers = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

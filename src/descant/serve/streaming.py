"""Server-sent events, and work that ends with its connection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final, TypeVar

from starlette.types import Receive, Scope, Send

from descant.serve.api_errors import ApiError, api_error, in_words_of
from descant.serve.exchange import Exchange
from descant.trace.records import to_json_line

__all__ = ["EventStream", "last_chunks", "trace_chunk", "until_disconnect", "usage_field"]

Result = TypeVar("Result")

_DONE: Final = b"data: [DONE]\n\n"
_HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # of nginx: events must not wait for each other
}


def usage_field(usage: Mapping[str, Any]) -> bytes:
    """The tokens used so far, as a further field of a chunk."""
    return b', "usage": %b' % json.dumps(usage).encode()


def trace_chunk(head: bytes, records: Sequence[Any]) -> bytes:
    """A chunk of trace records; `head` is the chunk's JSON object up to its choices, left open."""
    lines = ", ".join(to_json_line(record) for record in records)
    return b'data: %b, "choices": [], "trace": [%b]}\n\n' % (head, lines.encode())


def last_chunks(head: bytes, trace_id: str | None, usage: Mapping[str, Any] | None) -> Iterator[bytes]:
    """What ends a stream: a chunk with the trace's id and the usage where there are any, and `[DONE]`."""
    fields = {"trace_id": trace_id, "usage": usage}
    last = {name: value for name, value in fields.items() if value is not None}
    if last:
        yield b'data: %b, "choices": [], %b}\n\n' % (head, json.dumps(last)[1:-1].encode())
    yield _DONE


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

    def __init__(
        self, events: AsyncIterator[bytes], format_error: Callable[[ApiError], bytes] | None = None
    ) -> None:
        self._events = events
        self._format_error = format_error or _error_event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        await until_disconnect(receive, self._send_all(Exchange.of(scope), send))

    async def _send_all(self, exchange: Exchange, send: Send) -> None:
        async with aclosing(self._events) as events:  # type: ignore[type-var]
            try:
                async for event in events:
                    if not exchange.status:
                        await self._start(exchange, send)
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except Exception as error:
                if not exchange.status:
                    raise
                failure = in_words_of(api_error(error), exchange.field_names)
                exchange.error_code = failure.code
                event = self._format_error(failure)
                await send({"type": "http.response.body", "body": event, "more_body": True})
                if failure.status >= 500:
                    exchange.failure = error
        await send({"type": "http.response.body", "body": b""})

    async def _start(self, exchange: Exchange, send: Send) -> None:
        exchange.status = 200
        headers = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})


def _error_event(error: ApiError) -> bytes:
    return b"data: " + error.encode() + b"\n\n"

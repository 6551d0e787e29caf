"""The end of a stream in Ray's HTTP proxy, where the replica that streamed has died.

Ray's proxy loads it where the environment in which Ray starts has
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=descant.serve.ray_proxy.middlewares`.
"""

from __future__ import annotations

import json

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from descant.serve.http.errors import ApiError


class ErrorAtEnd:
    """An ASGI application whose streams of events end with an error event if nothing else has ended them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a connection."""
        is_open, num_events = False, 0

        async def send_on(message: Message) -> None:
            nonlocal is_open, num_events
            if message["type"] == "http.response.start":
                kind = Headers(raw=message.get("headers", ())).get("content-type", "")
                is_open = kind.startswith("text/event-stream")
            elif message["type"] == "http.response.body":
                num_events += 1
                is_open = is_open and message.get("more_body", False)
            await send(message)

        await self._app(scope, receive, send_on)
        if is_open:
            error = ApiError(502, "the replica that ran the request has died", code="replica_died")
            event = b"data: " + error.encode()
            if scope["path"].endswith("/responses"):
                fields = {**error.body["error"], "type": "error", "sequence_number": num_events}
                event = b"event: error\ndata: " + json.dumps(fields).encode()
            await send({"type": "http.response.body", "body": event + b"\n\n"})


def middlewares() -> list[Middleware]:
    """The layers around Ray's proxy."""
    return [Middleware(ErrorAtEnd)]

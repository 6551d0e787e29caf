"""The ASGI application of a served model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from descant.serve.access_log import AccessLog
from descant.serve.gateway import Gateway
from descant.serve.metrics import ServerMetrics
from descant.serve.request_spans import RequestSpans
from descant.serve.routes.chat import chat_completions
from descant.serve.routes.completions import completions
from descant.serve.routes.openapi import openapi
from descant.serve.routes.page import show_page, show_page_asset
from descant.serve.routes.responses import responses
from descant.serve.routes.status import health, metrics, ready, show_trace
from descant.serve.routes.tokens import detokenize, list_models, show_model, tokenize
from descant.serve.routes.transcriptions import transcriptions
from descant.serve.served_model import ServedModel
from descant.serve.transcriber import Transcriber

__all__ = ["ROUTES", "ServerApplication"]

TEXT_ROUTES = (
    Route("/", show_page, methods=["GET"]),
    Route("/page/{name}", show_page_asset, methods=["GET"]),
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/responses", responses, methods=["POST"]),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/openapi.json", openapi, methods=["GET"]),
    Route("/traces/{name}", show_trace, methods=["GET"]),
)
SPEECH_ROUTES = (Route("/v1/audio/transcriptions", transcriptions, methods=["POST"]),)
COMMON_ROUTES = (
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{name:path}", show_model, methods=["GET"]),
    Route("/health", health, methods=["GET"]),
    Route("/ready", ready, methods=["GET"]),
    Route("/metrics", metrics, methods=["GET"]),
)
ROUTES = (*TEXT_ROUTES, *SPEECH_ROUTES, *COMMON_ROUTES)


class ServerApplication:
    """The application of a model, for any ASGI server; it closes the engine when it ends."""

    def __init__(self, model: ServedModel | Transcriber, log: AccessLog | None = None) -> None:
        self.model = model
        engine = model.engine if isinstance(model, ServedModel) else None
        routes = SPEECH_ROUTES if engine is None else TEXT_ROUTES
        self._app = Starlette(routes=[*routes, *COMMON_ROUTES], lifespan=self._lifespan)
        state = self._app.state
        state.model, state.is_draining = model, False
        settings = model.settings
        log = log or AccessLog()
        state.metrics = ServerMetrics(engine, settings.model_name)
        state.spans = None
        if settings.otlp_endpoint is not None:
            state.spans = RequestSpans.export_to(settings.otlp_endpoint, settings.model_name, log)
        # The router itself: errors are the gateway's, not those of Starlette's middleware.
        self._gateway = Gateway(self._app.router, state, settings, log)
        self._entry: ASGIApp = self._gateway
        if settings.cors_origins:
            self._entry = CORSMiddleware(
                self._gateway,
                allow_origins=list(settings.cors_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],  # clients send headers of their own; none has an effect by itself
                expose_headers=["x-request-id", "retry-after"],
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a connection event."""
        scope["app"] = self._app
        await self._entry(scope, receive, send)

    @property
    def num_active(self) -> int:
        """The HTTP requests that have not ended, probes left out."""
        return self._gateway.num_active

    def start_draining(self) -> None:
        """Accept no further request; those that run go on."""
        self._app.state.is_draining = True

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        yield
        self.start_draining()
        await asyncio.to_thread(self.model.close)
        if self._app.state.spans is not None:
            await asyncio.to_thread(self._app.state.spans.close)

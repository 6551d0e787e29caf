"""The ASGI application of a served model, built from its name and sized for the machine, and its gateway."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Mapping, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from starlette.applications import Starlette
from starlette.datastructures import State
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from descant.config.generation_config import GenerationConfig
from descant.engine.protocol import Engine
from descant.engine.scheduling.config import SchedulerConfig
from descant.engine.scheduling.sizing import sized_scheduler
from descant.engine.serving.async_engine import AsyncEngine
from descant.engine.serving.fallback_engine import FallbackEngine
from descant.engine.session import Session
from descant.engine.vllm.vllm_engine import VLLM
from descant.errors import ConfigError, EngineFull
from descant.kv_cache.prefix_cache import PrefixCache
from descant.models.audio.whisper import is_whisper
from descant.models.fast.products import prepack_weights
from descant.models.fast_paths import compile_layers
from descant.models.loading.loading import load, load_processor, load_tokenizer
from descant.serve.bodies import DetokenizeBody, TokenizeBody
from descant.serve.http.errors import ApiError, api_error, in_words_of
from descant.serve.http.request import ClientDisconnected, RequestState
from descant.serve.http.telemetry import AccessLog, RequestSpans, ServerMetrics
from descant.serve.model.served_model import ServedModel
from descant.serve.routes.chat import ChatCall
from descant.serve.routes.completions import CompletionCall
from descant.serve.routes.responses import ResponseCall
from descant.serve.routes.service import (
    ApiRoute,
    detokenize,
    health,
    list_models,
    metrics,
    openapi,
    ready,
    show_model,
    show_page,
    show_page_asset,
    show_trace,
    tokenize,
)
from descant.serve.routes.transcriptions import Transcriber, TranscriptionForm, transcriptions
from descant.serve.settings import ServerSettings

OPEN_PATHS: Final = frozenset({"/health", "/ready"})
_GENERATION_PREFIX: Final = "/v1/"
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9_.:-]{1,128}")
_SECURITY_HEADERS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


class Gateway:
    """The outermost ASGI application: lets a request through, and sees to the end of it."""

    def __init__(self, app: ASGIApp, state: State, settings: ServerSettings, log: AccessLog) -> None:
        self._app, self._shared, self._settings, self._log = app, state, settings, log
        self.num_active = 0  # requests other than those of probes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection event."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return  # websockets are closed by the server when nothing is sent
        root = scope.get("root_path", "")
        if root and scope["path"].startswith(f"{root}{root}/"):
            # The server puts the root before every path, and a proxy may have left it there.
            scope["path"] = scope["path"][len(root) :]
        state = RequestState()
        scope.setdefault("state", {})["request"] = state
        is_probe = _path(scope) in OPEN_PATHS
        self.num_active += not is_probe
        try:
            await self._handle(state, scope, receive, send)
        finally:
            self.num_active -= not is_probe
            state.end()
            self._record(state, scope)

    async def _handle(self, state: RequestState, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                state.status = message["status"]
                headers = list(message.get("headers", ()))
                headers += [*_SECURITY_HEADERS, (b"x-request-id", _request_id(state, scope))]
                message = {**message, "headers": headers}
            await send(message)

        try:
            self._check(state, scope)
            await self._app(scope, receive, send_with_headers)
        except ClientDisconnected:
            state.is_disconnected = True
            state.status = state.status or 499
        except HTTPException as error:
            await self._send_error(state, _routing_error(error), send_with_headers)
        except Exception as error:
            failure = in_words_of(api_error(error), state.field_names)
            if failure.status >= 500 and failure.code == "internal_error":
                state.failure = error
            await self._send_error(state, failure, send_with_headers)
        except asyncio.CancelledError:
            state.is_disconnected = True
            raise

    def _check(self, state: RequestState, scope: Scope) -> None:
        """Raise unless the request may pass."""
        path, headers = _path(scope), dict(scope["headers"])
        self._check_host(headers)
        if path in OPEN_PATHS:
            return
        authorization = headers.get(b"authorization")
        state.key = self._settings.keys.authenticate(
            None if authorization is None else authorization.decode("latin-1")
        )
        if scope["method"] == "POST":
            if self._shared.is_draining:
                raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after=1.0)
            if self.num_active > self._settings.max_connections:
                raise ApiError(429, "too many requests at once", code="too_many_requests", retry_after=1.0)
            if path.startswith(_GENERATION_PREFIX) and self._shared.model.is_full:
                # Before anything is read or parsed: refusing must cost little.
                raise api_error(EngineFull(0, 0))
            state.lease = state.key.limiter.begin()

    def _check_host(self, headers: MutableMapping[bytes, bytes]) -> None:
        """Raise for the name of another site, whose page would read this server's answers (DNS rebinding)."""
        allowed = self._settings.allowed_hosts
        if not allowed:
            return
        host = headers.get(b"host", b"").decode("latin-1").lower()
        name = re.sub(r":\d+$", "", host)
        if name not in allowed:
            message = "this name of the server is not allowed: start it with --allowed-host"
            raise ApiError(403, message, code="host_not_allowed")

    async def _send_error(self, state: RequestState, error: ApiError, send: Send) -> None:
        state.error_code = error.code
        if state.status:  # the response has begun: nothing but the end of the connection can tell
            return
        body = error.encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        with contextlib.suppress(OSError):  # the client may be gone
            await send({"type": "http.response.start", "status": error.status, "headers": encoded})
            await send({"type": "http.response.body", "body": body})

    def _record(self, state: RequestState, scope: Scope) -> None:
        seconds = time.monotonic() - state.began
        route = scope.get("route")
        path = getattr(route, "path", "other")
        self._shared.metrics.count(path, state, seconds)
        self._log.write(scope["method"], path, state, seconds)
        if self._shared.spans is not None and scope["method"] == "POST":
            self._shared.spans.record(_path(scope), state, scope["headers"], seconds)


def _path(scope: Scope) -> str:
    path, root = scope["path"], scope.get("root_path", "")
    return str(path[len(root) :] if root and path.startswith(root) else path)


def _request_id(state: RequestState, scope: Scope) -> bytes:
    """The client's own id of the request, or ours."""
    given = dict(scope["headers"]).get(b"x-request-id", b"")
    return given if _REQUEST_ID.fullmatch(given) else state.id.encode()


def _routing_error(error: HTTPException) -> ApiError:
    """The error of a path or a method that does not exist."""
    messages: dict[int, Any] = {
        404: ("there is no such path", "not_found"),
        405: ("this path has no such method", "method_not_allowed"),
    }
    message, code = messages.get(error.status_code, (str(error.detail), "invalid_request"))
    return ApiError(error.status_code, message, code=code)


TEXT_ROUTES = (
    ApiRoute("/", show_page, include_in_schema=False),
    ApiRoute("/page/{name}", show_page_asset, include_in_schema=False),
    ApiRoute("/v1/chat/completions", ChatCall.handle, ChatCall.body_type),
    ApiRoute("/v1/completions", CompletionCall.handle, CompletionCall.body_type),
    ApiRoute("/v1/responses", ResponseCall.handle, ResponseCall.body_type),
    ApiRoute("/tokenize", tokenize, TokenizeBody),
    ApiRoute("/detokenize", detokenize, DetokenizeBody),
    ApiRoute("/traces/{name}", show_trace, include_in_schema=False),
)
SPEECH_ROUTES = (ApiRoute("/v1/audio/transcriptions", transcriptions, TranscriptionForm),)
COMMON_ROUTES = (
    ApiRoute("/v1/models", list_models),
    ApiRoute("/v1/models/{name:path}", show_model, include_in_schema=False),
    ApiRoute("/health", health),
    ApiRoute("/ready", ready),
    ApiRoute("/metrics", metrics),
    ApiRoute("/openapi.json", openapi, include_in_schema=False),
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


_ENGINES: Final = ("descant", "vllm", "auto")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The options of a server's engine: its kind, its sizes, precision and device."""

    max_running_rows: int = 256
    max_step_tokens: int = 2048
    chunk_tokens: int = 512
    max_waiting: int = 256
    kv_bytes: int | None = None  # of the KV pool; None: half of the free memory
    prefix_cache: bool = True
    fast: bool = False  # prepack the weights and compile the layers
    max_traced: int = 4
    engine: str = "descant"  # "vllm", or "auto": vLLM for all that it can run
    engine_options: Mapping[str, Any] = field(default_factory=dict)  # of vLLM's EngineArgs
    dtype: str | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        if self.engine not in _ENGINES:
            raise ConfigError("engine", f"must be one of {', '.join(_ENGINES)}", self.engine)
        if self.kv_bytes is not None and self.kv_bytes < 1:
            raise ConfigError("kv_bytes", "must be >= 1", self.kv_bytes)
        if self.engine_options and self.engine == "descant":
            given, do = dict(self.engine_options), 'set engine = "vllm"'
            raise ConfigError("engine_options", "must be empty without vLLM", given, do)
        if self.fast and self.engine != "descant":
            must = "must be False with vLLM, which compiles by itself"
            raise ConfigError("fast", must, True, "leave it out")
        if self.device is not None and self.engine == "vllm":
            do = 'leave it out, or set engine = "auto"'
            raise ConfigError("device", "must not be given with vLLM", self.device, do)


def start_vllm(
    source: str, options: EngineOptions, model: Any = None
) -> tuple[AsyncEngine, GenerationConfig]:
    """The engine of a model on vLLM, and the model's own config; a loaded `model` runs what vLLM cannot."""
    arguments: dict[str, Any] = {
        "dtype": options.dtype or "auto",
        "max_num_seqs": options.max_running_rows,
        "max_num_batched_tokens": max(options.max_step_tokens, options.max_running_rows),
        "enable_prefix_caching": options.prefix_cache,
    }
    if options.kv_bytes is not None:
        arguments["kv_cache_memory_bytes"] = options.kv_bytes
    engine: Engine
    engine = vllm = VLLM(source, max_waiting=options.max_waiting, **{**arguments, **options.engine_options})
    if model is not None:
        engine = FallbackEngine(engine, Session(model, scheduler=_scheduler_config(model, options)[0]))
    return AsyncEngine(engine), vllm.generation_config


def start_engine(model: Any, options: EngineOptions) -> AsyncEngine:
    """The engine of a model, with a KV pool, a queue and a prefix cache."""
    if options.fast:
        prepack_weights(model)
        compile_layers(model)
    scheduler, budget = _scheduler_config(model, options)
    prefixes = None
    if options.prefix_cache:
        # Cached prefixes lie in the pool, and have what the requests leave of it.
        prefixes = PrefixCache(max_bytes=budget or 2**30)
    return AsyncEngine(model, scheduler=scheduler, prefix_cache=prefixes, max_traced=options.max_traced)


def _scheduler_config(model: Any, options: EngineOptions) -> tuple[SchedulerConfig, int | None]:
    """The limits of a session of a model, and the bytes of its KV pool."""
    return sized_scheduler(
        model,
        max_running_rows=options.max_running_rows,
        max_step_tokens=options.max_step_tokens,
        chunk_tokens=options.chunk_tokens,
        max_waiting=options.max_waiting,
        kv_bytes=options.kv_bytes,
    )


def load_application(
    source: str,
    settings: ServerSettings,
    options: EngineOptions | None = None,
    *,
    chat_template: str | None = None,
    log: AccessLog | None = None,
) -> ServerApplication:
    """The application of the model in a folder or on the Hub; its engine starts at once."""
    options = options or EngineOptions()
    model: Any = None
    if options.engine == "vllm":
        tokenizer = load_tokenizer(source)[0]
    else:
        model, tokenizer = load(source, options.dtype, options.device, speech=True)
    if options.engine == "descant":
        if is_whisper(model):
            return ServerApplication(Transcriber(model, load_processor(source), settings), log)
        engine = start_engine(model, options)
        config = GenerationConfig.from_transformers(model.generation_config)
        size = _trained_positions(model)
    else:
        engine, config = start_vllm(source, options, model)
        size = engine.traits.max_positions
    sizes = [limit for limit in (size, settings.max_context) if limit is not None]
    served = ServedModel(
        engine,
        tokenizer,
        settings,
        config,
        context_size=min(sizes, default=None),
        chat_template=chat_template,
    )
    return ServerApplication(served, log)


def _trained_positions(model: Any) -> int | None:
    """The positions that a model was trained for; many models run on beyond them, with nonsense."""
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", lambda: config)()
    size = getattr(text, "max_position_embeddings", None)
    return size if isinstance(size, int) and size > 0 else None

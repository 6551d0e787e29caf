"""The ASGI application of a served model, built from its name and sized for the machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from descant.config.generation_config import GenerationConfig
from descant.engine.protocol import Engine
from descant.engine.scheduling.config import SchedulerConfig
from descant.engine.scheduling.sizing import sized_scheduler
from descant.engine.serving.async_engine import AsyncEngine
from descant.engine.serving.fallback_engine import FallbackEngine
from descant.engine.session import Session
from descant.engine.vllm.vllm_engine import VLLM
from descant.errors import ConfigError
from descant.kv_cache.prefix_cache import PrefixCache
from descant.models.audio.whisper import is_whisper
from descant.models.fast.prepacked_weights import prepack_weights
from descant.models.fast_paths import compile_layers
from descant.models.loading.loading import load, load_processor, load_tokenizer
from descant.serve.gateway import Gateway
from descant.serve.http.telemetry import AccessLog, RequestSpans, ServerMetrics
from descant.serve.model.served_model import ServedModel
from descant.serve.model.transcriber import Transcriber
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
from descant.serve.routes.transcriptions import TranscriptionForm, transcriptions
from descant.serve.schema.bodies import DetokenizeBody, TokenizeBody
from descant.serve.settings import ServerSettings

__all__ = ["ROUTES", "EngineOptions", "ServerApplication", "load_application", "start_engine"]

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
    """How a server runs its model: the engine, its sizes, precision and device."""

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

"""A server from a loaded model: its engine, sized for the machine, and its application."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from descant.config.generation_config import GenerationConfig
from descant.engine.async_engine import AsyncEngine
from descant.engine.fallback_engine import FallbackEngine
from descant.engine.protocol import Engine
from descant.engine.scheduler_sizing import sized_scheduler
from descant.engine.scheduling.config import SchedulerConfig
from descant.engine.session import Session
from descant.engine.vllm.vllm_engine import VLLM
from descant.errors import ConfigError
from descant.kv_cache.prefix_cache import PrefixCache
from descant.models.layer_compilation import compile_layers
from descant.models.prepacked_weights import prepack_weights
from descant.models.whisper import is_whisper
from descant.serve.access_log import AccessLog
from descant.serve.application import ServerApplication
from descant.serve.served_model import ServedModel
from descant.serve.settings import ServerSettings
from descant.serve.transcriber import Transcriber

__all__ = ["EngineOptions", "build_application", "build_vllm_application", "start_engine", "start_vllm"]

_ENGINES: Final = ("descant", "vllm", "auto")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The sizes of a server's engine."""

    max_running_rows: int = 256
    max_step_tokens: int = 2048
    chunk_tokens: int = 512
    max_waiting: int = 256
    kv_bytes: int | None = None  # of the KV pool; None: half of the free memory
    prefix_cache: bool = True
    fast: bool = False  # prepack the weights and compile the layers
    max_traced: int = 4
    engine: str = "descant"  # "vllm", or "auto": vLLM for all that it can run

    def __post_init__(self) -> None:
        if self.engine not in _ENGINES:
            raise ConfigError("engine", f"must be one of {', '.join(_ENGINES)}", self.engine)
        if self.kv_bytes is not None and self.kv_bytes < 1:
            raise ConfigError("kv_bytes", "must be >= 1", self.kv_bytes)


def start_vllm(
    name: str, options: EngineOptions, dtype: str | None, model: Any = None
) -> tuple[AsyncEngine, GenerationConfig]:
    """The engine of a model on vLLM, and the model's own config; a loaded `model` runs what vLLM cannot."""
    if options.fast:
        raise ConfigError("fast", "must be False with vLLM, which compiles by itself", True, "leave it out")
    sizes: dict[str, Any] = {}
    if options.kv_bytes is not None:
        sizes["kv_cache_memory_bytes"] = options.kv_bytes
    engine: Engine
    engine = vllm = VLLM(
        name,
        max_waiting=options.max_waiting,
        dtype=dtype or "auto",
        max_num_seqs=options.max_running_rows,
        max_num_batched_tokens=max(options.max_step_tokens, options.max_running_rows),
        enable_prefix_caching=options.prefix_cache,
        **sizes,
    )
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


def build_application(
    model: Any,
    tokenizer: Any,
    settings: ServerSettings,
    *,
    engine: EngineOptions | None = None,
    chat_template: str | None = None,
    log: AccessLog | None = None,
) -> ServerApplication:
    """The application of a loaded model; its engine starts at once.

    Of a Whisper model the processor takes the tokenizer's place.
    """
    if is_whisper(model):
        return ServerApplication(Transcriber(model, tokenizer, settings), log)
    served = ServedModel(
        start_engine(model, engine or EngineOptions()),
        tokenizer,
        settings,
        GenerationConfig.from_transformers(model.generation_config),
        context_size=_context_size(model, settings.max_context),
        chat_template=chat_template,
    )
    return ServerApplication(served, log)


def build_vllm_application(
    engine: AsyncEngine,
    tokenizer: Any,
    settings: ServerSettings,
    model_config: GenerationConfig,
    *,
    chat_template: str | None = None,
    log: AccessLog | None = None,
) -> ServerApplication:
    """The application of an engine of `start_vllm`."""
    size = engine.traits.max_positions
    sizes = [one for one in (size, settings.max_context) if one is not None]
    served = ServedModel(
        engine,
        tokenizer,
        settings,
        model_config,
        context_size=min(sizes, default=None),
        chat_template=chat_template,
    )
    return ServerApplication(served, log)


def _context_size(model: Any, limit: int | None) -> int | None:
    """The positions that a model was trained for; many models run on beyond them, with nonsense."""
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", lambda: config)()
    size = getattr(text, "max_position_embeddings", None)
    sizes = [one for one in (size, limit) if isinstance(one, int) and one > 0]
    return min(sizes, default=None)

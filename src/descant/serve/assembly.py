"""A server from the name of a model: its engine, sized for the machine, and its application."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
from descant.models.loading import load, load_processor, load_tokenizer
from descant.models.prepacked_weights import prepack_weights
from descant.models.whisper import is_whisper
from descant.serve.access_log import AccessLog
from descant.serve.application import ServerApplication
from descant.serve.served_model import ServedModel
from descant.serve.settings import ServerSettings
from descant.serve.transcriber import Transcriber

__all__ = ["EngineOptions", "load_application", "start_engine", "start_vllm"]

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

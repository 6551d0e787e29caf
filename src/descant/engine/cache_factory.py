"""Which cache a table of rows works on: by name, or the one that suits what is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from descant.config.compile_config import CompileConfig
from descant.config.generation_config import GenerationConfig
from descant.core.interfaces import ModelTraits, RowCache
from descant.errors import ConfigError, UnsupportedModel
from descant.kv_cache.dense import DenseStore
from descant.kv_cache.evicting import H2OStore, SnapKVStore
from descant.kv_cache.offloaded import OffloadedStaticStore, OffloadedStore
from descant.kv_cache.paged import PagedStore
from descant.kv_cache.quantized import QuantizedStore
from descant.kv_cache.quantizers import build_quantizer
from descant.kv_cache.recurrent_state import RecurrentStateCache
from descant.kv_cache.sink import SinkStore
from descant.kv_cache.static import StaticStore
from descant.kv_cache.window import WindowStore
from descant.models.compiled_step import uncompilable_reason
from descant.models.hf_caches.configs import QuantizedCacheConfig
from descant.models.rope import rope_of_model

__all__ = [
    "CACHES",
    "CacheRequest",
    "CacheSpec",
    "build_cache",
    "cache_name",
    "default_cache",
    "missing_requirement",
    "quantized_cache_config",
]

# A prompt shorter than this is as cheap to copy as to share.
_MIN_SHARED_PROMPT: Final = 64

CACHE_FIELD: Final = "cache_implementation"


class CacheRequest(NamedTuple):
    """What a cache is made for."""

    model: Any  # behind the Model port
    config: GenerationConfig
    max_slots: int  # how many positions a row may come to

    @property
    def traits(self) -> ModelTraits:
        """The traits of the model."""
        facts: ModelTraits = self.model.traits
        return facts

    def settings(self, **known: Any) -> dict[str, Any]:
        """The settings of the config, of which only these are known, with what stands for those not given."""
        given = dict(self.config.cache_config or {})
        for name, value in given.items():
            if name not in known:
                do = f"known are {', '.join(sorted(known)) or 'none'}"
                kind = self.config.cache_implementation
                raise ConfigError("cache_config", f"has no `{name}` for the {kind} cache", value, do)
            _check_setting(name, value, known[name] is None)
        return {**known, **given}


# The least that a setting may be.
_MIN_SETTINGS: Final = {
    "max_cache_len": 1, "batch_size": 1, "window_length": 1, "num_sink_tokens": 0, "budget": 1, "window": 1,
    "kernel": 1, "recent": 1, "nbits": 1, "q_group_size": 1, "residual_length": 0,
}  # fmt: skip


def _check_setting(name: str, value: Any, optional: bool) -> None:
    """Raise for a setting that no cache can be made with."""
    if value is None and (optional or name == "compute_dtype"):
        return
    if name in _MIN_SETTINGS:
        least = _MIN_SETTINGS[name]
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
            raise ConfigError("cache_config", f"must have an integer >= {least} as `{name}`", value)
    elif name == "compute_dtype" and not isinstance(value, str | torch.dtype):
        raise ConfigError("cache_config", "must have a dtype or its name as `compute_dtype`", value)
    elif name == "offload_device":
        try:
            torch.empty(0, device=torch.device(value))
        except (RuntimeError, TypeError, ValueError, AssertionError) as error:
            must = "must have a device that is here as `offload_device`"
            raise ConfigError("cache_config", must, value) from error


@dataclass(frozen=True)
class CacheSpec:
    """A cache that can be named: how it is made, what it is for, and what it asks of a model."""

    build: Callable[[CacheRequest], RowCache]
    description: str  # when to use it
    drops_tokens: bool = False  # it keeps no more than some of a row, so that a row cannot be cut at will
    unsupported_reason: Callable[[CacheRequest], str | None] = lambda _: None  # what a model lacks for it


def _mask_requirement(want: CacheRequest) -> str | None:
    """What a cache needs whose slots are not positions."""
    return None if want.traits.supports_custom_mask else "a model that takes positions and masks of ours"


def _has_windows(want: CacheRequest) -> bool:
    """Whether any layer of the model sees no further than a window."""
    return any(window is not None for window in want.traits.sliding_windows.values())


def _window_requirement(want: CacheRequest) -> str | None:
    return _mask_requirement(want) or (None if _has_windows(want) else "a model with sliding windows")


def _rope_requirement(want: CacheRequest) -> str | None:
    if _has_windows(want):
        return "a model without windows of its own"
    return _mask_requirement(want) or (
        None if _rope_of(want) is not None else "a model with rotary positions"
    )


def _sdpa_requirement(want: CacheRequest) -> str | None:
    if _has_windows(want):
        return "a model without windows of its own"
    asks = 'a model loaded with attn_implementation="sdpa"'
    return _mask_requirement(want) or (None if want.traits.attn_implementation == "sdpa" else asks)


def _rope_of(want: CacheRequest) -> Any:
    model = getattr(want.model, "model", None)
    return None if model is None else rope_of_model(model)


def _make_window(want: CacheRequest) -> RowCache:
    want.settings()
    return WindowStore([want.traits.sliding_windows.get(kind) for kind in want.traits.layer_types])


def _make_sink(want: CacheRequest) -> RowCache:
    given = want.settings(window_length=256, num_sink_tokens=4)
    return SinkStore(given["window_length"], given["num_sink_tokens"], _rope_of(want))


def quantized_cache_config(want: CacheRequest) -> QuantizedCacheConfig:
    """How a quantized cache is made."""
    config = QuantizedCacheConfig(**want.settings(**vars(QuantizedCacheConfig())))
    config.validate(config.backend)
    return config


def _make_quantized(want: CacheRequest) -> RowCache:
    config = quantized_cache_config(want)
    return QuantizedStore(build_quantizer(config), config.residual_length)


def _capacity(want: CacheRequest) -> tuple[int, int | None]:
    # Documented; blocks lie where keys come from, whatever `device` says.
    given = want.settings(max_cache_len=None, batch_size=None, device=None)
    return given["max_cache_len"] or want.max_slots, given["batch_size"]


def _compile_config(want: CacheRequest) -> CompileConfig | None:
    """How the decode step is to be compiled: where asked for, and by itself where a device pays for calls."""
    config, model = want.config, getattr(want.model, "model", None)
    if config.disable_compile:
        return None
    cannot = None if model is None else uncompilable_reason(model, want.traits)
    if config.compile_config is not None and (cannot is None or config.source("compile_config") != "model"):
        if cannot is not None:
            raise UnsupportedModel(f"{cannot}: leave out compile_config")
        return CompileConfig.of(config.compile_config)
    return CompileConfig() if want.model.device.type == "cuda" and cannot is None else None


def _make_static(want: CacheRequest) -> RowCache:
    return StaticStore(*_capacity(want), compile_config=_compile_config(want))


def _make_offloaded_static(want: CacheRequest) -> RowCache:
    return OffloadedStaticStore(*_capacity(want))


def _make_state(want: CacheRequest) -> RowCache:
    want.settings()
    return RecurrentStateCache(want.traits.cache_argument)


def _make_offloaded(want: CacheRequest) -> RowCache:
    return OffloadedStore(want.settings(offload_device="cpu")["offload_device"])


def _make_snapkv(want: CacheRequest) -> RowCache:
    return SnapKVStore(**want.settings(budget=1024, window=32, kernel=7))


def _make_h2o(want: CacheRequest) -> RowCache:
    return H2OStore(**want.settings(budget=1024, recent=None))


def _maker_of(kind: type[RowCache]) -> Callable[[CacheRequest], RowCache]:
    def build(want: CacheRequest) -> RowCache:
        want.settings()
        return kind()

    return build


# One line a cache: how it is made, what it is for, whether it forgets, what it asks of a model.
# fmt: off
CACHES: Final[Mapping[str, CacheSpec]] = {
    "dynamic": CacheSpec(_maker_of(DenseStore), "always right"),
    "paged": CacheSpec(_maker_of(PagedStore), "beams, many sequences, prompts used again"),
    "static": CacheSpec(_make_static, "compiled decoding"),
    "offloaded": CacheSpec(_make_offloaded, "long texts on a small accelerator"),
    "offloaded_static": CacheSpec(_make_offloaded_static, "the same at a fixed size"),
    "sliding_window": CacheSpec(_make_window, "models with sliding windows", True, _window_requirement),
    "hybrid": CacheSpec(_make_window, "models with windows in some layers", True, _mask_requirement),
    "mamba": CacheSpec(_make_state, "recurrent models", True),
    "quantized": CacheSpec(_make_quantized, "long texts in little memory, at some loss"),
    "sink": CacheSpec(_make_sink, "endless texts that need no far past", True, _rope_requirement),
    "snapkv": CacheSpec(_make_snapkv, "long prompts of which little matters", True, _sdpa_requirement),
    "h2o": CacheSpec(_make_h2o, "long texts of which little matters", True, _sdpa_requirement),
}
# fmt: on
# Names that 4.x used for the same.
ALIASES: Final = {
    "hybrid_chunked": "hybrid",
    "offloaded_hybrid": "offloaded",
    "offloaded_hybrid_chunked": "offloaded",
}  # fmt: skip


def cache_name(config: GenerationConfig) -> str | None:
    """The cache that a config names."""
    name = config.cache_implementation
    return None if name is None else ALIASES.get(name, name)


def build_cache(want: CacheRequest) -> RowCache:
    """The cache that a config names, or a ConfigError that says what it lacks."""
    name = cache_name(want.config)
    assert name is not None
    compiling = want.config.compile_config is not None and want.config.source("compile_config") != "model"
    if compiling and name != "static":
        do = 'set cache_implementation="static" or leave it out'
        raise ConfigError("compile_config", f"has no use with the {name} cache", name, do)
    missing = missing_requirement(name, want)
    if missing is None and want.traits.cache_type == "recurrent":
        return _make_state(want)  # whatever 4.x called it
    if missing is None:
        return CACHES[name].build(want)
    if want.config.source(CACHE_FIELD) == "model":
        return default_cache(want, 0)  # a model's own config may name what a later version of it does without
    raise ConfigError(CACHE_FIELD, f"needs {missing}", want.config.cache_implementation, "leave it out")


def missing_requirement(name: str, want: CacheRequest) -> str | None:
    """What a model lacks for a cache."""
    memory = want.traits.cache_type
    if memory == "recurrent":
        does = name in ("mamba", "hybrid", "dynamic")
        return None if does else "a model that remembers keys and values only"
    if memory == "none":
        return None if name == "dynamic" else "a model that remembers anything"
    if name == "mamba":
        return "a model with a state of its own"
    return CACHES[name].unsupported_reason(want)


def default_cache(want: CacheRequest, shared: int) -> RowCache:
    """The cache that suits a model, whose rows come to share so many positions."""
    facts = want.traits
    if facts.cache_type == "recurrent":
        return RecurrentStateCache(facts.cache_argument)
    plain = facts.cache_type == "kv" and not facts.is_encoder_decoder and facts.attn_implementation == "sdpa"
    return PagedStore() if plain and shared >= _MIN_SHARED_PROMPT else DenseStore()

"""The registry of cache types, and the choice of a table's cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from descant.config.cache_config import QuantizedCacheConfig
from descant.config.compile_config import CompileConfig
from descant.config.generation_config import GenerationConfig
from descant.core.interfaces import Model, ModelTraits, RowCache
from descant.errors import ConfigError, UnsupportedModel
from descant.kv_cache.stores.dense import DenseStore, OffloadedStaticStore, OffloadedStore, StaticStore
from descant.kv_cache.stores.evicting import H2OStore, SnapKVStore
from descant.kv_cache.stores.paged import PagedStore
from descant.kv_cache.stores.quantized import QuantizedStore
from descant.kv_cache.stores.quantizers import build_quantizer
from descant.kv_cache.stores.recurrent_state import RecurrentStateCache
from descant.kv_cache.stores.sink_window import SinkStore, WindowStore
from descant.models.fast.compiled_step import uncompilable_reason
from descant.models.fast_paths import unshareable_reason
from descant.models.forward.rope import rope_of_model

# The paged cache is the default from this many numbers on: positions that rows share x width of embeddings.
# Below, each row reads a copy in less time than the cache takes to plan how a shared one is read.
_MIN_SHARED_READ: Final = 2**20
_MIN_SHARED_POSITIONS: Final = 128  # the same for a model of unknown width

CACHE_FIELD: Final = "cache_implementation"


class CacheKey(NamedTuple):
    """The key by which requests share a cache: its name and its settings."""

    name: str
    settings: object = ()  # hashable


class CacheRequest(NamedTuple):
    """The model, config and size that a cache is built for."""

    model: Model
    config: GenerationConfig
    max_slots: int  # the most positions of a row

    @property
    def traits(self) -> ModelTraits:
        """The traits of the model."""
        return self.model.traits

    def settings(self, **known: Any) -> dict[str, Any]:
        """The config's `cache_config` with these defaults; raises for a name without a default."""
        config = self.config.cache_config
        given = dict(config or {})
        # The configs of transformers 4 name their cache among the settings.
        named = given.pop(CACHE_FIELD, getattr(config, CACHE_FIELD, None))
        implementation = str(self.config.cache_implementation)
        if named not in (None, implementation, implementation.removeprefix("offloaded_")):
            must = f"must be for the cache that `{CACHE_FIELD}` names, {self.config.cache_implementation!r}"
            raise ConfigError("cache_config", must, named)
        for name, value in given.items():
            if name not in known:
                do = f"known are {', '.join(sorted(known)) or 'none'}"
                kind = self.config.cache_implementation
                raise ConfigError("cache_config", f"has no `{name}` for the {kind} cache", value, do)
            _check_setting(name, value, known[name] is None)
        return {**known, **given}


# The minimum of each integer setting.
_MIN_SETTINGS: Final = {
    "max_cache_len": 1, "batch_size": 1, "window_length": 1, "num_sink_tokens": 0, "budget": 1, "window": 1,
    "kernel": 1, "recent": 1, "nbits": 1, "q_group_size": 1, "residual_length": 0,
}  # fmt: skip


def _check_setting(name: str, value: Any, optional: bool) -> None:
    """Raise for an invalid setting."""
    if value is None and (optional or name == "compute_dtype"):
        return
    if name in _MIN_SETTINGS:
        minimum = _MIN_SETTINGS[name]
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value < 2**31:
            raise ConfigError("cache_config", f"must have an integer >= {minimum} as `{name}`", value)
    elif name == "compute_dtype" and not isinstance(value, str | torch.dtype):
        raise ConfigError("cache_config", "must have a dtype or its name as `compute_dtype`", value)
    elif name == "offload_device":
        try:
            torch.empty(0, device=torch.device(value))
        except (RuntimeError, TypeError, ValueError, AssertionError) as error:
            must = "must have an available device as `offload_device`"
            raise ConfigError("cache_config", must, value) from error


@dataclass(frozen=True)
class CacheSpec:
    """A cache type: how it is built, what it is for, and what it needs of a model."""

    build: Callable[[CacheRequest], RowCache]
    description: str  # when to use it
    drops_tokens: bool = False  # it evicts positions, so a row cannot be cut to any length
    unsupported_reason: Callable[[CacheRequest], str | None] = lambda _: None  # what the model lacks
    saves_memory: bool = False  # whether it is suggested where another cache does not fit


def _mask_requirement(request: CacheRequest) -> str | None:
    """The requirement of a cache whose slots are not positions."""
    return (
        None if request.traits.supports_custom_mask else "a model that takes position ids and attention masks"
    )


def _has_windows(request: CacheRequest) -> bool:
    """Whether any layer of the model has a sliding window."""
    return any(window is not None for window in request.traits.sliding_windows.values())


def _window_requirement(request: CacheRequest) -> str | None:
    return _mask_requirement(request) or (None if _has_windows(request) else "a model with sliding windows")


def _rope_requirement(request: CacheRequest) -> str | None:
    if _has_windows(request):
        return "a model without windows of its own"
    return _mask_requirement(request) or (
        None if _rope_of(request) is not None else "a model with rotary position embeddings"
    )


def _sdpa_requirement(request: CacheRequest) -> str | None:
    if _has_windows(request):
        return "a model without windows of its own"
    needs = 'a model loaded with attn_implementation="sdpa"'
    return _mask_requirement(request) or (None if request.traits.attn_implementation == "sdpa" else needs)


def _rope_of(request: CacheRequest) -> Any:
    network = request.model.network
    return None if network is None else rope_of_model(network)


def _make_window(request: CacheRequest) -> RowCache:
    request.settings()
    return WindowStore([request.traits.sliding_windows.get(kind) for kind in request.traits.layer_types])


def _make_sink(request: CacheRequest) -> RowCache:
    given = request.settings(window_length=256, num_sink_tokens=4)
    return SinkStore(given["window_length"], given["num_sink_tokens"], _rope_of(request))


def quantized_cache_config(request: CacheRequest) -> QuantizedCacheConfig:
    """The settings of a quantized cache."""
    config = QuantizedCacheConfig(**request.settings(**vars(QuantizedCacheConfig())))
    config.validate(config.backend)
    return config


def _make_quantized(request: CacheRequest) -> RowCache:
    config = quantized_cache_config(request)
    return QuantizedStore(build_quantizer(config), config.residual_length)


def _capacity(request: CacheRequest) -> tuple[int, int | None]:
    # `device` is accepted, as in transformers, but blocks are allocated where the keys are.
    given = request.settings(max_cache_len=None, batch_size=None, device=None)
    return given["max_cache_len"] or request.max_slots, given["batch_size"]


def _compile_config(request: CacheRequest) -> CompileConfig | None:
    """The settings of a compiled decode step: as requested, and by default on CUDA; None: it is not."""
    config, network = request.config, request.model.network
    if config.disable_compile:
        return None
    reason = None if network is None else uncompilable_reason(network, request.traits)
    if config.compile_config is not None and (reason is None or config.source("compile_config") != "model"):
        if reason is not None:
            raise UnsupportedModel(f"{reason}: leave out compile_config")
        assert isinstance(config.compile_config, CompileConfig)
        return config.compile_config
    return CompileConfig() if request.model.device.type == "cuda" and reason is None else None


def _make_static(request: CacheRequest) -> RowCache:
    return StaticStore(*_capacity(request), compile_config=_compile_config(request))


def _make_offloaded_static(request: CacheRequest) -> RowCache:
    return OffloadedStaticStore(*_capacity(request))


def _make_state(request: CacheRequest) -> RowCache:
    request.settings()
    return RecurrentStateCache(request.traits.cache_argument)


def _make_offloaded(request: CacheRequest) -> RowCache:
    device = request.settings(offload_device="cpu")["offload_device"]
    return OffloadedStore(device, _num_fed(request))


def _make_dense(request: CacheRequest) -> RowCache:
    request.settings()
    return DenseStore(_num_fed(request))


def _num_fed(request: CacheRequest) -> int:
    """The most positions of a row that need a slot: its last token is never fed."""
    return max(request.max_slots - 1, 1)


def _make_snapkv(request: CacheRequest) -> RowCache:
    return SnapKVStore(**request.settings(budget=1024, window=32, kernel=7))


def _make_h2o(request: CacheRequest) -> RowCache:
    return H2OStore(**request.settings(budget=1024, recent=None))


def _maker_of(kind: type[RowCache]) -> Callable[[CacheRequest], RowCache]:
    def build(request: CacheRequest) -> RowCache:
        request.settings()
        return kind()

    return build


# One line per cache: how it is built, what it is for, whether it evicts, what it needs of a model.
# fmt: off
CACHES: Final[Mapping[str, CacheSpec]] = {
    "dynamic": CacheSpec(_make_dense, "the default, exact"),
    "paged": CacheSpec(_maker_of(PagedStore), "beams, many sequences, shared prompts", saves_memory=True),
    "static": CacheSpec(_make_static, "compiled decoding"),
    "offloaded": CacheSpec(_make_offloaded, "long sequences on a small accelerator", saves_memory=True),
    "offloaded_static": CacheSpec(_make_offloaded_static, "the same at a fixed size"),
    "sliding_window": CacheSpec(_make_window, "models with sliding windows", True, _window_requirement, True),
    "hybrid": CacheSpec(_make_window, "models with windows in some layers", True, _mask_requirement),
    "mamba": CacheSpec(_make_state, "recurrent models", True),
    "quantized": CacheSpec(_make_quantized, "long sequences in little memory, lossy", saves_memory=True),
    "sink": CacheSpec(
        _make_sink, "endless sequences that need no distant context", True, _rope_requirement, True
    ),
    "snapkv": CacheSpec(
        _make_snapkv, "long prompts of which few positions matter", True, _sdpa_requirement, True
    ),
    "h2o": CacheSpec(
        _make_h2o, "long sequences of which few positions matter", True, _sdpa_requirement, True
    ),
}
# fmt: on
# The caches without settings, which are the defaults.
CACHE_NAMES: Final[Mapping[type[Any], str]] = {DenseStore: "dynamic", PagedStore: "paged"}
# Names of transformers 4 for the same caches.
ALIASES: Final = {
    "hybrid_chunked": "hybrid",
    "offloaded_hybrid": "offloaded",
    "offloaded_hybrid_chunked": "offloaded",
}  # fmt: skip


def cache_name(config: GenerationConfig) -> str | None:
    """The name of the cache that a config selects; None: it selects none."""
    name = config.cache_implementation
    return None if name is None else ALIASES.get(name, name)


def cache_key(config: GenerationConfig, traits: ModelTraits) -> CacheKey | None:
    """The cache that a request names itself; None: it takes the default, for which a model's hint counts."""
    name = cache_name(config)
    has_one_cache = traits.needs_own_cache or traits.cache_type != "kv"
    if name is None or has_one_cache or config.source(CACHE_FIELD) == "model":
        return None
    settings = sorted(dict(config.cache_config or {}).items())
    if name == "static":
        settings += [("compile", (config.compile_config, config.disable_compile))]
    return CacheKey(name, repr(settings) if settings else ())


def default_cache_key(cache: RowCache) -> CacheKey | None:
    """The key of a cache without settings; None: no request can name one like it."""
    name = CACHE_NAMES.get(type(cache))
    return None if name is None else CacheKey(name)


def build_cache(request: CacheRequest) -> RowCache:
    """The cache that a config selects, or a ConfigError that says what the model lacks."""
    name = cache_name(request.config)
    assert name is not None
    compiling = (
        request.config.compile_config is not None and request.config.source("compile_config") != "model"
    )
    if compiling and name != "static":
        do = 'set cache_implementation="static" or leave it out'
        raise ConfigError("compile_config", f"has no use with the {name} cache", name, do)
    missing = missing_requirement(name, request)
    if missing is None and request.traits.cache_type == "recurrent":
        return _make_state(request)  # whatever name it was requested by
    if missing is None:
        return CACHES[name].build(request)
    if request.config.source(CACHE_FIELD) == "model":
        return default_cache(request, 0)  # a model's own config is only a hint
    raise ConfigError(CACHE_FIELD, f"needs {missing}", request.config.cache_implementation, "leave it out")


def missing_requirement(name: str, request: CacheRequest) -> str | None:
    """The requirement of a cache that a model lacks; None: it lacks nothing."""
    cache_type = request.traits.cache_type
    if cache_type == "recurrent":
        supported = name in ("mamba", "hybrid", "dynamic")
        return None if supported else "a model without a recurrent state"
    if cache_type == "none":
        return None if name == "dynamic" else "a model with a cache"
    if name == "mamba":
        return "a model with a recurrent state"
    return CACHES[name].unsupported_reason(request)


def default_cache(request: CacheRequest, shared: int) -> RowCache:
    """The default cache of a model; `shared` counts the positions that rows will share, once for each row."""
    traits = request.model.traits
    if traits.cache_type == "recurrent":
        return RecurrentStateCache(traits.cache_argument)
    width = traits.embedding_size
    is_large = shared >= _MIN_SHARED_POSITIONS if width is None else shared * width >= _MIN_SHARED_READ
    return PagedStore() if is_large and unshareable_reason(traits) is None else DenseStore(_num_fed(request))


def choose_cache(model: Model, configs: Sequence[GenerationConfig], num_slots: int, shared: int) -> RowCache:
    """The cache of a table: the one that the first config names, or the default for the model.

    `num_slots` is the most positions of a row; `shared` counts the positions that rows will share, once for
    each row.
    """
    name = cache_name(configs[0])
    if model.traits.needs_own_cache:
        if name not in (None, "dynamic") and configs[0].source(CACHE_FIELD) != "model":
            raise ConfigError(CACHE_FIELD, "is for one model, not for several", name, "leave it out")
        return model.new_cache()
    request = CacheRequest(model, configs[0], num_slots)
    return default_cache(request, shared) if name is None else build_cache(request)

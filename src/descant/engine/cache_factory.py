"""Which cache a table of rows works on: by name, or the one that suits what is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from descant.config.compile_config import CompileConfig
from descant.config.generation_config import GenerationConfig
from descant.core.interfaces import Cache, Facts
from descant.errors import ConfigError, UnsupportedModel
from descant.kv_cache.dense import DenseCache
from descant.kv_cache.evicting import HeavyStore, SnapStore
from descant.kv_cache.offloaded import OffloadedStaticStore, OffloadedStore
from descant.kv_cache.paged import PagedStore
from descant.kv_cache.quantized import QuantizedStore
from descant.kv_cache.quantizers import quantizer_of
from descant.kv_cache.recurrent_state import ObjectCache
from descant.kv_cache.sink import SinkStore
from descant.kv_cache.static import StaticStore
from descant.kv_cache.window import WindowStore
from descant.models.compiled_step import uncompilable
from descant.models.hf_caches.configs import QuantizedCacheConfig
from descant.models.rope import rotation_of

__all__ = ["KINDS", "Kind", "Wanted", "kind_of", "lacks", "made", "quantization", "suiting"]

# A prompt shorter than this is as cheap to copy as to share.
_WORTH: Final = 64

NAME: Final = "cache_implementation"


class Wanted(NamedTuple):
    """What a cache is made for."""

    model: Any  # behind the Model port
    config: GenerationConfig
    slots: int  # how many positions a row may come to

    @property
    def facts(self) -> Facts:
        """The traits of the model."""
        facts: Facts = self.model.facts
        return facts

    def settings(self, **known: Any) -> dict[str, Any]:
        """The settings of the config, of which only these are known, with what stands for those not given."""
        given = dict(self.config.cache_config or {})
        for name, value in given.items():
            if name not in known:
                do = f"known are {', '.join(sorted(known)) or 'none'}"
                kind = self.config.cache_implementation
                raise ConfigError("cache_config", f"has no `{name}` for the {kind} cache", value, do)
            _check(name, value, known[name] is None)
        return {**known, **given}


# The least that a setting may be.
_LEAST: Final = {
    "max_cache_len": 1, "batch_size": 1, "window_length": 1, "num_sink_tokens": 0, "budget": 1, "window": 1,
    "kernel": 1, "recent": 1, "nbits": 1, "q_group_size": 1, "residual_length": 0,
}  # fmt: skip


def _check(name: str, value: Any, optional: bool) -> None:
    """Raise for a setting that no cache can be made with."""
    if value is None and (optional or name == "compute_dtype"):
        return
    if name in _LEAST:
        least = _LEAST[name]
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
class Kind:
    """A cache that can be named: how it is made, what it is for, and what it asks of a model."""

    build: Callable[[Wanted], Cache]
    about: str  # when to use it
    forgets: bool = False  # it keeps no more than some of a row, so that a row cannot be cut at will
    refuses: Callable[[Wanted], str | None] = lambda _: None  # what a model lacks for it


def _masked(want: Wanted) -> str | None:
    """What a cache needs whose slots are not positions."""
    return None if want.facts.masks else "a model that takes positions and masks of ours"


def _windows(want: Wanted) -> bool:
    """Whether any layer of the model sees no further than a window."""
    return any(window is not None for window in want.facts.windows.values())


def _windowed(want: Wanted) -> str | None:
    return _masked(want) or (None if _windows(want) else "a model with sliding windows")


def _rotary(want: Wanted) -> str | None:
    if _windows(want):
        return "a model without windows of its own"
    return _masked(want) or (None if _rotation(want) is not None else "a model with rotary positions")


def _watched(want: Wanted) -> str | None:
    if _windows(want):
        return "a model without windows of its own"
    asks = 'a model loaded with attn_implementation="sdpa"'
    return _masked(want) or (None if want.facts.attention == "sdpa" else asks)


def _rotation(want: Wanted) -> Any:
    model = getattr(want.model, "model", None)
    return None if model is None else rotation_of(model)


def _window(want: Wanted) -> Cache:
    want.settings()
    return WindowStore([want.facts.windows.get(kind) for kind in want.facts.kinds])


def _sink(want: Wanted) -> Cache:
    given = want.settings(window_length=256, num_sink_tokens=4)
    return SinkStore(given["window_length"], given["num_sink_tokens"], _rotation(want))


def quantization(want: Wanted) -> QuantizedCacheConfig:
    """How a quantized cache is made."""
    config = QuantizedCacheConfig(**want.settings(**vars(QuantizedCacheConfig())))
    config.validate(config.backend)
    return config


def _quantized(want: Wanted) -> Cache:
    config = quantization(want)
    return QuantizedStore(quantizer_of(config), config.residual_length)


def _capacity(want: Wanted) -> tuple[int, int | None]:
    # Documented; blocks lie where keys come from, whatever `device` says.
    given = want.settings(max_cache_len=None, batch_size=None, device=None)
    return given["max_cache_len"] or want.slots, given["batch_size"]


def _compiling(want: Wanted) -> CompileConfig | None:
    """How the decode step is to be compiled: where asked for, and by itself where a device pays for calls."""
    config, model = want.config, getattr(want.model, "model", None)
    if config.disable_compile:
        return None
    cannot = None if model is None else uncompilable(model, want.facts)
    if config.compile_config is not None and (cannot is None or config.source("compile_config") != "model"):
        if cannot is not None:
            raise UnsupportedModel(f"{cannot}: leave out compile_config")
        return CompileConfig.of(config.compile_config)
    return CompileConfig() if want.model.device.type == "cuda" and cannot is None else None


def _static(want: Wanted) -> Cache:
    return StaticStore(*_capacity(want), compile=_compiling(want))


def _offloaded_static(want: Wanted) -> Cache:
    return OffloadedStaticStore(*_capacity(want))


def _state(want: Wanted) -> Cache:
    want.settings()
    return ObjectCache(want.facts.past)


def _offloaded(want: Wanted) -> Cache:
    return OffloadedStore(want.settings(offload_device="cpu")["offload_device"])


def _snap(want: Wanted) -> Cache:
    return SnapStore(**want.settings(budget=1024, window=32, kernel=7))


def _heavy(want: Wanted) -> Cache:
    return HeavyStore(**want.settings(budget=1024, recent=None))


def _plain(kind: type[Cache]) -> Callable[[Wanted], Cache]:
    def build(want: Wanted) -> Cache:
        want.settings()
        return kind()

    return build


# One line a cache: how it is made, what it is for, whether it forgets, what it asks of a model.
# fmt: off
KINDS: Final[Mapping[str, Kind]] = {
    "dynamic": Kind(_plain(DenseCache), "always right"),
    "paged": Kind(_plain(PagedStore), "beams, many sequences, prompts used again"),
    "static": Kind(_static, "compiled decoding"),
    "offloaded": Kind(_offloaded, "long texts on a small accelerator"),
    "offloaded_static": Kind(_offloaded_static, "the same at a fixed size"),
    "sliding_window": Kind(_window, "models with sliding windows", True, _windowed),
    "hybrid": Kind(_window, "models with windows in some layers", True, _masked),
    "mamba": Kind(_state, "recurrent models", True),
    "quantized": Kind(_quantized, "long texts in little memory, at some loss"),
    "sink": Kind(_sink, "endless texts that need no far past", True, _rotary),
    "snapkv": Kind(_snap, "long prompts of which little matters", True, _watched),
    "h2o": Kind(_heavy, "long texts of which little matters", True, _watched),
}
# fmt: on
# Names that 4.x used for the same.
SAME: Final = {
    "hybrid_chunked": "hybrid",
    "offloaded_hybrid": "offloaded",
    "offloaded_hybrid_chunked": "offloaded",
}  # fmt: skip


def kind_of(config: GenerationConfig) -> str | None:
    """The cache that a config names."""
    name = config.cache_implementation
    return None if name is None else SAME.get(name, name)


def made(want: Wanted) -> Cache:
    """The cache that a config names, or a ConfigError that says what it lacks."""
    name = kind_of(want.config)
    assert name is not None
    compiling = want.config.compile_config is not None and want.config.source("compile_config") != "model"
    if compiling and name != "static":
        do = 'set cache_implementation="static" or leave it out'
        raise ConfigError("compile_config", f"has no use with the {name} cache", name, do)
    missing = lacks(name, want)
    if missing is None and want.facts.memory == "own":
        return _state(want)  # whatever 4.x called it
    if missing is None:
        return KINDS[name].build(want)
    if want.config.source(NAME) == "model":
        return suiting(want, 0)  # a model's own config may name what a later version of it does without
    raise ConfigError(NAME, f"needs {missing}", want.config.cache_implementation, "leave it out")


def lacks(name: str, want: Wanted) -> str | None:
    """What a model lacks for a cache."""
    memory = want.facts.memory
    if memory == "own":
        does = name in ("mamba", "hybrid", "dynamic")
        return None if does else "a model that remembers keys and values only"
    if memory == "none":
        return None if name == "dynamic" else "a model that remembers anything"
    if name == "mamba":
        return "a model with a state of its own"
    return KINDS[name].refuses(want)


def suiting(want: Wanted, shared: int) -> Cache:
    """The cache that suits a model, whose rows come to share so many positions."""
    facts = want.facts
    if facts.memory == "own":
        return ObjectCache(facts.past)
    plain = facts.memory == "keys" and not facts.encoder_decoder and facts.attention == "sdpa"
    return PagedStore() if plain and shared >= _WORTH else DenseCache()

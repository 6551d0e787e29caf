"""Cache configs: the documented classes that `cache_config` takes in place of a dict."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from descant.config.fields import FrozenMap, freeze
from descant.core.atomic_file import write_text
from descant.errors import ConfigError

if TYPE_CHECKING:
    import torch


_QUANTIZED_SETTINGS: Final = frozenset({
    "backend", "nbits", "axis_key", "axis_value", "q_group_size", "residual_length", "compute_dtype",
    "device",
})  # fmt: skip
_STATIC_SETTINGS: Final = frozenset({"batch_size", "max_cache_len", "device"})

# The bits that each backend supports, and its axes with whether groups run over positions.
QUANTIZED_BACKENDS: Final[Mapping[str, tuple[tuple[int, ...], Mapping[int, bool]]]] = {
    "quanto": ((2, 4), {0: False, -1: True}),
    "hqq": ((1, 2, 3, 4, 8), {0: True, 1: False}),
}


class CacheConfig:
    """Base of the cache configs: the name of a cache, as `cache_implementation` takes it."""

    cache_implementation: str | None = None

    def __init__(self, cache_implementation: str | None = None) -> None:
        self.cache_implementation = cache_implementation

    def validate(self) -> None:
        """Raise ConfigError if a setting is invalid."""

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], **changes: Any) -> Self:
        """A config from a dict; `changes` take precedence."""
        return cls(**{**config_dict, **changes})

    def to_dict(self) -> dict[str, Any]:
        """A deep copy of all settings."""
        return copy.deepcopy(vars(self))

    def to_json_string(self) -> str:
        """All settings as JSON, dtypes and devices by name."""
        return json.dumps(vars(self), indent=2, sort_keys=True, default=_json_name) + "\n"

    def to_json_file(self, json_file_path: str | Path) -> None:
        """Write all settings to a JSON file."""
        write_text(json_file_path, self.to_json_string())

    def update(self, **changes: Any) -> dict[str, Any]:
        """Set the known settings; returns the unknown ones."""
        for name in [name for name in changes if name in vars(self)]:
            setattr(self, name, changes.pop(name))
        return changes

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self.to_dict().items())

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash((type(self), self.to_json_string()))

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({settings})"


class QuantizedCacheConfig(CacheConfig):
    """Settings of a quantized cache: package, bits, axes and group size."""

    cache_implementation = "quantized"

    def __init__(  # noqa: PLR0913 - as documented
        self,
        backend: str = "quanto",
        nbits: int = 4,
        axis_key: int = 0,
        axis_value: int = 0,
        q_group_size: int = 64,
        residual_length: int = 128,
        compute_dtype: torch.dtype | str | None = "float16",
        device: torch.device | str = "cpu",
    ) -> None:
        self.backend = backend
        self.nbits = nbits
        self.axis_key = axis_key
        self.axis_value = axis_value
        self.q_group_size = q_group_size
        self.residual_length = residual_length
        # Documented, but unused: keys are returned in the dtype and on the device of the model.
        self.compute_dtype = _as_dtype(compute_dtype)
        self.device = device

    def validate(self, backend: str | None = None) -> None:
        """Raise ConfigError if a setting is invalid, or not supported by `backend`."""
        for name in {backend or self.backend, self.backend}:
            if str(name).lower() not in QUANTIZED_BACKENDS:
                raise ConfigError("backend", f"must be one of {', '.join(QUANTIZED_BACKENDS)}", name)
        limits = QUANTIZED_BACKENDS.values() if backend is None else [QUANTIZED_BACKENDS[backend.lower()]]
        nbits = sorted({bits for supported, _ in limits for bits in supported})
        axes = sorted({axis for _, supported in limits for axis in supported})
        for name, choices in (("nbits", nbits), ("axis_key", axes), ("axis_value", axes)):
            value = getattr(self, name)
            if isinstance(value, bool) or value not in choices:
                listed = " or ".join(map(str, choices)) + (f" for {backend}" if backend else "")
                raise ConfigError(name, f"must be {listed}", value)
        _check_integers(self, q_group_size=1, residual_length=0)


class StaticCacheConfig(CacheConfig):
    """Size of a static cache."""

    cache_implementation = "static"

    def __init__(self, batch_size: int, max_cache_len: int, device: torch.device | str = "cpu") -> None:
        self.batch_size = batch_size
        self.max_cache_len = max_cache_len
        self.device = device

    def validate(self) -> None:
        """Raise ConfigError if a setting is invalid."""
        _check_integers(self, batch_size=1, max_cache_len=1)


def _check_integers(config: CacheConfig, **minima: int) -> None:
    for name, minimum in minima.items():
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ConfigError(name, f"must be an integer >= {minimum}", value)


def as_cache_config(settings: Mapping[str, Any]) -> CacheConfig | FrozenMap:
    """The documented config with these settings, or the settings of a cache that has none."""
    given = dict(settings)
    named = given.pop("cache_implementation", None)
    if named in (None, "quantized") and given.keys() - {"device"} and given.keys() <= _QUANTIZED_SETTINGS:
        return QuantizedCacheConfig(**given)
    if named in (None, "static") and {"batch_size", "max_cache_len"} <= given.keys() <= _STATIC_SETTINGS:
        return StaticCacheConfig(**given)
    return FrozenMap(freeze(settings))


def _json_name(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _as_dtype(value: torch.dtype | str | None) -> torch.dtype | None:
    """A dtype from its name, as JSON stores it."""
    if isinstance(value, str):
        import torch

        dtype = getattr(torch, value.removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            raise ConfigError("compute_dtype", "must be a torch dtype or its name", value)
        return dtype
    return value

"""The settings of caches as objects: what users give as `cache_config` where a dict will not do."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import torch

from descant.errors import ConfigError

__all__ = ["CacheConfig", "QuantizedCacheConfig", "StaticCacheConfig"]

_BACKEND_LIMITS = {"quanto": ((2, 4), (0, -1)), "hqq": ((1, 2, 3, 4, 8), (0, 1))}  # widths in bits, axes


class CacheConfig:
    """The settings of one kind of cache, by name."""

    cache_implementation: str | None = None

    def validate(self) -> None:
        """Raise if any setting is wrong by itself."""

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], **changes: Any) -> Self:
        """Settings from a dict, and others over them."""
        return cls(**{**config_dict, **changes})

    def to_dict(self) -> dict[str, Any]:
        """All settings, copied."""
        return copy.deepcopy(vars(self))

    def to_json_string(self) -> str:
        """All settings as JSON; a dtype or device by its name."""
        return json.dumps(vars(self), indent=2, sort_keys=True, default=_json_name) + "\n"

    def to_json_file(self, json_file_path: str | Path) -> None:
        """Write all settings as JSON."""
        Path(json_file_path).write_text(self.to_json_string(), encoding="utf-8")

    def update(self, **changes: Any) -> dict[str, Any]:
        """Change the settings that there are; the rest is given back."""
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
    """How keys and values are quantised: by which package, to how many bits, in which groups."""

    cache_implementation = "quantized"

    def __init__(  # noqa: PLR0913 - as documented
        self,
        backend: str = "quanto",
        nbits: int = 4,
        axis_key: int = 0,
        axis_value: int = 0,
        q_group_size: int = 64,
        residual_length: int = 128,
        compute_dtype: torch.dtype | str | None = torch.float16,
        device: torch.device | str = "cpu",
    ) -> None:
        self.backend = backend
        self.nbits = nbits
        self.axis_key = axis_key
        self.axis_value = axis_value
        self.q_group_size = q_group_size
        self.residual_length = residual_length
        # Documented; keys come back in the dtype and on the device of the model, whatever these say.
        self.compute_dtype = _as_dtype(compute_dtype)
        self.device = device

    def validate(self, backend: str | None = None) -> None:
        """Raise if any setting is wrong by itself, or for that backend."""
        for name in {backend or self.backend, self.backend}:
            if str(name).lower() not in _BACKEND_LIMITS:
                raise ConfigError("backend", f"must be one of {', '.join(_BACKEND_LIMITS)}", name)
        bits, axes = ((1, 2, 3, 4, 8), (0, 1, -1)) if backend is None else _BACKEND_LIMITS[backend.lower()]
        for name, one_of in (("nbits", bits), ("axis_key", axes), ("axis_value", axes)):
            value = getattr(self, name)
            if isinstance(value, bool) or value not in one_of:
                choice = " or ".join(map(str, one_of)) + (f" for {backend}" if backend else "")
                raise ConfigError(name, f"must be {choice}", value)
        for name, least in (("q_group_size", 1), ("residual_length", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(name, f"must be an integer >= {least}", value)


class StaticCacheConfig(CacheConfig):
    """How large a static cache is made."""

    cache_implementation = "static"

    def __init__(self, batch_size: int, max_cache_len: int, device: torch.device | str = "cpu") -> None:
        self.batch_size = batch_size
        self.max_cache_len = max_cache_len
        self.device = device

    def validate(self) -> None:
        """Raise if any setting is wrong."""
        for name in ("batch_size", "max_cache_len"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(name, "must be an integer >= 1", value)


def _json_name(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _as_dtype(value: torch.dtype | str | None) -> torch.dtype | None:
    """A dtype, which JSON can only name."""
    if isinstance(value, str):
        found = getattr(torch, value.removeprefix("torch."), None)
        if not isinstance(found, torch.dtype):
            raise ConfigError("compute_dtype", "must be a torch dtype or its name", value)
        return found
    return value

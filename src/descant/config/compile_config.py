"""How a model's step is compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from descant.config.fields import freeze, thaw
from descant.errors import ConfigError

__all__ = ["CompileConfig"]

_FIELD: Final = "compile_config"
_DEFAULT_MODE: Final = "reduce-overhead"


@dataclass(frozen=True)
class CompileConfig:
    """What `torch.compile` is told of the decode step; what is not given is as documented there.

    `mode` and `options` may be given together, the options then change what the mode has set. Only inductor
    knows modes. `dynamic` unset means shapes as they are, since a step is fed in few, fixed ones.
    """

    fullgraph: bool = True
    dynamic: bool | None = None
    backend: str | Callable[..., Any] = "inductor"
    mode: str | None = _DEFAULT_MODE
    options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        given: Any = self  # whatever its annotations promise
        if not isinstance(given.fullgraph, bool):
            raise ConfigError(_FIELD, "must have a bool as `fullgraph`", given.fullgraph)
        if not (given.dynamic is None or isinstance(given.dynamic, bool)):
            raise ConfigError(_FIELD, "must have a bool or None as `dynamic`", given.dynamic)
        if not (callable(given.backend) or (isinstance(given.backend, str) and given.backend)):
            raise ConfigError(_FIELD, "must have a name or a callable as `backend`", given.backend)
        if not (given.mode is None or isinstance(given.mode, str)):
            raise ConfigError(_FIELD, "must have a name or None as `mode`", given.mode)
        options = given.options
        if options is not None:
            if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
                raise ConfigError(_FIELD, "must have a dict with string keys as `options`", options)
            # Frozen, so that what was compiled with the same settings can be found again.
            object.__setattr__(self, "options", freeze(options))
        try:
            hash(self)
        except TypeError:
            raise ConfigError(_FIELD, "must have plain values as `options`", self.options) from None

    @classmethod
    def of(cls, given: CompileConfig | Mapping[str, Any]) -> CompileConfig:
        """The settings that were given as an object or a dict."""
        if isinstance(given, CompileConfig):
            return given
        known = {one.name for one in fields(cls)}
        if strange := sorted(set(given) - known):
            raise ConfigError(_FIELD, f"must have only {', '.join(sorted(known))}", strange)
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        """All settings by name."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        return found | {"options": thaw(self.options)}

    @property
    def arguments(self) -> dict[str, Any]:
        """What `torch.compile` is called with."""
        known: dict[str, Any] = {
            "fullgraph": self.fullgraph,
            "dynamic": bool(self.dynamic),
            "backend": self.backend,
        }
        options = thaw(self.options)
        if self.backend == "inductor":
            import torch._inductor as inductor

            modes = inductor.list_mode_options()
            if self.mode is not None and self.mode not in modes:
                raise ConfigError(_FIELD, f"must have one of {', '.join(sorted(modes))} as `mode`", self.mode)
            if options is None:
                return known | {"mode": self.mode}
            # torch takes either; a mode is nothing but options that go together.
            return known | {"options": {**modes.get(self.mode or "default", {}), **options}}
        if self.mode not in (None, _DEFAULT_MODE):
            known["mode"] = self.mode
        return known | ({} if options is None else {"options": options})

"""CompileConfig: the arguments of torch.compile for the decode step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from descant.config.fields import freeze, thaw
from descant.errors import ConfigError

_FIELD: Final = "compile_config"
_DEFAULT_MODE: Final = "reduce-overhead"


@dataclass(unsafe_hash=True)
class CompileConfig:
    """The arguments of `torch.compile` for the decode step.

    `mode` and `options` may be given together: the options override those of the mode. Only the inductor
    backend has modes. `dynamic=None` means static shapes, as a step has few, fixed ones.
    """

    fullgraph: bool = True
    dynamic: bool | None = None
    backend: str | Callable[..., Any] = "inductor"
    mode: str | None = _DEFAULT_MODE
    options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        given: Any = self  # the values may not match the annotations
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
            # Hashable, so that a compiled forward is found by its settings.
            object.__setattr__(self, "options", freeze(options))
        try:
            hash(self)
        except TypeError:
            raise ConfigError(_FIELD, "must have plain values as `options`", self.options) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self) or name not in type(self).__dataclass_fields__:
            vars(self).update(vars(self.of({**vars(self), name: value})))
        else:
            object.__setattr__(self, name, value)  # the first time, by the constructor

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> CompileConfig:
        """The config with these settings."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(given) - known):
            raise ConfigError(_FIELD, f"must have only {', '.join(sorted(known))}", unknown)
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        """All settings by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {"options": thaw(self.options)}

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of `torch.compile`."""
        arguments: dict[str, Any] = {
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
                return arguments | {"mode": self.mode}
            # torch accepts a mode or options; a mode is a set of options.
            return arguments | {"options": {**modes.get(self.mode or "default", {}), **options}}
        if self.mode not in (None, _DEFAULT_MODE):
            arguments["mode"] = self.mode
        return arguments | ({} if options is None else {"options": options})

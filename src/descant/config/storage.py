"""Storage of a config: only given values are stored, every other field reads as its default."""

from __future__ import annotations

from typing import Any, Final, dataclass_transform

from descant.config.fields import FrozenMap, field

__all__ = ["StoredParameters"]

EMPTY_MAP: Final = FrozenMap()


class ParameterStorage:
    """Slots of a config: the given values, the source of each, unknown entries, and values set aside."""

    __slots__ = ("__weakref__", "_extra", "_sources", "_unused", "_values")
    _values: dict[str, Any]
    _sources: dict[str, str]
    _extra: FrozenMap
    _unused: FrozenMap


@dataclass_transform(kw_only_default=True, field_specifiers=(field,))
class StoredParameters(ParameterStorage):
    """Base of `Parameters`; type checkers see the declared fields as keyword-only."""

    __slots__ = ()

    def __init__(self, **given: Any) -> None:
        self._set_state(self._parse_given(given), {})
        self.__post_init__()

    def _parse_given(self, given: dict[str, Any]) -> dict[str, Any]:
        """The stored values of the constructor's arguments."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        """Validation hook of a subclass, called once the values are set."""

    def _set_state(
        self,
        values: dict[str, Any],
        sources: dict[str, str],
        extra: FrozenMap = EMPTY_MAP,
        unused: FrozenMap = EMPTY_MAP,
    ) -> None:
        object.__setattr__(self, "_values", values)
        object.__setattr__(self, "_sources", sources)
        object.__setattr__(self, "_extra", extra)
        object.__setattr__(self, "_unused", unused)

"""Declaration and storage of a generation parameter: `Field`, `FieldType` and the frozen containers.

A field type parses a user's value into one frozen, hashable form (sequences become tuples, mappings become
`FrozenMap`) or raises a `ConfigError` that names the field, the value and the fix. The types themselves are
in `field_types`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, dataclass_transform

from descant.errors import ConfigError


class FrozenMap(Mapping[Any, Any]):
    """A read-only, hashable mapping that compares equal to a dict of the same items."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[Any, Any] | None = None) -> None:
        self._items = dict(items or {})

    def __getitem__(self, key: Any) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


class RedactedMap(FrozenMap):
    """A `FrozenMap` whose repr hides watermark keys, so that they do not reach a log."""

    __slots__ = ()

    SECRET_KEYS: Final = ("hashing_key", "keys", "key")

    def without_secrets(self) -> dict[str, Any]:
        """The settings with a placeholder for each key."""
        return {name: "(hidden)" if name in self.SECRET_KEYS else value for name, value in self.items()}

    def __repr__(self) -> str:
        return repr(self.without_secrets())


class NoOffValue:
    """Marks a field without an off value: passing None then means "not given"."""


def freeze(value: Any) -> Any:
    """Plain data in hashable form; mapping keys become strings, as in JSON."""
    if isinstance(value, list | tuple):
        return tuple([freeze(item) for item in value])
    if isinstance(value, Mapping):
        names = {key: key if isinstance(key, str) else json.dumps(key) for key in value}
        return FrozenMap({names[key]: freeze(item) for key, item in value.items()})
    return value


def thaw(value: Any) -> Any:
    """The inverse of `freeze`, in JSON types."""
    if isinstance(value, list | tuple):
        return [thaw(item) for item in value]
    if isinstance(value, Mapping):
        return {key: thaw(item) for key, item in value.items()}
    return thaw(value.to_dict()) if hasattr(value, "to_dict") else value  # a documented class of settings


@dataclass(frozen=True, slots=True)
class FieldType:
    """The values that a field accepts.

    `parse` returns the stored value or raises any exception. The user sees "must be {expected}", unless the
    exception is a `FieldValueError`, whose text then replaces `expected`.
    """

    type_name: str
    expected: str
    parse: Callable[[Any], Any]
    is_secret: bool = False  # an error shows its type, not its value


class FieldValueError(ValueError):
    """A parse failure with a more specific requirement than `FieldType.expected`."""


@dataclass(slots=True)
class Field:
    """One declared parameter: type, default, group and description. It is also the attribute's descriptor."""

    kind: FieldType
    default: Any
    group: str
    doc: str
    off: Any
    name: str = ""
    is_drafter: bool = False  # its value selects what drafts tokens
    needs: tuple[str, ...] = ()  # fields without whose values this one has no effect
    setting: str = ""  # of a needed field, as an error suggests it; empty: by the field's type

    @property
    def type(self) -> str:
        """The accepted type as text, for tables and command-line help."""
        return self.kind.type_name

    def __set_name__(self, owner: Any, name: str) -> None:
        self.name = name

    def __get__(self, config: Any, owner: Any) -> Any:
        return self if config is None else config._values.get(self.name, self.default)

    def parse(self, value: Any) -> Any:
        """The stored form of a value that is not None."""
        try:
            return self.kind.parse(value)
        except ConfigError:
            raise
        except FieldValueError as error:
            raise ConfigError(self.name, f"must be {error}", self._shown(value)) from None
        except Exception:  # arrays and user objects may raise anything
            raise ConfigError(self.name, f"must be {self.kind.expected}", self._shown(value)) from None

    def _shown(self, value: Any) -> Any:
        return type(value) if self.kind.is_secret else value


GROUP_NEEDS: Final[Mapping[str, tuple[str, ...]]] = {"sampling": ("do_sample",), "beams": ("num_beams",)}


def field(*, default: Any, kind: FieldType, group: str, doc: str, off: Any = None, **facts: Any) -> Any:
    """Declare a field of a config class. `off` is the value that None stands for; unset, the default.

    `facts` are the remaining attributes of `Field`. A field of a group in `GROUP_NEEDS` needs what the group
    needs, unless it says otherwise.
    """
    facts.setdefault("needs", GROUP_NEEDS.get(group, ()))
    return Field(kind, default, group, doc, default if off is None else off, **facts)


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

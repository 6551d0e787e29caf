"""Lookup of generation parameters by name.

`FIELDS` maps every name to its declaration. `UNSUPPORTED` lists the fields whose method is not implemented;
it must only shrink.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from descant.config.fields import Field, FrozenMap, NoOffValue, thaw
from descant.config.name_suggestions import suggest_name
from descant.config.parameters import Parameters
from descant.errors import ConfigError

__all__ = [
    "FIELDS",
    "UNSUPPORTED",
    "UnsupportedField",
    "expand_kwargs",
    "parse_fields",
    "unknown_field_error",
]


@dataclass(frozen=True, slots=True)
class UnsupportedField:
    """Why a field is not supported, and which of its values have no effect."""

    reason: str
    no_op_values: tuple[Any, ...] = (None,)


UNSUPPORTED: Final[Mapping[str, UnsupportedField]] = MappingProxyType({})


def _collect_fields() -> dict[str, Field]:
    declared = {name: field for name, field in vars(Parameters).items() if isinstance(field, Field)}
    for name in UNSUPPORTED:
        declared[name].unsupported = True
    return declared


FIELDS: Final[Mapping[str, Field]] = MappingProxyType(_collect_fields())


def parse_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """The stored values of arguments given in code, where None switches a field off."""
    values = {}
    for name, value in given.items():
        if name not in FIELDS:
            raise unknown_field_error(name, value)
        field = FIELDS[name]
        parsed = field.off if value is None else field.parse(value)
        if parsed is not NoOffValue:
            values[name] = parsed
    return values


def expand_kwargs(values: dict[str, Any]) -> dict[str, Any]:
    """Given values with the fields inside `generation_kwargs` in place of the config's own.

    What remains in `generation_kwargs` are inputs of the model.
    """
    kwargs: Mapping[str, Any] = values.get("generation_kwargs") or {}
    if not kwargs:
        return values
    if "generation_kwargs" in kwargs:
        raise ConfigError("generation_kwargs", "must not hold itself", dict(kwargs))
    fields = parse_fields({name: thaw(value) for name, value in kwargs.items() if name in FIELDS})
    inputs = FrozenMap({name: value for name, value in kwargs.items() if name not in FIELDS})
    return {**values, **fields, "generation_kwargs": inputs}


def unknown_field_error(name: str, value: Any) -> ConfigError:
    """The error for an unknown parameter name, with the name that may be meant."""
    do = suggest_name(name, FIELDS) or "leave it out"
    return ConfigError(name, "is not a generation parameter", value, do)

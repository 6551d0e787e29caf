"""Lookup of generation parameters by name.

`FIELDS` maps every name to its declaration. `UNSUPPORTED` lists the fields whose method is not implemented;
it must only shrink.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from descant.config.fields import Field, FrozenMap, NoOffValue
from descant.config.parameters import Parameters
from descant.errors import ConfigError

__all__ = ["FIELDS", "UNSUPPORTED", "UnsupportedField", "parse_fields", "unknown_field_error"]


@dataclass(frozen=True, slots=True)
class UnsupportedField:
    """Why a field is not supported, and which of its values have no effect."""

    reason: str
    no_op_values: tuple[Any, ...] = (None,)


# fmt: off
UNSUPPORTED: Final[Mapping[str, UnsupportedField]] = MappingProxyType({
    "forced_decoder_ids": UnsupportedField("forced decoder tokens", (None, ())),
    "generation_kwargs": UnsupportedField("arguments passed through to the model", (FrozenMap(),)),
})
# fmt: on


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


def unknown_field_error(name: str, value: Any) -> ConfigError:
    """The error for an unknown parameter name, with the closest known one."""
    close = difflib.get_close_matches(name, FIELDS, n=1)
    do = f"did you mean `{close[0]}`?" if close else "leave it out"
    return ConfigError(name, "is not a generation parameter", value, do)

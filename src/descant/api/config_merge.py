"""The config of a call, merged from its arguments, a given config and the model's, and remembered."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from functools import lru_cache
from typing import Any, Final

from descant.config.generation_config import GenerationConfig
from descant.errors import InputError
from descant.models.hf_generation_config import explicit_values

__all__ = ["merge_config"]

# A config as plain data: each name with the type and the value of its entry. 1, 1.0 and True are equal, and
# differ as values of a field.
_Entries = tuple[tuple[str, Any, Any], ...]

_PLAIN_TYPES: Final = frozenset({bool, int, float, str})


def merge_config(
    call: Mapping[str, Any],
    argument: Any,
    model_config: Any,
    use_model_defaults: bool,
    **options: bool,
) -> GenerationConfig:
    """The effective config of call arguments, a config given as argument and the model's; None: not given.

    `options` are those of `GenerationConfig.merge`.
    Calls often repeat all three: plain data that has been merged before is not parsed and checked again.
    """
    if argument is None and not isinstance(model_config, GenerationConfig):
        call_entries = _plain_entries(call)
        model_entries = () if model_config is None else _plain_entries(_config_values(model_config))
        if call_entries is not None and model_entries is not None:
            # A copy, since it may change.
            return copy(_merge_plain(call_entries, model_entries, model_config is not None, **options))
    explicit, defaults = _as_generation_config(argument), _as_generation_config(model_config)
    if defaults is not None and explicit is not None and not use_model_defaults:
        defaults = defaults.only_special_tokens()
    return GenerationConfig.merge(call, explicit, defaults, **options)


@lru_cache(maxsize=256)
def _merge_plain(call: _Entries, model: _Entries, has_model: bool, **options: bool) -> GenerationConfig:
    """The effective config of plain call arguments and a plain config of the model."""
    defaults = GenerationConfig.from_transformers(_as_values(model)) if has_model else None
    return GenerationConfig.merge(_as_values(call), None, defaults, **options)


def _plain_entries(values: Mapping[str, Any]) -> _Entries | None:
    """The values as plain data; None: they hold something else, which may change."""
    entries: list[tuple[str, Any, Any]] = []
    for name, value in values.items():
        kind = type(value)
        if value is None or kind in _PLAIN_TYPES:
            entries.append((name, kind, value))
        elif kind in (list, tuple) and all(type(part) in _PLAIN_TYPES for part in value):
            entries.append((name, (kind, *map(type, value)), tuple(value)))
        else:
            return None
    return tuple(entries)


def _as_values(entries: _Entries) -> dict[str, Any]:
    """The values of plain data."""
    return {name: kind[0](value) if isinstance(kind, tuple) else value for name, kind, value in entries}


def _config_values(config: Any) -> dict[str, Any]:
    """The given values of transformers' config."""
    _check_config_type(config)
    # Not `to_dict`, which makes a deep copy at every call.
    return {name: value for name, value in explicit_values(config).items() if value is not None}


def _as_generation_config(given: Any) -> GenerationConfig | None:
    """Our generation config, from ours or from transformers'."""
    if given is None or isinstance(given, GenerationConfig):
        return given
    _check_config_type(given)
    return GenerationConfig.from_transformers(explicit_values(given))


def _check_config_type(config: Any) -> None:
    """Raise for what is no config."""
    if not hasattr(config, "to_dict"):
        raise InputError("generation_config", "must be a GenerationConfig, or a list of them", config)

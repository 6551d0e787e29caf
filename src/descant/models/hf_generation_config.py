"""transformers GenerationConfig with all defaults filled in, for function recipes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import transformers

from descant.config.generation_config import FIELDS, GenerationConfig
from descant.errors import InputError

__all__ = ["explicit_values", "fill_defaults"]

_LENGTH_FIELDS: Final = (("max_new_tokens", "max_length"), ("min_new_tokens", "min_length"))


def fill_defaults(model: Any, given: Any, call: Mapping[str, Any]) -> Any:
    """A transformers GenerationConfig: call arguments over the given config over the model's over defaults.

    transformers 5 leaves unset fields at None, which functions written for its documentation do not expect.
    Values are not validated: their meaning is up to the function. A list of configs is returned unchanged.
    """
    if isinstance(given, list | tuple):
        return given
    values: dict[str, Any] = {}
    for level in (_non_null_values(getattr(model, "generation_config", None)), _non_null_values(given), call):
        for new_tokens, total in _LENGTH_FIELDS:
            # Both names set the same limit, so a later level replaces either.
            for name, other in ((new_tokens, total), (total, new_tokens)):
                if level.get(name) is not None and level.get(other) is None:
                    values.pop(other, None)
        values |= {name: value for name, value in level.items() if value is not None}
    counterparts = dict(_LENGTH_FIELDS) | {total: new_tokens for new_tokens, total in _LENGTH_FIELDS}
    config: Any = transformers.GenerationConfig()  # type: ignore[no-untyped-call]
    missing = {
        name: FIELDS[name].default
        for name, value in vars(config).items()
        if name in FIELDS and value is None and name not in values and counterparts.get(name) not in values
    }
    for name, value in {**missing, **values}.items():
        setattr(config, name, value)
    explicit = _non_null_values(given).keys() | call.keys()
    config._filled = {name: value for name, value in vars(config).items() if name not in explicit}
    return config


def explicit_values(config: Any) -> dict[str, Any]:
    """The explicitly set values of a transformers GenerationConfig.

    Values that `fill_defaults` added are left out unless they were changed since: a function that passes its
    config on has not asked for them.
    """
    filled = getattr(config, "_filled", {})
    return {
        name: value
        for name, value in vars(config).items()
        if name not in filled or (filled[name] is not value and filled[name] != value)
    }


def _non_null_values(config: Any) -> dict[str, Any]:
    """The values of a Descant or transformers config that are not None."""
    if config is None:
        return {}
    if isinstance(config, GenerationConfig):
        return {name: value for name, value in config.to_dict().items() if value is not None}
    if not hasattr(config, "to_dict"):
        raise InputError("generation_config", "must be a GenerationConfig or a list of them", config)
    return {name: value for name, value in vars(config).items() if value is not None and name[0] != "_"}

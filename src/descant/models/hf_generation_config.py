"""What a function in the place of generate() is given for a config: one without gaps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import transformers

from descant.config.generation_config import FIELDS, GenerationConfig
from descant.errors import InputError

__all__ = ["explicit_values", "fill_defaults"]

_LENGTH_FIELDS: Final = (("max_new_tokens", "max_length"), ("min_new_tokens", "min_length"))


def fill_defaults(model: Any, given: Any, call: Mapping[str, Any]) -> Any:
    """A config of transformers' own kind: the call over what was given over the model's over the defaults.

    transformers 5 has None for what is not set, with which a function that follows the documents cannot
    count. Nothing is checked: what its fields mean is for the function to say. Several configs stay as
    they are.
    """
    if isinstance(given, list | tuple):
        return given
    values: dict[str, Any] = {}
    for level in (_non_null_values(getattr(model, "generation_config", None)), _non_null_values(given), call):
        for new, whole in _LENGTH_FIELDS:
            # How many are new and how many there are in all say the same thing: the later level counts.
            for name, other in ((new, whole), (whole, new)):
                if level.get(name) is not None and level.get(other) is None:
                    values.pop(other, None)
        values |= {name: value for name, value in level.items() if value is not None}
    pairs = {one: other for new, whole in _LENGTH_FIELDS for one, other in ((new, whole), (whole, new))}
    config: Any = transformers.GenerationConfig()  # type: ignore[no-untyped-call]
    missing = {
        name: FIELDS[name].default
        for name, value in vars(config).items()
        if name in FIELDS and value is None and name not in values and pairs.get(name) not in values
    }
    for name, value in {**missing, **values}.items():
        setattr(config, name, value)
    told = _non_null_values(given).keys() | call.keys()
    config._filled = {name: value for name, value in vars(config).items() if name not in told}
    return config


def explicit_values(config: Any) -> dict[str, Any]:
    """What was really given of a config of transformers' own kind, one that `completed` made among them.

    A function that hands its config on has not asked for what was only filled in, unless it changed that.
    """
    filled = getattr(config, "_filled", {})
    return {
        name: value
        for name, value in vars(config).items()
        if name not in filled or (filled[name] is not value and filled[name] != value)
    }


def _non_null_values(config: Any) -> dict[str, Any]:
    """The values that a config has, of ours or transformers' own."""
    if config is None:
        return {}
    if isinstance(config, GenerationConfig):
        return {name: value for name, value in config.to_dict().items() if value is not None}
    if not hasattr(config, "to_dict"):
        raise InputError("generation_config", "must be a GenerationConfig, or a list of them", config)
    return {name: value for name, value in vars(config).items() if value is not None and name[0] != "_"}

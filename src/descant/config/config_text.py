"""The printed form of a config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from descant.config.fields import RedactedMap

__all__ = ["format_config"]


def format_config(values: Mapping[str, Any]) -> str:
    """Values as indented JSON, sorted by name; keys of watermarks are hidden, objects are shown by repr."""
    return json.dumps(_to_json(values), indent=2, sort_keys=True, default=repr) + "\n"


def _to_json(value: Any) -> Any:
    if isinstance(value, RedactedMap):
        value = value.without_secrets()
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    return value

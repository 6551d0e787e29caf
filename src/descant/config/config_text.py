"""The printed form of a config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from descant.config.fields import RedactedMap

__all__ = ["format_config"]


def format_config(values: Mapping[str, Any]) -> str:
    """Values as indented JSON, sorted by name; keys of watermarks are hidden, objects are shown by repr."""
    # The order of a schema's properties decides the text.
    shown = {name: _to_json(values[name], keep_order=name == "grammar") for name in sorted(values)}
    return json.dumps(shown, indent=2, default=repr) + "\n"


def _to_json(value: Any, keep_order: bool) -> Any:
    if hasattr(value, "to_dict"):  # a documented class of settings
        value = RedactedMap(value.to_dict()).without_secrets()
    if isinstance(value, Mapping):
        items = {
            key if isinstance(key, str) else str(key): _to_json(item, keep_order)
            for key, item in value.items()
        }
        return items if keep_order else dict(sorted(items.items()))
    if isinstance(value, list | tuple):
        return [_to_json(item, keep_order) for item in value]
    return value

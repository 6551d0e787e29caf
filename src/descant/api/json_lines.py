"""Lines of JSON, one object in each, and fields of JSON or text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from descant.errors import InputError


def parse_line(line: bytes) -> Mapping[str, Any]:
    """The object in a line."""
    text = line.decode(errors="replace").strip()
    try:
        data = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InputError("input", f"must hold a JSON object in each line ({error})", text) from None
    if not isinstance(data, dict):
        raise InputError("input", "must hold a JSON object in each line", text)
    return data


def parse_text(text: str) -> Any:
    """The JSON value of a field that is written as text, as in CSV; text that is no JSON is itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def format_line(record: Mapping[str, Any]) -> str:
    """A record as a line, ASCII-escaped only if it cannot be encoded."""
    line = json.dumps(record, ensure_ascii=False)
    try:
        line.encode()
    except UnicodeEncodeError:
        line = json.dumps(record)
    return line + "\n"

"""JSON bodies of responses."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response

__all__ = ["JsonResponse", "encode_json"]


def encode_json(value: Any) -> bytes:
    """A value as JSON; lone surrogates, which a request may hold and UTF-8 cannot, are escaped."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False).encode()


class JsonResponse(Response):
    """A response of one JSON value."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body."""
        return encode_json(content)

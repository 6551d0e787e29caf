"""Errors of the HTTP API in OpenAI's schema, and JSON bodies."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from starlette.responses import Response

from descant.errors import (
    ConfigError,
    DeadlineExceeded,
    DescantError,
    EngineClosed,
    EngineFull,
    InputError,
    MissingExtra,
    NotEnoughMemory,
    RowError,
    UnsupportedModel,
)

_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
}
# Of errors that the engine may have raised, which names fields as `GenerationConfig` does.
_FIELD_CODES: Final = (
    *("invalid_value", "context_length_exceeded", "generation_failed", "unsupported"),
    "unsupported_parameter",
)
MAX_MESSAGE_CHARS: Final = 2000
MAX_PARAM_CHARS: Final = 200  # a name of the body may be as long as the body


class ApiError(Exception):
    """An error that is the response to a request."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after = retry_after  # seconds

    @property
    def body(self) -> dict[str, Any]:
        """The error as JSON values."""
        message = self.message
        if len(message) > MAX_MESSAGE_CHARS:
            message = message[: MAX_MESSAGE_CHARS - 3] + "..."
        kind = _TYPES.get(self.status, "server_error")
        param = None if self.param is None else self.param[:MAX_PARAM_CHARS]
        return {"error": {"message": message, "type": kind, "param": param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the response."""
        headers = {}
        if self.retry_after is not None:
            # A whole number of seconds, as the header must be, and never 0.
            headers["retry-after"] = str(max(1, int(-(-self.retry_after // 1))))
        if self.status == 401:
            headers["www-authenticate"] = 'Basic realm="descant", charset="UTF-8"'
        return headers

    def encode(self) -> bytes:
        """The body of the response."""
        # A message may quote a lone surrogate of the request, which UTF-8 cannot hold.
        return json.dumps(self.body).encode()


def invalid_value(param: str, message: str) -> ApiError:
    """The error of a field whose value is wrong."""
    return ApiError(400, message, param=param, code="invalid_value")


def api_error(error: Exception) -> ApiError:
    """The response to an error of the library; whatever it does not know is an internal error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RowError) and isinstance(error.__cause__, EngineClosed):
        error = error.__cause__  # of requests that ran when it was closed
    if isinstance(error, EngineFull):
        return ApiError(429, "the queue is full: try again later", code="queue_full", retry_after=1.0)
    if isinstance(error, EngineClosed):
        return ApiError(503, "the server is shutting down", code="shutting_down", retry_after=1.0)
    if isinstance(error, DeadlineExceeded):
        return ApiError(408, "the request took longer than the server allows", code="timeout")
    if isinstance(error, NotEnoughMemory):
        return ApiError(400, str(error), code="not_enough_memory")
    if isinstance(error, ConfigError | InputError):
        field = error.field if isinstance(error.field, str) else error.field[0]
        return invalid_value(field, str(error))
    if isinstance(error, MissingExtra):
        return ApiError(400, str(error), code="not_installed")
    if isinstance(error, RowError) and _is_caused_by_request(error):
        return ApiError(400, str(error), code="generation_failed")
    if isinstance(error, UnsupportedModel):
        return ApiError(400, str(error), code="unsupported")
    # What went wrong inside is logged, and not told to the client.
    return ApiError(500, "the server failed to answer this request", code="internal_error")


def in_words_of(error: ApiError, field_names: Mapping[str, str]) -> ApiError:
    """An error that names the fields as its request does; `field_names` has those that differ."""

    def own(match: re.Match[str]) -> str:
        return f"`{field_names.get(match[1], match[1])}`"

    if error.code not in _FIELD_CODES:
        return error
    message = re.sub(r"`(\w+)`", own, error.message)
    for name, other in field_names.items():
        if "_" in name:  # else it may be a word of the sentence
            message = re.sub(rf"(?<![\w`]){name}(?![\w`])", other, message)
    param = None if error.param is None else field_names.get(error.param, error.param)
    return ApiError(error.status, message, param=param, code=error.code)


def _is_caused_by_request(error: RowError) -> bool:
    """Whether a request failed by its own parameters, such as those that leave no token to choose."""
    cause = error.__cause__
    return cause is None or (isinstance(cause, DescantError) and not isinstance(cause, RowError))


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

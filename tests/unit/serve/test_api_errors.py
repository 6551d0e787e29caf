"""Errors as responses: statuses, the schema, and nothing of the inside."""

from __future__ import annotations

import json

import pytest

from descant.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineClosed,
    EngineFull,
    InputError,
    MissingExtra,
    NotEnoughMemory,
    RowError,
    UnsupportedModel,
)
from descant.serve.http.errors import ApiError, JsonResponse, api_error, encode_json


def caused(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        (ConfigError("top_k", "must be >= 0", -1), 400, "top_k"),
        (ConfigError(("seed", "x"), "must be", 1), 400, "seed"),
        (InputError("prompt", "must be", 1), 400, "prompt"),
        (EngineFull(3, 3), 429, None),
        (EngineClosed(), 503, None),
        (DeadlineExceeded(1), 408, None),
        (NotEnoughMemory("too much"), 400, None),
        (MissingExtra("xgrammar", "it"), 400, None),
        (UnsupportedModel("no"), 400, None),
        (RowError("no token is left", 1), 400, None),
        (caused(RowError("failed", 1), ConfigError("grammar", "must be", 1)), 400, None),
        (caused(RowError("failed", 1), ZeroDivisionError("secret")), 500, None),
        (ValueError("secret"), 500, None),
    ],
)
def test_statuses(error, status, param):
    failure = api_error(error)
    body = failure.body["error"]
    assert (failure.status, body["param"]) == (status, param)
    assert set(body) == {"message", "type", "param", "code"}
    assert "secret" not in body["message"]
    assert status != 429 or int(failure.headers["retry-after"]) >= 1


@pytest.mark.parametrize("value", [{"a": "é"}, ["\ud800é"], "😀", [1.5, None, True]])
def test_every_text_can_be_encoded(value):
    assert json.loads(encode_json(value)) == value
    assert JsonResponse("é").body == '"é"'.encode()
    with pytest.raises(ValueError, match="JSON"):
        encode_json(float("nan"))


def test_a_message_is_bounded_and_may_hold_surrogates():
    error = ApiError(400, "\ud800" * 10_000)
    assert len(json.loads(error.encode())["error"]["message"]) == 2000

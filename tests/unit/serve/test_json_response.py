"""JSON bodies."""

from __future__ import annotations

import json

import pytest

from descant.serve.http.errors import JsonResponse, encode_json


@pytest.mark.parametrize("value", [{"a": "é"}, ["\ud800é"], "😀", [1.5, None, True]])
def test_every_text_can_be_encoded(value):
    assert json.loads(encode_json(value)) == value


def test_letters_are_not_escaped():
    assert JsonResponse("é").body == '"é"'.encode()


def test_numbers_that_json_lacks_are_refused():
    with pytest.raises(ValueError, match="JSON"):
        encode_json(float("nan"))

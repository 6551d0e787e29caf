"""A config written, read and written again is the same file."""

import pytest

from descant import GenerationConfig
from descant.errors import format_value
from descant.testing import check_config_roundtrip
from tests.contracts.subjects import METHODS
from tests.support.config_cases import EVERY_VALUE, made

UNWRITABLE = ("constraints", "prefix_allowed_tokens_fn")
WRITABLE = [(name, value) for name, value in EVERY_VALUE if name not in UNWRITABLE]


@pytest.mark.parametrize(("name", "value"), WRITABLE, ids=format_value)
def test_every_value_of_every_field(name, value):
    check_config_roundtrip(made(name, value))


@pytest.mark.parametrize("method", METHODS)
def test_every_method(method):
    check_config_roundtrip(GenerationConfig(**METHODS[method]))


def test_a_config_with_entries_of_others():
    check_config_roundtrip(
        GenerationConfig.from_dict({"num_beams": 3, "their_own": {"a": [1, None]}, "zz": "é"})
    )


class Forgetful(GenerationConfig):
    """One that loses a field on the way to a dict."""

    __slots__ = ()

    def to_dict(self):
        return {**super().to_dict(), "num_beams": None}


def test_a_config_that_loses_a_field_is_found():
    check_config_roundtrip(Forgetful(top_k=3))
    with pytest.raises(AssertionError, match="by to_dict and from_dict the config became"):
        check_config_roundtrip(Forgetful(num_beams=3))

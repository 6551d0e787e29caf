"""The small helpers of `descant.parts`."""

from __future__ import annotations

import pytest

from descant import InputError
from descant.parts import check_number


@pytest.mark.parametrize(("value", "bounds"), [(0, (0,)), (0.5, (0.0, 1.0)), (7, (1, 7))])
def test_a_number_within_its_bounds_is_returned(value: float, bounds: tuple[float, ...]) -> None:
    assert check_number("scale", value, *bounds) == value


@pytest.mark.parametrize(
    ("value", "options"),
    [(-1, {}), (True, {}), ("1", {}), (None, {}), (1.5, {"integer": True}), (3, {"high": 2})],
)
def test_any_other_value_is_an_error_that_names_it(value: object, options: dict[str, object]) -> None:
    with pytest.raises(InputError, match="`scale` must be"):
        check_number("scale", value, 0, **options)

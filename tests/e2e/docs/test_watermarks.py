"""The tables of the page on watermarks equal the measurements, and the measurements are sufficient."""

import json
from typing import Any

import pytest

from tools.docs import watermark_tables


@pytest.fixture(scope="module")
def figures() -> Any:
    return json.loads(watermark_tables.FIGURES.read_text(encoding="utf-8"))


def test_the_page_is_current(figures: Any) -> None:
    page = watermark_tables.PAGE.read_text(encoding="utf-8")
    assert page == watermark_tables.render(page, figures), "run tools/docs/watermark_tables.py"
    assert [found[1] for found in watermark_tables.BLOCK.finditer(page)] == list(watermark_tables.BLOCKS)


def test_enough_was_measured(figures: Any) -> None:
    none = figures["texts"]["none"]
    assert sum(none.values()) >= 2000
    assert sum(many for name, many in none.items() if name.startswith("human")) >= 500
    for mark in watermark_tables.NAMES:
        marked = figures["texts"][mark]
        assert sum(many for name, many in marked.items() if name.startswith("sampled, ")) >= 500
        assert marked["sampled, smollm2"] >= 150
        assert figures["false"][mark]["0.01"]["exact"]["count"] >= 25 * sum(none.values())
        assert figures["edits"][mark].keys() == {
            f"{kind} {share}" for kind in ("deleted", "replaced", "reordered") for share in (0.1, 0.3, 0.5)
        }


def test_the_rates_equal_the_levels(figures: Any) -> None:
    for mark, found in figures["false"].items():
        for level in ("0.01", "0.001"):
            assert abs(found[level]["randomised"]["sigma"]) < 3, mark
            assert found[level]["exact"]["sigma"] < 3, mark
            assert found[level]["human"]["sigma"] < 3, mark
            assert found[level]["text"]["sigma"] < 3, mark

"""The reference of parameters is what the table of parameters says."""

from descant.config import FIELDS, GROUPS
from scripts import reference


def test_the_page_is_current() -> None:
    assert reference.PAGE.read_text(encoding="utf-8") == reference.render(), "run scripts/reference.py"


def test_every_field_is_on_the_page_once() -> None:
    page = reference.render()
    assert [name for name in FIELDS if page.count(f"\n| `{name}` |") != 1] == []
    assert {field.group for field in FIELDS.values()} == set(GROUPS)

"""The reference of parameters equals the table of parameters."""

from descant.config.generation_config import FIELDS, GROUPS
from tools.docs import config_reference


def test_the_page_is_current() -> None:
    assert config_reference.PAGE.read_text(encoding="utf-8") == config_reference.render(), (
        "run tools/docs/config_reference.py"
    )


def test_every_field_is_on_the_page_once() -> None:
    page = config_reference.render()
    assert [name for name in FIELDS if page.count(f"\n| `{name}` |") != 1] == []
    assert {field.group for field in FIELDS.values()} == set(GROUPS)

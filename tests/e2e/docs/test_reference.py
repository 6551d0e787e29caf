"""The reference of parameters equals the table of parameters."""

from tools.docs import config_reference


def test_the_page_is_current() -> None:
    assert config_reference.PAGE.read_text(encoding="utf-8") == config_reference.render(), (
        "run tools/docs/config_reference.py"
    )

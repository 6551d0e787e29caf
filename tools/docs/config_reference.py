"""Write docs/reference/config.md from the table of generation parameters, or check that it is current.

python tools/docs/config_reference.py             write
python tools/docs/config_reference.py --check     fail if the page differs from the table
"""

import argparse
import difflib
import sys
from pathlib import Path

from descant.config.generation_config import FIELDS, GROUPS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "config.md"

HEAD = """\
<!-- Written by tools/docs/config_reference.py from descant.config.generation_config.FIELDS: edit there. -->

# GenerationConfig

Every parameter of `descant.GenerationConfig`. The same names are keyword arguments of `descant.generate()`.
Setting an attribute and `update` check the values and change a config in place, `replace` returns a changed
copy. A value comes from the call, else from the `generation_config` argument, else from the model's own
config, else from the defaults below.
"""


def cell(text: str) -> str:
    """Text escaped for a table cell."""
    return text.replace("|", "\\|")


def code(text: str) -> str:
    """Inline code inside a table cell; a bar in backticks is read differently by different dialects."""
    if "|" not in text:
        return f"`{text}`"
    return f"<code>{text.replace('|', '&#124;')}</code>"


def render() -> str:
    """The current page."""
    parts = [HEAD]
    for group in GROUPS:
        parts.append(
            f'\n## {group.capitalize()}\n\n<div class="parameters" markdown>\n\n'
            "| parameter | type | default | meaning |\n|---|---|---|---|\n"
        )
        for name, field in FIELDS.items():
            if field.group != group:
                continue
            default, about = code(repr(field.default)), cell(field.doc)
            parts.append(f"| {code(name)} | {code(field.type)} | {default} | {about} |\n")
        parts.append("\n</div>\n")
    return "".join(parts)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    new = render()
    if not parser.parse_args().check:
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(new, encoding="utf-8")
        return 0
    old = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    difference = difflib.unified_diff(
        old.splitlines(), new.splitlines(), "the page", "the table", lineterm=""
    )
    print("\n".join(difference), end="")
    return int(old != new)


if __name__ == "__main__":
    sys.exit(main())

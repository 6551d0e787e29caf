"""Writes the table of the migration guide: where Descant differs from the documentation, and why.

python -m tests.reference.spec_sentences.design
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.reference.spec_sentences import checks
from tests.reference.spec_sentences.sentence import SENTENCES

__all__ = ["PAGE", "render"]

PAGE = Path(__file__).resolve().parents[3] / "docs" / "guide" / "migrate-4.md"
_TABLE = re.compile(r"(<!-- sentences: begin -->\n).*(<!-- sentences: end -->)", re.DOTALL)


def render(page: str) -> str:
    """The page with the current table."""
    assert checks.__all__
    rows = [one for one in SENTENCES.values() if one.ours]
    lines = ["", "| documented | where | Descant |", "|---|---|---|"]
    lines += [
        f"| {_cell(one.text)} | {one.document}, line {one.line} | {_cell(one.ours)} |"
        for one in sorted(rows, key=lambda one: (one.document, one.line, one.name))
    ]
    table = "\n".join([*lines, "", ""])
    assert _TABLE.search(page), f"{PAGE.name} has no place for the table"
    return _TABLE.sub(lambda found: found[1] + table + found[2], page)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

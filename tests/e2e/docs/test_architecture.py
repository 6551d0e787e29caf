"""The architecture page: its pictures show the rooms and the step as they are in the code."""

from __future__ import annotations

import re

import pytest

from descant.core import interfaces
from tools.docs import architecture_pictures as pictures


@pytest.mark.parametrize("path", pictures.PICTURE_FILES, ids=lambda path: path.name)
def test_pictures_are_current(path):
    assert path.read_text(encoding="utf-8") == pictures.PICTURE_FILES[path]()


def test_every_room_is_drawn_with_a_description():
    drawn = [room for layer in pictures.layers() for room in layer]
    found = {path.parent.name for path in pictures.SOURCE.glob("*/__init__.py")}
    found |= {path.stem for path in pictures.SOURCE.glob("*.py")} - {"__init__"}
    assert sorted(drawn) == sorted(found)
    assert [room for room in drawn if len(pictures.summary(room)) < 20] == []


def _extension_points():
    """(symbol, path) for every "`symbol` in `path`" of the table "Where to add what"."""
    page = (pictures.ROOT / "docs/guide/architecture.md").read_text(encoding="utf-8")
    table = page.split("## Where to add what")[1].split("\n## ")[0]
    for cell in re.split(r"[|\n]", table):
        for symbols, path in re.findall(r"((?:`\w+`(?: or )?)+) (?:in|of) `([\w/]+(?:\.py|/))`", cell):
            for symbol in re.findall(r"`(\w+)`", symbols):
                yield symbol, path


@pytest.mark.parametrize(("symbol", "path"), sorted(set(_extension_points())))
def test_the_table_names_what_the_file_defines(symbol, path):
    target = pictures.SOURCE / path
    assert target.exists()
    if target.is_dir():  # the interface to implement there
        from descant import parts

        assert hasattr(parts, symbol) or hasattr(interfaces, symbol)
        return
    assert re.search(
        rf"^\s*(?:class |def )?{symbol}\b\s*[:(=]", target.read_text(encoding="utf-8"), re.MULTILINE
    )


def test_the_table_has_every_kind_of_part():
    assert len(set(_extension_points())) >= 20

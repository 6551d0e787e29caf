"""The form of the example recipes: one page each, with public parts only, and with their papers."""

from __future__ import annotations

import ast
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import descant.parts
import descant.recipes.cookbook

FOLDER = Path(descant.recipes.cookbook.__file__).parent
PAGES = sorted(one for one in FOLDER.glob("*.py") if one.name != "__init__.py")


@pytest.mark.parametrize("page", PAGES, ids=lambda one: one.stem)
def test_a_page_each(page):
    source = page.read_text()
    assert len(source.splitlines()) < 80
    tree = ast.parse(source)
    assert "arXiv" in (ast.get_docstring(tree) or "")
    names = {one.module for one in ast.walk(tree) if isinstance(one, ast.ImportFrom)}
    names |= {name.name for one in ast.walk(tree) if isinstance(one, ast.Import) for name in one.names}
    ours = {one for one in names if one.split(".")[0] not in {*sys.stdlib_module_names, "torch"}}
    assert ours == {"descant.parts"}


@pytest.mark.parametrize("page", PAGES, ids=lambda one: one.stem)
def test_a_page_is_a_recipe_folder_too(page, tmp_path):
    """A copy of its folder is a recipe of its own: the way to start one."""
    from descant import load_recipe
    from descant.recipes.lock import Lock

    (tmp_path / "generate.py").write_text(page.read_text())
    found = load_recipe(tmp_path, trust_remote_code=True, lock=Lock(tmp_path.parent / f"{page.stem}.lock"))
    installed = load_recipe(page.stem.replace("_", "-"))
    assert (found.kind, found.argument_names) == (installed.kind, installed.argument_names)


def test_each_has_an_entry_point():
    found = {
        one.name: one.value for one in entry_points(group="descant.recipes") if one.dist.name == "descant"
    }
    assert found == {one.stem.replace("_", "-"): f"descant.recipes.cookbook.{one.stem}" for one in PAGES}

"""Recipes of installed packages: by an entry point, without trust."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from descant.errors import RecipeError
from descant.recipes.loading import inspect_recipe, load_recipe, trust_recipe

GENERATE = "def generate(model, left_padding=None, **kwargs):\n    return 'ran'\n"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """`installed("dist", {"name": "module:attribute"}, {"module": source})`: a package on the path."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    made: list[str] = []

    def install(dist: str, entries: dict[str, str], modules: dict[str, str]) -> Path:
        info = site / f"{dist}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n")
        lines = "".join(f"{name} = {value}\n" for name, value in entries.items())
        (info / "entry_points.txt").write_text(f"[descant.recipes]\n{lines}")
        for name, text in modules.items():
            (site / f"{name}.py").write_text(text)
            made.append(name)
        importlib.invalidate_caches()
        return site

    yield install
    for name in made:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("trust", [False, None, True])
def test_an_installed_recipe_needs_no_trust(
    installed: Callable[..., Path], trust: bool | None, own_lock: Path
) -> None:
    installed("some-dist", {"their-way": "their_module"}, {"their_module": GENERATE})
    recipe = load_recipe("their-way", trust_remote_code=trust)
    assert (recipe.name, recipe.kind, recipe.source) == ("their-way", "generate", "package")
    assert recipe.make(None) == "ran"
    assert not own_lock.exists()


KINDS = {
    "module": ("their_module", "class Any: ...\nstrategy = Any", "strategy"),
    "module attribute": ("their_module:processor", "def processor(strength=1): ...", "processor"),
    "factory of a kind": ("their_module:wrapper", "def wrapper(inner, strength=1): ...", "wrapper"),
    "class": ("their_module:Mine", "class Mine:\n    def draft(self, rows): ...", "drafter"),
    "function": ("their_module:something", "def something(model): ...", "generate"),
}


@pytest.mark.parametrize("case", KINDS)
def test_what_a_package_may_offer(installed: Callable[..., Path], case: str) -> None:
    value, text, kind = KINDS[case]
    installed("some-dist", {"their-way": value}, {"their_module": text})
    recipe = load_recipe("their-way")
    assert (recipe.name, recipe.kind, recipe.source) == ("their-way", kind, "package")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("their_module", "1 / 0"),
        ("their_module", "raise SystemExit(2)"),
        ("their_module", "import no_such_module_anywhere"),
        ("their_module:absent", ""),
        ("their_module:number", "number = 5"),
        ("their_module:generate", "generate = 5"),
        ("their_module", "x = 1"),
        ("their_module", "def generate(model): ...\ndef drafter(): ..."),
        ("absent_module", ""),
        ("!!", ""),
    ],
)
def test_an_entry_point_that_cannot_be_used_is_a_recipe_error(
    installed: Callable[..., Path], value: str, text: str
) -> None:
    installed("some-dist", {"their-way": value}, {"their_module": text})
    with pytest.raises(RecipeError) as error:
        load_recipe("their-way")
    assert error.value.recipe == "their-way"
    assert "\n" not in str(error.value)


def test_an_interrupt_while_a_package_is_imported_stays_one(installed: Callable[..., Path]) -> None:
    installed("some-dist", {"their-way": "their_module"}, {"their_module": "raise KeyboardInterrupt"})
    with pytest.raises(KeyboardInterrupt):
        load_recipe("their-way")


def test_a_look_at_an_installed_one_imports_nothing(installed: Callable[..., Path]) -> None:
    installed("some-dist", {"their-way": "their_module:strategy"}, {"their_module": "raise SystemExit"})
    seen = inspect_recipe("their-way")
    assert (seen.trust_state, seen.kind, seen.contents, seen.lock_key) == (
        "installed",
        "strategy",
        None,
        None,
    )
    entry = seen.reference.entry_point
    assert entry is not None
    assert entry.dist is not None
    assert (entry.value, entry.dist.name) == (
        "their_module:strategy",
        "some-dist",
    )
    assert "their_module" not in sys.modules
    with pytest.raises(RecipeError, match="needs no trust"):
        trust_recipe("their-way")

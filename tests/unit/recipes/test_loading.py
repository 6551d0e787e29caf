"""From a folder's name to a recipe: what is trusted, what is pinned, what has changed."""

from __future__ import annotations

import os
import re
import shlex
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from descant.errors import ChangedRecipe, InputError, MissingRequirements, RecipeError, UntrustedRecipe
from descant.recipes.loading import (
    PACKAGE_PREFIX,
    Reference,
    inspect_recipe,
    load_recipe,
    lock_key,
    trust_recipe,
)
from descant.recipes.lock import Lock
from descant.recipes.recipe import Recipe

GENERATE = "def generate(model, left_padding=None, **kwargs):\n    return 'ran'\n"


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """Every test imports its modules again."""
    yield
    for name in ours():
        del sys.modules[name]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "recipe"
    made.mkdir()
    (made / "generate.py").write_text(GENERATE)
    return made


def ours() -> set[str]:
    return {name for name in sys.modules if name.startswith(PACKAGE_PREFIX)}


# -- folders


@pytest.mark.parametrize("trust", [False, None])
def test_a_folder_needs_trust_and_is_not_even_read(folder: Path, trust: bool | None, own_lock: Path) -> None:
    (folder / "generate.py").unlink()
    (folder / "generate.py").symlink_to("/nowhere")  # reading it would be another error
    with pytest.raises(
        UntrustedRecipe, match=r"needs trust_remote_code=True: .*descant recipe show"
    ) as error:
        load_recipe(folder, trust_remote_code=trust)
    assert not isinstance(error.value, ChangedRecipe)
    assert error.value.recipe == str(folder)
    assert not own_lock.exists()


def test_a_folder_that_is_trusted_runs_and_is_pinned(folder: Path, own_lock: Path) -> None:
    recipe = load_recipe(folder, trust_remote_code=True)
    assert (recipe.name, recipe.kind, recipe.source, recipe.revision) == (
        str(folder),
        "generate",
        "folder",
        None,
    )
    assert recipe.make(None) == "ran"
    assert recipe.contents is not None
    assert set(recipe.contents.files) == {"generate.py"}
    [(key, pin)] = Lock(own_lock).pins().items()
    assert key == f"folder:{folder.resolve()}"
    assert (pin.revision, pin.digest) == (None, recipe.contents.digest)
    assert pin.files == recipe.contents.hashes


@pytest.mark.parametrize("trust", [1, "True", "yes", 0, [], 1.0])
def test_trust_is_true_false_or_none(folder: Path, trust: Any) -> None:
    with pytest.raises(InputError, match="`trust_remote_code` must be True, False or None"):
        load_recipe(folder, trust_remote_code=trust)


def test_an_unchanged_folder_runs_again_without_another_import(folder: Path) -> None:
    first = load_recipe(folder, trust_remote_code=True)
    before = ours()
    again = load_recipe(str(folder), trust_remote_code=True)
    assert again.make is first.make
    assert ours() == before


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda at: (at / "generate.py").write_text(GENERATE + "#"), "generate.py has changed"),
        (lambda at: (at / "other.py").write_text(""), "other.py is new"),
        (lambda at: (at / "README.md").unlink(), "README.md is gone"),
        (
            lambda at: (at / "tests").mkdir() or (at / "tests" / "test_it.py").write_text(""),
            "tests/test_it.py is new",
        ),
        (lambda at: (at / "data.txt").rename(at / "Data.txt"), "Data.txt is new, data.txt is gone"),
    ],
)
def test_a_changed_folder_is_refused_until_it_is_trusted_again(
    folder: Path, change: Callable[[Path], object], told: str
) -> None:
    (folder / "README.md").write_text("read me")
    (folder / "data.txt").write_text("data")
    load_recipe(folder, trust_remote_code=True)
    change(folder)
    for _ in range(2):
        with pytest.raises(ChangedRecipe) as error:
            load_recipe(folder, trust_remote_code=True)
        message = str(error.value)
        assert told in message
        assert f"`descant recipe show {folder}`" in message
        assert f"`descant recipe trust {folder}`" in message
        assert "\n" not in message
    assert inspect_recipe(folder).trust_state == "changed"
    trusted = trust_recipe(folder)
    assert trusted.trust_state == "trusted"
    assert load_recipe(folder, trust_remote_code=True).make(None) == "ran"


def test_an_error_names_a_few_files_only(folder: Path) -> None:
    load_recipe(folder, trust_remote_code=True)
    for number in range(9):
        (folder / f"m{number}.py").write_text("")
    with pytest.raises(ChangedRecipe, match=r"\(m0.py is new, m1.py is new, m2.py is new, 6 more\)"):
        load_recipe(folder, trust_remote_code=True)


def test_commands_in_errors_can_be_pasted(tmp_path: Path) -> None:
    made = tmp_path / "it's; mine"
    made.mkdir()
    (made / "generate.py").write_text(GENERATE)
    load_recipe(made, trust_remote_code=True)
    (made / "generate.py").write_text(GENERATE + "#")
    for trust in (False, True):
        with pytest.raises(UntrustedRecipe) as error:
            load_recipe(made, trust_remote_code=trust)
        shown = re.search("`descant recipe show (.*?)`", str(error.value))
        assert shown is not None
        assert shlex.split(shown[1]) == [str(made)]


def test_what_comes_back_is_trusted_still(folder: Path) -> None:
    load_recipe(folder, trust_remote_code=True)
    (folder / "generate.py").write_text(GENERATE.replace("ran", "changed"))
    with pytest.raises(ChangedRecipe):
        load_recipe(folder, trust_remote_code=True)
    (folder / "generate.py").write_text(GENERATE)
    assert load_recipe(folder, trust_remote_code=True).make(None) == "ran"


def test_a_pin_is_of_one_folder(folder: Path, tmp_path: Path, own_lock: Path) -> None:
    load_recipe(folder, trust_remote_code=True)
    other = tmp_path / "other"
    other.mkdir()
    (other / "generate.py").write_text(GENERATE.replace("ran", "other"))
    assert load_recipe(other, trust_remote_code=True).make(None) == "other"
    assert len(Lock(own_lock).pins()) == 2


def test_one_folder_has_one_pin_however_it_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, own_lock: Path, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "below").mkdir()
    (tmp_path / "way").symlink_to(tmp_path)
    for given in ("./recipe", "recipe", str(folder), folder, "./below/../recipe", f"{tmp_path}/way/recipe"):
        load_recipe(given, trust_remote_code=True)
    assert list(Lock(own_lock).pins()) == [f"folder:{folder.resolve()}"]


def test_what_was_hashed_is_what_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is changed after it was read and before it is imported changes nothing."""
    settle = Lock.get_or_add

    def slow(self: Lock, *given: Any) -> Any:
        (folder / "generate.py").write_text("raise SystemExit('somebody was quick')")
        return settle(self, *given)

    monkeypatch.setattr(Lock, "get_or_add", slow)
    assert load_recipe(folder, trust_remote_code=True).make(None) == "ran"


def test_a_broken_lock_file_stops_everything(folder: Path, own_lock: Path) -> None:
    own_lock.write_text("{}")
    for call in (
        lambda: load_recipe(folder, trust_remote_code=True),
        lambda: inspect_recipe(folder),
        lambda: trust_recipe(folder),
    ):
        with pytest.raises(RecipeError, match="lock file cannot be read"):
            call()
    assert own_lock.read_text() == "{}"


def test_what_cannot_be_pinned_does_not_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RecipeError, match="cannot be written"):
        load_recipe(folder, trust_remote_code=True)
    assert not ours()


def test_another_lock(folder: Path, tmp_path: Path, own_lock: Path) -> None:
    mine = Lock(tmp_path / "mine.lock")
    load_recipe(folder, trust_remote_code=True, lock=mine)
    assert len(mine.pins()) == 1
    assert not own_lock.exists()
    assert inspect_recipe(folder, lock=mine).trust_state == "trusted"
    assert inspect_recipe(folder).trust_state == "new"


def test_requirements_are_checked_before_the_import(folder: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    (folder / "generate.py").write_text(f"open({str(canary)!r}, 'w').close()\n{GENERATE}")
    (folder / "requirements.txt").write_text("no-such-package-anywhere\ntorch>=99.0\n")
    with pytest.raises(MissingRequirements) as error:
        load_recipe(folder, trust_remote_code=True)
    assert error.value.missing[0] == "no-such-package-anywhere (installed: None)"
    assert len(error.value.missing) == 2
    assert not canary.exists()


def test_a_name_that_means_nothing() -> None:
    for given in ("no-such-word", "a/b/c", "", "a b", "-x"):
        with pytest.raises(RecipeError):
            load_recipe(given, trust_remote_code=True)


def test_callables_and_recipes_need_no_trust() -> None:
    def mine(model: Any, much: int = 1) -> int:
        return much

    assert load_recipe(mine).make is mine
    recipe = Recipe.from_object(mine)
    assert load_recipe(recipe) is recipe
    with pytest.raises(InputError, match="`recipe` must be a recipe"):
        load_recipe(5)


def test_threads_import_it_once_and_pin_it_once(folder: Path, tmp_path: Path, own_lock: Path) -> None:
    log = tmp_path / "log"
    (folder / "generate.py").write_text(
        f"import time\ntime.sleep(0.2)\nwith open({str(log)!r}, 'a') as log: log.write('x')\n{GENERATE}"
    )
    start, found = threading.Barrier(6), list[Recipe]()

    def load() -> None:
        start.wait()
        found.append(load_recipe(folder, trust_remote_code=True))

    threads = [threading.Thread(target=load) for _ in range(6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(found) == 6
    assert len({id(one.make) for one in found}) == 1
    assert log.read_text() == "x"
    assert len(Lock(own_lock).pins()) == 1


# -- looking and trusting


def test_a_look_needs_no_trust_and_imports_nothing(folder: Path, own_lock: Path) -> None:
    (folder / "generate.py").write_text("raise SystemExit('imported')\ndef strategy(noise, stop, peers): ...")
    seen = inspect_recipe(folder)
    assert (seen.name, seen.kind, seen.trust_state, seen.pin, seen.revision) == (
        str(folder),
        "strategy",
        "new",
        None,
        None,
    )
    assert seen.contents is not None
    assert not ours()
    assert not own_lock.exists()
    trusted = trust_recipe(folder)
    assert not ours()
    assert trusted.pin is not None
    assert trusted.pin.digest == seen.contents.digest
    assert inspect_recipe(folder).trust_state == "trusted"


def test_trust_of_what_was_looked_at(folder: Path, own_lock: Path) -> None:
    seen = inspect_recipe(folder).contents
    assert seen is not None
    (folder / "generate.py").write_text(GENERATE + "# quick")
    with pytest.raises(ChangedRecipe, match="look at it again"):
        trust_recipe(folder, digest=seen.digest)
    assert not own_lock.exists()
    now = inspect_recipe(folder).contents
    assert now is not None
    assert trust_recipe(folder, digest=now.digest).trust_state == "trusted"


def test_trust_given_beforehand_needs_the_flag_still(folder: Path) -> None:
    trust_recipe(folder)
    with pytest.raises(UntrustedRecipe):
        load_recipe(folder)
    assert load_recipe(folder, trust_remote_code=True).make(None) == "ran"


def test_keys_need_no_file_access(tmp_path: Path) -> None:
    assert lock_key(Reference.parse(tmp_path / "gone")) == f"folder:{tmp_path.resolve() / 'gone'}"
    assert lock_key(Reference.parse("ann/rec")) == "hub:ann/rec"
    assert lock_key(Reference.parse("ann/rec@v1")) == "hub:ann/rec@v1"


def test_the_environment_is_left_alone(folder: Path) -> None:
    before = (list(sys.path), list(sys.meta_path), list(sys.path_hooks), dict(os.environ), os.getcwd())
    load_recipe(folder, trust_remote_code=True)
    assert before == (
        list(sys.path),
        list(sys.meta_path),
        list(sys.path_hooks),
        dict(os.environ),
        os.getcwd(),
    )
    assert not (folder / "__pycache__").exists()

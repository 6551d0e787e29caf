"""Recipe references: every form has one meaning, or is an error."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from descant.errors import RecipeError
from descant.recipes.loading import ENTRY_POINT_GROUP, Reference


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, and one installed recipe, `known`."""
    monkeypatch.chdir(tmp_path)
    offers(monkeypatch, ("known", "package.known"))
    return tmp_path


def offers(monkeypatch: pytest.MonkeyPatch, *entries: tuple[str, str]) -> None:
    """Have these entry points installed, and no others."""
    found = metadata.EntryPoints(
        metadata.EntryPoint(name, value, ENTRY_POINT_GROUP) for name, value in entries
    )
    monkeypatch.setattr(metadata, "entry_points", found.select)


@pytest.mark.parametrize("text", ["./mine", "../mine", ".", "..", "/abs/mine", "~/mine", "./owner/name@main"])
def test_paths_are_folders(text: str) -> None:
    found = Reference.parse(text)
    assert (found.kind, found.name, found.repo, found.revision) == ("folder", text, None, None)
    assert found.path == Path(text).expanduser().absolute()


@pytest.mark.parametrize("text", ["mine", "owner/name", "known", "~/mine"])
def test_path_objects_are_folders_whatever_they_are_called(text: str) -> None:
    found = Reference.parse(Path(text))
    assert (found.kind, found.path) == ("folder", Path(text).expanduser().absolute())


@pytest.mark.parametrize(
    ("text", "repo", "revision"),
    [
        ("owner/name", "owner/name", None),
        ("owner/name@v1.0.2", "owner/name", "v1.0.2"),
        ("owner/name@refs/pr/12", "owner/name", "refs/pr/12"),
        ("a/b@" + "0" * 40, "a/b", "0" * 40),
        ("Owner-1/name.2_x", "Owner-1/name.2_x", None),
    ],
)
def test_owner_and_name_are_the_hubs(text: str, repo: str, revision: str | None) -> None:
    found = Reference.parse(text)
    assert (found.kind, found.name, found.repo, found.revision) == ("hub", text, repo, revision)
    assert found.path is None


def test_a_folder_called_like_a_repository_is_refused(here: Path) -> None:
    (here / "owner" / "name").mkdir(parents=True)
    with pytest.raises(
        RecipeError, match=r"write \./owner/name for the folder, owner/name@main for the Hub's"
    ):
        Reference.parse("owner/name")
    assert Reference.parse("./owner/name").kind == "folder"
    assert Reference.parse("owner/name@main").kind == "hub"
    (here / "owner" / "name@main").symlink_to("nowhere")
    with pytest.raises(RecipeError, match=r"write \./owner/name@main for the folder"):
        Reference.parse("owner/name@main")


def test_a_word_is_an_installed_recipe_or_a_folder_here(here: Path) -> None:
    found = Reference.parse("known")
    assert (found.kind, found.name, found.path) == ("package", "known", None)
    (here / "mine").mkdir()
    found = Reference.parse("mine")
    assert (found.kind, found.name, found.path) == ("folder", "mine", here / "mine")
    (here / "known").mkdir()
    with pytest.raises(
        RecipeError, match=r"is ambiguous, installed and a folder: write \./known for the folder"
    ):
        Reference.parse("known")


def test_a_word_that_is_neither_is_refused_with_what_there_is() -> None:
    with pytest.raises(
        RecipeError, match=r"`unknown`: is neither installed \(installed: known\).*owner/name"
    ):
        Reference.parse("unknown")


def test_a_name_that_several_packages_offer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    offers(monkeypatch, ("known", "one.known"), ("known", "two.known"), ("twice", "a.b"), ("twice", "a.b"))
    with pytest.raises(RecipeError, match=r"several packages \(one.known and two.known\)"):
        Reference.parse("known")
    assert Reference.parse("twice").kind == "package"  # one package, found in two places of the path


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "a b", "owner/", "a/b/c", "owner//name", "owner/name/", "owner/../name", "own er/name",
        "https://huggingface.co/owner/name", "datasets/owner/name", "git@host:owner/name", "owner/na--me",
        "owner/name.git", "owner/-name", "-owner/name", "owner/name.", "owner\\name", "@main",
        "owner/" + "n" * 97, "name@main", "owner/name\n", "known\n", "own\u0435r/name", "owner/\u202ename",
        "-known", "kno\0wn", "C:\\mine", "x" * 5000, "\udce9",
    ],
)  # fmt: skip
def test_anything_else_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(RecipeError, match=r"write \./folder, owner/name, owner/name@revision") as caught:
        Reference.parse(text)
    assert "\n" not in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "revision",
    ["", "../x", "a..b", "a b", "-x", "/x", "x/", "a//b", "x.lock", ".x", "a/.b", "x@y", "x" * 300, "\u0430",
     "x?y", "#1"],
)  # fmt: skip
def test_odd_revisions_are_refused(revision: str) -> None:
    with pytest.raises(RecipeError, match="its revision must be a branch, a tag or a commit"):
        Reference.parse(f"owner/name@{revision}")


@pytest.mark.parametrize("text", ["/a\0b", "~nobody-of-this-name/mine"])
def test_paths_that_no_system_has_are_refused(text: str) -> None:
    with pytest.raises(RecipeError, match=r"is neither a path|is not a valid path"):
        Reference.parse(text)
    with pytest.raises(RecipeError, match=r"is neither a path|is not a valid path"):
        Reference.parse(Path(text))


@settings(deadline=None, max_examples=300)
@given(st.text(alphabet="ab./@~-_\\: \n\0\u202e", max_size=12) | st.text(max_size=20))
def test_any_text_is_one_thing_or_refused(text: str) -> None:
    try:
        found = Reference.parse(text)
    except RecipeError:
        return
    assert found.kind in ("folder", "hub", "package")
    if found.kind == "hub":
        assert found.repo is not None
        assert ".." not in text
        assert text == found.repo + (f"@{found.revision}" if found.revision else "")

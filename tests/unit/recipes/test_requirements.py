"""Requirements of recipes: checked before any import, with all missing ones in one list."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from descant.errors import MissingRequirements, RecipeError
from descant.recipes import recipe_files as requirements
from descant.recipes.recipe_files import RecipeFiles

INSTALLED = {"torch": "2.6.0+cu126", "numpy": "2.1.0", "early": "3.0rc1", "odd": "not a version"}
NEEDS = {
    "torch": [
        'triton>=3; extra == "fast"',
        'sympy; extra == "fast"',
        "numpy>=9",
        'numpy>=9; python_version > "3"',
        'numpy>=3; extra == "new_er"',
    ]
}


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a few packages of known versions."""

    def version(name: str) -> str:
        if name.lower() not in INSTALLED:
            raise metadata.PackageNotFoundError(name)
        return INSTALLED[name.lower()]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "requires", lambda name: NEEDS.get(name.lower()))


def missing(*lines: str) -> list[str]:
    try:
        requirements.check_requirements(lines, "owner/name")
    except MissingRequirements as error:
        return error.missing
    return []


def test_the_documented_list() -> None:
    with pytest.raises(MissingRequirements) as caught:
        requirements.check_requirements(["foo", "bar==0.5.0", "torch>=99.0", "numpy"], "owner/name")
    assert str(caught.value) == (
        "Missing requirements for owner/name:\n"
        "foo (installed: None)\n"
        "bar==0.5.0 (installed: None)\n"
        "torch>=99.0 (installed: 2.6.0+cu126)"
    )


@pytest.mark.parametrize(
    "line",
    [
        "torch", "Torch", "torch>=2.6.0", "torch==2.6.0", "torch==2.6.0+cu126", "torch ~= 2.5", "torch>=2,<3",
        "torch (>=2)", "numpy!=1.*", "early>=2", "early==3.0rc1", "odd", "torch===2.6.0+cu126",
    ],
)  # fmt: skip
def test_met(line: str) -> None:
    assert missing(line) == []


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("foo", "foo (installed: None)"),
        ("torch>2.6.0,<2.6.1", "torch<2.6.1,>2.6.0 (installed: 2.6.0+cu126)"),
        ("torch<2", "torch<2 (installed: 2.6.0+cu126)"),
        ("early>=3.0", "early>=3.0 (installed: 3.0rc1)"),
        ("odd>=1", "odd>=1 (installed: not a version)"),
        ("torch==2.6.0+cpu", "torch==2.6.0+cpu (installed: 2.6.0+cu126)"),
    ],
)
def test_unmet(line: str, told: str) -> None:
    assert missing(line) == [told]


def test_markers() -> None:
    assert missing('foo; python_version < "3"', 'foo; sys_platform == "nowhere"', 'foo; extra == "x"') == []
    assert missing('foo; python_version >= "3"') == ['foo; python_version >= "3" (installed: None)']


def test_extras_bring_what_they_need() -> None:
    assert missing("torch[fast]") == ["triton>=3 (installed: None)", "sympy (installed: None)"]
    assert missing("torch[new-er]") == ["numpy>=3 (installed: 2.1.0)"]
    assert missing("torch[unknown]") == []
    assert missing("foo[fast]") == ["foo[fast] (installed: None)"]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", []),
        ("# only a comment\n\n  \n", []),
        ("torch>=2  # needed\n#numpy\n\tnumpy\t# too\r\nfoo", ["torch>=2", "numpy", "foo"]),
        ("torch#egg", ["torch#egg"]),  # no comment, as pip reads it
    ],
)
def test_lines(text: str, lines: list[str]) -> None:
    assert requirements.requirement_lines(text) == lines


@pytest.mark.parametrize(
    "line",
    [
        "-r more.txt", "-e .", "--index-url https://evil.example", "--pre", "torch @ https://evil.example/x.whl",
        "torch@file:///x", "https://evil.example/x.whl", "./x", "git+https://evil.example/x", "x/y",
        "x-1.whl", "x.tar.gz", "torch==", "torch>=>2", "torch 2", "torch#egg", "torch; nonsense", "torch[",
        "${HOME}", "torch\\", "\u0442orch", "torch\u202e", "tor\0ch", 'foo; os_name != "\x1b[2J"',
    ],
)  # fmt: skip
def test_lines_that_are_more_or_less_than_a_requirement(line: str) -> None:
    with pytest.raises(RecipeError, match=r"recipe `owner/name`: its requirement .* keep to names") as caught:
        requirements.check_requirements([line], "owner/name")
    assert not isinstance(caught.value, MissingRequirements)
    assert str(caught.value).isprintable()


def test_markers_that_cannot_be_evaluated_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"the marker of its requirement .* must be valid"):
        requirements.check_requirements(['torch; os_name ~= "posix"'], "owner/name")


def test_as_a_recipe_has_them() -> None:
    main = b"def generate(model): ...\n"
    plain = RecipeFiles.from_files({"generate.py": main, "requirements.txt": b"foo # c\n\nbar\n"}, "r")
    assert plain.requirements == ["foo", "bar"]
    inner = {
        "custom_generate/generate.py": main,
        "custom_generate/requirements.txt": b"foo",
        "requirements.txt": b"bar",
    }
    assert RecipeFiles.from_files(inner, "r").requirements == ["foo"]
    del inner["custom_generate/requirements.txt"]
    assert RecipeFiles.from_files(inner, "r").requirements == ["bar"]
    assert RecipeFiles.from_files({"generate.py": main}, "r").requirements == []


@settings(deadline=None, max_examples=300)
@given(
    st.lists(
        st.text(alphabet="torch<>=!~.,;()[]@ \t#-'\"\\extra_name12", max_size=40) | st.text(max_size=20),
        max_size=4,
    )
)
def test_any_lines_are_met_or_refused(lines: list[str]) -> None:
    found: Any = None
    try:
        requirements.check_requirements(requirements.requirement_lines("\n".join(lines)), "owner/name")
    except RecipeError as error:
        found = error
    assert found is None or found.recipe == "owner/name"

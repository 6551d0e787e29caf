"""docs/guide/stability.md: what it calls public is what the code has, and a name is retired as it says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import descant
from descant.serve.application import ROUTES
from tools.docs import public_face

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "guide" / "stability.md").read_text(encoding="utf-8")
RETIRED = re.compile(r" is removed in Descant (\d+)\.(\d+): use ")
WARNINGS = {"DeprecationWarning", "FutureWarning", "PendingDeprecationWarning"}


def test_the_modules_are_those_of_the_public_face() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| the names ")]
    named = {
        name
        for row in rows
        for name in re.findall(r"`(?:from )?(descant(?:\.\w+)?)(?: import \.\.\.)?`", row)
    }
    assert named == set(public_face.MODULES)
    assert f"`{public_face.FACE.relative_to(ROOT)}`" in PAGE


def test_every_file_that_the_page_names_is_there() -> None:
    names = re.findall(r"`((?:src|tests)/[\w/.]+|pyproject\.toml)`", PAGE)
    assert len(names) > 2
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_the_paths_are_the_documented_routes_of_the_server() -> None:
    [listed] = re.findall(r"These paths of the server are public:\n\n(.*?)\n\n", PAGE, re.DOTALL)
    assert set(re.findall(r"`(.*?)`", listed)) == {route.path for route in ROUTES if route.include_in_schema}


def constants(file: str, *names: str) -> str:
    """The values of constants of a module, as the page writes them."""
    tree = ast.parse((ROOT / "src" / "descant" / file).read_text(encoding="utf-8"))
    values = {
        node.target.id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id in names
    }
    return " ".join(str(values[name]) for name in names)


def test_the_formats_are_those_of_the_files() -> None:
    rows = re.findall(r"^\| (?:a|the) [^|]*?\| ([^|]*?) \|$", PAGE.partition("## Files")[2], re.MULTILINE)
    assert [row.replace("`", "") for row in rows] == [
        constants("trace/records.py", "TRACE_FORMAT", "TRACE_VERSION"),
        constants("jobs/shards.py", "_FORMAT"),
        constants("api/prefill.py", "_FORMAT"),
        constants("recipes/lock.py", "_VERSION"),
        constants("cli/chat/conversation.py", "_VERSION"),
        constants("cli/doctor/report.py", "FORMAT"),
    ]


def shims(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The lines that call something deprecated, with the text that they say."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
            names = {
                part.id for argument in arguments for part in ast.walk(argument) if isinstance(part, ast.Name)
            }
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called == "deprecated" or (called == "warn" and names & WARNINGS):
                said = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
                yield node.lineno, "".join(part for part in said if isinstance(part, str))


def overdue(text: str, version: str) -> str | None:
    """What is wrong with a shim in a version; None if it names a version to come and the new name."""
    found = RETIRED.search(text)
    if found is None:
        return "it must say `NAME is removed in Descant MAJOR.MINOR: use NAME`"
    present = tuple(map(int, version.split(".")[:2]))
    return None if tuple(map(int, found.groups())) > present else "its version has come: remove the shim"


def test_every_shim_names_a_version_to_come_in_which_it_goes() -> None:
    wrong = {
        f"{path.relative_to(ROOT)}:{line}": problem
        for path in (ROOT / "src").rglob("*.py")
        for line, text in shims(ast.parse(path.read_text(encoding="utf-8")))
        if (problem := overdue(text, descant.__version__))
    }
    assert wrong == {}


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("warnings.warn('a is removed in Descant 0.3: use b', DeprecationWarning, stacklevel=2)", None),
        ("warnings.warn(f'{a} is removed in Descant 0.3: use {b}', category=FutureWarning)", None),
        ("@deprecated('a is removed in Descant 1.0: use b')\ndef a(): ...", None),
        ("warnings.warn('a is old', DeprecationWarning)", "it must say"),
        ("warnings.warn('a is removed in Descant 0.2: use b', DeprecationWarning)", "its version has come"),
    ],
)
def test_a_shim_is_found_and_judged(code: str, problem: str | None) -> None:
    [(_, text)] = shims(ast.parse(code))
    assert (overdue(text, "0.2.1") or "").startswith(problem or "")
    assert (problem is None) == (overdue(text, "0.2.1") is None)


def test_the_page_shows_the_message_of_a_shim() -> None:
    [shown] = re.findall(r"`([^`]* is removed in Descant [^`]*)`", PAGE)
    assert overdue(shown, "0.1.0") is None

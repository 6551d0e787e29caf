"""The shape of the source: names, rooms, sizes and the direction of imports, read from the syntax trees."""

from __future__ import annotations

import ast
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import descant
from descant.config.registry import DRAFTER_FIELDS
from descant.engine.planning.cache_factory import CACHES

ROOT = Path(descant.__file__).resolve().parent
FILES = sorted(ROOT.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
TOP = {"__init__.py", "__init__.pyi", "errors.py", "parts.py", "py.typed"}
PACKAGES, LINES, FUNCTION = 14, 700, 60
# Of a room: files that stand in no folder of it, and imports between its files and folders.
LOOSE_FILES, ARROWS = 15, 40
SMALL = 60  # a module of fewer lines is part of the one neighbour that it serves
SOURCE_FILES = 333


def module(path: Path) -> str:
    """`descant.core.rows` of a path; a package is named without `__init__`."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module(path): path for path in FILES}


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


def base_names(node: ast.ClassDef) -> set[str]:
    """The last part of each base's name: `Cache` of `interfaces.Cache[int]`."""
    names = set()
    for base in node.bases:
        inner = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(inner, ast.Name | ast.Attribute):
            names.add(inner.id if isinstance(inner, ast.Name) else inner.attr)
    return names


def is_interface(node: ast.ClassDef) -> bool:
    return "Protocol" in base_names(node)


def test_no_two_classes_share_a_name() -> None:
    """An implementation may have its interface's name."""
    classes: dict[str, list[tuple[Path, ast.ClassDef]]] = defaultdict(list)
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append((path, node))
    shared = {
        name: [short(path) for path, _ in places]
        for name, places in classes.items()
        if len([node for _, node in places if not is_interface(node)]) > 1
        or len([node for _, node in places if is_interface(node)]) > 1
    }
    assert shared == {}


def test_the_top_holds_rooms_and_nothing_else() -> None:
    entries = {path.name for path in ROOT.iterdir() if path.is_file()}
    assert entries <= TOP


def test_there_are_at_most_fourteen_rooms() -> None:
    rooms = sorted(path.name for path in ROOT.iterdir() if (path / "__init__.py").exists())
    assert len(rooms) <= PACKAGES, rooms


def test_no_file_is_long() -> None:
    lines = {short(path): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {name: count for name, count in lines.items() if count > LINES} == {}


def test_no_function_is_long() -> None:
    """Counted from `def` to the last line, the docstring included, decorators not."""
    lengths = {
        f"{short(path)}:{node.lineno} {node.name}": node.end_lineno - node.lineno + 1
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
    }
    assert {name: count for name, count in lengths.items() if count > FUNCTION} == {}


# ------------------------------------------------------------------------ imports
def imported(path: Path, tree: ast.Module) -> Iterator[str]:
    """Every module of ours that a file names in an import: at the top, in a function or for types only."""
    own = module(path).split(".")
    package = own if path.name == "__init__.py" else own[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*start, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{source}.{alias.name}"
                if name in MODULES:
                    yield name
                elif source in MODULES:
                    yield source


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The sets of modules that import each other around a circle (Tarjan's components of more than one)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            component = stack[at:]
            del stack[at:]
            if len(component) > 1:
                found.append(sorted(component))

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return found


def import_graph() -> dict[str, set[str]]:
    return {
        name: {other for other in imported(path, TREES[path]) if other != name}
        for name, path in MODULES.items()
    }


def test_no_imports_run_in_a_circle() -> None:
    """Imports inside functions and under TYPE_CHECKING count as well."""
    assert circles(import_graph()) == []


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}, [["a", "b", "c"]]),
    ],
)
def test_circles_are_found(graph: dict[str, set[str]], expected: list[list[str]]) -> None:
    assert circles(graph) == expected


# ------------------------------------------------------------------------ rooms
def contents(package: str) -> dict[str, set[str]]:
    """The modules below each box of a package: its loose modules and its subpackages."""
    boxes: dict[str, set[str]] = defaultdict(set)
    for name, path in MODULES.items():
        if name.startswith(f"{package}.") and path.name != "__init__.py":
            boxes[name[len(package) + 1 :].split(".")[0]].add(name)
    return boxes


ROOMS = sorted(name for name, path in MODULES.items() if path.name == "__init__.py" and name != "descant")


@pytest.mark.parametrize("room", ROOMS)
def test_one_look_explains_a_room(room: str) -> None:
    """At most fifteen loose files and forty arrows between its boxes, and no circle of them."""
    boxes = contents(room)
    graph = import_graph()
    owner = {name: box for box, names in boxes.items() for name in names}
    arrows = {
        box: {owner[other] for name in names for other in graph[name] if other in owner} - {box}
        for box, names in boxes.items()
    }
    assert len([box for box, names in boxes.items() if names == {f"{room}.{box}"}]) <= LOOSE_FILES
    assert sum(map(len, arrows.values())) <= ARROWS
    assert circles(arrows) == []


def test_no_small_module_serves_one_neighbour() -> None:
    graph = import_graph()
    importers: dict[str, list[str]] = defaultdict(list)
    for name, others in graph.items():
        for other in others:
            importers[other].append(name)
    small = [
        name
        for name, path in MODULES.items()
        if path.name not in {"__init__.py", "__main__.py"}
        and len(path.read_text(encoding="utf-8").splitlines()) < SMALL
        and len(importers[name]) == 1
        and importers[name][0].rpartition(".")[0] == name.rpartition(".")[0]
    ]
    assert small == []


def test_the_source_has_few_files() -> None:
    assert len(FILES) <= SOURCE_FILES


def test_the_repository_has_no_links() -> None:
    """A symbolic link names a path of one machine: `.venv` as a link ends every install from a clone."""
    checkout = ROOT.parent.parent
    if not (checkout / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "--stage"],
        cwd=checkout,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert [line for line in listed.splitlines() if line.startswith("120000")] == []


# The names of parts, and the files that may list them: those that declare them.
PARTS = {
    "drafter": (set(DRAFTER_FIELDS), {"config/parameters.py", "engine/planning/drafter_factory.py"}),
    "cache": (
        set(CACHES),
        {"config/parameters.py", "engine/planning/cache_factory.py", "api/prefill.py"},
    ),
}


@pytest.mark.parametrize("kind", PARTS)
def test_no_list_names_parts_by_hand(kind: str) -> None:
    """Which drafters and caches there are is said once, on the part; other lists derive from it."""
    names, declared = PARTS[kind]
    found = []
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            elements = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", ())
            named = {one.value for one in elements if isinstance(one, ast.Constant)} & names
            if len(named) > 1 and short(path) not in declared:
                found.append(f"{short(path)}:{node.lineno} names {', '.join(sorted(named))}")
    assert not found, "\n".join(found)

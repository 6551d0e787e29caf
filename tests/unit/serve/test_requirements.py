"""The extras of the server name every package that it imports."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import descant.serve

ROOT = Path(__file__).resolve().parents[3]
FOLDER = Path(descant.serve.__file__).parent
DISTRIBUTIONS = packages_distributions()
OWN_EXTRAS = {
    "ray_app.py": "ray",
    "telemetry.py": "otel",
    "transcriptions.py": "audio",
}  # of files that are imported where they are needed


def imported_packages(path: Path) -> set[frozenset[str]]:
    """The distributions of each module that a file imports, Python's own and ours left out.

    There are several where distributions share a namespace.
    """
    modules = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            modules.add(node.module.split(".")[0])
    modules -= {"descant", *sys.stdlib_module_names}
    modules = {"pydantic" if one == "pydantic_core" else one for one in modules}  # which pydantic pins
    return {frozenset(map(normal, DISTRIBUTIONS.get(module, [module]))) for module in modules}


def normal(requirement: str) -> str:
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name is not None
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def test_every_imported_package_is_required():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    allowed = {normal(one) for one in [*project["dependencies"], *extras["serve"]]}
    needed = {path.name: imported_packages(path) for path in FOLDER.rglob("*.py")}
    assert {"starlette"} in needed["application.py"]
    missing = {}
    for name, modules in needed.items():
        own = {normal(one) for one in extras.get(OWN_EXTRAS.get(name, ""), ())}
        missing[name] = [packages for packages in modules if not packages & (allowed | own)]
    assert {name: packages for name, packages in missing.items() if packages} == {}

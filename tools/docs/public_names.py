"""The public names of the generation module of the installed transformers, for tools/docs/migration.py.

Names are read from the sources, so that those which need TensorFlow or Flax count without these packages.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any


def exported() -> dict[str, Any]:
    """Names by module, methods, arguments, and config fields with their defaults."""
    import transformers
    from transformers import cache_utils
    from transformers.generation.utils import GenerationMixin

    root = Path(str(transformers.__file__)).parent
    init = ast.parse((root / "generation" / "__init__.py").read_text(encoding="utf-8"))
    package = {
        name.name
        for node in ast.walk(init)
        if isinstance(node, ast.ImportFrom) and node.level == 1
        for name in node.names
    }
    modules = {path.stem: defined(path) for path in sorted((root / "generation").glob("[!_]*.py"))}
    caches = [getattr(cache_utils, name) for name in defined(root / "cache_utils.py")]
    return {
        "version": transformers.__version__,
        "package": sorted(package),
        "modules": modules,
        "caches": defined(root / "cache_utils.py"),
        "top": [name for name in transformers.__all__ if not name.startswith("_")],
        "methods": [name for name in dir(GenerationMixin) if not name.startswith("__")],
        "cache_methods": sorted({name for one in caches if inspect.isclass(one) for name in members(one)}),
        "arguments": list(inspect.signature(GenerationMixin.generate).parameters),
        "fields": {
            name: repr(value)
            for name, value in vars(transformers.GenerationConfig()).items()
            if not name.startswith("_") and name != "transformers_version"
        },
    }


def defined(path: Path) -> list[str]:
    """The public classes, functions and tables of a file, without docstring fragments."""
    found: set[str] = set()

    def walk(body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Assign):
                found.update(one.id for one in node.targets if isinstance(one, ast.Name))
            elif isinstance(node, ast.If | ast.Try):
                walk([*node.body, *node.orelse])

    walk(ast.parse(path.read_text(encoding="utf-8")).body)
    return sorted(
        one for one in found if one[0] != "_" and one != "logger" and not one.endswith("_DOCSTRING")
    )


def members(kind: type) -> list[str]:
    """The public methods and properties of a class that is a cache of the package."""
    return [name for name in dir(kind) if not name.startswith("_")] if "Cache" in kind.__name__ else []

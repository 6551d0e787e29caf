"""Imports a recipe's code from the hashed bytes, as a private package."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Mapping
from importlib.abc import ExecutionLoader, PathEntryFinder
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, spec_from_loader
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from descant.errors import RecipeError, format_value

if TYPE_CHECKING:
    from descant.recipes.recipe_files import RecipeFiles

__all__ = ["import_recipe"]

PACKAGE_PREFIX: Final = "_descant_recipe_"
_MAIN: Final = "generate"

_locks_guard: Final = threading.Lock()
_locks: Final[dict[str, threading.RLock]] = {}


def import_recipe(contents: RecipeFiles, name: str) -> Mapping[str, Any]:
    """The namespace of a recipe's `generate.py`; the same content is imported once per process.

    Its modules form a private package in `sys.modules` and see each other by relative imports only.
    """
    package = PACKAGE_PREFIX + contents.digest.rpartition(":")[2]
    with _locks_guard:
        # One lock per recipe: a recipe may load another one during its import.
        lock = _locks.setdefault(package, threading.RLock())
    with lock:
        main = f"{package}.{_MAIN}"
        if main in sys.modules:
            return vars(sys.modules[main])
        return _import_package(package, main, _MemoryImporter(package, contents.modules, name), name)


def _import_package(package: str, main: str, source: _MemoryImporter, name: str) -> Mapping[str, Any]:
    """Create the package and import its main module; on an error nothing remains in `sys.modules`."""
    sys.path_importer_cache[source.path_entry] = source
    sys.modules[package] = _make_package(package, source)
    try:
        return vars(importlib.import_module(main))
    except BaseException as error:
        for one in [one for one in sys.modules if one == package or one.startswith(f"{package}.")]:
            sys.modules.pop(one, None)
        sys.path_importer_cache.pop(source.path_entry, None)
        if isinstance(error, KeyboardInterrupt):
            raise
        # Also for `sys.exit()`: a recipe must not end the program.
        reason = format_value(error, 280).replace(package, "")
        raise RecipeError(name, f"its import failed: {reason}") from error


def _make_package(package: str, source: _MemoryImporter) -> ModuleType:
    spec = ModuleSpec(package, None, is_package=True)
    spec.submodule_search_locations = [source.path_entry]
    return module_from_spec(spec)


class _MemoryImporter(PathEntryFinder, ExecutionLoader):
    """Finder and loader of one recipe's modules, from memory.

    It is registered in `sys.path_importer_cache` under an entry that only the private package has in its
    `__path__`, so that it sees no other imports. The entry is a path below a file, where no folder can exist,
    and absolute, since relative entries are dropped when caches are invalidated.
    """

    def __init__(self, package: str, modules: Mapping[str, bytes], name: str) -> None:
        self.path_entry = f"{__file__}/{package}"
        self._modules = {f"{package}.{stem}": data for stem, data in modules.items() if stem != "__init__"}
        # Shown in tracebacks. Not a path: the file there may differ from the code that runs.
        printable = "".join(one if one.isprintable() else "?" for one in name)
        self._origin = f"recipe:{printable}"

    def find_spec(self, fullname: str, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec of a module of the recipe."""
        del target
        if fullname not in self._modules:
            return None
        return spec_from_loader(fullname, self, origin=self.get_filename(fullname))

    def invalidate_caches(self) -> None:
        """Nothing to invalidate: sources are in memory."""

    def get_filename(self, fullname: str) -> str:
        """The name of a module in tracebacks."""
        return f"{self._origin}/{fullname.rpartition('.')[2]}.py"

    def get_source(self, fullname: str) -> str:
        """The source of a module."""
        if fullname not in self._modules:
            raise ImportError(f"no module {fullname}", name=fullname)
        # Ignores an encoding cookie: the source was checked as UTF-8.
        return self._modules[fullname].decode("utf-8")

    def is_package(self, fullname: str) -> bool:
        """False: a recipe has no subpackages."""
        del fullname
        return False

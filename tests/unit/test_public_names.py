"""The public names: sorted, each there, as the stub says, and nothing public beside them."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import types
from pathlib import Path

import descant

STUB = Path(descant.__file__).with_suffix(".pyi")


def test_names_are_sorted_and_there():
    # As ruff sorts: names in capitals first.
    assert descant.__all__ == sorted(descant.__all__, key=lambda name: (not name.isupper(), name))
    assert len(set(descant.__all__)) == len(descant.__all__)
    for name in descant.__all__:
        assert getattr(descant, name) is not None


def test_nothing_else_is_public():
    found = {name for name in dir(descant) if not name.startswith("_")}
    modules = {name for name in found if isinstance(getattr(descant, name), types.ModuleType)}
    # `descant.generate` is the function: it takes the place of the module of its name.
    assert found - modules == set(descant.__all__)


def test_names_are_what_type_checkers_read_in_the_stub():
    imports = [
        (node.module, alias)
        for node in ast.parse(STUB.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    # Only `import X as X` exports a name from a stub.
    assert [alias.name for _, alias in imports if alias.name != alias.asname] == []
    assert sorted(alias.name for _, alias in imports) == sorted(descant.__all__)
    for module, alias in imports:
        assert getattr(importlib.import_module(str(module)), alias.name) is getattr(descant, alias.name)


def test_no_name_is_that_of_a_module():
    # The import of such a module would replace what the name stands for.
    assert set(descant.__all__) & {one.name for one in pkgutil.iter_modules(descant.__path__)} == set()


def test_a_star_imports_every_name():
    namespace: dict[str, object] = {}
    exec("from descant import *", namespace)  # noqa: S102 - a star is only allowed in a module
    assert {name for name in namespace if not name.startswith("__")} == set(descant.__all__)


def test_a_documented_processor_works_by_hand():
    import torch

    scores = torch.tensor([[1.0, 3.0, 2.0]])
    kept = descant.TopKLogitsWarper(top_k=1)(torch.zeros(1, 1, dtype=torch.long), scores)
    assert kept.tolist() == [[-torch.inf, 3.0, -torch.inf]]

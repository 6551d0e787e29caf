"""Descant: every way to decode a language model, in one exact loop.

The public names are listed once, in `__init__.pyi`, where type checkers and editors read them. Each is
imported at its first use: torch and transformers take seconds to import, which `descant --help` need not.
"""

import ast as _ast
import importlib as _importlib
import pkgutil as _pkgutil
import typing as _typing

from descant.config.explainer import EXPLAINER as _EXPLAINER

__version__ = "0.1.0"


_STUB = _pkgutil.get_data(__name__, "__init__.pyi")
if _STUB is None:
    raise ImportError(f"{__name__} lacks its file __init__.pyi: install it again")
# The module of each public name, from the lines `from MODULE import NAME as NAME`.
_MODULES = {
    name.name: str(line.module)
    for line in _ast.parse(_STUB).body
    if isinstance(line, _ast.ImportFrom)
    for name in line.names
    if name.asname == name.name
}

# Names in capitals first, as ruff sorts.
__all__ = sorted(_MODULES, key=lambda name: (not name.isupper(), name))  # noqa: PLE0605 - sorted returns a list


def __getattr__(name: str) -> _typing.Any:
    """Import a public name, or a package of Descant, at its first use."""
    if name in _MODULES:
        value = getattr(_importlib.import_module(_MODULES[name]), name)
    elif not name.startswith("_") and name in {module.name for module in _pkgutil.iter_modules(__path__)}:
        value = _importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """All public names, those not imported yet included."""
    return sorted({*globals(), *__all__})


def _load_explainer() -> _typing.Callable[[_typing.Any, _typing.Any], str]:
    """The engine's text of `GenerationConfig.explain`."""
    from descant.engine.explain import explain_config

    return explain_config


_EXPLAINER.load = _load_explainer

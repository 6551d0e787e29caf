"""Write the public names with their signatures and fields: `python tools/docs/public_face.py`.

A change of the file is a change that users see. A test compares it with the code.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
# Bases that no user names: they hold what several public classes have in common.
SHARED_CODE: Final = frozenset({"FilteringWarper", "RestoredAtExit", "StrategyDefaults"})

FACE: Final = ROOT / "tests" / "assets" / "public_face.txt"
MODULES: Final = ("descant", "descant.jobs", "descant.parts", "descant.testing")
# Addresses of objects, and the modules of classes.
NOISE: Final = re.compile(r" at 0x[0-9a-f]+|\bdescant\.[a-z_.]+\.(?=[A-Z_])|\btyping\.")
# An annotation that is a text.
REFERENCE: Final = re.compile(r"ForwardRef\(('[^']*')\)")


def lines() -> Iterator[str]:
    """Every public name, and below a class its public members that Descant defines."""
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in module.__all__:
            yield from describe(f"{module_name}.{name}", getattr(module, name))


def describe(name: str, value: Any) -> Iterator[str]:
    """The lines of a name."""
    if inspect.isclass(value):
        yield f"class {name}({', '.join(public_bases(value))})"
        yield from (f"    {line}" for line in members(value))
    elif callable(value):
        yield f"{name}{signature(value)}"
    else:
        yield f"{name}: {type(value).__name__}"


def public_bases(kind: type) -> Iterator[str]:
    """The names of a class's bases; a base that only shares code inside Descant is read as its own bases."""
    for base in kind.__bases__:
        if base.__name__ in SHARED_CODE:
            yield from public_bases(base)
        elif base is not object:
            yield base.__name__


def members(kind: type) -> Iterator[str]:
    """How a class is made, its fields, and its methods and properties, inherited ones of Descant included."""
    yield f"(){signature(kind)}"
    if dataclasses.is_dataclass(kind):
        yield from (clean(f"{field.name}: {field.type}") for field in dataclasses.fields(kind))
    elif issubclass(kind, tuple):
        types = inspect.get_annotations(kind)
        yield from (clean(f"{name}: {types.get(name)}") for name in getattr(kind, "_fields", ()))
    owners = [base for base in kind.__mro__ if base.__module__.startswith("descant")]
    for name in sorted({name for owner in owners for name in vars(owner) if not name.startswith("_")}):
        value = inspect.getattr_static(kind, name)
        if isinstance(value, staticmethod | classmethod):
            yield f"{name}{signature(value.__func__)} [{type(value).__name__}]"
        elif inspect.isfunction(value):
            yield f"{name}{signature(value)}"
        elif isinstance(value, property) or hasattr(value, "attrname"):
            yield f"{name}: a property"


def signature(value: Any) -> str:
    """The parameters and types of a function or class."""
    try:
        return clean(str(inspect.signature(value)))
    except (TypeError, ValueError):
        return "(...)"


def clean(text: str) -> str:
    """A text without what differs between processes and with the place of a class."""
    return NOISE.sub("", REFERENCE.sub(r"\1", text))


if __name__ == "__main__":
    FACE.write_text("".join(f"{line}\n" for line in lines()), encoding="utf-8")

"""Scorers of completions that are Python functions: of a file, or of an installed module."""

from __future__ import annotations

import copy
import hashlib
import importlib
import importlib.util
import math
import numbers
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from descant.errors import InputError, printable

__all__ = ["FunctionScorer", "check_scorer_name", "scorer_digest"]

_MODULE_PREFIX: Final = "_descant_scorer_"
_FORM: Final = "must be a function, as file.py:function or package.module:function"


class FunctionScorer:
    """A function `(row, text) -> float` that is loaded once; what it raises is an InputError of the row."""

    def __init__(self, name: str) -> None:
        self.name = name
        place, _, attribute = name.rpartition(":")
        try:
            module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        except InputError:
            raise
        except (Exception, SystemExit) as error:  # a scorer must not end the program by `sys.exit()`
            raise InputError("scorer", f"must be importable ({_reason(error)})", name) from error
        function = getattr(module, attribute, None)
        if not callable(function):
            raise InputError("scorer", f"must name a function of {place}", attribute)
        self._function: Callable[[dict[str, Any], str], Any] = function

    def score(self, row: Mapping[str, Any], text: str) -> float:
        """The score of a text; each call has a copy of the row, so that none sees what another did to it."""
        try:
            value = self._function(copy.deepcopy(dict(row)), text)
        except (Exception, SystemExit) as error:
            raise InputError("scorer", f"must not raise ({_reason(error)})", self.name) from error
        if not isinstance(value, numbers.Real):
            # Its repr may have an address in it, which would differ between runs.
            must = f"must return a number, and {self.name} has not"
            raise InputError("scorer", must, type(value).__name__, "return float(...)")
        try:
            score = float(value)
        except OverflowError:
            score = math.inf
        if not math.isfinite(score):
            raise InputError("scorer", f"must return a finite number, and {self.name} has not", score)
        return score


def check_scorer_name(name: str) -> None:
    """Raise InputError for a name that is no function of a file or module."""
    place, _, attribute = name.rpartition(":")
    is_module = all(part.isidentifier() for part in place.split("."))
    if not attribute.isidentifier() or not (place.endswith(".py") or is_module):
        raise InputError("scorer", _FORM, name, "or use mean_logprob or length")


def scorer_digest(name: str) -> str:
    """The digest of the source of a scorer's file or module; what it imports is not part of it."""
    place = name.rpartition(":")[0]
    if place.endswith(".py"):
        return _digest(_read(Path(place)))
    try:
        spec = importlib.util.find_spec(place)
    except (Exception, SystemExit) as error:  # of a package that the module is in
        raise InputError("scorer", f"must be importable ({_reason(error)})", name) from error
    if spec is None:
        raise InputError("scorer", "must be of an installed module", name)
    return _digest(_read(Path(spec.origin))) if spec.has_location and spec.origin else ""


def _load_file(path: Path) -> ModuleType:
    """The module of a file; the same content is loaded once."""
    source = _read(path)
    name = _MODULE_PREFIX + _digest(source)
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module  # before it runs: dataclasses look their module up
    try:
        exec(compile(source, str(path), "exec"), vars(module))  # noqa: S102 - the user's own file
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError("scorer", f"must be a file that can be read ({error.strerror})", str(path)) from None


def _digest(source: bytes) -> str:
    return hashlib.blake2b(source, digest_size=16, person=b"descant scorer").hexdigest()


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {printable(error)}" if str(error) else type(error).__name__

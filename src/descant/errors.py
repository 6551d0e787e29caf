"""Descant's exceptions: every error says what must be, what was given, and what to do.

DescantError (Exception)
├── ConfigError (ValueError)        a generation parameter is wrong; `.field`, `.must`, `.got`, `.do`
│   └── NotInThisVersion            a documented parameter that this version does not support
├── InputError (ValueError)         a tensor or another argument is wrong; `.field`, `.must`, `.got`, `.do`
├── UnsupportedModel (ValueError)   the model is not supported, or not with this method
├── NotEnoughMemory (MemoryError)   the cache would not fit; `.needed`, `.free` in bytes, `.fitting` caches
├── RecipeError (ValueError)        a recipe cannot be loaded or run; `.recipe` is its name
│   ├── UntrustedRecipe             it is third-party code that was not explicitly trusted
│   │   └── ChangedRecipe           it has changed since it was trusted
│   └── MissingRequirements         required packages are not installed; `.missing` lists them
├── TraceError (ValueError)         a trace cannot be read or drawn
├── HubError (OSError)              a download from or upload to the Hub failed; `.repo` names the repository
├── RankError (RuntimeError)        another process of a tensor-parallel model failed; `.rank` is its rank
├── SessionBusy (RuntimeError)      a session is used from inside a step, or by two threads at once
├── WorkerFailed (RuntimeError)     a worker of a job failed; its text says why
├── EngineFull (RuntimeError)       the queue is full; `.waiting` requests wait of at most `.limit`
├── RowError (ValueError)           one request failed, the others are unaffected; `.request` is its id
│   ├── DeadlineExceeded            it has not ended by its deadline
│   └── ConstraintError             its result does not meet its constraints; `.unmet` lists them
└── MissingExtra (ImportError)      an optional dependency is absent; `.extra` names the extra
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Self, cast

__all__ = [
    "ChangedRecipe",
    "ConfigError",
    "ConstraintError",
    "DeadlineExceeded",
    "DescantError",
    "EngineClosed",
    "EngineFull",
    "HubError",
    "InputError",
    "MissingExtra",
    "MissingRequirements",
    "NotEnoughMemory",
    "NotInThisVersion",
    "RankError",
    "RecipeError",
    "RowError",
    "SessionBusy",
    "TraceError",
    "UnsupportedModel",
    "UntrustedRecipe",
    "WorkerFailed",
    "file_errors",
    "first_line",
    "format_bytes",
    "format_value",
    "printable",
]

FieldNames = str | tuple[str, ...]
# A watermark key in the text of a value: in a dict, in JSON, in the repr of another library's object.
_SECRET = re.compile(
    r"""(\b(?:hashing_key|keys?)\b['"\\]*\s*[:=]\s*)(?:\[[^\]]*\]?|\([^)]*\)?|[^\s,})\]]+)"""
)


def format_value(value: object, limit: int = 80) -> str:
    """A value for an error message: one short line, tensors as shape and dtype, watermark keys hidden."""
    kind = type(value).__name__
    try:
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        if shape is not None and dtype is not None and len(shape) > 0:
            return f"{kind} {list(shape)} {dtype}"
        text = _SECRET.sub(r"\1(hidden)", " ".join(_short_repr(value, limit).split()))
    except Exception:  # a failing repr must not hide the error itself
        return f"<{kind}>"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _short_repr(value: object, limit: int) -> str:
    """The beginning of a repr, of about `limit` characters: the whole of nested data may be very long."""
    if type(value) is str or type(value) is bytes:
        return repr(value[: max(limit, 0) + 1])
    if type(value) not in (dict, list, tuple) or not value:
        return repr(value)
    parts: list[str] = []
    length = 0
    for item in value:  # type: ignore[attr-defined]
        part = _short_repr(item, limit - length)
        if type(value) is dict:
            part += ": " + _short_repr(value[item], limit - length - len(part))
        parts.append(part)
        length += len(part) + 2
        if length > limit:
            break
    text = ", ".join(parts)
    if type(value) is tuple:
        return f"({text},)" if len(value) == 1 else f"({text})"
    return f"[{text}]" if type(value) is list else f"{{{text}}}"


class Words(str):
    """A value given in words, as "nothing": an error shows it without quotation marks."""

    __slots__ = ()
    __repr__ = str.__str__


class DescantError(Exception):
    """The base class of all errors that Descant raises."""

    _parts: tuple[Any, ...] | None = None  # arguments of the class, where `args` hold its message alone

    def __reduce__(self) -> str | tuple[Any, ...]:
        return super().__reduce__() if self._parts is None else (type(self), self._parts)


class _FieldError(DescantError, ValueError):
    """An error about a named value: "`field` must ..., got value: do this".

    `InputError("seed", must="must be an int", got=seed, do="leave it out")`: the parts, in one call.
    """

    field: FieldNames
    must: str
    got: str  # the value as text
    do: str

    def __init__(self, field: FieldNames, must: str, got: object, do: str = "") -> None:
        self._set_parts(field, must, format_value(got), do)

    def _set_parts(self, field: FieldNames, must: str, got: str, do: str) -> None:
        self.field, self.must, self.got, self.do = field, must, got, do
        name = field if isinstance(field, str) else field[0]
        self.args = (f"`{name}` {must}, got {got}" + (f": {do}" if do else ""),)

    def with_hint(self, hint: str) -> Self:
        """The same error with one more sentence."""
        do = f"{self.do} ({hint})" if self.do else hint
        return cast(Self, _rebuild(type(self), self.field, self.must, self.got, do))

    def __reduce__(self) -> tuple[Any, ...]:
        # The default calls the class with `args`, which hold the message and not its parts.
        return _rebuild, (type(self), self.field, self.must, self.got, self.do)


def _rebuild(kind: type[_FieldError], *parts: Any) -> _FieldError:
    error = kind.__new__(kind)
    error._set_parts(*parts)
    return error


class ConfigError(_FieldError):
    """A generation parameter that is invalid, contradicts another, or has no effect."""


class NotInThisVersion(ConfigError):
    """A documented parameter that this version does not support."""


class InputError(_FieldError):
    """An invalid tensor, path or other argument."""


@contextmanager
def file_errors(field: str, path: str | os.PathLike[str], done: str = "opened") -> Iterator[None]:
    """Raise InputError for a file that the system lets nobody open, read or write in the block."""
    try:
        yield
    except OSError as error:
        must = f"must be a file that can be {done} ({error.strerror})"
        raise InputError(field, must, os.fspath(path)) from None


class UnsupportedModel(DescantError, ValueError):
    """A model that is not supported, or not with the requested method."""


class RowError(DescantError, ValueError):
    """The failure of one request; the others of its batch are unaffected."""

    def __init__(self, message: str, request: int | None = None) -> None:
        self.request = request
        super().__init__(message, request)

    def __str__(self) -> str:
        return str(self.args[0])


class ConstraintError(RowError):
    """A result that does not meet its constraints, where the output has no field to say so."""

    def __init__(self, message: str, request: int | None = None, unmet: tuple[int, ...] = ()) -> None:
        super().__init__(message, request)
        self.unmet = unmet
        self.args = (message, request, unmet)


class SessionBusy(DescantError, RuntimeError):
    """A call of a session that another call is inside of; nothing has changed."""


class DeadlineExceeded(RowError):
    """A request that has not ended by its deadline."""

    def __init__(self, request: int) -> None:
        super().__init__("", request)
        self.args = (request,)

    def __str__(self) -> str:
        return f"request {self.request} must end by its `deadline`, and has not: allow more time"


class EngineClosed(DescantError, RuntimeError):
    """A call of an engine that accepts no more requests."""

    _parts = ()

    def __init__(self) -> None:
        super().__init__("the engine must be open, and it is draining or closed: make another one")


class EngineFull(DescantError, RuntimeError):
    """A request that a full queue refuses; nothing of it was kept.

    `name` is the limit: "max_waiting", or "max_traced" of an engine's traced requests, which do not wait.
    """

    def __init__(self, waiting: int, limit: int, name: str = "max_waiting") -> None:
        self._parts = self.waiting, self.limit, self.name = waiting, limit, name
        may = "may wait" if name == "max_waiting" else "may run"
        super().__init__(
            f"at most {name}={limit} requests {may}, and {waiting} do: try again later, or raise {name}"
        )


class RecipeError(DescantError, ValueError):
    """A recipe that cannot be loaded or run."""

    def __init__(self, recipe: str, message: str) -> None:
        self.recipe = recipe
        self._parts = (recipe, message)
        super().__init__(f"recipe `{printable(recipe)}`: {message}")


class UntrustedRecipe(RecipeError):
    """Third-party code that was not explicitly trusted; none of it has run."""


class ChangedRecipe(UntrustedRecipe):
    """A recipe that has changed since it was trusted; none of it has run."""


class MissingRequirements(RecipeError):
    """Packages that a recipe requires and that are missing or have the wrong version."""

    def __init__(self, recipe: str, missing: list[str]) -> None:
        DescantError.__init__(self, "\n".join((f"Missing requirements for {recipe}:", *missing)))
        self.recipe, self.missing = recipe, missing
        self._parts = (recipe, missing)


class TraceError(DescantError, ValueError):
    """A trace that cannot be read or drawn."""


class HubError(DescantError, OSError):
    """A failed download from or upload to the Hub."""

    def __init__(self, repo: str, message: str) -> None:
        self.repo = repo
        self._parts = (repo, message)
        super().__init__(f"`{printable(repo)}` on the Hub: {message}")


def printable(text: object) -> str:
    """Untrusted text for a message: one short line without control characters."""
    escaped = "".join(char if char.isprintable() else repr(char)[1:-1] for char in str(text))
    return escaped if len(escaped) <= 160 else escaped[:157] + "..."


def format_bytes(size: float) -> str:
    """A number of bytes with its unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


class NotEnoughMemory(DescantError, MemoryError):
    """A cache that would exceed the free memory; nothing was allocated for it."""

    def __init__(self, message: str, needed: int = 0, free: int = 0, fitting: tuple[str, ...] = ()) -> None:
        self.needed, self.free, self.fitting = needed, free, fitting
        super().__init__(message, needed, free, fitting)

    def __str__(self) -> str:
        return str(self.args[0])


class RankError(DescantError, RuntimeError):
    """The failure of another process that runs the same model."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._parts = (rank,)
        super().__init__(f"rank {rank} has failed, so all ranks stop: see its error")


class WorkerFailed(DescantError, RuntimeError):
    """A worker of a job failed, and with it the run; a resume computes what is missing."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"a worker of the job failed: {reason}")
        self.reason = reason
        self._parts = (reason,)


class MissingExtra(DescantError, ImportError):
    """An optional dependency that is not installed."""

    def __init__(self, extra: str, needed_for: str) -> None:
        self.extra = extra
        self._parts = (extra, needed_for)
        super().__init__(f"{needed_for} needs the extra `{extra}`: pip install descant[{extra}]")


_MAX_CHARS: Final = 300


def first_line(error: BaseException) -> str:
    """The first line of an error's message, truncated to fit into one of ours."""
    lines = str(error).strip().splitlines()
    line = lines[0].rstrip(".: ") if lines else format_value(error)
    return line if len(line) <= _MAX_CHARS else line[: _MAX_CHARS - 3] + "..."

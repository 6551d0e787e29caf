"""Descant's exceptions: every error says what is wrong, what was got, and what to do.

DescantError (Exception)
├── ConfigError (ValueError)        a generation parameter is wrong; `.field` names it
│   └── NotInThisVersion            right, but its method is not built yet
├── InputError (ValueError)         a tensor or another argument is wrong; `.field` names it
├── UnsupportedModel (ValueError)   the model cannot be decoded this way
├── NotEnoughMemory (MemoryError)   a cache would not fit; `.needed`, `.free` in bytes, `.fitting` caches
├── RecipeError (ValueError)        a recipe cannot be loaded or run; `.recipe` is its name
│   ├── UntrustedRecipe             it is somebody else's code, and nobody said that it is trusted
│   │   └── ChangedRecipe           it is no longer what was trusted
│   └── MissingRequirements         packages that it needs are not there; `.missing` says which
├── TraceError (ValueError)         a trace cannot be read or drawn
├── HubError (OSError)              the Hub did not give or take what was asked; `.repo` says of which
├── RankError (RuntimeError)        another process of a tensor-parallel model failed; `.rank` says which
├── RowError (ValueError)           one request failed, its neighbours did not; `.request` is its number
│   └── ConstraintError             its result does not meet its constraints; `.unmet` says which
└── MissingExtra (ImportError)      an optional dependency is absent; `.extra` names the extra
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "ChangedRecipe",
    "ConfigError",
    "ConstraintError",
    "DescantError",
    "HubError",
    "InputError",
    "MissingExtra",
    "MissingRequirements",
    "NotEnoughMemory",
    "NotInThisVersion",
    "RankError",
    "RecipeError",
    "RowError",
    "TraceError",
    "UnsupportedModel",
    "UntrustedRecipe",
    "format_value",
    "printable",
]

FieldNames = str | tuple[str, ...]


def format_value(value: object, limit: int = 80) -> str:
    """A value as an error message shows it: one short line, tensors by shape and dtype."""
    kind = type(value).__name__
    try:
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        if shape is not None and dtype is not None and len(shape) > 0:
            return f"{kind} {list(shape)} {dtype}"
        text = " ".join(repr(value).split())
    except Exception:  # a value whose own repr fails must not hide the error it caused
        return f"<{kind}>"
    return text if len(text) <= limit else text[: limit - 3] + "..."


class DescantError(Exception):
    """The root of everything Descant raises on purpose."""


class _FieldError(DescantError, ValueError):
    """An error about one named value (or several): "`field` must ..., got value: do this"."""

    field: FieldNames

    def __init__(self, field: FieldNames, must: str, got: object, do: str = "") -> None:
        self.field = field
        name = field if isinstance(field, str) else field[0]
        super().__init__(f"`{name}` {must}, got {format_value(got)}" + (f": {do}" if do else ""))

    def __reduce__(self) -> tuple[Any, ...]:
        # The default rebuilds from `args`, which hold the finished sentence and not its parts.
        return _rebuild, (type(self), self.field, str(self))


def _rebuild(kind: type[_FieldError], field: FieldNames, message: str) -> _FieldError:
    error = kind.__new__(kind, message)
    error.field = field
    return error


class ConfigError(_FieldError):
    """A generation parameter that is wrong by itself, contradicts another, or has no use."""


class NotInThisVersion(ConfigError):
    """A documented parameter whose method this version does not have."""


class InputError(_FieldError):
    """A tensor, path or other argument that is wrong."""


class UnsupportedModel(DescantError, ValueError):
    """A model that cannot be decoded as asked."""


class RowError(DescantError, ValueError):
    """The failure of one request; the others of its batch are unharmed."""

    def __init__(self, message: str, request: int | None = None) -> None:
        self.request = request
        super().__init__(message, request)

    def __str__(self) -> str:
        return str(self.args[0])


class ConstraintError(RowError):
    """A result that does not meet its constraints, where no record would say so."""

    def __init__(self, message: str, request: int | None = None, unmet: tuple[int, ...] = ()) -> None:
        super().__init__(message, request)
        self.unmet = unmet
        self.args = (message, request, unmet)


class RecipeError(DescantError, ValueError):
    """A recipe that cannot be loaded, or not run as asked."""

    def __init__(self, recipe: str, message: str) -> None:
        self.recipe = recipe
        self._parts: tuple[Any, ...] = (recipe, message)
        super().__init__(f"recipe `{printable(recipe)}`: {message}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._parts


class UntrustedRecipe(RecipeError):
    """Somebody else's code that was not said to be trusted; none of it has run."""


class ChangedRecipe(UntrustedRecipe):
    """A recipe that is no longer what was trusted; none of it has run."""


class MissingRequirements(RecipeError):
    """Packages that a recipe needs and that are not installed, or not as it needs them."""

    def __init__(self, recipe: str, missing: list[str]) -> None:
        DescantError.__init__(self, "\n".join((f"Missing requirements for {recipe}:", *missing)))
        self.recipe, self.missing = recipe, missing
        self._parts = (recipe, missing)


class TraceError(DescantError, ValueError):
    """A trace that cannot be read, or not drawn as asked."""


class HubError(DescantError, OSError):
    """What the Hub did not give, or not take."""

    def __init__(self, repo: str, message: str) -> None:
        self.repo = repo
        self._parts = (repo, message)
        super().__init__(f"`{printable(repo)}` on the Hub: {message}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._parts


def printable(text: object) -> str:
    """Text of somebody else's as a message shows it: one short line without control characters."""
    told = "".join(one if one.isprintable() else repr(one)[1:-1] for one in str(text))
    return told if len(told) <= 160 else told[:157] + "..."


class NotEnoughMemory(DescantError, MemoryError):
    """A run whose cache would come to more than there is; nothing was allocated for it."""

    def __init__(self, message: str, needed: int = 0, free: int = 0, fitting: tuple[str, ...] = ()) -> None:
        self.needed, self.free, self.fitting = needed, free, fitting
        super().__init__(message, needed, free, fitting)

    def __str__(self) -> str:
        return str(self.args[0])


class RankError(DescantError, RuntimeError):
    """The failure of another process that holds a part of the same model."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        super().__init__(f"rank {rank} has failed, and no rank goes on alone: look at its error")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rank,)


class MissingExtra(DescantError, ImportError):
    """An optional dependency that is not installed."""

    def __init__(self, extra: str, needed_for: str) -> None:
        self.extra = extra
        self._parts = (extra, needed_for)
        super().__init__(f"{needed_for} needs the extra `{extra}`: pip install descant[{extra}]")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._parts

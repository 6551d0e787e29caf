"""Loads recipes by name: only with explicit trust, and only unchanged since they were trusted."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, Final

from descant.config import hub
from descant.errors import ChangedRecipe, InputError, RecipeError, UntrustedRecipe, format_value
from descant.recipes import requirements
from descant.recipes.importing import import_recipe
from descant.recipes.kinds import RECIPE_KINDS
from descant.recipes.lock import Lock, Pin
from descant.recipes.recipe import Recipe
from descant.recipes.recipe_files import MAX_FILE_BYTES, RecipeFiles, select_files
from descant.recipes.reference import ENTRY_POINT_GROUP, Reference

__all__ = ["ENTRY_POINT_GROUP", "RecipeInfo", "inspect_recipe", "load_recipe", "lock_key", "trust_recipe"]

_MAX_LISTED_CHANGES: Final = 3  # in an error message


@dataclass(frozen=True)
class RecipeInfo:
    """The recipe that a name refers to, without importing it."""

    reference: Reference
    lock_key: str | None  # key in the lock file; None: an installed package, which needs no trust
    contents: RecipeFiles | None  # None: an installed package
    revision: str | None  # commit on the Hub
    pin: Pin | None  # the trusted version
    entry_point: EntryPoint | None = None  # of an installed package

    @property
    def name(self) -> str:
        """The name as given."""
        return self.reference.name

    @property
    def kind(self) -> str | None:
        """Its kind, one of `RECIPE_KINDS`; None if only importing it would tell."""
        if self.contents is not None:
            kinds = self.contents.defined_kinds()
            return kinds[0] if len(kinds) == 1 else None
        return (
            self.entry_point.attr
            if self.entry_point is not None and self.entry_point.attr in RECIPE_KINDS
            else None
        )

    @property
    def current_pin(self) -> Pin | None:
        """A pin of the current version; None for an installed package."""
        if self.contents is None:
            return None
        return Pin(self.revision, self.contents.digest, self.contents.hashes)

    @property
    def trust_state(self) -> str:
        """One of "installed", "new" (never trusted), "trusted", "changed" (since it was trusted)."""
        if self.contents is None:
            return "installed"
        if self.pin is None:
            return "new"
        return "trusted" if self._matches(self.pin) else "changed"

    def pin_or_verify(self, lock: Lock) -> None:
        """Pin the current version if there is no pin; raise ChangedRecipe if it differs from the pin."""
        current = self.current_pin
        if self.lock_key is None or current is None:
            return
        pin = lock.get_or_add(self.lock_key, current)
        if not self._matches(pin):
            raise _changed_error(self.reference, pin, current)

    def _matches(self, pin: Pin) -> bool:
        return self.contents is not None and (pin.revision, pin.digest) == (
            self.revision,
            self.contents.digest,
        )


def load_recipe(recipe: Any, *, trust_remote_code: bool | None = False, lock: Lock | None = None) -> Recipe:
    """Load a recipe from a folder, an installed package, the Hub, or a function or class.

    Recipes in a folder or on the Hub are third-party code: they need `trust_remote_code=True`, and are pinned
    by hash when first trusted. A recipe that differs from its pin is refused until `trust_recipe` (or
    `descant recipe trust`) pins it again.
    """
    if trust_remote_code is not None and not isinstance(trust_remote_code, bool):
        raise InputError("trust_remote_code", "must be True, False or None", trust_remote_code)
    if not isinstance(recipe, str | os.PathLike):
        return Recipe.from_object(recipe)
    reference = Reference.parse(recipe)
    if reference.kind == "package":
        return _load_installed(reference)
    if trust_remote_code is not True:
        advice = f"read it with `descant recipe show {shlex.quote(reference.name)}`"
        why = "is third-party code and needs trust_remote_code=True"
        raise UntrustedRecipe(reference.name, f"{why}: {advice}")
    lock = Lock() if lock is None else lock
    info = _inspect(reference, lock, latest=False)
    assert info.contents is not None
    info.pin_or_verify(lock)
    requirements.check(info.contents.requirements, reference.name)
    names = import_recipe(info.contents, reference.name)
    origin: dict[str, Any] = {"source": reference.kind, "contents": info.contents, "revision": info.revision}
    return Recipe.from_namespace(reference.name, names, **origin)


def inspect_recipe(
    recipe: str | os.PathLike[str], *, lock: Lock | None = None, latest: bool = False
) -> RecipeInfo:
    """The files, digest and requirements of the recipe that a name refers to; nothing is imported.

    A recipe on the Hub that was trusted without a revision runs at the trusted commit; `latest` shows the
    newest version, which is what `trust_recipe` would pin.
    """
    return _inspect(Reference.parse(recipe), Lock() if lock is None else lock, latest)


def trust_recipe(
    recipe: str | os.PathLike[str], *, lock: Lock | None = None, digest: str | None = None
) -> RecipeInfo:
    """Pin the current version, replacing any earlier pin; `digest`, if given, must match."""
    lock = Lock() if lock is None else lock
    reference = Reference.parse(recipe)
    info = _inspect(reference, lock, latest=True)
    current = info.current_pin
    if info.lock_key is None or current is None:
        raise RecipeError(reference.name, "is from an installed package and needs no trust: just use it")
    if digest is not None and digest != current.digest:
        raise ChangedRecipe(reference.name, f"has digest {current.digest}, not {digest}: look at it again")
    lock.trust(info.lock_key, current)
    return replace(info, pin=current)


def lock_key(reference: Reference) -> str | None:
    """The key of a recipe in the lock file; None for an installed package. Reads no files."""
    if reference.kind == "folder":
        assert reference.path is not None
        return f"folder:{os.path.realpath(reference.path)}"
    if reference.kind == "hub":
        return f"hub:{reference.repo}" + (f"@{reference.revision}" if reference.revision else "")
    return None


def _inspect(reference: Reference, lock: Lock, latest: bool) -> RecipeInfo:
    key = lock_key(reference)
    if key is None:
        return RecipeInfo(reference, None, None, None, None, _find_entry_point(reference))
    if reference.kind == "folder":
        assert reference.path is not None
        contents = RecipeFiles.from_folder(reference.path, reference.name)
        return RecipeInfo(reference, key, contents, None, lock.pin(key))
    assert reference.repo is not None
    pin = lock.pin(key)
    pinned = None if pin is None or latest else pin.revision
    if pin is not None and pinned is not None and reference.revision in (None, pinned):
        # Use the pinned commit: independent of the branch, and available offline.
        revision, names = pinned, tuple(pin.files)
    else:
        commit = hub.resolve_commit(reference.repo, reference.revision)
        revision, names = commit.sha, select_files(commit.files, reference.name)
    files = hub.fetch_files(reference.repo, revision, names, limit=MAX_FILE_BYTES)
    return RecipeInfo(reference, key, RecipeFiles.from_files(files, reference.name), revision, pin)


def _find_entry_point(reference: Reference) -> EntryPoint:
    """The entry point of an installed package with this name."""
    candidates = list(entry_points(group=ENTRY_POINT_GROUP, name=reference.name))
    if len({one.value for one in candidates}) != 1:  # changed since `Reference.parse`
        raise RecipeError(reference.name, "must be offered by one installed package: try again")
    return candidates[0]


def _load_installed(reference: Reference) -> Recipe:
    """The recipe of an installed package: a module like a folder's `generate.py`, a class or a function."""
    entry = _find_entry_point(reference)
    try:
        offered = entry.load()
        attribute = entry.attr
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also `sys.exit()`
        raise RecipeError(
            reference.name, f"the import of {entry.value} failed: {format_value(error, 200)}"
        ) from error
    if attribute in RECIPE_KINDS and callable(offered):
        return Recipe(reference.name, attribute, offered, source="package")
    if not isinstance(offered, ModuleType) and not callable(offered):
        raise RecipeError(reference.name, f"{entry.value} must be a module, a class or a function")
    if isinstance(offered, ModuleType):
        return Recipe.from_namespace(reference.name, vars(offered), source="package")
    return replace(Recipe.from_object(offered), name=reference.name, source="package")


def _changed_error(reference: Reference, pin: Pin, current: Pin) -> ChangedRecipe:
    changes = (
        []
        if pin.revision == current.revision
        else [f"commit {_short_commit(pin.revision)} is now {_short_commit(current.revision)}"]
    )
    changes += pin.differences(current)
    num_more = len(changes) - _MAX_LISTED_CHANGES
    changes = changes[:_MAX_LISTED_CHANGES] + ([f"{num_more} more"] if num_more > 0 else [])
    name = shlex.quote(reference.name)
    advice = f"read it with `descant recipe show {name}`, then pin it with `descant recipe trust {name}`"
    problem = f"is not what was trusted on {pin.trusted}"
    return ChangedRecipe(reference.name, f"{problem} ({', '.join(changes)}): {advice}")


def _short_commit(revision: str | None) -> str:
    return "none" if revision is None else revision[:12]

"""The way from a name to a recipe: nothing is read before it is trusted, nothing runs that has changed."""

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
from descant.recipes.lock import Lock, Pin
from descant.recipes.recipe import RECIPE_KINDS, Recipe
from descant.recipes.recipe_files import MAX_FILE_BYTES, RecipeFiles, select_files
from descant.recipes.reference import ENTRY_POINT_GROUP, Reference

__all__ = ["ENTRY_POINT_GROUP", "RecipeInfo", "inspect_recipe", "load_recipe", "lock_key", "trust_recipe"]

_MAX_LISTED_CHANGES: Final = 3  # files that an error names


@dataclass(frozen=True)
class RecipeInfo:
    """What would run under a name, with none of it imported."""

    reference: Reference
    lock_key: str | None  # in the lock file; None of an installed package's, which needs no trust
    contents: RecipeFiles | None  # None of an installed package's
    revision: str | None  # the commit, of one from the Hub
    pin: Pin | None  # what was trusted of it
    entry_point: EntryPoint | None = None  # of an installed package's

    @property
    def name(self) -> str:
        """Its name, as it was given."""
        return self.reference.name

    @property
    def kind(self) -> str | None:
        """Which of `KINDS` it is; None where only its import would tell."""
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
        """What a pin of it would hold; None of an installed package's."""
        if self.contents is None:
            return None
        return Pin(self.revision, self.contents.digest, self.contents.hashes)

    @property
    def trust_state(self) -> str:
        """Whether it would run: "installed", "new" (never trusted), "trusted" or "changed" since."""
        if self.contents is None:
            return "installed"
        if self.pin is None:
            return "new"
        return "trusted" if self._matches(self.pin) else "changed"

    def pin_or_verify(self, lock: Lock) -> None:
        """Pin it if nothing was; raise ChangedRecipe if it is not what was pinned."""
        now = self.current_pin
        if self.lock_key is None or now is None:
            return
        pin = lock.get_or_add(self.lock_key, now)
        if not self._matches(pin):
            raise _changed_error(self.reference, pin, now)

    def _matches(self, pin: Pin) -> bool:
        return self.contents is not None and (pin.revision, pin.digest) == (
            self.revision,
            self.contents.digest,
        )


def load_recipe(given: Any, *, trust_remote_code: bool | None = False, lock: Lock | None = None) -> Recipe:
    """The recipe in a folder, of an installed package, on the Hub, or of a function or class.

    What is in a folder or on the Hub is somebody else's code: it needs `trust_remote_code=True`, and is
    pinned by its content when it is first trusted. What was pinned and has changed is refused until
    `trust_recipe` (or `descant recipe trust`) pins it again.
    """
    if trust_remote_code is not None and not isinstance(trust_remote_code, bool):
        raise InputError("trust_remote_code", "must be True, False or None", trust_remote_code)
    if not isinstance(given, str | os.PathLike):
        return Recipe.from_object(given)
    reference = Reference.parse(given)
    if reference.kind == "package":
        return _load_installed(reference)
    if trust_remote_code is not True:
        do = f"read it with `descant recipe show {shlex.quote(reference.name)}`"
        why = "is somebody else's code, and needs trust_remote_code=True"
        raise UntrustedRecipe(reference.name, f"{why}: {do}")
    lock = Lock() if lock is None else lock
    found = _inspect(reference, lock, latest=False)
    assert found.contents is not None
    found.pin_or_verify(lock)
    requirements.check(found.contents.requirements, reference.name)
    names = import_recipe(found.contents, reference.name)
    more: dict[str, Any] = {"source": reference.kind, "contents": found.contents, "revision": found.revision}
    return Recipe.from_namespace(reference.name, names, **more)


def inspect_recipe(
    given: str | os.PathLike[str], *, lock: Lock | None = None, latest: bool = False
) -> RecipeInfo:
    """What would run under a name: its files, their digest, its requirements; nothing is imported.

    A recipe on the Hub that was trusted without a revision runs as it was then; `latest` shows what is
    there now, which is what `trust_recipe` would pin.
    """
    return _inspect(Reference.parse(given), Lock() if lock is None else lock, latest)


def trust_recipe(
    given: str | os.PathLike[str], *, lock: Lock | None = None, digest: str | None = None
) -> RecipeInfo:
    """Pin what is there now, in the place of what was trusted; only with this digest, where one is given."""
    lock = Lock() if lock is None else lock
    reference = Reference.parse(given)
    found = _inspect(reference, lock, latest=True)
    now = found.current_pin
    if found.lock_key is None or now is None:
        raise RecipeError(reference.name, "is of an installed package, and needs no trust: just use it")
    if digest is not None and digest != now.digest:
        raise ChangedRecipe(reference.name, f"has digest {now.digest}, not {digest}: look at it again")
    lock.trust(found.lock_key, now)
    return replace(found, pin=now)


def lock_key(reference: Reference) -> str | None:
    """Under which key the lock file knows it; None of an installed package's. Nothing is read for it."""
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
        # What was pinned runs, by its commit: wherever the branch is now, and also offline.
        revision, names = pinned, tuple(pin.files)
    else:
        commit = hub.resolve_commit(reference.repo, reference.revision)
        revision, names = commit.sha, select_files(commit.files, reference.name)
    files = hub.fetch_files(reference.repo, revision, names, limit=MAX_FILE_BYTES)
    return RecipeInfo(reference, key, RecipeFiles.from_files(files, reference.name), revision, pin)


def _find_entry_point(reference: Reference) -> EntryPoint:
    """The entry point that an installed package offers under a name."""
    found = list(entry_points(group=ENTRY_POINT_GROUP, name=reference.name))
    if len({one.value for one in found}) != 1:  # as its reference found it, a moment ago
        raise RecipeError(reference.name, "must be offered by one installed package: try again")
    return found[0]


def _load_installed(reference: Reference) -> Recipe:
    """What an installed package offers: a module like a folder's `generate.py`, a class or a function."""
    entry = _find_entry_point(reference)
    try:
        offered = entry.load()
        attribute = entry.attr
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # `sys.exit()` too
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


def _changed_error(reference: Reference, pin: Pin, now: Pin) -> ChangedRecipe:
    told = (
        []
        if pin.revision == now.revision
        else [f"commit {_short_commit(pin.revision)} is now {_short_commit(now.revision)}"]
    )
    told += pin.differences(now)
    more = len(told) - _MAX_LISTED_CHANGES
    told = told[:_MAX_LISTED_CHANGES] + ([f"{more} more"] if more > 0 else [])
    name = shlex.quote(reference.name)
    do = f"read it with `descant recipe show {name}`, then pin it with `descant recipe trust {name}`"
    what = f"is not what was trusted on {pin.trusted}"
    return ChangedRecipe(reference.name, f"{what} ({', '.join(told)}): {do}")


def _short_commit(revision: str | None) -> str:
    return "none" if revision is None else revision[:12]

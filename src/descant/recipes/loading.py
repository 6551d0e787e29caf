"""The way from a name to a recipe: nothing is read before it is trusted, nothing runs that has changed."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, Final

from descant.config import hub
from descant.errors import ChangedRecipe, InputError, RecipeError, UntrustedRecipe, shown
from descant.recipes import requirements
from descant.recipes.importing import imported
from descant.recipes.lock import Lock, Pin
from descant.recipes.recipe import KINDS, Recipe
from descant.recipes.recipe_files import LARGEST, Contents, wanted
from descant.recipes.reference import GROUP, Reference

__all__ = ["GROUP", "Look", "key_of", "load_recipe", "look", "trust_recipe"]

_SHOWN: Final = 3  # files that an error names


@dataclass(frozen=True)
class Look:
    """What would run under a name, with none of it imported."""

    reference: Reference
    key: str | None  # in the lock file; None of an installed package's, which needs no trust
    contents: Contents | None  # None of an installed package's
    revision: str | None  # the commit, of one from the Hub
    pin: Pin | None  # what was trusted of it
    entry: EntryPoint | None = None  # of an installed package's

    @property
    def name(self) -> str:
        """Its name, as it was given."""
        return self.reference.name

    @property
    def kind(self) -> str | None:
        """Which of `KINDS` it is; None where only its import would tell."""
        if self.contents is not None:
            kinds = self.contents.kinds()
            return kinds[0] if len(kinds) == 1 else None
        return self.entry.attr if self.entry is not None and self.entry.attr in KINDS else None

    @property
    def now(self) -> Pin | None:
        """What a pin of it would hold; None of an installed package's."""
        if self.contents is None:
            return None
        return Pin(self.revision, self.contents.digest, self.contents.hashes)

    @property
    def state(self) -> str:
        """Whether it would run: "installed", "new" (never trusted), "trusted" or "changed" since."""
        if self.contents is None:
            return "installed"
        if self.pin is None:
            return "new"
        return "trusted" if self._matches(self.pin) else "changed"

    def settle(self, lock: Lock) -> None:
        """Pin it if nothing was; raise ChangedRecipe if it is not what was pinned."""
        now = self.now
        if self.key is None or now is None:
            return
        pin = lock.settle(self.key, now)
        if not self._matches(pin):
            raise _changed(self.reference, pin, now)

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
        return Recipe.of(given)
    reference = Reference.of(given)
    if reference.kind == "package":
        return _installed(reference)
    if trust_remote_code is not True:
        do = f"read it with `descant recipe show {shlex.quote(reference.name)}`"
        why = "is somebody else's code, and needs trust_remote_code=True"
        raise UntrustedRecipe(reference.name, f"{why}: {do}")
    lock = Lock() if lock is None else lock
    found = _look(reference, lock, latest=False)
    assert found.contents is not None
    found.settle(lock)
    requirements.check(found.contents.requirements, reference.name)
    names = imported(found.contents, reference.name)
    more: dict[str, Any] = {"source": reference.kind, "contents": found.contents, "revision": found.revision}
    return Recipe.from_namespace(reference.name, names, **more)


def look(given: str | os.PathLike[str], *, lock: Lock | None = None, latest: bool = False) -> Look:
    """What would run under a name: its files, their digest, its requirements; nothing is imported.

    A recipe on the Hub that was trusted without a revision runs as it was then; `latest` shows what is
    there now, which is what `trust_recipe` would pin.
    """
    return _look(Reference.of(given), Lock() if lock is None else lock, latest)


def trust_recipe(
    given: str | os.PathLike[str], *, lock: Lock | None = None, digest: str | None = None
) -> Look:
    """Pin what is there now, in the place of what was trusted; only with this digest, where one is given."""
    lock = Lock() if lock is None else lock
    reference = Reference.of(given)
    found = _look(reference, lock, latest=True)
    now = found.now
    if found.key is None or now is None:
        raise RecipeError(reference.name, "is of an installed package, and needs no trust: just use it")
    if digest is not None and digest != now.digest:
        raise ChangedRecipe(reference.name, f"has digest {now.digest}, not {digest}: look at it again")
    lock.trust(found.key, now)
    return replace(found, pin=now)


def key_of(reference: Reference) -> str | None:
    """Under which key the lock file knows it; None of an installed package's. Nothing is read for it."""
    if reference.kind == "folder":
        assert reference.path is not None
        return f"folder:{os.path.realpath(reference.path)}"
    if reference.kind == "hub":
        return f"hub:{reference.repo}" + (f"@{reference.revision}" if reference.revision else "")
    return None


def _look(reference: Reference, lock: Lock, latest: bool) -> Look:
    key = key_of(reference)
    if key is None:
        return Look(reference, None, None, None, None, _entry(reference))
    if reference.kind == "folder":
        assert reference.path is not None
        contents = Contents.of_folder(reference.path, reference.name)
        return Look(reference, key, contents, None, lock.pin(key))
    assert reference.repo is not None
    pin = lock.pin(key)
    pinned = None if pin is None or latest else pin.revision
    if pin is not None and pinned is not None and reference.revision in (None, pinned):
        # What was pinned runs, by its commit: wherever the branch is now, and also offline.
        revision, names = pinned, tuple(pin.files)
    else:
        commit = hub.resolve(reference.repo, reference.revision)
        revision, names = commit.sha, wanted(commit.files, reference.name)
    files = hub.fetch(reference.repo, revision, names, limit=LARGEST)
    return Look(reference, key, Contents.of_files(files, reference.name), revision, pin)


def _entry(reference: Reference) -> EntryPoint:
    """The entry point that an installed package offers under a name."""
    found = list(entry_points(group=GROUP, name=reference.name))
    if len({one.value for one in found}) != 1:  # as its reference found it, a moment ago
        raise RecipeError(reference.name, "must be offered by one installed package: try again")
    return found[0]


def _installed(reference: Reference) -> Recipe:
    """What an installed package offers: a module like a folder's `generate.py`, a class or a function."""
    entry = _entry(reference)
    try:
        offered = entry.load()
        attribute = entry.attr
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # `sys.exit()` too
        raise RecipeError(
            reference.name, f"the import of {entry.value} failed: {shown(error, 200)}"
        ) from error
    if attribute in KINDS and callable(offered):
        return Recipe(reference.name, attribute, offered, source="package")
    if not isinstance(offered, ModuleType) and not callable(offered):
        raise RecipeError(reference.name, f"{entry.value} must be a module, a class or a function")
    if isinstance(offered, ModuleType):
        return Recipe.from_namespace(reference.name, vars(offered), source="package")
    return replace(Recipe.of(offered), name=reference.name, source="package")


def _changed(reference: Reference, pin: Pin, now: Pin) -> ChangedRecipe:
    told = (
        []
        if pin.revision == now.revision
        else [f"commit {_short(pin.revision)} is now {_short(now.revision)}"]
    )
    told += pin.differences(now)
    more = len(told) - _SHOWN
    told = told[:_SHOWN] + ([f"{more} more"] if more > 0 else [])
    name = shlex.quote(reference.name)
    do = f"read it with `descant recipe show {name}`, then pin it with `descant recipe trust {name}`"
    what = f"is not what was trusted on {pin.trusted}"
    return ChangedRecipe(reference.name, f"{what} ({', '.join(told)}): {do}")


def _short(revision: str | None) -> str:
    return "none" if revision is None else revision[:12]

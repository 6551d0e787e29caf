"""Recipes by name: loaded only with explicit trust and unchanged since then, and pushed to the Hub."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.abc import ExecutionLoader, PathEntryFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from descant.config import hub
from descant.config.hub import is_repo_id, validate_revision
from descant.errors import ChangedRecipe, HubError, InputError, RecipeError, UntrustedRecipe, format_value
from descant.recipes.lock import Lock, Pin
from descant.recipes.recipe_files import (
    MAX_FILE_BYTES,
    RECIPE_KINDS,
    RecipeFiles,
    check_requirements,
    select_files,
)

if TYPE_CHECKING:
    from descant.recipes.recipe import Recipe


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
    spec = ModuleSpec(package, None, is_package=True)
    spec.submodule_search_locations = [source.path_entry]
    sys.modules[package] = module_from_spec(spec)
    try:
        return vars(importlib.import_module(main))
    except BaseException as error:
        for module in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
            sys.modules.pop(module, None)
        sys.path_importer_cache.pop(source.path_entry, None)
        if isinstance(error, KeyboardInterrupt):
            raise
        # Also for `sys.exit()`: a recipe must not end the program.
        reason = format_value(error, 280).replace(package, "")
        raise RecipeError(name, f"its import failed: {reason}") from error


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
        printable = "".join(char if char.isprintable() else "?" for char in name)
        self._origin = f"recipe:{printable}"

    def find_spec(self, fullname: str, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec of a module of the recipe."""
        del target
        if fullname not in self._modules:
            return None
        return spec_from_loader(fullname, self, origin=self.get_filename(fullname), is_package=False)

    def get_filename(self, fullname: str) -> str:
        """The name of a module in tracebacks."""
        return f"{self._origin}/{fullname.rpartition('.')[2]}.py"

    def get_source(self, fullname: str) -> str:
        """The source of a module."""
        if fullname not in self._modules:
            raise ImportError(f"no module {fullname}", name=fullname)
        # Ignores an encoding cookie: the source was checked as UTF-8.
        return self._modules[fullname].decode("utf-8")


ENTRY_POINT_GROUP: Final = "descant.recipes"  # entry point group of installed recipes
_PACKAGE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_ACCEPTED_FORMS: Final = "write ./folder, owner/name, owner/name@revision, or the name of an installed recipe"
_MAX_LISTED_CHANGES: Final = 3  # in an error message


@dataclass(frozen=True)
class Reference:
    """The location of a recipe; nothing has been read or downloaded."""

    kind: str  # "folder", "hub" or "package"
    name: str  # as given
    path: Path | None = None  # of a folder, absolute
    repo: str | None = None  # on the Hub: owner/name
    revision: str | None = None  # on the Hub: branch, tag or commit, if given
    entry_point: EntryPoint | None = None  # of an installed package

    @classmethod
    def parse(cls, source: str | os.PathLike[str]) -> Reference:
        """Parse a path or name; raises RecipeError if it is invalid or ambiguous."""
        if isinstance(source, os.PathLike):
            return cls._folder(os.fspath(source))
        if not isinstance(source, str):
            raise RecipeError(format_value(source), f"must be a path or a name: {_ACCEPTED_FORMS}")
        if source.startswith((".", "/", "~")) or os.path.isabs(source):
            return cls._folder(source)
        repo, at, revision = source.partition("@")
        if is_repo_id(repo):
            return cls._hub(source, repo, revision if at else None)
        if _PACKAGE_NAME.fullmatch(source):
            return cls._installed_or_folder(source)
        raise RecipeError(source, f"is neither a path nor a name: {_ACCEPTED_FORMS}")

    @classmethod
    def _folder(cls, source: str) -> Reference:
        try:
            if "\0" in source:
                raise ValueError
            return cls("folder", source, path=Path(source).expanduser().absolute())
        except (TypeError, ValueError, RuntimeError, OSError):
            raise RecipeError(format_value(source), f"is not a valid path: {_ACCEPTED_FORMS}") from None

    @classmethod
    def _hub(cls, source: str, repo: str, revision: str | None) -> Reference:
        if os.path.lexists(source):
            on_hub = "" if revision else f", {source}@main for the Hub's"
            advice = f"write ./{source} for the folder{on_hub}"
            raise RecipeError(source, f"is ambiguous, a folder and a Hub repository: {advice}")
        try:
            validate_revision(repo, revision)
        except HubError:
            advice = "write owner/name@main"
            raise RecipeError(source, f"its revision must be a branch, a tag or a commit: {advice}") from None
        return cls("hub", source, repo=repo, revision=revision)

    @classmethod
    def _installed_or_folder(cls, source: str) -> Reference:
        entries = metadata.entry_points(group=ENTRY_POINT_GROUP, name=source)
        offered = {entry.value for entry in entries}
        exists = os.path.lexists(source)
        if offered and exists:
            advice = f"write ./{source} for the folder"
            raise RecipeError(source, f"is ambiguous, installed and a folder: {advice}")
        if len(offered) > 1:
            both = " and ".join(sorted(offered))
            raise RecipeError(source, f"is offered by several packages ({both}): keep one installed")
        if exists:
            return cls._folder(source)
        if offered:
            return cls("package", source, entry_point=next(iter(entries)))
        available = sorted({entry.name for entry in metadata.entry_points(group=ENTRY_POINT_GROUP)})
        installed = f"(installed: {', '.join(available) or 'none'})"
        raise RecipeError(source, f"is neither installed {installed} nor a folder here: {_ACCEPTED_FORMS}")


@dataclass(frozen=True)
class RecipeInfo:
    """The recipe that a name refers to, without importing it."""

    reference: Reference
    lock_key: str | None  # key in the lock file; None: an installed package, which needs no trust
    contents: RecipeFiles | None  # None: an installed package
    revision: str | None  # commit on the Hub
    pin: Pin | None  # the trusted version

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
        entry = self.reference.entry_point
        attribute = None if entry is None else entry.attr
        return attribute if attribute in RECIPE_KINDS else None

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
        digest = None if self.contents is None else self.contents.digest
        return (pin.revision, pin.digest) == (self.revision, digest)


def load_recipe(recipe: Any, *, trust_remote_code: bool | None = False, lock: Lock | None = None) -> Recipe:
    """Load a recipe from a folder, an installed package, the Hub, or a function or class.

    Recipes in a folder or on the Hub are third-party code: they need `trust_remote_code=True`, and are pinned
    by hash when first trusted. A recipe that differs from its pin is refused until `trust_recipe` (or
    `descant recipe trust`) pins it again.
    """
    from descant.recipes.recipe import Recipe  # loads torch, which inspecting a recipe does not need

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
    check_requirements(info.contents.requirements, reference.name)
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
        return RecipeInfo(reference, None, None, None, None)
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


def _load_installed(reference: Reference) -> Recipe:
    """The recipe of an installed package: a module like a folder's `generate.py`, a class or a function."""
    from descant.recipes.recipe import Recipe

    entry = reference.entry_point
    assert entry is not None
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
    changes = pin.differences(current)
    if pin.revision != current.revision:
        old, new = ("none" if commit is None else commit[:12] for commit in (pin.revision, current.revision))
        changes.insert(0, f"commit {old} is now {new}")
    num_more = len(changes) - _MAX_LISTED_CHANGES
    changes = changes[:_MAX_LISTED_CHANGES] + ([f"{num_more} more"] if num_more > 0 else [])
    name = shlex.quote(reference.name)
    advice = f"read it with `descant recipe show {name}`, then pin it with `descant recipe trust {name}`"
    problem = f"is not what was trusted on {pin.trusted}"
    return ChangedRecipe(reference.name, f"{problem} ({', '.join(changes)}): {advice}")


def push_recipe(
    folder: str | Path,
    repo: str,
    *,
    token: str | bool | None = None,
    private: bool | None = None,
    message: str | None = None,
    prune: bool = False,
) -> str:
    """Commit a folder's recipe to "owner/name" on the Hub ("name": of the token's user); returns the commit.

    Only valid recipes are pushed. A missing repository is created, `private` or not. Recipe files in the
    repository that the folder does not have are an error, or deleted with `prune`; files that are not part of
    a recipe, such as a model's weights beside `custom_generate/`, are kept.
    """
    contents = RecipeFiles.from_folder(folder, str(folder))
    repo_id = hub.full_repo_id(repo, token)
    remote = hub.create_repo(repo_id, token=token, private=private)
    sizes = {path: len(data) for path, data in contents.files.items()}
    stale = sorted(set(select_files({**remote.files, **sizes}, repo_id)) - set(sizes))
    if stale and not prune:
        listed = ", ".join(stale[:5]) + (" and others" if len(stale) > 5 else "")
        advice = "delete them there, or push with prune=True (--prune)"
        problem = f"`{repo_id}` holds files that the folder does not have: {listed}; {advice}"
        raise RecipeError(str(folder), problem)
    commit_message = message or f"Upload the recipe {Path(folder).resolve().name}"
    return hub.upload_files(remote, contents.files, deleted=stale, token=token, message=commit_message)

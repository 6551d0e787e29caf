"""References to recipes: a folder, a repository on the Hub, or the name of an installed recipe."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from descant.config.hub import is_repo_id
from descant.config.hub.names import validate_revision
from descant.errors import HubError, RecipeError, format_value

__all__ = ["ENTRY_POINT_GROUP", "Reference"]

ENTRY_POINT_GROUP: Final = "descant.recipes"  # entry point group of installed recipes
_PACKAGE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_ACCEPTED_FORMS: Final = "write ./folder, owner/name, owner/name@revision, or the name of an installed recipe"


@dataclass(frozen=True)
class Reference:
    """The location of a recipe; nothing has been read or downloaded."""

    kind: str  # "folder", "hub" or "package"
    name: str  # as given
    path: Path | None = None  # of a folder, absolute
    repo: str | None = None  # on the Hub: owner/name
    revision: str | None = None  # on the Hub: branch, tag or commit, if given

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
            advice = f"write ./{source} for the folder" + (
                "" if revision else f", {source}@main for the Hub's"
            )
            raise RecipeError(source, f"is ambiguous, a folder and a Hub repository: {advice}")
        try:
            validate_revision(repo, revision)
        except HubError:
            advice = "write owner/name@main"
            raise RecipeError(source, f"its revision must be a branch, a tag or a commit: {advice}") from None
        return cls("hub", source, repo=repo, revision=revision)

    @classmethod
    def _installed_or_folder(cls, source: str) -> Reference:
        offered = {one.value for one in metadata.entry_points(group=ENTRY_POINT_GROUP, name=source)}
        exists = os.path.lexists(source)
        if offered and exists:
            raise RecipeError(
                source, f"is ambiguous, installed and a folder: write ./{source} for the folder"
            )
        if len(offered) > 1:
            both = " and ".join(sorted(offered))
            raise RecipeError(source, f"is offered by several packages ({both}): keep one installed")
        if exists:
            return cls._folder(source)
        if offered:
            return cls("package", source)
        available = (
            ", ".join(sorted({one.name for one in metadata.entry_points(group=ENTRY_POINT_GROUP)})) or "none"
        )
        raise RecipeError(
            source, f"is neither installed (installed: {available}) nor a folder here: {_ACCEPTED_FORMS}"
        )

"""What a recipe is called by: a folder, a repository on the Hub, or the name of an installed one."""

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

ENTRY_POINT_GROUP: Final = "descant.recipes"  # the entry points under which packages offer recipes
_PACKAGE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_ACCEPTED_FORMS: Final = "write ./folder, owner/name, owner/name@revision, or the name of an installed recipe"


@dataclass(frozen=True)
class Reference:
    """Where a recipe is to be had; nothing has been read or fetched for it."""

    kind: str  # "folder", "hub" or "package"
    name: str  # as it was given
    path: Path | None = None  # a folder's, absolute
    repo: str | None = None  # on the Hub: owner/name
    revision: str | None = None  # on the Hub: a branch, tag or commit, where one was given

    @classmethod
    def parse(cls, given: str | os.PathLike[str]) -> Reference:
        """What a path or name means; RecipeError if it means nothing, or more than one thing."""
        if isinstance(given, os.PathLike):
            return cls._folder(os.fspath(given))
        if not isinstance(given, str):
            raise RecipeError(format_value(given), f"must be a path or a name: {_ACCEPTED_FORMS}")
        if given.startswith((".", "/", "~")) or os.path.isabs(given):
            return cls._folder(given)
        repo, at, revision = given.partition("@")
        if is_repo_id(repo):
            return cls._hub(given, repo, revision if at else None)
        if _PACKAGE_NAME.fullmatch(given):
            return cls._installed_or_folder(given)
        raise RecipeError(given, f"is no path and no name: {_ACCEPTED_FORMS}")

    @classmethod
    def _folder(cls, given: str) -> Reference:
        try:
            if "\0" in given:
                raise ValueError
            return cls("folder", given, path=Path(given).expanduser().absolute())
        except (TypeError, ValueError, RuntimeError, OSError):
            raise RecipeError(format_value(given), f"is no path of this system: {_ACCEPTED_FORMS}") from None

    @classmethod
    def _hub(cls, given: str, repo: str, revision: str | None) -> Reference:
        if os.path.lexists(given):
            do = f"write ./{given} for the folder" + ("" if revision else f", {given}@main for the Hub's")
            raise RecipeError(given, f"is there as a folder, and could be the Hub's: {do}")
        try:
            validate_revision(repo, revision)
        except HubError:
            do = "write owner/name@main"
            raise RecipeError(given, f"its revision must be a branch, a tag or a commit: {do}") from None
        return cls("hub", given, repo=repo, revision=revision)

    @classmethod
    def _installed_or_folder(cls, given: str) -> Reference:
        offered = {one.value for one in metadata.entry_points(group=ENTRY_POINT_GROUP, name=given)}
        here = os.path.lexists(given)
        if offered and here:
            raise RecipeError(given, f"is installed, and a folder here: write ./{given} for the folder")
        if len(offered) > 1:
            both = " and ".join(sorted(offered))
            raise RecipeError(given, f"is offered by several packages ({both}): keep one installed")
        if here:
            return cls._folder(given)
        if offered:
            return cls("package", given)
        has = (
            ", ".join(sorted({one.name for one in metadata.entry_points(group=ENTRY_POINT_GROUP)})) or "none"
        )
        raise RecipeError(
            given, f"is neither installed (there are: {has}) nor a folder here: {_ACCEPTED_FORMS}"
        )

"""Validation of repository, revision and file names for use in URLs and paths."""

from __future__ import annotations

import re
from typing import Final

from descant.errors import HubError, printable

__all__ = ["SHA_PATTERN", "is_repo_id", "validate_file_name", "validate_revision"]

SHA_PATTERN: Final = re.compile(r"[0-9a-f]{40}")
_REPO_PATTERN: Final = re.compile(r"{0}/{0}".format(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"))
_REVISION_PATTERN: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+/-]{0,199}")


def is_repo_id(name: object) -> bool:
    """Whether this is a valid "owner/name"."""
    return (
        isinstance(name, str)
        and _REPO_PATTERN.fullmatch(name) is not None
        and not any(part in name for part in ("--", ".."))
        and not name.endswith(".git")
    )


def validate_revision(repo: str, revision: str | None) -> str:
    """The revision, "main" by default, after validation of both names."""
    if not is_repo_id(repo):
        raise HubError(str(repo), "this is no repository's name: write owner/name")
    if revision is None:
        return "main"
    name = str(revision)
    is_unsafe = any(part in name for part in ("..", "//", "/.")) or name.endswith(("/", ".lock"))
    if is_unsafe or not _REVISION_PATTERN.fullmatch(name):
        raise HubError(
            repo, f"a revision must be a branch, a tag or a commit, got {printable(repr(revision))}"
        )
    return name


def validate_file_name(repo: str, name: object) -> None:
    """Raise for a file name that is not a plain path below the repository's root."""
    if (
        not isinstance(name, str)
        or not name.isprintable()
        or any(len(part.encode()) > 255 for part in name.split("/"))
        or any(char in name for char in "\\:")
        or any(part.strip() in ("", ".", "..") for part in name.split("/"))
    ):
        raise HubError(repo, f"a file of it has a name that is refused: {printable(repr(name))}")

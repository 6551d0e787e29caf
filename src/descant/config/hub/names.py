"""Names of repositories, revisions and files, refused unless they can stand in an address and in a path."""

from __future__ import annotations

import re
from typing import Final

from descant.errors import HubError, printable

__all__ = ["SHA_PATTERN", "is_repo_id", "validate_file_name", "validate_revision"]

SHA_PATTERN: Final = re.compile(r"[0-9a-f]{40}")
_REPO_PATTERN: Final = re.compile(r"{0}/{0}".format(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"))
_REVISION_PATTERN: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+/-]{0,199}")


def is_repo_id(name: object) -> bool:
    """Whether this can be the name of a repository with its owner."""
    return (
        isinstance(name, str)
        and _REPO_PATTERN.fullmatch(name) is not None
        and not any(odd in name for odd in ("--", ".."))
        and not name.endswith(".git")
    )


def validate_revision(repo: str, revision: str | None) -> str:
    """The revision that is meant, after a look at both names."""
    if not is_repo_id(repo):
        raise HubError(str(repo), "this is no repository's name: write owner/name")
    if revision is None:
        return "main"
    said = str(revision)
    odd = any(part in said for part in ("..", "//", "/.")) or said.endswith(("/", ".lock"))
    if odd or not _REVISION_PATTERN.fullmatch(said):
        raise HubError(
            repo, f"a revision must be a branch, a tag or a commit, got {printable(repr(revision))}"
        )
    return said


def validate_file_name(repo: str, name: object) -> None:
    """No file but an ordinary one below the repository's root."""
    if (
        not isinstance(name, str)
        or not name.isprintable()
        or any(len(part.encode()) > 255 for part in name.split("/"))
        or any(odd in name for odd in "\\:")
        or any(part.strip() in ("", ".", "..") for part in name.split("/"))
    ):
        raise HubError(repo, f"a file of it has a name that is refused: {printable(repr(name))}")

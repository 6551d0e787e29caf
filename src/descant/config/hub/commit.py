"""What a revision of a repository means: asked of the Hub once, remembered beside the cached files.

What was seen is kept in the repository's folder of the cache: in `refs/`, where the Hub's own clients keep it
too, and in `listings/`, so that offline it is known whether all of a commit's files are there.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from descant.config.hub.client import ONLINE_HINT, AuthToken, call_hub, hub_api, is_offline
from descant.config.hub.names import SHA_PATTERN, validate_file_name, validate_revision
from descant.errors import HubError, printable

__all__ = ["HubCommit", "cache_folder", "cached_commit", "query_commit", "resolve_commit"]


@dataclass(frozen=True, slots=True)
class HubCommit:
    """A commit, and its files with their sizes in bytes."""

    repo: str
    sha: str
    files: Mapping[str, int]


def resolve_commit(repo: str, revision: str | None = None, *, token: AuthToken = None) -> HubCommit:
    """The commit that a branch, a tag or a hash means (None: the newest on main); offline, as last seen."""
    wanted = validate_revision(repo, revision)
    known = cached_commit(repo, wanted) if SHA_PATTERN.fullmatch(wanted) else None
    if known is not None:
        return known
    if is_offline():
        return _resolve_offline(repo, wanted)
    commit = query_commit(repo, wanted, token)
    # A cache that cannot be written costs the next call a question, no more.
    with contextlib.suppress(OSError):
        _cache_commit(commit, wanted)
    return commit


def query_commit(repo: str, revision: str, token: AuthToken) -> HubCommit:
    """What the Hub says of a revision, if it says it of this very repository."""
    from huggingface_hub import constants

    wait = constants.HF_HUB_ETAG_TIMEOUT
    said = call_hub(
        repo,
        lambda: hub_api().model_info(repo, revision=revision, files_metadata=True, timeout=wait, token=token),
    )
    if said.id != repo:
        do = "look at what it is now, and use that name"
        raise HubError(repo, f"it answers as `{printable(said.id)}`, renamed or moved: {do}")
    if not isinstance(said.sha, str) or not SHA_PATTERN.fullmatch(said.sha):
        raise HubError(
            repo, f"the Hub names no commit for revision {printable(revision)}: {printable(said.sha)}"
        )
    files: dict[str, int] = {}
    for sibling in said.siblings or ():
        validate_file_name(repo, sibling.rfilename)
        # A mirror may not say sizes; a download is measured again.
        files[sibling.rfilename] = sibling.size if isinstance(sibling.size, int) else 0
    return HubCommit(repo, said.sha, files)


def cache_folder(repo: str) -> Path:
    """Where the Hub's clients cache a repository."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser() / f"models--{repo.replace('/', '--')}"


def _cache_commit(commit: HubCommit, revision: str) -> None:
    listing = json.dumps({"sha": commit.sha, "files": dict(commit.files)}, sort_keys=True)
    _write_atomic(cache_folder(commit.repo) / "listings" / f"{commit.sha}.json", listing)
    if revision != commit.sha:
        _write_atomic(cache_folder(commit.repo) / "refs" / revision, commit.sha)


def _write_atomic(path: Path, text: str) -> None:
    """A small file, all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(draft).replace(path)
    finally:
        Path(draft).unlink(missing_ok=True)


def cached_commit(repo: str, sha: str) -> HubCommit | None:
    """A commit as it was seen before; it can never have changed."""
    path = cache_folder(repo) / "listings" / f"{sha}.json"
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        files = {name: int(size) for name, size in said["files"].items()}
        sound = said["sha"] == sha
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        sound = False
    if not sound:
        raise HubError(
            repo, f"what the cache knows of commit {sha[:12]} is damaged: delete {printable(path)}"
        )
    for name in files:
        validate_file_name(repo, name)
    return HubCommit(repo, sha, files)


def _resolve_offline(repo: str, revision: str) -> HubCommit:
    sha = revision
    if not SHA_PATTERN.fullmatch(sha):
        try:
            sha = (cache_folder(repo) / "refs" / revision).read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            sha = ""
    known = cached_commit(repo, sha) if SHA_PATTERN.fullmatch(sha) else None
    if known is None:
        raise HubError(
            repo, f"revision {printable(revision)} is not cached, and the client is offline; {ONLINE_HINT}"
        )
    return known

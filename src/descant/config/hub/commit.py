"""Resolving a revision to a commit and its files, with a cache for offline use.

The result is stored in the repository's cache folder: in `refs/`, as huggingface_hub does, and in
`listings/`, so that an offline client can tell whether all files of a commit are cached.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from descant.config.hub.client import ONLINE_HINT, AuthToken, call_hub, hub_api, is_offline
from descant.config.hub.names import SHA_PATTERN, validate_file_name, validate_revision
from descant.core.atomic_file import write_text
from descant.errors import HubError, printable

__all__ = [
    "HubCommit",
    "cache_folder",
    "cache_root",
    "cached_commit",
    "query_commit",
    "resolve_commit",
    "use_cache_dir",
]


@dataclass(frozen=True, slots=True)
class HubCommit:
    """A commit, and its files with their sizes in bytes."""

    repo: str
    sha: str
    files: Mapping[str, int]


def resolve_commit(repo: str, revision: str | None = None, *, token: AuthToken = None) -> HubCommit:
    """The commit of a branch, tag or hash (None: the newest on main); offline, the last known one."""
    name = validate_revision(repo, revision)
    cached = cached_commit(repo, name) if SHA_PATTERN.fullmatch(name) else None
    if cached is not None:
        return cached
    if is_offline():
        return _resolve_offline(repo, name)
    commit = query_commit(repo, name, token)
    # If the cache cannot be written, the next call queries the Hub again.
    with contextlib.suppress(OSError):
        _cache_commit(commit, name)
    return commit


def query_commit(repo: str, revision: str, token: AuthToken) -> HubCommit:
    """The commit of a revision on the Hub; raises for a renamed repository."""
    from huggingface_hub import constants

    timeout = constants.HF_HUB_ETAG_TIMEOUT
    info = call_hub(
        repo,
        lambda: hub_api().model_info(
            repo, revision=revision, files_metadata=True, timeout=timeout, token=token
        ),
    )
    if info.id != repo:
        do = "look at what it is now, and use that name"
        raise HubError(repo, f"it answers as `{printable(info.id)}`, renamed or moved: {do}")
    if not isinstance(info.sha, str) or not SHA_PATTERN.fullmatch(info.sha):
        raise HubError(
            repo, f"the Hub names no commit for revision {printable(revision)}: {printable(info.sha)}"
        )
    files: dict[str, int] = {}
    for sibling in info.siblings or ():
        validate_file_name(repo, sibling.rfilename)
        # A mirror may not report sizes; the download is measured in any case.
        files[sibling.rfilename] = sibling.size if isinstance(sibling.size, int) else 0
    return HubCommit(repo, info.sha, files)


_cache_dir: ContextVar[Path | None] = ContextVar("hub_cache_dir", default=None)


@contextlib.contextmanager
def use_cache_dir(cache_dir: str | os.PathLike[str] | None) -> Iterator[None]:
    """A block that keeps downloads in another folder than the user's cache; None: in that cache."""
    reset = _cache_dir.set(None if cache_dir is None else Path(cache_dir).expanduser())
    try:
        yield
    finally:
        _cache_dir.reset(reset)


def cache_root() -> Path:
    """The folder of all downloads."""
    from huggingface_hub import constants

    return _cache_dir.get() or Path(constants.HF_HUB_CACHE).expanduser()


def cache_folder(repo: str) -> Path:
    """The cache folder of a repository in the layout of huggingface_hub."""
    return cache_root() / f"models--{repo.replace('/', '--')}"


def _cache_commit(commit: HubCommit, revision: str) -> None:
    listing = json.dumps({"sha": commit.sha, "files": dict(commit.files)}, sort_keys=True)
    _write_cached(cache_folder(commit.repo) / "listings" / f"{commit.sha}.json", listing)
    if revision != commit.sha:
        _write_cached(cache_folder(commit.repo) / "refs" / revision, commit.sha)


def _write_cached(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)


def cached_commit(repo: str, sha: str) -> HubCommit | None:
    """A cached commit; None if it is not cached."""
    path = cache_folder(repo) / "listings" / f"{sha}.json"
    try:
        listing = json.loads(path.read_text(encoding="utf-8"))
        files = {name: int(size) for name, size in listing["files"].items()}
        is_valid = listing["sha"] == sha
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_valid = False
    if not is_valid:
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
    commit = cached_commit(repo, sha) if SHA_PATTERN.fullmatch(sha) else None
    if commit is None:
        raise HubError(
            repo, f"revision {printable(revision)} is not cached, and the client is offline; {ONLINE_HINT}"
        )
    return commit

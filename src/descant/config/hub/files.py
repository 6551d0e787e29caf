"""Fetching named small files of a commit through the cache of huggingface_hub."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from descant.config.hub.client import ONLINE_HINT, AuthToken, call_hub, hub_api, is_offline
from descant.config.hub.commit import HubCommit, cache_folder, cache_root, cached_commit
from descant.config.hub.names import SHA_PATTERN, validate_file_name, validate_revision
from descant.errors import HubError, printable

__all__ = ["FILE_LIMIT", "fetch_files"]

FILE_LIMIT: Final = 1 << 20  # bytes of one file

_ETAG_PATTERN: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_WEIGHT_SUFFIXES: Final = (
    ".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".pickle", ".pkl", ".pt", ".pth",
    ".safetensors",
)  # fmt: skip


def fetch_files(
    repo: str, sha: str, names: Iterable[str], *, limit: int = FILE_LIMIT, token: AuthToken = None
) -> dict[str, bytes]:
    """The bytes of the named files of a commit, each of at most `limit` bytes."""
    requested = list(names)
    if not SHA_PATTERN.fullmatch(validate_revision(repo, sha)):
        raise HubError(repo, f"files are fetched by a commit's whole hash, got {printable(sha)}")
    commit = cached_commit(repo, sha)
    for name in requested:
        _validate_listing(repo, commit, name, limit)
    snapshot = cache_folder(repo) / "snapshots" / sha
    missing = [name for name in requested if not _is_cached(repo, snapshot / name)]
    if missing and is_offline():
        shown = ", ".join(map(printable, missing[:5])) + (" and others" if len(missing) > 5 else "")
        raise HubError(repo, f"not in the cache, at commit {sha[:12]}: {shown}; {ONLINE_HINT}")
    for name in missing:
        _validate_headers(repo, sha, name, limit, token)
        _download(repo, sha, name, limit, token)
    return {name: _read_bytes(repo, snapshot / name, name, limit) for name in requested}


def _validate_listing(repo: str, commit: HubCommit | None, name: str, limit: int) -> None:
    """Refuse a file by its name and listed size, before any request."""
    validate_file_name(repo, name)
    if name.lower().endswith(_WEIGHT_SUFFIXES):
        raise HubError(repo, f"its file {printable(name)} is a model's weights, which nothing here downloads")
    if commit is not None and name not in commit.files:
        raise HubError(repo, f"no file {printable(name)} at commit {commit.sha[:12]}")
    if commit is not None and commit.files[name] > limit:
        raise HubError(repo, _too_large_message(name, commit.files[name], limit))


def _validate_headers(repo: str, sha: str, name: str, limit: int, token: AuthToken) -> None:
    """Request a file's headers, and refuse one that is too large, of another commit or moved."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(repo, name, revision=sha, endpoint=hub_api().endpoint)
    timeout = constants.HF_HUB_ETAG_TIMEOUT
    metadata = call_hub(
        repo, lambda: get_hf_file_metadata(url, token=token, timeout=timeout, library_name="descant")
    )
    location = urlsplit(metadata.location)
    # Large files are served by other hosts; on the Hub itself another path is another repository.
    own_path = re.compile(rf"(/api/[^/]+/models)?/{re.escape(repo)}/")
    if location.netloc == urlsplit(url).netloc and not own_path.match(unquote(location.path)):
        raise HubError(
            repo,
            f"its file {printable(name)} has moved to {printable(location.path)}: look at what is there now",
        )
    if metadata.commit_hash != sha:
        raise HubError(
            repo, f"its file {printable(name)} came from another commit than {sha[:12]}: try again"
        )
    if metadata.etag is None or not _ETAG_PATTERN.fullmatch(metadata.etag):  # becomes a file name
        raise HubError(
            repo, f"its file {printable(name)} has an ETag that is refused: {printable(metadata.etag)}"
        )
    if metadata.size is not None and metadata.size > limit:
        raise HubError(repo, _too_large_message(name, metadata.size, limit))


def _is_cached(repo: str, path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:
        raise HubError(repo, f"the cache cannot be read ({printable(error)})") from error


def _download(repo: str, sha: str, name: str, limit: int, token: AuthToken) -> None:
    bar = _make_size_limit_bar(repo, name, limit)
    folder = cache_root()  # read here: the call runs in another thread
    call_hub(
        repo,
        lambda: hub_api().hf_hub_download(
            repo, name, revision=sha, token=token, tqdm_class=bar, cache_dir=folder
        ),
    )


def _make_size_limit_bar(repo: str, name: str, limit: int) -> type[Any]:
    """A hidden progress bar that aborts a download of more than `limit` bytes."""
    from huggingface_hub import utils

    bar: Any = utils.tqdm  # type: ignore[attr-defined]

    class SizeLimitBar(bar):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            self.num_bytes = 0
            super().__init__(*args, **{**options, "disable": True})
            self.check_size(int(options.get("total") or 0))

        def update(self, n: float | None = 1) -> None:
            self.num_bytes += int(n or 0)
            self.check_size(self.num_bytes)

        def check_size(self, size: int) -> None:
            if size > limit:
                raise HubError(repo, _too_large_message(name, size, limit))

    return SizeLimitBar


def _read_bytes(repo: str, path: Path, name: str, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise HubError(
            repo, f"its file {printable(name)} is not in the cache ({printable(error)})"
        ) from error
    if len(data) > limit:
        raise HubError(repo, _too_large_message(name, len(data), limit))
    return data


def _too_large_message(name: str, size: int, limit: int) -> str:
    return f"its file {printable(name)} has {size:,} bytes or more, and {limit:,} are allowed"

"""The bytes of named files of a commit, small ones only, through the cache of the Hub's clients."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from descant.config.hub.client import ONLINE_HINT, AuthToken, call_hub, hub_api, is_offline
from descant.config.hub.commit import HubCommit, cache_folder, cached_commit
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
    """The bytes of these files of a commit, and of no others; none may be larger than `limit`."""
    wanted = list(names)
    if not SHA_PATTERN.fullmatch(validate_revision(repo, sha)):
        raise HubError(repo, f"files are fetched by a commit's whole hash, got {printable(sha)}")
    known = cached_commit(repo, sha)
    for name in wanted:
        _validate_listing(repo, known, name, limit)
    snapshot = cache_folder(repo) / "snapshots" / sha
    absent = [name for name in wanted if not _is_cached(repo, snapshot / name)]
    if absent and is_offline():
        some = ", ".join(map(printable, absent[:5])) + (" and others" if len(absent) > 5 else "")
        raise HubError(repo, f"not in the cache, at commit {sha[:12]}: {some}; {ONLINE_HINT}")
    for name in absent:
        _validate_headers(repo, sha, name, limit, token)
        _download(repo, sha, name, limit, token)
    return {name: _read_bytes(repo, snapshot / name, name, limit) for name in wanted}


def _validate_listing(repo: str, known: HubCommit | None, name: str, limit: int) -> None:
    """Refuse what need not even be asked for."""
    validate_file_name(repo, name)
    if name.lower().endswith(_WEIGHT_SUFFIXES):
        raise HubError(repo, f"its file {printable(name)} is a model's weights, which nothing here downloads")
    if known is not None and name not in known.files:
        raise HubError(repo, f"no file {printable(name)} at commit {known.sha[:12]}")
    if known is not None and known.files[name] > limit:
        raise HubError(repo, _too_large_message(name, known.files[name], limit))


def _validate_headers(repo: str, sha: str, name: str, limit: int, token: AuthToken) -> None:
    """Ask for a file's headers, and refuse one that is too large, of another commit or of another place."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(repo, name, revision=sha, endpoint=hub_api().endpoint)
    wait = constants.HF_HUB_ETAG_TIMEOUT
    said = call_hub(
        repo, lambda: get_hf_file_metadata(url, token=token, timeout=wait, library_name="descant")
    )
    place = urlsplit(said.location)
    # Large files are sent for elsewhere; on the Hub itself another path is another repository.
    here = re.compile(rf"(/api/[^/]+/models)?/{re.escape(repo)}/")
    if place.netloc == urlsplit(url).netloc and not here.match(unquote(place.path)):
        raise HubError(
            repo,
            f"its file {printable(name)} has moved to {printable(place.path)}: look at what is there now",
        )
    if said.commit_hash != sha:
        raise HubError(
            repo, f"its file {printable(name)} came from another commit than {sha[:12]}: try again"
        )
    if said.etag is None or not _ETAG_PATTERN.fullmatch(said.etag):  # the name of a file in the cache
        raise HubError(
            repo, f"its file {printable(name)} has an ETag that is refused: {printable(said.etag)}"
        )
    if said.size is not None and said.size > limit:
        raise HubError(repo, _too_large_message(name, said.size, limit))


def _is_cached(repo: str, path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:
        raise HubError(repo, f"the cache cannot be read ({printable(error)})") from error


def _download(repo: str, sha: str, name: str, limit: int, token: AuthToken) -> None:
    meter = _make_size_limit_bar(repo, name, limit)
    call_hub(repo, lambda: hub_api().hf_hub_download(repo, name, revision=sha, token=token, tqdm_class=meter))


def _make_size_limit_bar(repo: str, name: str, limit: int) -> type[Any]:
    """A progress bar that shows nothing, and ends a download of more bytes than its headers said."""
    from huggingface_hub import utils

    bar: Any = utils.tqdm  # type: ignore[attr-defined]

    class Meter(bar):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            self.seen = 0
            super().__init__(*args, **{**options, "disable": True})
            self.refuse(int(options.get("total") or 0))

        def update(self, n: float | None = 1) -> None:
            self.seen += int(n or 0)
            self.refuse(self.seen)

        def refuse(self, size: int) -> None:
            if size > limit:
                raise HubError(repo, _too_large_message(name, size, limit))

    return Meter


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

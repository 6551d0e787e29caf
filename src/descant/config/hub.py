"""Hub client: resolve a revision, fetch named files of a commit, and push a commit.

It uses huggingface_hub with the user's cache, tokens, offline mode (HF_HUB_OFFLINE) and endpoint
(HF_ENDPOINT), and adds what third-party code needs: the commit is pinned before any download, a repository
that was renamed is refused, only named files below a size limit are fetched, and every failure is a
`HubError` of one line within seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import unquote, urlsplit

from descant.core.atomic_file import write_text
from descant.errors import HubError, printable

if TYPE_CHECKING:
    from huggingface_hub import HfApi


AuthToken = str | bool | None
Answer = TypeVar("Answer")

ONLINE_HINT: Final = "run it once without HF_HUB_OFFLINE"
LOGIN_HINT: Final = "pass token=..., set HF_TOKEN, or run `hf auth login`"
_CACHE_HINT: Final = "try again, or use what is cached with HF_HUB_OFFLINE=1"


def hub_api() -> HfApi:
    """A client with the current endpoint."""
    from huggingface_hub import HfApi

    return HfApi(library_name="descant")


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE is set."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


class _HubThread(threading.Thread):
    """The thread of one call; once it is abandoned, it sends no further request."""

    is_abandoned = False


def end_if_abandoned(_: object = None) -> None:
    """End the thread of a call for whose result nobody waits any more."""
    if getattr(threading.current_thread(), "is_abandoned", False):
        raise SystemExit


def call_hub(repo: str, call: Callable[[], Answer]) -> Answer:
    """The result of a call of huggingface_hub; any exception or timeout is a HubError.

    huggingface_hub has no deadline, and its retries can take minutes. The call runs in a thread that ends at
    its next request after the timeout, so that a call that failed here has no later effect.
    """
    from huggingface_hub import constants, get_session

    timeout = 3.0 * max(constants.HF_HUB_ETAG_TIMEOUT, constants.HF_HUB_DOWNLOAD_TIMEOUT)  # three packets
    answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            hooks = get_session().event_hooks["request"]
            if end_if_abandoned not in hooks:
                hooks.append(end_if_abandoned)
            answers.put((call(), None))
        except BaseException as error:  # all of it becomes the caller's HubError
            answers.put((None, error))

    thread = _HubThread(target=run, name="descant-hub", daemon=True)
    thread.start()
    try:
        answer, error = answers.get(timeout=timeout)
    except queue.Empty:
        do = "try again, or give it longer with HF_HUB_DOWNLOAD_TIMEOUT"
        raise HubError(repo, f"no answer after {timeout:g} s: {do}") from None
    finally:  # also at an interrupt of the waiting thread
        thread.is_abandoned = True
    if isinstance(error, HubError):
        raise error
    if error is not None:
        raise HubError(repo, _describe_error(error)) from error
    return answer  # type: ignore[no-any-return]


def _describe_error(error: BaseException) -> str:
    """The failure in one line, and what to do."""
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        return _describe_error(error.__cause__)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"the client is offline; {ONLINE_HINT}"
    for error_type, reason in (
        (errors.GatedRepoError, f"it is gated: ask for access on its page, and {LOGIN_HINT}"),
        (
            errors.RepositoryNotFoundError,
            f"no such repository, or it is private: check the name, or {LOGIN_HINT}",
        ),
        (errors.RevisionNotFoundError, "no such revision: look at its branches, tags and commits"),
        (errors.EntryNotFoundError, "no such file at this commit"),
    ):
        if isinstance(error, error_type):
            return reason
    message = printable(str(getattr(error, "server_message", None) or error).strip().split("\n")[0])
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return f"the token may not do this (status {status}): {LOGIN_HINT}"
    if status is not None:
        return f"the Hub answered with status {status} ({message}): try again later"
    class_names = {base.__name__ for base in type(error).__mro__}  # independent of the HTTP library
    if any("Timeout" in name for name in class_names):
        return f"the Hub did not answer in time: {_CACHE_HINT}"
    if "TransportError" in class_names or isinstance(error, ConnectionError):
        return f"the Hub cannot be reached ({message}): {_CACHE_HINT}"
    return f"{type(error).__name__}: {message}"


def disable_progress_bars() -> contextlib.AbstractContextManager[object]:
    """Disable progress bars, unless HF_HUB_DISABLE_PROGRESS_BARS is set."""
    from huggingface_hub import constants, utils

    if constants.HF_HUB_DISABLE_PROGRESS_BARS is not None:
        return contextlib.nullcontext()
    return utils.disable_progress_bars()  # type: ignore[attr-defined]


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
    folder = cache_folder(commit.repo)
    listing = json.dumps({"sha": commit.sha, "files": dict(commit.files)}, sort_keys=True)
    texts = {folder / "listings" / f"{commit.sha}.json": listing}
    if revision != commit.sha:
        texts[folder / "refs" / revision] = commit.sha
    for path, text in texts.items():
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
        raise _file_error(repo, name, "is a model's weights, which nothing here downloads")
    if commit is not None:
        if name not in commit.files:
            raise HubError(repo, f"no file {printable(name)} at commit {commit.sha[:12]}")
        _check_size(repo, name, commit.files[name], limit)


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
        raise _file_error(repo, name, f"has moved to {printable(location.path)}: look at what is there now")
    if metadata.commit_hash != sha:
        raise _file_error(repo, name, f"came from another commit than {sha[:12]}: try again")
    if metadata.etag is None or not _ETAG_PATTERN.fullmatch(metadata.etag):  # becomes a file name
        raise _file_error(repo, name, f"has an ETag that is refused: {printable(metadata.etag)}")
    _check_size(repo, name, metadata.size or 0, limit)


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
            _check_size(repo, name, int(options.get("total") or 0), limit)

        def update(self, n: float | None = 1) -> None:
            end_if_abandoned()
            self.num_bytes += int(n or 0)
            _check_size(repo, name, self.num_bytes, limit)

    return SizeLimitBar


def _read_bytes(repo: str, path: Path, name: str, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise _file_error(repo, name, f"is not in the cache ({printable(error)})") from error
    _check_size(repo, name, len(data), limit)
    return data


def _check_size(repo: str, name: str, size: int, limit: int) -> None:
    """Raise for a file that is too large."""
    if size > limit:
        raise _file_error(repo, name, f"has {size:,} bytes or more, and {limit:,} are allowed")


def _file_error(repo: str, name: str, problem: str) -> HubError:
    """The error for a file of a repository."""
    return HubError(repo, f"its file {printable(name)} {problem}")


def full_repo_id(repo: str, token: AuthToken = None) -> str:
    """The repository name with its owner, by default the token's user."""
    if "/" in repo:
        validate_revision(repo, None)
        return repo
    validate_revision(f"owner/{repo}", None)
    _require_token(repo, token)
    user: Any = call_hub(repo, lambda: hub_api().whoami(token=token))
    owner = user.get("name") if isinstance(user, dict) else None
    if not is_repo_id(f"{owner}/{repo}") or owner is None:
        raise HubError(repo, f"the Hub does not say whose token this is: write owner/{repo}")
    return f"{owner}/{repo}"


def create_repo(repo: str, *, token: AuthToken = None, private: bool | None = None) -> HubCommit:
    """Create a repository if it does not exist; its newest commit."""
    validate_revision(repo, None)
    _require_token(repo, token)
    call_hub(repo, lambda: hub_api().create_repo(repo, token=token, private=private, exist_ok=True))
    return query_commit(repo, "main", token)


def upload_files(
    base_commit: HubCommit,
    files: Mapping[str, bytes],
    *,
    deleted: Iterable[str] = (),
    token: AuthToken = None,
    message: str = "Upload with Descant",
) -> str:
    """Add or replace `files` and delete `deleted` in one commit on top of `base_commit`; its hash."""
    deleted_names = list(deleted)
    for name in (*files, *deleted_names):
        validate_file_name(base_commit.repo, name)
    _require_token(base_commit.repo, token)

    def commit() -> Any:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        changes: list[Any] = [CommitOperationAdd(name, data) for name, data in files.items()]
        changes += [CommitOperationDelete(name, is_folder=False) for name in deleted_names]
        with disable_progress_bars():
            return hub_api().create_commit(
                base_commit.repo, changes, commit_message=message, token=token, parent_commit=base_commit.sha
            )

    return str(call_hub(base_commit.repo, commit).oid)


def _require_token(repo: str, token: AuthToken) -> None:
    from huggingface_hub import get_token

    if is_offline():
        raise HubError(repo, f"nothing can be pushed offline; {ONLINE_HINT}")
    if token is False or not (token if isinstance(token, str) else call_hub(repo, get_token)):
        raise HubError(repo, f"to push takes a token, and there is none: {LOGIN_HINT}")

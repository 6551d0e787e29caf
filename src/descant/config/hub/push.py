"""Creating a repository and pushing a commit to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from descant.config.hub.client import (
    LOGIN_HINT,
    ONLINE_HINT,
    AuthToken,
    call_hub,
    disable_progress_bars,
    hub_api,
    is_offline,
)
from descant.config.hub.commit import HubCommit, query_commit
from descant.config.hub.names import is_repo_id, validate_file_name, validate_revision
from descant.errors import HubError

__all__ = ["create_repo", "full_repo_id", "upload_files"]


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

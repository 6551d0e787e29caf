"""A commit to a repository of one's own, which is made when it is not there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from descant.config.hub.client import LOGIN, ONLINE, Token, api, ask, no_bars, offline
from descant.config.hub.commit import Commit, asked
from descant.config.hub.names import checked, is_repo, refuse_file
from descant.errors import HubError

__all__ = ["create", "full_name", "upload"]


def full_name(repo: str, token: Token = None) -> str:
    """A repository's name with its owner, who is the token's user where none is given."""
    if "/" in repo:
        checked(repo, None)
        return repo
    checked(f"owner/{repo}", None)
    _refuse_without_token(repo, token)
    said: Any = ask(repo, lambda: api().whoami(token=token))
    owner = said.get("name") if isinstance(said, dict) else None
    if not is_repo(f"{owner}/{repo}") or owner is None:
        raise HubError(repo, f"the Hub does not say whose token this is: write owner/{repo}")
    return f"{owner}/{repo}"


def create(repo: str, *, token: Token = None, private: bool | None = None) -> Commit:
    """What a repository holds now, which is nothing when it had to be made."""
    checked(repo, None)
    _refuse_without_token(repo, token)
    ask(repo, lambda: api().create_repo(repo, token=token, private=private, exist_ok=True))
    return asked(repo, "main", token)


def upload(
    there: Commit,
    files: Mapping[str, bytes],
    *,
    gone: Iterable[str] = (),
    token: Token = None,
    message: str = "Upload with Descant",
) -> str:
    """Add or replace files and delete those `gone`, in one commit on top of what is `there`; its hash."""
    lost = list(gone)
    for name in (*files, *lost):
        refuse_file(there.repo, name)
    _refuse_without_token(there.repo, token)

    def commit() -> Any:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        changes: list[Any] = [CommitOperationAdd(name, data) for name, data in files.items()]
        changes += [CommitOperationDelete(name, is_folder=False) for name in lost]
        with no_bars():
            return api().create_commit(
                there.repo, changes, commit_message=message, token=token, parent_commit=there.sha
            )

    return str(ask(there.repo, commit).oid)


def _refuse_without_token(repo: str, token: Token) -> None:
    from huggingface_hub import get_token

    if offline():
        raise HubError(repo, f"nothing can be pushed offline; {ONLINE}")
    if token is False or not (token if isinstance(token, str) else ask(repo, get_token)):
        raise HubError(repo, f"to push takes a token, and there is none: {LOGIN}")

"""Hub client: resolve a revision, fetch named files of a commit, and push a commit.

It uses huggingface_hub with the user's cache, tokens, offline mode (HF_HUB_OFFLINE) and endpoint
(HF_ENDPOINT), and adds what third-party code needs: the commit is pinned before any download, a repository
that was renamed is refused, only named files below a size limit are fetched, and every failure is a
`HubError` of one line within seconds.
"""

from descant.config.hub.client import (
    FILE_LIMIT,
    HubCommit,
    create_repo,
    fetch_files,
    full_repo_id,
    is_repo_id,
    resolve_commit,
    upload_files,
    use_cache_dir,
)

__all__ = [
    "FILE_LIMIT",
    "HubCommit",
    "create_repo",
    "fetch_files",
    "full_repo_id",
    "is_repo_id",
    "resolve_commit",
    "upload_files",
    "use_cache_dir",
]

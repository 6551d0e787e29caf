"""Hub client: resolve a revision, fetch named files of a commit, and push a commit.

It uses huggingface_hub with the user's cache, tokens, offline mode (HF_HUB_OFFLINE) and endpoint
(HF_ENDPOINT), and adds what third-party code needs: the commit is pinned before any download, a repository
that was renamed is refused, only named files below a size limit are fetched, and every failure is a
`HubError` of one line within seconds.
"""

from descant.config.hub.commit import HubCommit, resolve_commit, use_cache_dir
from descant.config.hub.files import FILE_LIMIT, fetch_files
from descant.config.hub.names import is_repo_id
from descant.config.hub.push import create_repo, full_repo_id, upload_files

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

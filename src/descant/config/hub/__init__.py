"""The Hub, as far as Descant asks it: which files a revision has, the bytes of those named, and a commit.

huggingface_hub does the work: its cache, its tokens, its offline mode (HF_HUB_OFFLINE) and its endpoint
(HF_ENDPOINT) are the user's own. Added is what code from strangers needs: a commit is fixed before anything
is downloaded, a repository that answers under another name is refused, only files that were named and are
small enough are fetched, and whatever goes wrong is a `HubError` in one line within seconds.
"""

from descant.config.hub.commit import HubCommit, resolve_commit
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
]

"""The Hub, as far as Descant asks it: which files a revision has, the bytes of those named, and a commit.

huggingface_hub does the work: its cache, its tokens, its offline mode (HF_HUB_OFFLINE) and its endpoint
(HF_ENDPOINT) are the user's own. Added is what code from strangers needs: a commit is fixed before anything
is downloaded, a repository that answers under another name is refused, only files that were named and are
small enough are fetched, and whatever goes wrong is a `HubError` in one line within seconds.
"""

from descant.config.hub.commit import Commit, resolve
from descant.config.hub.files import FILE_LIMIT, fetch
from descant.config.hub.names import is_repo
from descant.config.hub.push import create, full_name, upload

__all__ = ["FILE_LIMIT", "Commit", "create", "fetch", "full_name", "is_repo", "resolve", "upload"]

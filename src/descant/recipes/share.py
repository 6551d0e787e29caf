"""Pushes a recipe to the Hub."""

from __future__ import annotations

from pathlib import Path

from descant.config import hub
from descant.errors import RecipeError
from descant.recipes.recipe_files import RecipeFiles, select_files

__all__ = ["push_recipe"]


def push_recipe(
    folder: str | Path,
    repo: str,
    *,
    token: str | bool | None = None,
    private: bool | None = None,
    message: str | None = None,
    prune: bool = False,
) -> str:
    """Commit a folder's recipe to "owner/name" on the Hub ("name": of the token's user); returns the commit.

    Only valid recipes are pushed. A missing repository is created, `private` or not. Recipe files in the
    repository that the folder does not have are an error, or deleted with `prune`; files that are not part of
    a recipe, such as a model's weights beside `custom_generate/`, are kept.
    """
    contents = RecipeFiles.from_folder(folder, str(folder))
    repo_id = hub.full_repo_id(repo, token)
    remote = hub.create_repo(repo_id, token=token, private=private)
    sizes = {path: len(data) for path, data in contents.files.items()}
    stale = sorted(set(select_files({**remote.files, **sizes}, repo_id)) - set(sizes))
    if stale and not prune:
        listed = ", ".join(stale[:5]) + (" and others" if len(stale) > 5 else "")
        advice = "delete them there, or push with prune=True (--prune)"
        raise RecipeError(
            str(folder), f"`{repo_id}` holds files that the folder does not have: {listed}; {advice}"
        )
    commit_message = message or f"Upload the recipe {Path(folder).resolve().name}"
    return hub.upload_files(remote, contents.files, deleted=stale, token=token, message=commit_message)

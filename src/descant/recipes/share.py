"""A recipe, pushed to the Hub as it lies in its folder."""

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
    """Commit a folder's recipe to "owner/name" on the Hub ("name": of the token's user); the commit's hash.

    Nothing goes up that could not be loaded again. A repository that is not there is made, `private` or not.
    Files in it that would belong to the recipe and are not in the folder are an error, and are deleted with
    `prune`; what is no part of a recipe, as a model's weights beside `custom_generate/`, is left alone.
    """
    contents = RecipeFiles.from_folder(folder, str(folder))
    whole = hub.full_repo_id(repo, token)
    there = hub.create_repo(whole, token=token, private=private)
    sizes = {path: len(data) for path, data in contents.files.items()}
    stale = sorted(set(select_files({**there.files, **sizes}, whole)) - set(sizes))
    if stale and not prune:
        some = ", ".join(stale[:5]) + (" and others" if len(stale) > 5 else "")
        do = "delete them there, or push with prune=True (--prune)"
        raise RecipeError(str(folder), f"`{whole}` holds files that the folder does not have: {some}; {do}")
    said = message or f"Upload the recipe {Path(folder).resolve().name}"
    return hub.upload_files(there, contents.files, deleted=stale, token=token, message=said)

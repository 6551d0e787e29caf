"""Creates new recipes from templates."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Final

from descant.core.atomic_file import SUFFIX, temporary_start, write_text
from descant.errors import InputError
from descant.recipes.recipe_files import RECIPE_KINDS

# The Hub's rules, so that a folder can be pushed under its name.
_RECIPE_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?")
_FORBIDDEN_PARTS: Final = ("--", "..", ".git")


def new_recipe(name: str, kind: str, parent: Path = Path()) -> Path:
    """Create a folder with a recipe of a kind; returns the folder."""
    files = template_files(name, kind)
    folder = parent / name
    try:
        _create_folder(folder, files)
    except FileExistsError:
        advice = "choose another name, or move what is there"
        raise InputError("name", "must not exist yet", name, advice) from None
    except OSError as error:
        raise InputError("name", f"must be a folder that can be created ({error.strerror})", name) from None
    return folder


def _create_folder(folder: Path, contents: Mapping[str, str]) -> None:
    """Create a folder with text files, by their paths in it; raises FileExistsError if the name is taken."""
    if os.path.lexists(folder):
        raise FileExistsError
    start = temporary_start(folder.name)
    for leftover in folder.absolute().parent.glob(f"{start}*{SUFFIX}"):  # of a run that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(SUFFIX, start, folder.parent) as temporary:
        whole = Path(temporary, folder.name)
        for file, text in contents.items():
            (whole / file).parent.mkdir(parents=True, exist_ok=True)
            write_text(whole / file, text)
        whole.rename(folder)


def template_files(name: str, kind: str) -> dict[str, str]:
    """The files of a new recipe, by path: those of `templates/<kind>`, and a README."""
    if not _RECIPE_NAME.fullmatch(name) or any(part in name for part in _FORBIDDEN_PARTS):
        must = "must be letters, digits, and single - . _ between them, 96 at the most"
        raise InputError("name", must, name, "for instance my-method")
    if kind not in RECIPE_KINDS:
        raise InputError("kind", f"must be one of {', '.join(RECIPE_KINDS)}", kind)
    templates = files("descant.recipes") / "templates"
    about = tomllib.loads((templates / kind / "about.toml").read_text("utf-8"))
    readme = Template((templates / "README.md").read_text("utf-8")).substitute(
        name=name,
        kind=kind,
        about=about["about"],
        use="\n    ".join(f"{argument}," for argument in about["use"]),
        arguments="\n".join(f"| `{argument}` | {text} |" for argument, text in about["arguments"].items()),
    )
    code, test = (templates / kind / file for file in ("generate.py", "test_recipe.py"))
    return {
        "generate.py": code.read_text("utf-8"),
        "README.md": readme,
        "tests/test_recipe.py": test.read_text("utf-8"),
    }

"""Creates new recipes from templates."""

from __future__ import annotations

import re
from pathlib import Path
from string import Template
from typing import Final

from descant.core.atomic_file import create_folder
from descant.errors import InputError
from descant.recipes.kinds import RECIPE_KINDS
from descant.recipes.templates import RECIPE_TEMPLATES

__all__ = ["new_recipe", "template_files"]

# The Hub's rules, so that a folder can be pushed under its name.
_RECIPE_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?")
_FORBIDDEN_PARTS: Final = ("--", "..", ".git")


def new_recipe(name: str, kind: str, parent: Path = Path()) -> Path:
    """Create a folder with a recipe of a kind; returns the folder."""
    files = template_files(name, kind)
    folder = parent / name
    try:
        create_folder(folder, files)
    except FileExistsError:
        advice = "choose another name, or move what is there"
        raise InputError("name", "must not exist yet", name, advice) from None
    except OSError as error:
        raise InputError("name", f"must be a folder that can be created ({error.strerror})", name) from None
    return folder


def template_files(name: str, kind: str) -> dict[str, str]:
    """The files of a new recipe, by path."""
    if not _RECIPE_NAME.fullmatch(name) or any(part in name for part in _FORBIDDEN_PARTS):
        requirement = "must be letters, digits, and single - . _ between them, 96 at the most"
        raise InputError("name", requirement, name, "for instance my-method")
    if kind not in RECIPE_KINDS:
        raise InputError("kind", f"must be one of {', '.join(RECIPE_KINDS)}", kind)
    template = RECIPE_TEMPLATES[kind]
    argument_rows = [
        f"| `{argument}` | {description} |" for argument, description in template.arguments.items()
    ]
    example_arguments = template.example_arguments.replace(", ", ",\n    ") + ","
    readme = Template(_README).substitute(
        name=name,
        kind=kind,
        about=template.description,
        arguments="\n".join(argument_rows),
        use=example_arguments,
    )
    imports = "check_recipe, toy" if "toy(" in template.test else "check_recipe"
    test = Template(_TEST).substitute(imports=imports) + template.test
    return {"generate.py": template.code, "README.md": readme, "tests/test_recipe.py": test}


_README: Final = """\
---
library_name: transformers
tags:
- custom_generate
- descant
---

# $name

$about

A recipe of the kind `$kind` for [Descant](https://pypi.org/project/descant/).

## Use it

With a model and its tokenizer, loaded with transformers:

```python
from descant import generate

inputs = tokenizer("Once upon a time", return_tensors="pt")
ids = generate(
    model,
    **inputs,
    $use
    max_new_tokens=40,
    recipe="./$name",
    trust_remote_code=True,
)
print(tokenizer.decode(ids[0], skip_special_tokens=True))
```

| argument | meaning |
|---|---|
$arguments

## Work on it

`descant recipe check ./$name --trust-remote-code` runs the contract tests of
`descant.testing` and the tests in `tests/`. Modules beside `generate.py` are
imported with `from .module import name`. List required packages in
`requirements.txt`, one per line. Generation configs are JSON files beside this
README. `descant recipe push ./$name owner/$name` shares the recipe.
"""

_TEST: Final = '''\
"""Contract tests of every recipe, and tests of this one."""

from pathlib import Path

import pytest
import torch

import descant
from descant.recipes.lock import Lock
from descant.testing import $imports

FOLDER = Path(__file__).parents[1]


@pytest.fixture
def recipe(tmp_path):
    # A separate lock file: tests the current files, not the trusted version.
    lock = Lock(tmp_path / "recipes.lock")
    return descant.load_recipe(FOLDER, trust_remote_code=True, lock=lock)


def test_it_fulfils_the_contracts(recipe):
    check_recipe(recipe)


'''

"""The files of a new recipe: one of each kind that works as it is, as a first step to another."""

from __future__ import annotations

import re
from pathlib import Path
from string import Template
from typing import Final

from descant.errors import InputError
from descant.recipes.recipe import RECIPE_KINDS
from descant.recipes.templates import RECIPE_TEMPLATES

__all__ = ["new_recipe", "template_files"]

# As the Hub takes them, so that a folder can be shared under its name.
_RECIPE_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?")
_FORBIDDEN_PARTS: Final = ("--", "..", ".git")


def new_recipe(name: str, kind: str, parent: Path = Path()) -> Path:
    """Make a folder of that name with a recipe of that kind; the folder."""
    files = template_files(name, kind)
    folder = parent / name
    try:
        folder.mkdir()
        (folder / "tests").mkdir()
        for file, text in files.items():
            with open(folder / file, "x", encoding="utf-8", newline="\n") as target:
                target.write(text)
    except FileExistsError:
        do = "choose another name, or move what is there"
        raise InputError("name", "must be one that nothing has here yet", name, do) from None
    except OSError as error:
        raise InputError("name", f"must be a folder that can be made ({error.strerror})", name) from None
    return folder


def template_files(name: str, kind: str) -> dict[str, str]:
    """The texts of a new recipe by path."""
    if not _RECIPE_NAME.fullmatch(name) or any(part in name for part in _FORBIDDEN_PARTS):
        must = "must be letters, digits, and single - . _ between them, 96 at the most"
        raise InputError("name", must, name, "for instance my-method")
    if kind not in RECIPE_KINDS:
        raise InputError("kind", f"must be one of {', '.join(RECIPE_KINDS)}", kind)
    start = RECIPE_TEMPLATES[kind]
    lines = [f"| `{argument}` | {what} |" for argument, what in start.arguments.items()]
    use = start.example_arguments.replace(", ", ",\n    ") + ","
    readme = Template(_README).substitute(
        name=name,
        kind=kind,
        about=start.description,
        arguments="\n".join(lines),
        use=use,
    )
    imports = "check_recipe, toy" if "toy(" in start.test else "check_recipe"
    test = Template(_TEST).substitute(imports=imports) + start.test
    return {"generate.py": start.code, "README.md": readme, "tests/test_recipe.py": test}


_README: Final = """\
---
library_name: transformers
tags:
- custom_generate
- descant
---

# $name

$about

It is a recipe of the kind `$kind` for [Descant](https://pypi.org/project/descant/).

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

| argument | what it is |
|---|---|
$arguments

## Work on it

`descant recipe check ./$name --trust-remote-code` runs the laws of
`descant.testing` and the tests in `tests/`. Modules beside `generate.py` are
imported with `from .module import name`. Packages that it needs go into
`requirements.txt`, a line each, and generation configs that suit it beside this
file, as JSON. `descant recipe push ./$name owner/$name` shares it.
"""

_TEST: Final = '''\
"""The laws that every recipe keeps, and what this one is for."""

from pathlib import Path

import pytest
import torch

import descant
from descant.recipes.lock import Lock
from descant.testing import $imports

FOLDER = Path(__file__).parents[1]


@pytest.fixture
def recipe(tmp_path):
    # With a lock of its own: what is tested is what is here now, not what was trusted.
    lock = Lock(tmp_path / "recipes.lock")
    return descant.load_recipe(FOLDER, trust_remote_code=True, lock=lock)


def test_it_keeps_the_laws(recipe):
    check_recipe(recipe)


'''

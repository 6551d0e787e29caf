"""A recipe's files, all in memory and looked over: what was hashed is what runs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Final

from descant.errors import RecipeError, shown
from descant.recipes import names, requirements, source
from descant.recipes.folder import read_folder
from descant.recipes.recipe import KINDS

__all__ = ["LARGEST", "Contents", "wanted"]

LARGEST: Final = names.LIMITS["file"]  # bytes of a file
wanted = names.wanted
_BEGIN: Final = b"descant recipe 1\0"  # so that a later way to hash is never taken for this one


@dataclass(frozen=True, eq=False)
class Contents:
    """The files of a recipe, read once and found sound; nothing of them has run.

    The code folder is the root, or transformers' `custom_generate/`. In the first case every file of the
    folder is part of the recipe. In the second the rest of the root is a model's own (weights, tokenizer,
    modelling code): of it README.md, requirements.txt and generation configs (`*generation_config*.json`) are
    part of the recipe, and whatever else lies there is neither read nor hashed nor refused. Hidden files and
    `__pycache__` are passed over everywhere.
    """

    name: str  # the recipe's, as errors show it
    files: Mapping[str, bytes] = field(repr=False)  # by relative POSIX path, in order

    @classmethod
    def of_folder(cls, path: str | Path, name: str | None = None) -> Contents:
        """What a folder holds; RecipeError if it is no recipe, or has what none may have."""
        return cls.of_files(read_folder(Path(path), name or str(path)), name or str(path))

    @classmethod
    def of_files(cls, files: Mapping[str, bytes], name: str) -> Contents:
        """The same of files that came from elsewhere; those that are not the recipe's are left out."""
        mine = wanted({path: len(data) for path, data in files.items()}, name)
        contents = cls(name, MappingProxyType({path: bytes(files[path]) for path in mine}))
        contents._check()
        return contents

    @cached_property
    def digest(self) -> str:
        """A hash of all names and bytes."""
        whole = hashlib.sha256(_BEGIN)
        for path, data in self.files.items():
            for part in (path.encode(), data):
                whole.update(len(part).to_bytes(8, "big"))
                whole.update(part)
        return f"sha256:{whole.hexdigest()}"

    @cached_property
    def hashes(self) -> Mapping[str, str]:
        """The hash of each file."""
        return {path: f"sha256:{hashlib.sha256(data).hexdigest()}" for path, data in self.files.items()}

    @cached_property
    def code(self) -> str:
        """The prefix of the code folder's files: "" or "custom_generate/"."""
        return names.layout({path.split("/")[0] for path in self.files}, self.name)

    @cached_property
    def modules(self) -> Mapping[str, bytes]:
        """The sources of the code folder's modules, by the module's name."""
        found = ((names.module(path, self.code), data) for path, data in self.files.items())
        return {name: data for name, data in found if name is not None}

    @cached_property
    def requirements(self) -> list[str]:
        """The lines of its requirements.txt, in the code folder or else at the root, without comments."""
        path = self._beside("requirements.txt", self.code, "")
        return requirements.lines(source.text_of(self.files[path], path, self.name)) if path else []

    @cached_property
    def readme(self) -> str | None:
        """Its README.md, at the root or else in the code folder."""
        path = self._beside("README.md", "", self.code)
        return source.text_of(self.files[path], path, self.name) if path else None

    @cached_property
    def configs(self) -> tuple[str, ...]:
        """The names of the generation configs at the root."""
        return tuple(path for path in self.files if "/" not in path and path.endswith(".json"))

    def kinds(self) -> tuple[str, ...]:
        """Which of a method's names `generate.py` defines, as far as its text says."""
        path = self.code + names.MAIN
        found = source.bound(self.files[path], path, self.name)
        return tuple(kind for kind in KINDS if kind in found)

    def _beside(self, name: str, *prefixes: str) -> str | None:
        return next((prefix + name for prefix in prefixes if prefix + name in self.files), None)

    def _check(self) -> None:
        """Refuse what the files hold, where a recipe may not hold it."""
        for path, data in self.files.items():
            self._check_file(path, data)
        if self.modules.get("__init__", b"").strip():
            raise RecipeError(self.name, "its `__init__.py` must be empty: write its code in `generate.py`")
        kinds = self.kinds()
        if len(kinds) != 1:
            what = f"its `{names.MAIN}` must define one of {', '.join(KINDS)}"
            raise RecipeError(self.name, f"{what}, got {' and '.join(kinds) or 'none'}")
        requirements.parsed(self.requirements, self.name)
        _ = self.readme

    def _check_file(self, path: str, data: bytes) -> None:
        if source.opaque(data):
            raise RecipeError(
                self.name, f"its file {shown(path)} is compiled, pickled or packed: keep to source and text"
            )
        kind = path.casefold().rpartition(".")[2]
        if kind == "py":
            source.checked_python(data, path, self.name)
        elif kind == "json":
            source.checked_json(data, path, self.name, config=path in self.configs)

"""A recipe's files in memory, checked and hashed: the hashed bytes are the ones that run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Final

from descant.errors import RecipeError, format_value
from descant.recipes import file_rules, requirements, source_checks
from descant.recipes.folder import read_folder
from descant.recipes.kinds import RECIPE_KINDS

__all__ = ["MAX_FILE_BYTES", "RecipeFiles", "select_files"]

MAX_FILE_BYTES: Final = file_rules.LIMITS["file"]
select_files = file_rules.select_files
_HASH_PREFIX: Final = b"descant recipe 1\0"  # version of the hash scheme


@dataclass(frozen=True, eq=False)
class RecipeFiles:
    """The checked files of a recipe; none of its code has run.

    The code folder is the root, or transformers' `custom_generate/`. In the first case every file of the
    folder is part of the recipe. In the second the root belongs to a model (weights, tokenizer, modelling
    code): only its README.md, requirements.txt and generation configs (`*generation_config*.json`) are part
    of the recipe; its other files are neither read nor hashed nor refused. Hidden files and `__pycache__` are
    always skipped.
    """

    name: str  # of the recipe, for error messages
    files: Mapping[str, bytes] = field(repr=False)  # by relative POSIX path, in order

    @classmethod
    def from_folder(cls, path: str | Path, name: str | None = None) -> RecipeFiles:
        """Read a folder; raises RecipeError if it is not a valid recipe."""
        return cls.from_files(read_folder(Path(path), name or str(path)), name or str(path))

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], name: str) -> RecipeFiles:
        """The recipe in files from another source; files that are not part of it are left out."""
        selected = select_files({path: len(data) for path, data in files.items()}, name)
        contents = cls(name, MappingProxyType({path: bytes(files[path]) for path in selected}))
        contents._check()
        return contents

    @cached_property
    def digest(self) -> str:
        """A hash of all paths and contents."""
        digest = hashlib.sha256(_HASH_PREFIX)
        for path, data in self.files.items():
            for part in (path.encode(), data):
                digest.update(len(part).to_bytes(8, "big"))
                digest.update(part)
        return f"sha256:{digest.hexdigest()}"

    @cached_property
    def hashes(self) -> Mapping[str, str]:
        """The hash of each file."""
        return {path: f"sha256:{hashlib.sha256(data).hexdigest()}" for path, data in self.files.items()}

    @cached_property
    def code_prefix(self) -> str:
        """The prefix of the code folder's files: "" or "custom_generate/"."""
        return file_rules.code_prefix({path.split("/")[0] for path in self.files}, self.name)

    @cached_property
    def modules(self) -> Mapping[str, bytes]:
        """The sources of the modules in the code folder, by module name."""
        named = ((file_rules.module_name(path, self.code_prefix), data) for path, data in self.files.items())
        return {name: data for name, data in named if name is not None}

    @cached_property
    def requirements(self) -> list[str]:
        """The lines of requirements.txt (in the code folder, else at the root), without comments."""
        path = self._first_existing("requirements.txt", self.code_prefix, "")
        return (
            requirements.requirement_lines(source_checks.decode_text(self.files[path], path, self.name))
            if path
            else []
        )

    @cached_property
    def readme(self) -> str | None:
        """README.md (at the root, else in the code folder)."""
        path = self._first_existing("README.md", "", self.code_prefix)
        return source_checks.decode_text(self.files[path], path, self.name) if path else None

    @cached_property
    def configs(self) -> tuple[str, ...]:
        """The names of the generation configs at the root."""
        return tuple(path for path in self.files if "/" not in path and path.endswith(".json"))

    def defined_kinds(self) -> tuple[str, ...]:
        """The kinds whose names `generate.py` defines, by static analysis."""
        path = self.code_prefix + file_rules.MAIN_FILE
        names = source_checks.top_level_names(self.files[path], path, self.name)
        return tuple(kind for kind in RECIPE_KINDS if kind in names)

    def _first_existing(self, name: str, *prefixes: str) -> str | None:
        return next((prefix + name for prefix in prefixes if prefix + name in self.files), None)

    def _check(self) -> None:
        """Raise RecipeError for contents that are not allowed."""
        for path, data in self.files.items():
            self._check_file(path, data)
        if self.modules.get("__init__", b"").strip():
            raise RecipeError(self.name, "its `__init__.py` must be empty: write its code in `generate.py`")
        kinds = self.defined_kinds()
        if len(kinds) != 1:
            requirement = f"its `{file_rules.MAIN_FILE}` must define one of {', '.join(RECIPE_KINDS)}"
            raise RecipeError(self.name, f"{requirement}, got {' and '.join(kinds) or 'none'}")
        requirements.parse_requirements(self.requirements, self.name)
        _ = self.readme

    def _check_file(self, path: str, data: bytes) -> None:
        if source_checks.is_binary(data):
            raise RecipeError(
                self.name,
                f"its file {format_value(path)} is compiled, pickled or packed: keep to source and text",
            )
        kind = path.casefold().rpartition(".")[2]
        if kind == "py":
            source_checks.check_python(data, path, self.name)
        elif kind == "json":
            source_checks.check_json(data, path, self.name, config=path in self.configs)

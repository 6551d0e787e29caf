"""Rules for the files of a recipe: which belong to it, and which names and sizes are refused."""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from descant.errors import RecipeError, format_value

__all__ = [
    "CODE_FOLDER",
    "LIMITS",
    "MAIN_FILE",
    "check_path",
    "check_size",
    "code_prefix",
    "is_recipe_file",
    "is_skipped",
    "module_name",
    "select_files",
]

MAIN_FILE: Final = "generate.py"
CODE_FOLDER: Final = "custom_generate"  # the sub-folder that transformers looks in
# Size limits. Those of Python files are lower, since they are compiled for inspection.
LIMITS: Final = {
    "file": 1 << 20,  # bytes per file
    "python": 1 << 19,  # bytes per Python file
    "total": 8 << 20,  # bytes of all files
    "pythons": 1 << 20,  # bytes of all Python files
    "files": 200,
    "depth": 8,  # nested folders
    "entries": 10_000,  # directory entries, including hidden ones and the model's own
}

# Files that execute or unpickle when opened, and archives: they cannot be reviewed before trust.
_BINARY_SUFFIXES: Final = re.compile(
    r"\.(so[.\d]*|pyd|dll|dylib|exe|com|msi|o|a|lib|class|jar|wasm|pyc|pyo|pth|egg|whl"
    r"|pkl|pickle|pckl|pk|p|dill|cloudpickle|joblib|shelve|marshal|pt|pt2|ptl|bin|ckpt|npy|npz|h5|hdf5|keras|mar"
    r"|zip|tar|gz|tgz|bz2|xz|lzma|zst|7z|rar|iso|dmg|deb|rpm)\Z"
)
_GENERATION_CONFIG: Final = re.compile(r"[^/]*generation_config[^/]*\.json\Z")
_MODULE_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_ROOT_FILES: Final = ("README.md", "requirements.txt")
# Names that would shadow other modules.
_RESERVED_MODULES: Final = sys.stdlib_module_names | {
    *("descant", "torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "packaging"),
    *("numpy", "sitecustomize", "usercustomize"),
}


def is_skipped(part: str) -> bool:
    """Whether a file or folder is skipped: hidden, or `__pycache__`."""
    return part.startswith(".") or part == "__pycache__"


def code_prefix(names: Collection[str], recipe: str) -> str:
    """The folder of the code, by the names at the root: "" or "custom_generate/"."""
    if CODE_FOLDER not in names:
        return ""
    if MAIN_FILE in names:
        raise RecipeError(recipe, f"has both `{MAIN_FILE}` and `{CODE_FOLDER}/`: keep one of them")
    return f"{CODE_FOLDER}/"


def check_path(path: str, recipe: str) -> None:
    """Raise RecipeError if a path is not allowed in a recipe."""
    _check_relative(path, recipe)
    subject = f"its file {format_value(path)}"
    parts = path.split("/")
    if len(parts) - 1 > LIMITS["depth"]:
        raise RecipeError(recipe, f"{subject} lies more than {LIMITS['depth']} folders deep: make it flat")
    if len(path) > 1024 or any(len(part) > 200 for part in parts):
        raise RecipeError(recipe, f"{subject} has a name of {len(path)} characters: rename it")
    if (
        not path.isprintable()
        or re.search(r'[:*?"<>|]', path)
        or any(_has_trimmable_ends(part) for part in parts)
    ):
        raise RecipeError(recipe, f"{subject} has characters that some systems or eyes misread: rename it")
    if unicodedata.normalize("NFC", path) != path:
        raise RecipeError(recipe, f"{subject} has a name that is not in Unicode's normal form C: rename it")
    if _BINARY_SUFFIXES.search(parts[-1].casefold()):
        advice = "keep to source and text"
        raise RecipeError(recipe, f"{subject} is compiled, pickled or packed by its name: {advice}")


def select_files(sizes: Mapping[str, int], recipe: str) -> tuple[str, ...]:
    """The recipe's files in a listing (path -> bytes); raises RecipeError for those that are not allowed.

    If the code is in `custom_generate/`, the root belongs to a model: only README.md, requirements.txt and
    generation configs (`*generation_config*.json`) of it are part of the recipe.
    """
    if len(sizes) > LIMITS["entries"]:
        raise RecipeError(recipe, f"has {len(sizes)} files: no more than {LIMITS['files']} can be a recipe's")
    for path in sizes:
        _check_relative(path, recipe)  # also of skipped files: ".." starts with a dot
    visible = [path for path in sizes if not any(map(is_skipped, path.split("/")))]
    code = code_prefix({path.split("/")[0] for path in visible}, recipe)
    selected = sorted(path for path in visible if not code or is_recipe_file(path))
    for path in selected:
        check_path(path, recipe)
    _check_sizes({path: sizes[path] for path in selected}, recipe)
    _check_distinct(selected, recipe)
    _check_modules(selected, code, recipe)
    return tuple(selected)


def is_recipe_file(path: str) -> bool:
    """Whether a file is part of a recipe whose code is in `custom_generate/`."""
    return (
        path in _ROOT_FILES
        or path.startswith(f"{CODE_FOLDER}/")
        or path == CODE_FOLDER
        or bool(_GENERATION_CONFIG.match(path))
    )


def module_name(path: str, code: str) -> str | None:
    """The module name of a file in the code folder; None if it is no module."""
    stem = path.removeprefix(code).removesuffix(".py")
    return stem if path == f"{code}{stem}.py" and _MODULE_NAME.match(stem) else None


def _check_relative(path: str, recipe: str) -> None:
    """Raise RecipeError for a path that could lead out of its folder."""
    unsafe = (
        not path or "\\" in path or "\0" in path or any(part in ("", ".", "..") for part in path.split("/"))
    )
    if unsafe:
        raise RecipeError(
            recipe, f"its file {format_value(path)} has a path that leads elsewhere: name it plainly"
        )


def _has_trimmable_ends(part: str) -> bool:
    return part != part.strip() or part.endswith(".")


def _check_sizes(sizes: Mapping[str, int], recipe: str) -> None:
    if len(sizes) > LIMITS["files"]:
        raise RecipeError(recipe, f"has {len(sizes)} files: keep to {LIMITS['files']}")
    for path, size in sizes.items():
        check_size(path, size, recipe)
    python = sum(size for path, size in sizes.items() if _is_python(path))
    for unit, size, limit in (
        ("bytes", sum(sizes.values()), "total"),
        ("bytes of Python", python, "pythons"),
    ):
        if size > LIMITS[limit]:
            raise RecipeError(recipe, f"has {size} {unit}: keep to {LIMITS[limit]}")


def check_size(path: str, size: int, recipe: str) -> None:
    """Raise RecipeError if a file is too large."""
    limit = LIMITS["python" if _is_python(path) else "file"]
    if size > limit:
        advice = f"keep to {limit}, or put the code in `{CODE_FOLDER}/` and a model's own files beside it"
        raise RecipeError(recipe, f"its file {format_value(path)} has {size} bytes: {advice}")


def _is_python(path: str) -> bool:
    return path.casefold().endswith(".py")


def _check_distinct(paths: Iterable[str], recipe: str) -> None:
    """Raise RecipeError for two paths that some file systems treat as the same."""
    names: dict[str, tuple[str, bool]] = {}
    for path in paths:
        parts = path.split("/")
        for end in range(1, len(parts) + 1):
            name, is_file = "/".join(parts[:end]), end == len(parts)
            first = names.setdefault(unicodedata.normalize("NFKC", name).casefold(), (name, is_file))
            if first != (name, is_file):
                both = f"{format_value(first[0])} and {format_value(name)}"
                raise RecipeError(recipe, f"some systems cannot tell its files {both} apart: rename one")


def _check_modules(paths: list[str], code: str, recipe: str) -> None:
    """Raise RecipeError for a code folder without its main file, or with a module that shadows another."""
    if code + MAIN_FILE not in paths:
        below = any(path.startswith(f"{code}{MAIN_FILE}/") for path in paths)
        subject = (
            f"its `{code}{MAIN_FILE}` must be a file, got a folder"
            if below
            else f"has no `{code}{MAIN_FILE}`"
        )
        raise RecipeError(recipe, f"{subject}: write one that defines its method")
    tops = {path.removeprefix(code).split("/")[0] for path in paths if path.startswith(code)}
    for top in sorted(tops):
        stem = top[:-3] if _is_python(top) else None
        if stem is None or f"{code}{top}" not in paths:
            continue
        subject = f"its module `{top}`" if top.isascii() else f"its module {format_value(top)}"
        if not top.isascii():
            raise RecipeError(recipe, f"{subject} can be mistaken for another: name it in ASCII")
        if stem.casefold() in _RESERVED_MODULES or (stem.startswith("__") and stem != "__init__"):
            raise RecipeError(recipe, f"{subject} has the name of another, or of Python's own: rename it")
        if stem in tops:
            raise RecipeError(recipe, f"{subject} has a folder of the same name beside it: rename one")

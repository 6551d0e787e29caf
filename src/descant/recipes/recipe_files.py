"""A recipe's files in memory, checked and hashed, so that the hashed bytes run; and its requirements."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import stat
import unicodedata
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Final

from packaging.markers import UndefinedComparison, UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier
from packaging.version import InvalidVersion, Version

from descant.errors import MissingRequirements, RecipeError, format_value

_COMMENT: Final = re.compile(r"(^|\s)#.*")
_MAX_LINES: Final = 100
_MAX_LINE_CHARS: Final = 300
_ARCHIVE_SUFFIXES: Final = (".whl", ".zip", ".egg", ".gz", ".tgz", ".bz2", ".xz", ".tar")


def requirement_lines(text: str) -> list[str]:
    """The non-empty lines of a requirements.txt, without comments."""
    return [line for line in (_COMMENT.sub("", line).strip() for line in text.splitlines()) if line]


def parse_requirements(lines: Iterable[str], recipe: str) -> list[Requirement]:
    """Parse requirement lines; raises RecipeError for anything but package names with versions.

    Options, URLs and paths are refused: a recipe must not decide where a package comes from.
    """
    requirements = []
    for index, line in enumerate(lines):
        subject = f"its requirement {format_value(line)}"
        if index == _MAX_LINES or len(line) > _MAX_LINE_CHARS:
            raise RecipeError(
                recipe, f"must have at most {_MAX_LINES} requirements of {_MAX_LINE_CHARS} characters"
            )
        try:
            requirement = Requirement(line)
        except (InvalidRequirement, InvalidVersion, RecursionError):
            requirement = None
        is_plain = (
            requirement is not None
            and requirement.url is None
            and not requirement.name.casefold().endswith(_ARCHIVE_SUFFIXES)
        )
        if requirement is None or not is_plain or not line.isprintable():
            advice = "keep to names with versions, as in `torch>=2.4`"
            raise RecipeError(recipe, f"{subject} must be a package name with versions: {advice}")
        requirements.append(requirement)
    return requirements


def check_requirements(lines: Iterable[str], recipe: str) -> None:
    """Raise MissingRequirements with the unmet requirements, if there are any."""
    missing = [
        f"{requirement} (installed: {installed_version(requirement.name)})"
        for requirement in unmet_requirements(parse_requirements(lines, recipe), recipe)
    ]
    if missing:
        raise MissingRequirements(recipe, missing)


def unmet_requirements(requirements: Iterable[Requirement], recipe: str) -> Iterator[Requirement]:
    """Applicable requirements that are not met, including those of their extras."""
    pending = list(requirements)[::-1]
    visited: set[str] = set()
    while pending:
        requirement = pending.pop()
        if str(requirement) in visited or not _is_applicable(requirement, recipe):
            continue
        visited.add(str(requirement))
        if not _is_met(requirement):
            yield requirement
        else:
            pending += reversed(_extra_requirements(requirement))


def installed_version(name: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return metadata.version(name)
    except (metadata.PackageNotFoundError, KeyError, ValueError):
        return None


def _is_met(requirement: Requirement) -> bool:
    version = installed_version(requirement.name)
    if version is None:
        return False
    try:
        # An installed pre-release was chosen by the user.
        return requirement.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return not requirement.specifier


def _is_applicable(requirement: Requirement, recipe: str) -> bool:
    try:
        return requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    except (UndefinedComparison, UndefinedEnvironmentName, InvalidSpecifier, InvalidVersion, RecursionError):
        raise RecipeError(
            recipe, f"the marker of its requirement {format_value(str(requirement))} must be valid"
        ) from None


def _extra_requirements(requirement: Requirement) -> list[Requirement]:
    """The requirements of a requirement's extras."""
    requirements = []
    for line in (metadata.requires(requirement.name) or []) if requirement.extras else []:
        try:
            inner = Requirement(line)
            marker, inner.marker = inner.marker, None
            if marker is None or marker.evaluate({"extra": ""}):
                continue  # needed without the extra
            if any(marker.evaluate({"extra": extra}) for extra in requirement.extras):
                requirements.append(inner)
        except (InvalidRequirement, UndefinedComparison, UndefinedEnvironmentName):
            continue  # metadata of an installed package, not of the recipe
    return requirements


# Kind -> positional arguments of its callable.
RECIPE_KINDS: Final[Mapping[str, tuple[str, ...]]] = {
    "generate": ("model",),
    "strategy": ("noise", "stop", "rank_group"),
    "drafter": (),
    "processor": (),
    "wrapper": ("inner",),
}
# Methods by which the kind of a class is recognised.
KIND_METHODS: Final = {
    "strategy": ("propose", "select", "finish"),
    "drafter": ("draft",),
    "wrapper": ("forward", "wrap_cache"),
    "processor": ("process",),
}
# Members that the engine requires of the object that a recipe builds.
REQUIRED_MEMBERS: Final = {
    "strategy": ("needs_log_probs", "columns", "propose", "select", "finish", "drop", "finished_so_far"),
    "drafter": ("is_model_free", "add_requests", "remove_requests", "commit", "draft"),
    "wrapper": ("traits", "wrap_cache", "forward"),
}


MAIN_FILE: Final = "generate.py"
CODE_FOLDER: Final = "custom_generate"  # the sub-folder that transformers looks in
MAX_FILE_BYTES: Final = 1 << 20
# Python has lower limits, since it is compiled for inspection.
_MAX_PYTHON_BYTES: Final = 1 << 19
_MAX_TOTAL_BYTES, _MAX_TOTAL_PYTHON_BYTES = 8 << 20, 1 << 20
_MAX_FILES, _MAX_DEPTH = 200, 8
_MAX_ENTRIES: Final = 10_000  # of directories, hidden ones and the model's own included
_HASH_PREFIX: Final = b"descant recipe 1\0"  # version of the hash scheme

# Files that execute or unpickle when opened, and archives: they cannot be reviewed before trust.
_BINARY_SUFFIXES: Final = re.compile(
    r"\.(so[.\d]*|pyd|dll|dylib|exe|com|msi|o|a|lib|class|jar|wasm|pyc|pyo|pth|egg|whl"
    r"|pkl|pickle|pckl|pk|p|dill|cloudpickle|joblib|shelve|marshal|pt|pt2|ptl|bin|ckpt|npy|npz|h5|hdf5|keras|mar"
    r"|zip|tar|gz|tgz|bz2|xz|lzma|zst|7z|rar|iso|dmg|deb|rpm)\Z"
)
_GENERATION_CONFIG: Final = re.compile(r"[^/]*generation_config[^/]*\.json\Z")
_MODULE_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
# Missing on some systems, where `_read_folder` raises. A pipe must not block.
_OPEN_FLAGS: Final[int] = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
# Categories of characters that hide or reorder what a reader sees.
_INVISIBLE_CATEGORIES: Final = ("Cc", "Cf", "Cs", "Zl", "Zp")
_ASCII: Final = frozenset(map(chr, range(32, 127))) | {"\t", "\n", "\f"}


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
        return cls.from_files(_read_folder(Path(path), name or str(path)), name or str(path))

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
        return _code_prefix({path.split("/")[0] for path in self.files}, self.name)

    @cached_property
    def modules(self) -> Mapping[str, bytes]:
        """The sources of the modules in the code folder, by module name."""
        stems = {path: path.removeprefix(self.code_prefix).removesuffix(".py") for path in self.files}
        return {
            stem: self.files[path]
            for path, stem in stems.items()
            if path == f"{self.code_prefix}{stem}.py" and _MODULE_NAME.match(stem)
        }

    @cached_property
    def requirements(self) -> list[str]:
        """The lines of requirements.txt (in the code folder, else at the root), without comments."""
        path = self._first_existing("requirements.txt", self.code_prefix, "")
        return [] if path is None else requirement_lines(self._text(path))

    @cached_property
    def readme(self) -> str | None:
        """README.md (at the root, else in the code folder)."""
        path = self._first_existing("README.md", "", self.code_prefix)
        return None if path is None else self._text(path)

    @cached_property
    def configs(self) -> tuple[str, ...]:
        """The names of the generation configs at the root."""
        return tuple(path for path in self.files if "/" not in path and path.endswith(".json"))

    def defined_kinds(self) -> tuple[str, ...]:
        """The kinds whose names `generate.py` defines, by static analysis."""
        path = self.code_prefix + MAIN_FILE
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # syntax warnings of third-party code
                names = frozenset(_bound_names(ast.parse(self._text(path))))
        except (RecursionError, MemoryError):
            raise self._error(path, "is nested too deep: make it flatter") from None
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None)
            where, reason = f" in line {line}" if line else "", getattr(error, "msg", str(error))
            raise self._error(path, f"must be valid Python{where}: {format_value(reason)}") from None
        return tuple(kind for kind in RECIPE_KINDS if kind in names)

    def _error(self, path: str, problem: str) -> RecipeError:
        return RecipeError(self.name, f"its file {format_value(path)} {problem}")

    def _text(self, path: str) -> str:
        try:
            return self.files[path].decode("utf-8")
        except UnicodeDecodeError:
            raise self._error(path, "must be UTF-8: save it as such") from None

    def _first_existing(self, name: str, *prefixes: str) -> str | None:
        return next((prefix + name for prefix in prefixes if prefix + name in self.files), None)

    # -------------------------------------------------------------------- checks
    def _check(self) -> None:
        """Raise RecipeError for contents that would not load, or that look different from what runs."""
        for path in self.files:
            if path.casefold().endswith(".py"):
                self._check_python(path)
        for path in self.configs:
            self._check_config(path)
        if self.modules.get("__init__", b"").strip():
            raise RecipeError(self.name, "its `__init__.py` must be empty: write its code in `generate.py`")
        kinds = self.defined_kinds()
        if len(kinds) != 1:
            requirement = f"its `{MAIN_FILE}` must define one of {', '.join(RECIPE_KINDS)}"
            raise RecipeError(self.name, f"{requirement}, got {' and '.join(kinds) or 'none'}")
        parse_requirements(self.requirements, self.name)
        _ = self.readme

    def _check_python(self, path: str) -> None:
        """Raise RecipeError for Python that is not UTF-8, or that looks different from what runs.

        Invisible characters and those that reorder text ("Trojan Source", Boucher and Anderson 2021) are
        refused, also in strings and comments, where an escape can be used instead.
        """
        text = self._text(path).replace("\r\n", "\n")
        for char in sorted(set(text) - _ASCII):
            if unicodedata.category(char) in _INVISIBLE_CATEGORIES:
                position = f"U+{ord(char):04X} in line {text[: text.index(char)].count(chr(10)) + 1}"
                raise self._error(path, f"has the invisible character {position}: remove it")

    def _check_config(self, path: str) -> None:
        """Raise RecipeError for a generation config that is no JSON object."""
        try:
            value = json.loads(self._text(path), parse_constant=_refuse_constant)
        except (ValueError, RecursionError, MemoryError):
            raise self._error(path, "must be JSON") from None
        if not isinstance(value, dict):
            raise self._error(path, "must hold an object, as a generation config does")


def _refuse_constant(text: str) -> None:
    raise ValueError(text)  # NaN and Infinity are not JSON


def _bound_names(module: ast.Module) -> Iterator[str]:
    """The names that a module binds at its top level."""
    stack: list[ast.AST] = list(module.body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                yield node.id
        elif isinstance(node, ast.AnnAssign) and node.value is None:
            continue
        elif isinstance(node, ast.ExceptHandler):
            stack.extend(node.body)  # its own name is unbound at its end
        elif not isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            stack.extend(ast.iter_child_nodes(node))


# ------------------------------------------------------------------------ which files
def select_files(sizes: Mapping[str, int], recipe: str) -> tuple[str, ...]:
    """The recipe's files in a listing (path -> bytes); raises RecipeError for those that are not allowed.

    If the code is in `custom_generate/`, the root belongs to a model: only README.md, requirements.txt and
    generation configs (`*generation_config*.json`) of it are part of the recipe.
    """
    if len(sizes) > _MAX_ENTRIES:
        raise RecipeError(recipe, f"has {len(sizes)} files: no more than {_MAX_FILES} can be a recipe's")
    for path in sizes:  # also of skipped files: ".." starts with a dot
        if not path or re.search(r"[\\\0]", path) or any(part in ("", ".", "..") for part in path.split("/")):
            subject = f"its file {format_value(path)}"
            raise RecipeError(recipe, f"{subject} has a path that leads elsewhere: name it plainly")
    visible = [path for path in sizes if not any(map(_is_skipped, path.split("/")))]
    code = _code_prefix({path.split("/")[0] for path in visible}, recipe)
    selected = sorted(path for path in visible if not code or _is_recipe_file(path))
    for path in selected:
        _check_path(path, recipe)
    _check_sizes({path: sizes[path] for path in selected}, recipe)
    if code + MAIN_FILE not in selected:
        raise RecipeError(recipe, f"has no `{code}{MAIN_FILE}`: write one that defines its method")
    return tuple(selected)


def _is_skipped(part: str) -> bool:
    """Whether a file or folder is skipped: hidden, or `__pycache__`."""
    return part.startswith(".") or part == "__pycache__"


def _code_prefix(names: Collection[str], recipe: str) -> str:
    """The folder of the code, by the names at the root: "" or "custom_generate/"."""
    if CODE_FOLDER not in names:
        return ""
    if MAIN_FILE in names:
        raise RecipeError(recipe, f"has both `{MAIN_FILE}` and `{CODE_FOLDER}/`: keep one of them")
    return f"{CODE_FOLDER}/"


def _is_recipe_file(path: str) -> bool:
    """Whether a file is part of a recipe whose code is in `custom_generate/`."""
    is_in_root = path in ("README.md", "requirements.txt", CODE_FOLDER)
    return is_in_root or path.startswith(f"{CODE_FOLDER}/") or bool(_GENERATION_CONFIG.match(path))


def _check_path(path: str, recipe: str) -> None:
    """Raise RecipeError if a path is not allowed in a recipe."""
    subject = f"its file {format_value(path)}"
    parts = path.split("/")
    if len(parts) - 1 > _MAX_DEPTH:
        raise RecipeError(recipe, f"{subject} lies more than {_MAX_DEPTH} folders deep: make it flat")
    if not path.isprintable():
        raise RecipeError(recipe, f"{subject} has characters that some systems or eyes misread: rename it")
    if _BINARY_SUFFIXES.search(parts[-1].casefold()):
        advice = "keep to source and text"
        raise RecipeError(recipe, f"{subject} is compiled, pickled or packed by its name: {advice}")


def _check_sizes(sizes: Mapping[str, int], recipe: str) -> None:
    """Raise RecipeError for too many files, or too many bytes in one or in all."""
    if len(sizes) > _MAX_FILES:
        raise RecipeError(recipe, f"has {len(sizes)} files: keep to {_MAX_FILES}")
    python = {path: size for path, size in sizes.items() if path.casefold().endswith(".py")}
    for path, size in sizes.items():
        limit = _MAX_PYTHON_BYTES if path in python else MAX_FILE_BYTES
        if size > limit:
            advice = f"keep to {limit}, or put the code in `{CODE_FOLDER}/` and a model's own files beside it"
            raise RecipeError(recipe, f"its file {format_value(path)} has {size} bytes: {advice}")
    for unit, size, limit in (
        ("bytes", sum(sizes.values()), _MAX_TOTAL_BYTES),
        ("bytes of Python", sum(python.values()), _MAX_TOTAL_PYTHON_BYTES),
    ):
        if size > limit:
            raise RecipeError(recipe, f"has {size} {unit}: keep to {limit}")


# ------------------------------------------------------------------------ the folder
def _read_folder(path: Path, recipe: str) -> dict[str, bytes]:
    """The contents of a recipe's files by relative POSIX path, each read once and never through a link."""
    if not hasattr(os, "fwalk"):
        raise RecipeError(recipe, "this system cannot read a folder without following links: use another")
    try:
        mode = os.lstat(path).st_mode
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or format_value(str(error))
        is_missing = isinstance(error, FileNotFoundError)
        problem = "there is no such folder" if is_missing else f"its folder cannot be opened: {reason}"
        raise RecipeError(recipe, problem) from None
    if stat.S_ISLNK(mode):
        raise RecipeError(recipe, "its folder is a link: give the folder itself")
    if not stat.S_ISDIR(mode):
        raise RecipeError(recipe, f"must be a folder with a `{MAIN_FILE}`, got a file")
    try:
        return _read_files(path, recipe)
    except OSError as error:  # deleted meanwhile, or not readable
        raise RecipeError(recipe, f"cannot be read: {error.strerror}") from None


def _read_files(root: Path, recipe: str) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    sizes: dict[str, int] = {}
    code, num_entries = "", 0
    for folder, folders, names, descriptor in os.fwalk(root, onerror=_raise):
        prefix = "" if folder == str(root) else f"{Path(folder).relative_to(root).as_posix()}/"
        num_entries += len(folders) + len(names)
        if num_entries > _MAX_ENTRIES:
            raise RecipeError(recipe, f"has more than {_MAX_ENTRIES} entries: clear its folder")
        if prefix.count("/") > _MAX_DEPTH:
            subject = f"its folder {format_value(prefix[:-1])}"
            raise RecipeError(recipe, f"{subject} is more than {_MAX_DEPTH} deep: make it flat")
        visible = sorted(name for name in (*folders, *names) if not _is_skipped(name))
        if not prefix:
            code = _code_prefix(visible, recipe)
            visible = [name for name in visible if not code or _is_recipe_file(name)]
        folders[:] = [name for name in folders if name in visible]
        for name in visible:
            path = prefix + name
            status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            if stat.S_ISLNK(status.st_mode):
                raise RecipeError(recipe, f"{format_value(path)} is a link: put the file itself there")
            if stat.S_ISDIR(status.st_mode):
                continue
            if not stat.S_ISREG(status.st_mode):  # to open a device can have side effects
                raise RecipeError(recipe, f"{format_value(path)} is neither a file nor a folder: remove it")
            sizes[path] = status.st_size
            _check_sizes(sizes, recipe)
            with open(os.open(name, _OPEN_FLAGS, dir_fd=descriptor), "rb") as file:
                files[path] = file.read(status.st_size + 1)
            if len(files[path]) != status.st_size:
                subject = f"its file {format_value(path)}"
                raise RecipeError(recipe, f"{subject} changed while it was read: try again")
    return files


def _raise(error: OSError) -> None:
    raise error

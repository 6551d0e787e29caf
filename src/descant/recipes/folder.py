"""Reads an untrusted folder, once and without following links."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final

from descant.errors import RecipeError, format_value
from descant.recipes import file_rules

__all__ = ["read_folder"]

# Missing on some systems, where `read_folder` raises.
_OPEN_FLAGS: Final[int] = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_FOLDER_FLAGS: Final[int] = _OPEN_FLAGS | getattr(os, "O_DIRECTORY", 0)
# Do not block on a pipe, and do not acquire a controlling terminal.
_FILE_FLAGS: Final[int] = _OPEN_FLAGS | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
_CHUNK: Final = 1 << 16


def read_folder(path: Path, recipe: str) -> dict[str, bytes]:
    """The contents of a recipe's files by relative POSIX path.

    Every file is opened relative to its opened folder, never through a link, and checked after opening, so
    that it cannot be replaced between check and read. At most the reported size is read. Files of a model
    (see `file_rules.is_recipe_file`) are not opened.
    """
    if os.open not in os.supports_dir_fd or os.scandir not in os.supports_fd:
        raise RecipeError(recipe, "this system cannot read a folder without following links: use another")
    try:
        root = os.open(path, _FOLDER_FLAGS)
    except (OSError, ValueError) as error:
        raise RecipeError(recipe, _open_error(path, error)) from None
    try:
        return _FolderReader(recipe).read(root)
    except OSError as error:  # deleted meanwhile, or not readable
        raise RecipeError(recipe, f"cannot be read: {error.strerror}") from None
    finally:
        os.close(root)


class _FolderReader:
    """One pass over a folder: the files read so far, and their totals."""

    def __init__(self, recipe: str) -> None:
        self.recipe = recipe
        self.files: dict[str, bytes] = {}
        self.num_bytes = self.num_entries = 0

    def read(self, root: int) -> dict[str, bytes]:
        """Read the recipe's files below an opened folder."""
        entries = self._list_entries(root)
        code = file_rules.code_prefix(entries, self.recipe)
        for entry in entries:
            if not code or file_rules.is_recipe_file(entry):
                self._read_entry(root, entry, entry)
        return self.files

    def _list_entries(self, folder: int) -> list[str]:
        names = []
        with os.scandir(folder) as entries:
            for entry in entries:
                self.num_entries += 1
                if self.num_entries > file_rules.LIMITS["entries"]:
                    limit = file_rules.LIMITS["entries"]
                    raise RecipeError(self.recipe, f"has more than {limit} entries: clear its folder")
                if not file_rules.is_skipped(entry.name):
                    names.append(entry.name)
        return sorted(names)

    def _read_entry(self, folder: int, entry: str, path: str) -> None:
        """Read one entry of an opened folder, recursively."""
        mode = os.stat(entry, dir_fd=folder, follow_symlinks=False).st_mode
        self._check_file_type(mode, path)  # before opening: opening a device can have side effects
        try:
            opened = os.open(entry, _FOLDER_FLAGS if stat.S_ISDIR(mode) else _FILE_FLAGS, dir_fd=folder)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
                raise
            changed = f"{format_value(path)} was replaced while it was read: try again"
            raise RecipeError(self.recipe, changed) from None
        try:
            status = os.fstat(opened)
            self._check_file_type(status.st_mode, path)
            if stat.S_ISDIR(status.st_mode):
                self._read_subfolder(opened, path)
            else:
                self._read_file(opened, status, path)
        finally:
            os.close(opened)

    def _read_subfolder(self, opened: int, path: str) -> None:
        if path.count("/") >= file_rules.LIMITS["depth"]:
            limit = file_rules.LIMITS["depth"]
            raise RecipeError(
                self.recipe, f"its folder {format_value(path)} is more than {limit} deep: make it flat"
            )
        for inner in self._list_entries(opened):
            self._read_entry(opened, inner, f"{path}/{inner}")

    def _read_file(self, opened: int, status: os.stat_result, path: str) -> None:
        file_rules.check_size(path, status.st_size, self.recipe)
        self.num_bytes += status.st_size
        if self.num_bytes > file_rules.LIMITS["total"]:
            limit = file_rules.LIMITS["total"]
            raise RecipeError(self.recipe, f"has more than {limit} bytes: keep to these")
        if len(self.files) >= file_rules.LIMITS["files"]:
            raise RecipeError(self.recipe, f"has more than {file_rules.LIMITS['files']} files: keep to these")
        data = bytearray()
        while len(data) <= status.st_size:  # one more byte than reported: the file has grown
            chunk = os.read(opened, min(_CHUNK, status.st_size + 1 - len(data)))
            if not chunk:
                break
            data += chunk
        if len(data) != status.st_size or os.fstat(opened).st_mtime_ns != status.st_mtime_ns:
            raise RecipeError(
                self.recipe, f"its file {format_value(path)} changed while it was read: try again"
            )
        self.files[path] = bytes(data)

    def _check_file_type(self, mode: int, path: str) -> None:
        if stat.S_ISLNK(mode):
            raise RecipeError(self.recipe, f"{format_value(path)} is a link: put the file itself there")
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise RecipeError(self.recipe, f"{format_value(path)} is neither a file nor a folder: remove it")


def _open_error(path: Path, error: Exception) -> str:
    """The error message for a folder that cannot be opened."""
    if path.is_symlink():
        return "its folder is a link: give the folder itself"
    if isinstance(error, FileNotFoundError):
        return "there is no such folder"
    if isinstance(error, NotADirectoryError):
        return f"must be a folder with a `{file_rules.MAIN_FILE}`, got a file"
    return f"its folder cannot be opened: {getattr(error, 'strerror', None) or format_value(str(error))}"

"""Writing of whole files: a reader finds the old content or the new one, also after a writer was killed.

The content goes into a file without a name (`O_TMPFILE`), is flushed to the disk, and then gets its name in
one step, so a killed process leaves nothing. Where a file is replaced, and on file systems without nameless
files, the content has a random temporary name in the same folder for a moment. Its writer holds a lock on it:
the next write of the same file removes what dead writers left. Two writers of one file do not disturb each
other, and the last one wins.

- A symbolic link stays, and the file that it points to is replaced. A temporary name is never followed.
- The permissions of a replaced file stay, unless it is `private`. A hard link keeps the old content.
- A device, a pipe or a terminal (`/dev/stdout`) is written directly: it has no content to replace.
- The folder must be writable.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

__all__ = [
    "PendingFile",
    "create_folder",
    "lock_file",
    "remove_leftovers",
    "require_writable",
    "write_bytes",
    "write_files",
    "write_new",
    "write_pending",
    "write_text",
]

StrPath = str | os.PathLike[str]

_OWNER_ONLY, _DEFAULT_MODE = 0o600, 0o666  # the second is narrowed by the umask
_SUFFIX: Final = ".descant-part"
_NOFOLLOW: Final = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_O_TMPFILE: Final[int] = getattr(os, "O_TMPFILE", 0)
# What open(2) answers where a file system or kernel has no nameless files.
_NO_TMPFILE: Final = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL, errno.ENOSYS})
_STREAM_PATHS: Final = ("/dev/fd/", "/dev/std", "/proc/")  # names of open descriptors


@dataclass
class PendingFile:
    """A file that is being written and does not have its final name yet."""

    file: BinaryIO
    path: str  # a path of it, also where it has no name in the folder
    temporary: str | None = None  # its name in the folder; None: it has none


def write_text(path: StrPath, text: str, *, private: bool = False) -> None:
    """Write a file in UTF-8, whole or not at all; `private`: only its owner can read it."""
    write_bytes(path, text.encode("utf-8"), private=private)


def write_bytes(path: StrPath, data: bytes, *, private: bool = False, exclusive: bool = False) -> None:
    """Write a file, whole or not at all; `exclusive`: raise FileExistsError if the name is taken."""
    with write_pending(path, private=private, exclusive=exclusive) as pending:
        pending.file.write(data)


def write_new(path: StrPath, data: bytes) -> None:
    """Write a file of a folder with very many, whole or not at all.

    What dead writers left stays: to find it, each write would list the folder. `remove_leftovers` does.
    """
    folder, name = os.path.split(_resolve(path, exclusive=False))
    with _filled(folder, name, data) as pending:
        _publish(pending, os.path.join(folder, name), exclusive=False)
    _sync_folder(folder)


def remove_leftovers(folder: StrPath) -> None:
    """Remove the temporary files of a folder whose writers have ended."""
    _remove_matching(os.fspath(folder), re.compile(rf"\..*\.[0-9a-f]{{32}}{re.escape(_SUFFIX)}"))


@contextlib.contextmanager
def write_pending(path: StrPath, *, private: bool = False, exclusive: bool = False) -> Iterator[PendingFile]:
    """A file to write into, which gets its name at the end of the block; an error changes nothing."""
    if not exclusive and _is_stream(path):
        with open(path, "ab") as file:  # standard output may be a file that has lines already
            yield PendingFile(file, os.fspath(path))
        return
    target = _resolve(path, exclusive)
    folder, name = os.path.split(target)
    _remove_leftovers(folder, name)
    with _open_pending(folder, name, _mode_of(target, private)) as pending:
        yield pending
        _flush(pending.file)
        _publish(pending, target, exclusive)
    _sync_folder(folder)


def write_files(folder: StrPath, contents: Mapping[str, bytes], *, private: bool = False) -> None:
    """Write files of a folder that belong together: all are complete before the first gets its name."""
    target = os.path.realpath(folder)
    with contextlib.ExitStack() as stack:
        opened = []
        for name, data in contents.items():
            _remove_leftovers(target, name)
            path = os.path.join(target, name)
            opened.append((stack.enter_context(_filled(target, name, data, _mode_of(path, private))), path))
        for pending, path in opened:
            _publish(pending, path, exclusive=False)
    _sync_folder(target)


def create_folder(path: Path, contents: Mapping[str, str]) -> None:
    """Create a folder with text files, by their paths in it; raises FileExistsError if the name is taken."""
    parent, name = os.path.split(os.path.abspath(path))
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    _remove_leftovers(parent, name)
    temporary = Path(parent) / _temporary_name(name)
    with contextlib.ExitStack() as stack:
        pending = {
            file: stack.enter_context(_filled(parent, name, text.encode("utf-8")))
            for file, text in contents.items()
        }
        # From here to the renaming only names are made, which takes an instant.
        os.mkdir(temporary)
        try:
            with _locked_folder(temporary):
                for file, one in pending.items():
                    (temporary / file).parent.mkdir(parents=True, exist_ok=True)
                    _publish(one, str(temporary / file), exclusive=True)
                _rename_new(temporary, path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    _sync_folder(parent)


def require_writable(path: StrPath) -> None:
    """Raise OSError if a file cannot be written; neither creates nor changes it."""
    if _is_stream(path):
        if os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
        return
    folder, name = os.path.split(_resolve(path, exclusive=False))
    with _open_pending(folder, name, _OWNER_ONLY):
        return


def _remove_leftovers(folder: str, name: str) -> None:
    """Remove the temporary files of one name whose writers have ended."""
    _remove_matching(folder, re.compile(rf"\.{re.escape(_stem(name))}\.[0-9a-f]{{32}}{re.escape(_SUFFIX)}"))


def _remove_matching(folder: str, pattern: re.Pattern[str]) -> None:
    """Remove the entries of a folder whose names match and whose writers have ended."""
    try:
        with os.scandir(folder) as entries:
            found = [entry.path for entry in entries if pattern.fullmatch(entry.name)]
    except OSError:
        return  # opening the file raises the error
    for path in found:
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | _NOFOLLOW)
            try:
                if lock_file(descriptor) is not True:
                    continue  # its writer is running, or there are no locks here
                if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    os.unlink(path)
            finally:
                os.close(descriptor)


def lock_file(descriptor: int) -> bool | None:
    """Lock an open file until it is closed; False: another process has it, None: there are no locks here."""
    try:
        import fcntl
    except ImportError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


# ------------------------------------------------------------------------ parts
def _is_stream(path: StrPath) -> bool:
    """Whether a path names something other than a regular file, or an open descriptor."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) or os.path.abspath(path).startswith(_STREAM_PATHS)


def _resolve(path: StrPath, exclusive: bool) -> str:
    """The absolute path of the file to write; raises PermissionError for a file that is read-only."""
    if exclusive:  # the name must be free, so a link in its place is not followed
        folder, name = os.path.split(os.path.abspath(path))
        return os.path.join(os.path.realpath(folder), name)
    target = os.path.realpath(path)
    if os.path.exists(target) and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
    return target


def _mode_of(target: str, private: bool) -> int | None:
    """The permissions of the new file; None: those of any new file."""
    if private:
        return _OWNER_ONLY
    try:
        return stat.S_IMODE(os.lstat(target).st_mode) & 0o777
    except OSError:
        return None


@contextlib.contextmanager
def _open_pending(folder: str, name: str, mode: int | None) -> Iterator[PendingFile]:
    """An empty file in a folder, without a name where the system can; without one at the end in any case."""
    pending = _open_nameless(folder) or _open_named(folder, name, mode)
    try:
        if mode is not None and hasattr(os, "fchmod"):
            os.fchmod(pending.file.fileno(), mode)
        yield pending
    finally:
        if pending.temporary is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(pending.temporary)
        pending.file.close()


@contextlib.contextmanager
def _filled(folder: str, name: str, data: bytes, mode: int | None = None) -> Iterator[PendingFile]:
    """A complete file that does not have its name yet."""
    with _open_pending(folder, name, mode) as pending:
        pending.file.write(data)
        _flush(pending.file)
        yield pending


def _open_nameless(folder: str) -> PendingFile | None:
    if not _O_TMPFILE:
        return None
    try:
        descriptor = os.open(folder, os.O_RDWR | _O_TMPFILE | _NOFOLLOW, _DEFAULT_MODE)
    except OSError as error:
        if error.errno in _NO_TMPFILE:
            return None
        raise
    path = f"/proc/self/fd/{descriptor}"
    if not os.path.exists(path):  # without /proc it could not get a name
        os.close(descriptor)
        return None
    lock_file(descriptor)
    return PendingFile(os.fdopen(descriptor, "w+b"), path)


def _open_named(folder: str, name: str, mode: int | None) -> PendingFile:
    while True:
        path = os.path.join(folder, _temporary_name(name))
        created = _DEFAULT_MODE if mode is None else _OWNER_ONLY
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _NOFOLLOW, created)
        # Another writer may take it for a leftover before it is locked, and holds the lock or has removed it.
        if lock_file(descriptor) is not False and os.fstat(descriptor).st_nlink:
            return PendingFile(os.fdopen(descriptor, "w+b"), path, path)
        os.close(descriptor)


def _publish(pending: PendingFile, target: str, exclusive: bool) -> None:
    """Give a complete file its final name."""
    if pending.temporary is None:
        # A new name needs no temporary one. A link to an existing name fails and changes nothing.
        try:
            _link(pending.path, target)
            return
        except FileExistsError:
            if exclusive:
                raise
        folder, name = os.path.split(target)
        pending.temporary = os.path.join(folder, _temporary_name(name))
        _link(pending.path, pending.temporary)
    elif exclusive:
        os.link(pending.temporary, target)
        return
    if os.name == "nt":
        pending.file.close()  # an open file cannot be renamed there
    os.replace(pending.temporary, target)
    pending.temporary = None


def _link(source: str, target: str) -> None:
    """Name a nameless file by its entry in /proc."""
    folder = os.open(os.path.dirname(target), os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        # A folder descriptor makes Python call linkat(2), which follows the entry; link(2) would not.
        os.link(source, os.path.basename(target), dst_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


def _rename_new(temporary: Path, target: Path) -> None:
    """Rename a folder to a name that was free; an empty folder that appeared meanwhile is replaced."""
    try:
        os.rename(temporary, target)
    except OSError as error:
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        raise error from None


@contextlib.contextmanager
def _locked_folder(path: Path) -> Iterator[None]:
    """Hold the lock of a folder, where the system has such locks."""
    try:
        descriptor = os.open(path, os.O_RDONLY | _NOFOLLOW)
    except OSError:
        yield
        return
    try:
        lock_file(descriptor)
        yield
    finally:
        os.close(descriptor)


def _temporary_name(name: str) -> str:
    return f".{_stem(name)}.{secrets.token_hex(16)}{_SUFFIX}"


def _stem(name: str) -> str:
    """The start of a name, so that a temporary name is not longer than file systems allow."""
    return name.encode("utf-8", "surrogateescape")[:120].decode("utf-8", "ignore")


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: str) -> None:
    """Flush a folder to the disk, where the system can: the new name survives a power failure."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

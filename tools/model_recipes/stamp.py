"""The stamp of a finished model folder: what it was built from and the hash of each file."""

import hashlib
import json
from pathlib import Path
from typing import Any

from .errors import ModelError
from .recipe import Recipe

STAMP = ".built.json"


def sha256(path: Path) -> str:
    """The SHA-256 of a file, as hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def check_sha256(path: Path, expected: str, remedy: str) -> None:
    """Raise unless the file has the expected hash."""
    got = sha256(path)
    if got != expected:
        raise ModelError(f"{path.name}: sha256 mismatch\n  expected {expected}\n  got      {got}\n{remedy}")


def write_stamp(folder: Path, recipe: Recipe, fingerprint: str) -> dict[str, Any]:
    """Hash every file of the folder and write the stamp."""
    files = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != STAMP
    }
    stamp = {
        "model": recipe.name,
        "licence": recipe.licence,
        "version": recipe.version,
        "fingerprint": fingerprint,
        "packages": [f"{package.registry}:{package.spec}" for package in recipe.packages],
        "files": files,
    }
    (folder / STAMP).write_text(json.dumps(stamp, indent=2) + "\n", encoding="utf-8")
    return stamp


def staleness(folder: Path, fingerprint: str, verify: bool = False) -> str | None:
    """Why the folder must be built, or None if it is finished; `verify` hashes every file again."""
    if not folder.is_dir():
        return "not built yet"
    try:
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
        files = {name: (entry["size"], entry["sha256"]) for name, entry in stamp["files"].items()}
        stamped = stamp["fingerprint"]
    except FileNotFoundError:
        return "no stamp"
    except (ValueError, KeyError, TypeError, AttributeError):
        return "unreadable stamp"
    if stamped != fingerprint:
        return "recipe changed"
    for name, (size, digest) in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, stamp says {size}"
        if verify and sha256(path) != digest:
            return f"{name} differs from its stamp"
    return None

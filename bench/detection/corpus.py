"""Human-written text: files of the Python installation, cut into pieces of equal length."""

from __future__ import annotations

import ast
import hashlib
import random
import sysconfig
from itertools import zip_longest
from pathlib import Path
from typing import Any

__all__ = ["LENGTH", "pieces"]

LENGTH = 200  # tokens of a text
_PROSE = (".md", ".rst", ".txt")
_SHARE = 6  # maximum pieces per file, so that no document dominates
_LARGEST = 2_000_000  # maximum bytes of a file


def pieces(tokenizer: Any, count: int, seed: int) -> list[list[int]]:
    """`count` different texts of LENGTH tokens, from files in shuffled order."""
    rng = random.Random(seed)
    groups = [sorted(group) for group in _groups()]
    for group in groups:
        rng.shuffle(group)
    files = [path for turn in zip_longest(*groups) for path in turn if path is not None]
    special = set(tokenizer.all_special_ids)
    found: list[list[int]] = []
    seen: set[bytes] = set()
    for path in files:
        ids = tokenizer(_read(path), add_special_tokens=False)["input_ids"]
        starts = list(range(0, len(ids) - LENGTH + 1, LENGTH))
        rng.shuffle(starts)
        for start in starts[:_SHARE]:
            piece = ids[start : start + LENGTH]
            # Licences are copied between packages: hash the middle.
            digest = hashlib.blake2b(str(piece[80:120]).encode()).digest()
            if digest not in seen and not special & set(piece):
                seen.add(digest)
                found.append(piece)
        if len(found) >= count:
            return found[:count]
    raise RuntimeError(f"the installed packages have only {len(found)} texts of {LENGTH} tokens, not {count}")


def _groups() -> list[list[Path]]:
    """Files of prose: documents and licences of packages, and the docstrings of Python and of packages."""
    paths = sysconfig.get_paths()
    packages, standard = Path(paths["purelib"]), Path(paths["stdlib"])
    names = ("METADATA", "LICENSE", "COPYING", "NOTICE")
    documents = [one for one in packages.rglob("*") if one.suffix in _PROSE or one.name in names]
    library_files = [
        one for one in standard.rglob("*.py") if packages not in one.parents and "test" not in one.parts
    ]
    package_files = [one for one in packages.rglob("*.py") if not {"test", "tests"} & set(one.parts)]
    return [documents, library_files, package_files]


def _read(path: Path) -> str:
    """The prose of a file; empty if unreadable."""
    try:
        if not path.is_file() or path.stat().st_size > _LARGEST:
            return ""
        text = path.read_text(encoding="utf-8")
        return _docstrings(text) if path.suffix == ".py" else text
    except (OSError, ValueError, SyntaxError):
        return ""


def _docstrings(source: str) -> str:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    return "\n\n".join(one for one in found if one)

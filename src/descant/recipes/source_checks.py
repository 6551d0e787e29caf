"""Static checks of a recipe's files: Python that reads as it runs, JSON that refers to no other code."""

from __future__ import annotations

import ast
import json
import re
import unicodedata
import warnings
from collections.abc import Iterator
from typing import Any, Final

from descant.errors import RecipeError, format_value

__all__ = ["check_json", "check_python", "decode_text", "is_binary", "top_level_names"]

# Magic numbers of executables, pickles and archives.
_BINARY_SIGNATURES: Final = (
    *(b"\x7fELF", b"PK\x03\x04", b"PK\x05\x06", b"\x1f\x8b", b"BZh9", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd"),
    *(b"7z\xbc\xaf", b"Rar!\x1a", b"\xca\xfe\xba\xbe", b"\xfe\xed\xfa\xce", b"\xfe\xed\xfa\xcf"),
    *(b"\xce\xfa\xed\xfe", b"\xcf\xfa\xed\xfe", b"\0asm", b"\x93NUMPY", b"\x89HDF\r\n", b"!<arch>\n"),
)
_PICKLE: Final = re.compile(rb"\x80[\x01-\x08]")
_ENCODING_COOKIE: Final = re.compile(r"[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")
# Characters without a glyph, in addition to the categories below.
_INVISIBLE_CHARS: Final = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0") | {
    *map(chr, range(0x180B, 0x1810)),
    *map(chr, range(0xFE00, 0xFE0F)),  # without U+FE0F, which many emoji contain
    *map(chr, (0x2065, *range(0xFFF0, 0xFFF9), *range(0xE0000, 0xE1000))),
}
_INVISIBLE_CATEGORIES: Final = ("Cc", "Cf", "Cs", "Zl", "Zp")
_ASCII: Final = frozenset(map(chr, range(32, 127))) | {"\t", "\n", "\f"}
# Keys that refer to code elsewhere, and values of such keys: "owner/name--module.Class".
_REMOTE_CODE_KEYS: Final = re.compile(r"auto_?map|custom_generate|custom_pipelines?|trust_remote_code")
_REMOTE_CODE_VALUE: Final = re.compile(r"[\w.-]+/[\w.-]+--[\w./-]+\Z")


def is_binary(data: bytes) -> bool:
    """Whether a file is compiled, pickled or an archive, by its first bytes."""
    if data.startswith(_BINARY_SIGNATURES) or _PICKLE.match(data):
        return True
    compiled = data[2:4] == b"\r\n" and b"\0" in data[4:8]  # a .pyc
    return compiled or (data[:2] == b"MZ" and b"\0" in data[:64]) or data[257:262] == b"ustar"


def decode_text(data: bytes, path: str, recipe: str) -> str:
    """The text of a file, which must be UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise RecipeError(recipe, f"its file {format_value(path)} must be UTF-8: save it as such") from None


def check_python(data: bytes, path: str, recipe: str) -> None:
    """Raise RecipeError for Python that does not compile, or that looks different from what runs.

    Invisible characters and those that reorder text ("Trojan Source", Boucher and Anderson 2021) are refused,
    also in strings and comments, where an escape can be used instead. Non-ASCII identifiers are refused:
    they can look like others, and Python normalises them.
    """
    text = decode_text(data, path, recipe).replace("\r\n", "\n")
    subject = f"its file {format_value(path)}"
    invisible = next((one for one in sorted(set(text) - _ASCII) if _is_invisible(one)), None)
    if invisible is not None:
        line = text[: text.index(invisible)].count("\n") + 1
        position = f"U+{ord(invisible):04X} in line {line}"
        raise RecipeError(recipe, f"{subject} has the invisible character {position}: remove it")
    for cookie in map(_ENCODING_COOKIE.match, text.split("\n", 2)[:2]):
        if cookie and cookie[1].lower() not in ("utf-8", "utf8"):
            raise RecipeError(
                recipe, f"{subject} says that it is {format_value(cookie[1])}: save it as UTF-8"
            )
    _check_compiles(text, subject, recipe)
    if not text.isascii():
        # `$` is invalid in code: if this parses, all non-ASCII characters are in strings or comments.
        try:
            _parse(re.sub(r"[^\0-\x7f]", "$", text))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            line_number = getattr(error, "lineno", None)
            location = f" in line {line_number}" if line_number else ""
            raise RecipeError(
                recipe, f"{subject} has a name that is not ASCII{location}: rename it"
            ) from None


def top_level_names(data: bytes, path: str, recipe: str) -> frozenset[str]:
    """The names that a module binds at its top level, by static analysis."""
    try:
        return frozenset(_bound_names(_parse(decode_text(data, path, recipe))))
    except (RecursionError, MemoryError):  # the compiler accepts deeper nesting than `ast.parse`
        raise RecipeError(
            recipe, f"its file {format_value(path)} is nested too deep: make it flatter"
        ) from None


def _bound_names(module: ast.Module) -> Iterator[str]:
    stack: list[ast.AST] = list(module.body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (one.asname or one.name.split(".")[0] for one in node.names)
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                yield node.id
        elif isinstance(node, ast.AnnAssign) and node.value is None:
            continue
        elif isinstance(node, ast.ExceptHandler):
            stack.extend(node.body)  # its own name is unbound at its end
        elif not isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            stack.extend(ast.iter_child_nodes(node))


def check_json(data: bytes, path: str, recipe: str, config: bool = False) -> None:
    """Raise RecipeError for invalid JSON, or JSON that refers to code elsewhere, as `auto_map` does.

    A generation config (`config`) must be an object.
    """
    subject = f"its file {format_value(path)}"
    text = decode_text(data, path, recipe)
    try:
        # Pairs, not a dict, so that both values of a duplicate key are checked.
        parsed = json.loads(text, object_pairs_hook=_JsonPairs, parse_constant=_reject_constant)
    except (ValueError, RecursionError, MemoryError):
        raise RecipeError(recipe, f"{subject} must be JSON") from None
    if config and not isinstance(parsed, _JsonPairs):
        raise RecipeError(recipe, f"{subject} must hold an object, as a generation config does")
    stack = [parsed]
    while stack:
        value = stack.pop()
        if isinstance(value, _JsonPairs):
            for key, inner in value:
                if _REMOTE_CODE_KEYS.fullmatch(key.strip().casefold()):
                    raise RecipeError(
                        recipe, f"{subject} refers to other code by its key {format_value(key)}: remove it"
                    )
                stack += [key, inner]
            if len({key for key, _ in value}) < len(value):
                raise RecipeError(recipe, f"{subject} has a key twice in one object: keep one")
        elif isinstance(value, list):
            stack += value
        elif isinstance(value, str) and _REMOTE_CODE_VALUE.match(value.strip()):
            raise RecipeError(recipe, f"{subject} refers to code elsewhere, {format_value(value)}: remove it")


class _JsonPairs(list[tuple[str, Any]]):
    """The pairs of a JSON object, in order."""


def _reject_constant(text: str) -> Any:
    raise ValueError(text)  # NaN and Infinity are not JSON


def _is_invisible(char: str) -> bool:
    return unicodedata.category(char) in _INVISIBLE_CATEGORIES or char in _INVISIBLE_CHARS


def _parse(text: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # syntax warnings of third-party code
        return ast.parse(text)


def _check_compiles(text: str, subject: str, recipe: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(text, "<recipe>", "exec", dont_inherit=True)
    except (RecursionError, MemoryError):
        raise RecipeError(recipe, f"{subject} is nested too deep: make it flatter") from None
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        location = f" in line {line}" if line else ""
        reason = format_value(getattr(error, "msg", str(error)))
        raise RecipeError(recipe, f"{subject} must be valid Python{location}: {reason}") from None

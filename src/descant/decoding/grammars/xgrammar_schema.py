"""Which JSON schemas xgrammar enforces: it ignores many keywords without a word."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from descant.decoding.grammars.backend import UnsupportedGrammar
from descant.decoding.grammars.json_schema import constants, integers, map_subschemas, subschemas, type_of

__all__ = ["check_xgrammar_regex", "check_xgrammar_schema", "rewrite_lengths"]

# The keywords that it enforces beside a `type`, found by generating from schemas and validating the result.
_BY_TYPE: Final[Mapping[str, frozenset[str]]] = {
    "string": frozenset({"minLength", "maxLength"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "number": frozenset(),
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "boolean": frozenset(),
    "null": frozenset(),
}
# Those that stand alone.
_ALONE: Final = frozenset({"const", "enum", "anyOf", "$ref"})
_ANNOTATIONS: Final = frozenset(
    {
        "title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated", "readOnly",
        "writeOnly", "discriminator", "$defs", "definitions",
    }
)  # fmt: skip
# All characters but quotes, backslashes and control characters; xgrammar knows no escape for the last range.
_CHARACTERS: Final = r"[ !#-\[\]-~" + "\u0080-\ud7ff\ue000-\U0010ffff]"
_MAX_INTEGER: Final = 2**63
_KNOWN_ESCAPES: Final = frozenset("dDsSwWnrtfvxu")
# Escapes, and what is no plain text outside of its own place: anchors, and operators of character classes.
_ESCAPE_OR_ANCHOR: Final = re.compile(r"\\.|(?<!\[)\^|\$|\[\[:|&&", re.DOTALL)
_COUNTS: Final = ("minItems", "maxItems", "minLength", "maxLength")


def check_xgrammar_schema(schema: Any) -> None:
    """Raise for a schema with a part that xgrammar does not enforce."""
    for part in subschemas(schema):
        keys = [key for key in part if key not in _ANNOTATIONS]
        alone = [key for key in keys if key in _ALONE]
        if alone:
            others = [key for key in keys if key != alone[0] and not (key == "type" and alone[0] != "$ref")]
            if others or (alone[0] == "anyOf" and "type" in part):
                raise _refusal(f"`{(others or ['type'])[0]}` beside `{alone[0]}`")
            _check_reference(part.get("$ref", "#"))
            _check_values(part)
            continue
        _check_typed(part, keys)


def _check_typed(part: Mapping[str, Any], keys: list[str]) -> None:
    """Raise for keywords that do not belong to the one type that a schema names."""
    kind = part.get("type")
    enforced: frozenset[str] = _BY_TYPE.get(kind, frozenset()) if isinstance(kind, str) else frozenset()
    for key in keys:
        if key != "type" and key not in enforced:
            beside = f" beside the type {kind!r}" if kind is not None else " without a `type`"
            raise _refusal(f"`{key}`{beside}")
    for key in _COUNTS:
        if not isinstance(part.get(key, 0), int):
            raise _refusal(f"`{key}` with a fraction")
    missing = [name for name in part.get("required", ()) if name not in part.get("properties", {})]
    if missing:
        raise _refusal(f"`required` with {missing[0]!r}, which is not in `properties`")


def _check_values(part: Mapping[str, Any]) -> None:
    """Raise for constants of another type than the one beside them, and for a union of nothing."""
    if "anyOf" in part and not part["anyOf"]:
        raise _refusal("`anyOf` without options")
    kind = part.get("type")
    kinds = {kind} if isinstance(kind, str) else set(kind or ())
    for value in constants(part) or ():
        own = type_of(value)
        if kinds and own not in kinds and not (own == "integer" and "number" in kinds):
            raise _refusal(f"`type` beside the constant {value!r}")
    for number in integers(part.get("enum", ())), integers(part.get("const")):
        if any(abs(one) >= _MAX_INTEGER for one in number):
            raise _refusal("integers of more than 63 bits")


def check_xgrammar_regex(pattern: str) -> None:
    """Raise for a regular expression that xgrammar reads as another one, with a warning at most."""
    body = pattern.removeprefix("^").removesuffix("$")
    for match in _ESCAPE_OR_ANCHOR.finditer(body):
        text = match.group()
        if text[0] != "\\" or (text[1:].isalnum() and text[1:] not in _KNOWN_ESCAPES):
            raise _refusal(f"`{text}` in a regular expression")


def _check_reference(reference: Any) -> None:
    if not isinstance(reference, str) or not reference.startswith("#") or set(reference) & set("%~"):
        raise _refusal(f"`$ref` to {reference!r}")


def _refusal(what: str) -> UnsupportedGrammar:
    return UnsupportedGrammar(f"it does not enforce {what}")


def rewrite_lengths(schema: Any) -> Any:
    """The same schema with patterns for `minLength` and `maxLength`.

    With these, xgrammar permits control characters, which are not JSON. The pattern permits no escapes, so
    that every character counts as one, and names ranges: their complement would permit invalid UTF-8.
    """

    def change(part: dict[str, Any]) -> dict[str, Any]:
        if "minLength" not in part and "maxLength" not in part:
            return part
        low, high = part.pop("minLength", 0), part.pop("maxLength", "")
        return {**part, "pattern": f"^{_CHARACTERS}{{{low},{high}}}$"}

    return map_subschemas(schema, change)

"""Random JSON values by a schema: those that fit it, and those that do not."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

__all__ = ["SchemaValues", "any_json"]

TEXTS = (
    "", "a", "the old sea", "é€😀", "\ud800", "\x00\x1f\x7f", "x" * 300, "{{ 7*7 }}", "<script>",
    "../../etc/passwd",
    "%s%n", "' OR 1=1", "</s>", "null", "-1", "tiny", "\u202e\ufeff", "a\nb\r\n", "[", "$ref",
)  # fmt: skip
NUMBERS = (0, 1, -1, 2, 3, 7, 255, 2**31, -(2**31), 2**63 - 1, 2**63, 10**30, -(10**30))
FLOATS = (0.0, -0.0, 0.5, 1.0, -1.5, 1e-30, 1e30, -1e300, 1e308, 0.1)
MAX_DEPTH = 5


def any_json(rng: random.Random, depth: int = 0) -> Any:
    """A value of any type."""
    kind = rng.randrange(8 if depth < MAX_DEPTH else 5)
    if kind == 0:
        return None
    if kind == 1:
        return rng.random() < 0.5
    if kind == 2:
        return rng.choice(NUMBERS)
    if kind == 3:
        return rng.choice(FLOATS)
    if kind == 4:
        return rng.choice(TEXTS)
    if kind == 5:
        return {rng.choice(TEXTS): any_json(rng, depth + 1) for _ in range(rng.randrange(4))}
    return [any_json(rng, depth + 1) for _ in range(rng.randrange(4))]


class SchemaValues:
    """Values of the schemas of an OpenAPI document."""

    def __init__(self, document: Mapping[str, Any], seed: int, known: Mapping[str, list[Any]]) -> None:
        self._schemas = document["components"]["schemas"]
        self._rng = random.Random(seed)
        self._known = known  # values of fields that have no schema

    def body(self, schema: Mapping[str, Any], *, is_wrong: bool) -> Any:
        """A body that fits the schema, or one with something wrong in it."""
        value = self._value(schema, 0)
        if not is_wrong:
            return value
        for _ in range(self._rng.randint(1, 3)):
            value = self._spoil(value)
        return value

    def _spoil(self, value: Any) -> Any:
        """The value with one part of another type, with an unknown name, or without a name."""
        rng = self._rng
        if isinstance(value, dict) and value and rng.random() < 0.9:
            name = rng.choice(list(value))
            kind = rng.randrange(4)
            if kind == 0:
                return {**value, rng.choice(TEXTS): any_json(rng)}
            if kind == 1:
                return {key: one for key, one in value.items() if key != name}
            return {**value, name: self._spoil(value[name]) if kind == 2 else any_json(rng)}
        if isinstance(value, list) and value and rng.random() < 0.7:
            at = rng.randrange(len(value))
            return [*value[:at], self._spoil(value[at]), *value[at + 1 :]]
        return any_json(rng)

    def _value(self, schema: Mapping[str, Any], depth: int, name: str = "") -> Any:
        rng = self._rng
        if "$ref" in schema:
            return self._value(self._schemas[schema["$ref"].rpartition("/")[2]], depth, name)
        for choice in ("anyOf", "oneOf"):
            if choice in schema:
                options = [one for one in schema[choice] if one.get("type") != "null"]
                return self._value(rng.choice(options or schema[choice]), depth, name)
        if "const" in schema or "enum" in schema:
            return schema["const"] if "const" in schema else rng.choice(schema["enum"])
        kind = schema.get("type")
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            count = max(schema.get("minItems", 0), rng.randrange(3 if depth < MAX_DEPTH else 1))
            return [self._value(schema.get("items", {}), depth + 1, name) for _ in range(count)]
        if kind is None:
            return rng.choice(self._known[name]) if name in self._known else any_json(rng, 3)
        return self._scalar(schema, kind)

    def _object(self, schema: Mapping[str, Any], depth: int) -> Any:
        rng = self._rng
        fields, needed = schema.get("properties"), schema.get("required", ())
        if fields is None:
            inner = schema.get("additionalProperties")
            if isinstance(inner, Mapping):
                keys = rng.sample((*TEXTS, "5", "12"), rng.randrange(3))
                return {key: self._value(inner, depth + 1) for key in keys}
            return {rng.choice(TEXTS): any_json(rng, depth + 1) for _ in range(rng.randrange(3))}
        optional = [name for name in fields if name not in needed]
        chosen = rng.sample(optional, min(len(optional), rng.choice((0, 1, 2, 3, 6))))
        return {name: self._value(fields[name], depth + 1, name) for name in (*needed, *chosen)}

    def _scalar(self, schema: Mapping[str, Any], kind: str) -> Any:
        rng = self._rng
        if kind == "string":
            text = rng.choice(TEXTS)
            return text if len(text) >= schema.get("minLength", 0) else "x" * schema["minLength"]
        if kind == "boolean":
            return rng.random() < 0.5
        if kind == "null":
            return None
        low, high = schema.get("minimum"), schema.get("maximum")
        pool = [*NUMBERS, *(() if kind == "integer" else FLOATS)]
        fitting = [one for one in pool if (low is None or one >= low) and (high is None or one <= high)]
        return rng.choice(fitting or [low])

"""JSON schemas of the kinds that people give to decoders: records, unions, references, bounds, formats.

All strings, lists and numbers are bounded, so that a model with random weights ends its text.
"""

from __future__ import annotations

import random
from typing import Any

_NAMES = ("id", "name", "age", "tags", "city", "price", "ok", "kind", "note", "items", "a b", 'quo"te', "é")
_PATTERNS = ("^[a-c]{1,4}$", "^\\d{2}-\\d{2}$", "^(x|yz)+$", "^[A-Z][a-z]{0,3}$")
_FORMATS = ("date", "time", "uuid", "ipv4", "email")


def schemas(count: int, plain: bool = False) -> list[dict[str, Any]]:
    """The first `count` schemas, always the same; `plain` ones use only what every backend enforces."""
    return [_schema(random.Random(index), 3, plain) for index in range(count)]


def _schema(rng: random.Random, depth: int, plain: bool) -> dict[str, Any]:
    if depth == 3 and rng.random() < 0.15:
        return _recursive(rng, plain)
    kinds = [_string, _integer, _constant, _boolean] + ([] if plain else [_number])
    if depth:
        kinds += [_object, _object, _object, _array, _tuple, _union]
    if depth == 3:
        kinds = kinds[-6:]
    return rng.choice(kinds)(rng, depth, plain)


def _string(rng: random.Random, depth: int, plain: bool) -> dict[str, Any]:
    if not plain and rng.random() < 0.3:
        return {"type": "string", "pattern": rng.choice(_PATTERNS)}
    if not plain and rng.random() < 0.2:
        return {"type": "string", "format": rng.choice(_FORMATS)}
    low = rng.randint(0, 2)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 6)}


def _integer(rng: random.Random, depth: int, plain: bool) -> dict[str, Any]:
    low = rng.randint(-200, 100)
    bounds = {"minimum": low, "maximum": low + rng.randint(0, 500)}
    if rng.random() < 0.3:
        bounds = {"exclusiveMinimum": low, "exclusiveMaximum": low + rng.randint(2, 50)}
    if not plain and rng.random() < 0.2:
        bounds["multipleOf"] = 1
    return {"type": "integer", **bounds}


def _number(rng: random.Random, depth: int, plain: bool) -> dict[str, Any]:
    low = round(rng.uniform(-5, 5), 2)
    return {"type": "number", "minimum": low, "maximum": low + 1.5}


def _constant(rng: random.Random, depth: int, plain: bool) -> dict[str, Any]:
    values = rng.sample(["red", "green", 'a "b"', 1, 2.5, None, True, "x\ny", "ü", [1, "z"], {"k": 0}], 4)
    return {"const": values[0]} if rng.random() < 0.3 else {"enum": values[:3]}


def _boolean(rng: random.Random, depth: int, plain: bool) -> dict[str, Any]:
    return {"type": rng.choice(["boolean", "null"])}


def _object(rng: random.Random, depth: int, plain: bool) -> dict[str, Any]:
    names = rng.sample(_NAMES, rng.randint(1, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _schema(rng, depth - 1, plain) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }
    if rng.random() < 0.3:
        schema |= {"title": "Record", "description": "Made for a test."}
    return schema


def _array(rng: random.Random, depth: int, plain: bool) -> dict[str, Any]:
    low = rng.randint(0, 2)
    return {
        "type": "array",
        "items": _schema(rng, depth - 1, plain),
        "minItems": low,
        "maxItems": low + rng.randint(0, 2),
    }


def _tuple(rng: random.Random, depth: int, plain: bool) -> dict[str, Any]:
    parts = [_schema(rng, depth - 1, plain) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}


def _union(rng: random.Random, depth: int, plain: bool) -> dict[str, Any]:
    if rng.random() < 0.5:
        return {"anyOf": [_schema(rng, depth - 1, plain) for _ in range(rng.randint(2, 3))]}
    options = []
    for kind in rng.sample(["cat", "dog", "bird"], 2):
        option = _object(rng, depth, plain)
        option["properties"] = {"type": {"const": kind}, **option["properties"]}
        option["required"] = ["type", *option["required"]]
        options.append(option)
    return {"oneOf": options}


def _recursive(rng: random.Random, plain: bool) -> dict[str, Any]:
    node = {
        "type": "object",
        "properties": {
            "value": _schema(rng, 0, plain),
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]},
        },
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    return {"$ref": "#/$defs/n", "$defs": {"n": node}}

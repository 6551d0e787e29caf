"""JSON schemas for grammar libraries: walks over their parts, and `oneOf` with disjoint options."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from descant.config.fields import thaw
from descant.config.grammar_spec import GrammarSpec
from descant.decoding.grammars.backend import UnsupportedGrammar
from descant.tokenization.response_syntax import HERMES, ToolCall

# Keywords whose value is a schema, a list of schemas, or a mapping to schemas.
_SCHEMA_KEYS: Final = (
    "additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames",
    "then", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_LIST_KEYS: Final = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_MAP_KEYS: Final = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")


def prepare_schema(schema: Any) -> Any:
    """The same schema with `anyOf` for each `oneOf` whose options exclude each other.

    Libraries cannot count how many options match, and need not where no text matches two.
    """

    def change(part: dict[str, Any]) -> dict[str, Any]:
        options = part.get("oneOf")
        if not isinstance(options, list) or "anyOf" in part:
            return part
        if not _exclude_each_other(options, schema):
            raise UnsupportedGrammar(
                "`oneOf` needs options that exclude each other by type, constant or a required property, "
                "use `anyOf`"
            )
        return {("anyOf" if key == "oneOf" else key): value for key, value in part.items()}

    return map_subschemas(schema, change)


def _exclude_each_other(options: Sequence[Any], root: Mapping[str, Any]) -> bool:
    """Whether no value matches two of the options, as far as it can be seen."""
    resolved = [_resolve(option, root) for option in options]
    return all(
        _are_disjoint(first, second)
        for index, first in enumerate(resolved)
        for second in resolved[index + 1 :]
    )


def _resolve(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema that a local reference names."""
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return schema
    found: Any = root
    for part in reference[2:].split("/"):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _are_disjoint(first: Any, second: Any) -> bool:
    if not isinstance(first, Mapping) or not isinstance(second, Mapping):
        return False
    values = constants(first), constants(second)
    if values[0] is not None and values[1] is not None:
        return not any(_equal(value, other) for value in values[0] for other in values[1])
    types = _types(first), _types(second)
    if types[0] and types[1] and not types[0] & types[1]:
        return True
    if not types[0] or not types[1] or types[0] & types[1] != {"object"}:
        return False  # properties say nothing of other values
    required = [_names(schema.get("required")) for schema in (first, second)]
    own, other = first.get("properties"), second.get("properties")
    if not isinstance(own, Mapping) or not isinstance(other, Mapping):
        return False
    return any(_are_disjoint(own.get(name), other.get(name)) for name in required[0] & required[1])


def _names(value: Any) -> set[str]:
    """The texts in a list; none if it is no list."""
    return {name for name in value if isinstance(name, str)} if isinstance(value, list | tuple) else set()


def constants(schema: Mapping[str, Any]) -> Sequence[Any] | None:
    """The values that a schema names; None: it names none."""
    if "const" in schema:
        return (schema["const"],)
    values = schema.get("enum")
    return values if isinstance(values, list | tuple) else None


def _equal(first: Any, second: Any) -> bool:
    """Whether two JSON values are equal, where true is not 1."""
    return first == second and isinstance(first, bool) == isinstance(second, bool)


def _types(schema: Mapping[str, Any]) -> set[str]:
    given = schema.get("type")
    types = {given} if isinstance(given, str) else _names(given)
    for value in constants(schema) or ():
        types.add(type_of(value))
    return types | ({"integer"} if "number" in types else set())


def type_of(value: Any) -> str:
    """The name of a JSON value's type."""
    names = {bool: "boolean", str: "string", int: "integer", float: "number", type(None): "null"}
    return names.get(type(value), "object" if isinstance(value, Mapping) else "array")


def map_subschemas(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """A copy of a schema in which all schemas are changed, the inner ones first."""
    if not isinstance(schema, Mapping):
        return schema
    result = dict(schema)
    for key in _SCHEMA_KEYS:
        if isinstance(result.get(key), Mapping):
            result[key] = map_subschemas(result[key], change)
    for key in _LIST_KEYS:
        if isinstance(result.get(key), list | tuple):
            result[key] = [map_subschemas(part, change) for part in result[key]]
    for key in _MAP_KEYS:
        if isinstance(result.get(key), Mapping):
            result[key] = {name: map_subschemas(part, change) for name, part in result[key].items()}
    return change(result)


def subschemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """A schema and all schemas in it."""
    if not isinstance(schema, Mapping):
        return
    yield schema
    for key in _SCHEMA_KEYS:
        yield from subschemas(schema.get(key))
    for key in _LIST_KEYS:
        for part in schema[key] if isinstance(schema.get(key), list | tuple) else ():
            yield from subschemas(part)
    for key in _MAP_KEYS:
        for part in schema[key].values() if isinstance(schema.get(key), Mapping) else ():
            yield from subschemas(part)


def integers(value: Any) -> Iterator[int]:
    """All integers in plain data."""
    if isinstance(value, int):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from integers(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from integers(part)


# The tags of Hermes' format, which the chat templates of SmolLM2, Qwen and others use.
CALL_BEGIN: Final = "<tool_call>\n"
CALL_END: Final = "\n</tool_call>"
_NO_PARAMETERS: Final = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolGrammar(NamedTuple):
    """The calls that a request may make."""

    schemas: tuple[Mapping[str, Any], ...]  # of the JSON between the tags, one for each tool
    is_required: bool  # exactly one call and no text, else any number of calls in free text
    answer: Any = None  # the schema of the text in place of calls; None: it is free, also around calls

    @classmethod
    def from_spec(cls, spec: GrammarSpec) -> ToolGrammar:
        """The grammar of a spec with `tools`."""
        choice, functions = spec["tool_choice"], [thaw(tool["function"]) for tool in spec["tools"]]
        if isinstance(choice, Mapping):
            name = choice["function"]["name"]
            functions = [function for function in functions if function["name"] == name]
        return cls(tuple(map(_call_schema, functions)), choice != "auto", thaw(spec.get("answer")))


def _call_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a call of one function."""
    parameters = dict(map_subschemas(function.get("parameters") or _NO_PARAMETERS, _moved_reference))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    for name in ("$defs", "definitions"):  # references count from the root
        if name in parameters:
            schema[name] = parameters.pop(name)
    return schema


def _moved_reference(part: dict[str, Any]) -> dict[str, Any]:
    """A schema whose reference counts from the root of the call, not of the parameters."""
    reference = part.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#"):
        return part
    if reference.startswith(("#/$defs/", "#/definitions/")):  # these move to the root
        return part
    return {**part, "$ref": "#/properties/arguments" + reference[1:]}


def parse_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """The text without its calls, and the calls; a call that is cut off or no JSON stays in the text."""
    calls: list[ToolCall] = []
    kept: list[str] = []
    start = 0  # of what is not read yet
    while (end := text.find(CALL_END, start)) >= 0:
        # The last tag before it: JSON has no line break in a string, so that no call contains another.
        begin = text.rfind(CALL_BEGIN, start, end)
        found = None if begin < 0 else HERMES.calls(text[begin + len(CALL_BEGIN) : end])
        after = end + len(CALL_END)
        kept.append(text[start : after if found is None else begin])
        calls += found or []
        start = after
    return "".join((*kept, text[start:])).strip(), calls

"""The value of the `grammar` field: which texts a request may generate."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any, Final

from descant.config.fields import FieldType, FieldValueError, FrozenMap, freeze
from descant.errors import MissingExtra

GRAMMAR_KINDS: Final = ("json_schema", "json", "regex", "choice", "grammar", "tools")
GRAMMAR_BACKENDS: Final = ("auto", "llguidance", "xgrammar")
TOOL_CHOICES: Final = ("auto", "required")

MAX_GRAMMAR_BYTES: Final = 1 << 20  # of the whole value as JSON
MAX_NESTING: Final = 100  # of lists and objects in a schema
MAX_PARTS: Final = 100_000
MAX_CHOICES: Final = 10_000

_OPTIONS: Final = ("backend", "drafts")


class GrammarSpec(FrozenMap):
    """A grammar as given, in plain data; equal to another only if the order of its keys is the same.

    The order of a schema's properties is the order in which they are generated.
    """

    __slots__ = ("text",)

    def __init__(self, items: Mapping[Any, Any]) -> None:
        super().__init__(items)
        self.text = _dump(items)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, GrammarSpec):
            return self.text == other.text
        return super().__eq__(other)

    def __hash__(self) -> int:
        return hash(self.text)

    @property
    def kind(self) -> str:
        """One of `GRAMMAR_KINDS`."""
        return next(name for name in GRAMMAR_KINDS if name in self)

    @property
    def content(self) -> str:
        """The accepted texts, as JSON: the same for two specs that differ in their options only."""
        return _dump({name: value for name, value in self.items() if name not in _OPTIONS})

    @property
    def backend(self) -> str:
        """The library that runs it, one of `GRAMMAR_BACKENDS`."""
        return str(self.get("backend", "auto"))

    @property
    def drafts(self) -> bool:
        """Whether the tokens that it forces are drafted."""
        return bool(self.get("drafts", True))


def grammar_spec() -> FieldType:
    """A grammar: a dict with one of `GRAMMAR_KINDS`."""
    kinds = ", ".join(f'"{kind}"' for kind in GRAMMAR_KINDS)
    return FieldType("dict", f"a dict with one of {kinds}", _parse)


def _parse(value: Any) -> GrammarSpec:
    if isinstance(value, GrammarSpec):
        return value
    if not isinstance(value, Mapping):
        raise ValueError
    given = [name for name in GRAMMAR_KINDS if name in value]
    if len(given) != 1:
        raise FieldValueError(f"a dict with exactly one of {', '.join(GRAMMAR_KINDS)}")
    kind = given[0]
    known = {kind, *_OPTIONS, *(("tool_choice", "answer") if kind == "tools" else ())}
    unknown = [name for name in value if name not in known]
    if unknown:
        raise FieldValueError(f"a dict with no other keys than {', '.join(sorted(known))}")
    items: dict[str, Any] = {kind: _PARSERS[kind](value[kind])}
    if kind == "tools":
        items["tool_choice"] = _tool_choice(value.get("tool_choice", "auto"), items["tools"])
        if "answer" in value:
            if items["tool_choice"] != "auto":
                raise FieldValueError('a dict with `answer` only where its `tool_choice` is "auto"')
            items["answer"] = _schema(value["answer"], "answer")
    if value.get("backend", "auto") not in GRAMMAR_BACKENDS:
        raise FieldValueError(f"a dict whose `backend` is one of {', '.join(GRAMMAR_BACKENDS)}")
    if not isinstance(value.get("drafts", True), bool):
        raise FieldValueError("a dict whose `drafts` is True or False")
    items |= {name: value[name] for name in _OPTIONS if name in value}
    _check_nesting(items)
    spec = GrammarSpec(freeze(items))
    try:
        size = len(spec.text.encode())
    except UnicodeEncodeError:
        raise FieldValueError("valid Unicode, without lone surrogates") from None
    if size > MAX_GRAMMAR_BYTES:
        raise FieldValueError(f"at most {MAX_GRAMMAR_BYTES} bytes as JSON, and it has {size}")
    return spec


def _schema(value: Any, name: str = "json_schema") -> Any:
    """A JSON schema: a dict or a bool, its text, a pydantic model or a dataclass."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise FieldValueError(f"a dict whose `{name}` is JSON, if it is a text") from None
    elif isinstance(value, type):
        value = _schema_of_type(value)
    if not isinstance(value, Mapping | bool):
        raise FieldValueError(f"a dict whose `{name}` is a schema, its text, or a type")
    return value


def _schema_of_type(kind: type) -> Any:
    """The schema of a pydantic model, a dataclass or a typed dict."""
    own = getattr(kind, "model_json_schema", None)
    if own is not None:
        return _closed(own())
    if not is_dataclass(kind) and not hasattr(kind, "__total__"):
        raise FieldValueError(
            "a dict whose `json_schema` is a pydantic model or a dataclass, if it is a type"
        )
    try:
        from pydantic import TypeAdapter
    except ImportError:
        raise MissingExtra("llguidance", "the schema of a dataclass") from None
    return _closed(TypeAdapter(kind).json_schema())


def _closed(schema: Any) -> Any:
    """The schema of a type whose objects have no further properties: the type would ignore them."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(part) for name, part in schema.items()}
    if schema.get("type") == "object" and isinstance(schema.get("properties"), dict):
        closed.setdefault("additionalProperties", False)
    return closed


def _any_json(value: Any) -> bool:
    if value is not True:
        raise FieldValueError("a dict whose `json` is True, if it has one")
    return True


def _text(name: str) -> Any:
    def parse(value: Any) -> str:
        if not isinstance(value, str) or not value or "\0" in value:
            raise FieldValueError(f"a dict whose `{name}` is a text without null characters")
        return value

    return parse


def _choices(value: Any) -> tuple[str, ...]:
    items = tuple(value) if isinstance(value, list | tuple) else ()
    if not items or not all(isinstance(item, str) and item for item in items):
        raise FieldValueError("a dict whose `choice` is a list of texts")
    if len(items) > MAX_CHOICES:
        raise FieldValueError(
            f"a dict whose `choice` has at most {MAX_CHOICES} texts, and it has {len(items)}"
        )
    return tuple(dict.fromkeys(items))


def _tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    """Tools in OpenAI's form: `{"type": "function", "function": {"name", "parameters", ...}}`."""
    tools = tuple(value) if isinstance(value, list | tuple) else ()
    names = set()
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise FieldValueError("a dict whose `tools` are functions, each with a name")
        if not isinstance((function or {}).get("parameters", {}), Mapping):
            raise FieldValueError("a dict whose `tools` have a schema as `parameters`")
        names.add(name)
    if not tools or len(names) != len(tools):
        raise FieldValueError("a dict whose `tools` are a list of functions with different names")
    return tools


def _tool_choice(value: Any, tools: tuple[Mapping[str, Any], ...]) -> Any:
    if value in TOOL_CHOICES:
        return value
    names = [tool["function"]["name"] for tool in tools]
    function = value.get("function") if isinstance(value, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if name not in names:
        raise FieldValueError(
            f"a dict whose `tool_choice` is {' or '.join(TOOL_CHOICES)}, or names one of {', '.join(names)}"
        )
    return {"type": "function", "function": {"name": name}}


_PARSERS: Final = {
    "json_schema": _schema,
    "json": _any_json,
    "regex": _text("regex"),
    "choice": _choices,
    "grammar": _text("grammar"),
    "tools": _tools,
}


def _check_nesting(value: Any) -> None:
    """Raise for data nested so deeply that recursion over it may fail, or with too many parts.

    Parts may share parts, so that a small object is large as text.
    """
    level, count = [value], 0
    for _ in range(MAX_NESTING):
        below: list[Any] = []
        for parent in level:
            below += _children(parent)
            if count + len(below) > MAX_PARTS:
                raise FieldValueError(f"made of at most {MAX_PARTS} values")
        if not below:
            return
        level, count = below, count + len(below)
    raise FieldValueError(f"nested at most {MAX_NESTING} levels deep")


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple):
        yield from value


def _dump(value: Any) -> str:
    """Plain data as JSON text."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain)
    except (TypeError, ValueError, RecursionError):
        raise FieldValueError("plain data, as in a JSON file") from None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError

"""xgrammar: grammars compiled ahead into masks over the vocabulary."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from threading import Lock, Thread
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from descant.config.fields import thaw
from descant.config.grammar_spec import GrammarSpec
from descant.decoding.grammars.backend import (
    CompiledGrammar,
    GrammarBackend,
    GrammarMatcher,
    GrammarVocabulary,
    UnsupportedGrammar,
    decode_prefix,
)
from descant.decoding.grammars.json_schema import (
    CALL_BEGIN,
    CALL_END,
    ToolGrammar,
    constants,
    integers,
    map_subschemas,
    prepare_schema,
    subschemas,
    type_of,
)

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
    if any(abs(integer) >= _MAX_INTEGER for integer in integers([part.get("enum"), part.get("const")])):
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


_MAX_SECONDS: Final = 3.0  # of a compilation
# Its work grows with the states of a grammar times the vocabulary, and it has no bound of its own.
_MAX_REPEATS: Final = 10_000
_MAX_OPTIONS: Final = 2_000
_MAX_PROPERTIES: Final = 200
_MAX_PATTERN: Final = 10_000

_LIMITS: Final[Mapping[str, int]] = {
    "enum": _MAX_OPTIONS, "anyOf": _MAX_OPTIONS, "oneOf": _MAX_OPTIONS, "properties": _MAX_PROPERTIES,
    "minItems": _MAX_REPEATS, "maxItems": _MAX_REPEATS, "minLength": _MAX_REPEATS, "maxLength": _MAX_REPEATS,
}  # fmt: skip
_REPEAT = re.compile(r"\{(\d*)(?:,(\d*))?\}")


class XGrammarBackend(GrammarBackend):
    """Grammars run by xgrammar."""

    name = "xgrammar"

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        super().__init__(vocabulary)
        info = self._library.TokenizerInfo(vocabulary.tokens, stop_token_ids=[vocabulary.end_token])
        # It keeps nothing itself: the cache of compiled grammars is that of all backends.
        self._compiler = self._library.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._compiling = Lock()

    def compile(self, spec: GrammarSpec, prefix: bytes = b"") -> CompiledGrammar:
        """Compile a grammar within a bounded time."""
        _check_size(spec)
        try:
            grammar = self._convert(spec)
            if prefix:
                start = self._library.Grammar.from_ebnf("root ::= " + _literal(decode_prefix(prefix)))
                grammar = self._library.Grammar.concat(start, grammar)
        except UnsupportedGrammar:
            raise
        except Exception as error:  # its own kinds, and RuntimeError
            raise UnsupportedGrammar(_message(error)) from None
        compiled = self._in_time(lambda: self._compiler.compile_grammar(grammar))
        size = int(compiled.memory_size_bytes)
        masks = np.zeros((1, self.mask_width), np.uint32)
        matcher = self.new_matcher(compiled)
        self.fill_masks([matcher], masks, [0])
        if not masks.any() and not matcher.is_complete():
            raise UnsupportedGrammar("no text matches it")
        return CompiledGrammar(self, compiled, size, (spec.content, prefix))

    def new_matcher(self, compiled: Any) -> _XGrammarMatcher:
        """A matcher at the beginning."""
        return _XGrammarMatcher(self._library.GrammarMatcher(compiled), self)

    def _in_time(self, compile_grammar: Callable[[], Any]) -> Any:
        """The result of a compilation, which runs in a thread of its own and cannot be interrupted.

        Only one runs at a time: one that has taken too long must not be joined by others.
        """
        if not self._compiling.acquire(timeout=_MAX_SECONDS):
            raise UnsupportedGrammar("it still compiles another grammar, try again later")
        results: list[Any] = []

        def run() -> None:
            try:
                results.append(compile_grammar())
            except Exception as error:
                results.append(error)
            finally:
                self._compiling.release()

        thread = Thread(target=run, name="descant-grammar", daemon=True)
        thread.start()
        thread.join(_MAX_SECONDS)
        if not results:
            raise UnsupportedGrammar(f"it takes more than {_MAX_SECONDS:.0f} s to compile it")
        if isinstance(results[0], Exception):
            raise UnsupportedGrammar(_message(results[0]))
        return results[0]

    def _convert(self, spec: GrammarSpec) -> Any:
        """The spec as xgrammar's grammar."""
        kind, value, make = spec.kind, spec[spec.kind], self._library.Grammar
        if kind == "json_schema":
            return self._json_grammar(_schema_text(thaw(value)))
        if kind == "json":
            return self._json_grammar('{"type": "object"}')
        if kind == "regex":
            check_xgrammar_regex(value)
            return make.from_regex(value)
        if kind == "choice":
            return make.from_ebnf("root ::= " + " | ".join(map(_literal, value)))
        if kind == "tools":
            return self._tool_grammar(ToolGrammar.from_spec(spec))
        return make.from_ebnf(value) if "::=" in value else make.from_lark(value)

    def _json_grammar(self, schema: str) -> Any:
        """The grammar of the texts of a schema."""
        return self._library.Grammar.from_json_schema(schema, any_whitespace=False, strict_mode=False)

    def _tool_grammar(self, tools: ToolGrammar) -> Any:
        """Calls between tags, each by its tool's schema."""
        make = self._library.Grammar
        schemas = [_schema_text(schema) for schema in tools.schemas]
        if tools.is_required:
            bodies = [self._json_grammar(schema) for schema in schemas]
            body = bodies[0] if len(bodies) == 1 else make.union(*bodies)
            begin, end = (make.from_ebnf("root ::= " + _literal(tag)) for tag in (CALL_BEGIN, CALL_END))
            return make.concat(begin, body, end)
        tags = [
            {
                "type": "tag",
                "begin": CALL_BEGIN,
                "content": {"type": "json_schema", "json_schema": json.loads(schema)},
                "end": CALL_END,
            }
            for schema in schemas
        ]
        text: dict[str, Any] = {"type": "triggered_tags", "triggers": [CALL_BEGIN], "tags": tags}
        if tools.answer is not None:
            calls = {"type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True}
            calls_grammar = make.from_structural_tag({"type": "structural_tag", "format": calls})
            return make.union(calls_grammar, self._json_grammar(_schema_text(tools.answer)))
        return make.from_structural_tag({"type": "structural_tag", "format": text})

    def fill_masks(self, matchers: Sequence[Any], masks: NDArray[Any], lines: Sequence[int]) -> None:
        """Fill the masks of all matchers in xgrammar's threads."""
        filled = torch.empty((len(matchers), self.mask_width), dtype=torch.int32)
        if len(matchers) == 1:
            matchers[0].matcher.fill_next_token_bitmask(filled, 0)
        else:
            if self._executor is None:
                self._executor = self._library.BatchGrammarMatcher(max_threads=torch.get_num_threads())
            self._executor.batch_fill_next_token_bitmask([matcher.matcher for matcher in matchers], filled)
        masks[list(lines)] = filled.numpy().view(masks.dtype)
        self.vocabulary.clear_unused(masks, lines)
        for matcher, line in zip(matchers, lines, strict=True):
            # As in llguidance, a text that must follow has one spelling: the tokenizer's own.
            for token in matcher.forced_tokens()[:1]:
                masks[line] = 0
                masks[line, token // 32] = 1 << (token % 32)


class _XGrammarMatcher(GrammarMatcher):
    """A `GrammarMatcher` of xgrammar, which never gets the end token and has no bounds while it runs."""

    def accept(self, tokens: Sequence[int]) -> int:
        """Advance over the tokens that the grammar permits."""
        accepted = 0
        for token in self.backend.vocabulary.leading_text(tokens):
            if not self.matcher.accept_token(token):
                break
            accepted += 1
        return accepted

    def copy(self) -> _XGrammarMatcher:
        """A fork."""
        return _XGrammarMatcher(self.matcher.fork(), self.backend)

    def is_complete(self) -> bool:
        """Whether the grammar is satisfied."""
        return bool(self.matcher.is_completed())

    def is_final(self) -> bool:
        """Whether nothing may follow."""
        if not self.is_complete():
            return False
        masks = np.zeros((1, self.backend.mask_width), np.uint32)
        self.backend.fill_masks([self], masks, [0])
        return not masks.any()

    def forced_tokens(self) -> list[int]:
        """The tokens of the forced text without the last, which may join with what follows."""
        try:
            text = self.matcher.find_jump_forward_string()
        except UnicodeDecodeError:  # the text so far ends within a character
            return []
        return self.backend.vocabulary.encode(text.encode())[:-1] if text else []


def _schema_text(schema: Any) -> str:
    """A schema that xgrammar enforces as a whole, as text."""
    schema = {} if schema is True else prepare_schema(schema)
    check_xgrammar_schema(schema)
    return json.dumps(rewrite_lengths(schema))


def _check_size(spec: GrammarSpec) -> None:
    """Raise for a grammar that would take xgrammar long."""
    value = spec[spec.kind]
    if spec.kind == "choice" and len(value) > _MAX_OPTIONS:
        raise UnsupportedGrammar(f"it takes at most {_MAX_OPTIONS} options, and it has {len(value)}")
    if spec.kind in ("regex", "grammar"):
        _check_pattern(value)
        return
    schemas = [value] if spec.kind == "json_schema" else []
    if spec.kind == "tools":
        schemas = [tool["function"].get("parameters") for tool in value]
    for part in (part for schema in schemas for part in subschemas(schema)):
        for name, limit in _LIMITS.items():
            value = part.get(name)
            count = value if isinstance(value, int) else len(value) if isinstance(value, Collection) else 0
            if count > limit:
                raise UnsupportedGrammar(f"it takes at most {limit} in `{name}`, and it has {count}")
        if isinstance(part.get("pattern"), str):
            _check_pattern(part["pattern"])


def _check_pattern(text: str) -> None:
    """Raise for a pattern that is long, or whose repeats multiply to many."""
    if len(text) > _MAX_PATTERN:
        raise UnsupportedGrammar(f"it takes at most {_MAX_PATTERN} characters, and it has {len(text)}")
    product = 1
    for low, high in _REPEAT.findall(text):
        product *= max(1, *(int(bound) for bound in (low, high) if bound)) if low or high else 1
        if product > _MAX_REPEATS:
            raise UnsupportedGrammar(f"it takes at most {_MAX_REPEATS} repeats in all")


def _literal(text: str) -> str:
    """A text as a literal of an EBNF grammar, which reads an escaped surrogate as a character."""
    return json.dumps(text, ensure_ascii=False)


def _message(error: Exception) -> str:
    """xgrammar's message without its place in the source."""
    text = str(error).strip().splitlines()
    return re.sub(r"^\[[\d:]+\] \S+: ", "", text[0]) if text else type(error).__name__

"""llguidance: lazily compiled grammars with bounded work in every step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

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
    integers,
    prepare_schema,
    subschemas,
)
from descant.errors import printable

# Python's separators. Free white space invites a model to generate it without end.
_JSON_OPTIONS: Final = {
    "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "coerce_one_of": False,
    "lenient": False,
}  # fmt: skip
_EMPTY_BYTES: Final = 1 << 16  # measured: memory of a small grammar, and of each byte of a large one
_BYTES_PER_CHARACTER: Final = 300
_MAX_PROPERTIES: Final = 2_000  # its work grows with their square, about a second here
_MAX_INTEGER: Final = 2**53  # it reads numbers as float64
_EBNF_ARROW: Final = "::="


class LLGuidanceBackend(GrammarBackend):
    """Grammars run by llguidance."""

    name = "llguidance"

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        super().__init__(vocabulary)
        self._tokenizer = self._library.LLTokenizer(
            self._library.TokenizerWrapper(_TokenizerView(vocabulary)), eos_token=vocabulary.end_token
        )

    def compile(self, spec: GrammarSpec, prefix: bytes = b"") -> CompiledGrammar:
        """Compile a grammar; its states are made as they are reached."""
        parts = self._grammar_parts(spec)
        if prefix:
            parts = _with_prefix(parts, prefix)
        text = json.dumps({"grammars": parts})
        matcher = self._library.LLMatcher(self._tokenizer, text, log_level=0)
        is_empty = not matcher.is_error() and not any(matcher.compute_bitmask())
        if matcher.is_error():
            raise UnsupportedGrammar(_message(matcher.get_error()))
        if is_empty and not matcher.is_accepting():
            raise UnsupportedGrammar("no text matches it")
        size = _EMPTY_BYTES + _BYTES_PER_CHARACTER * len(text)
        return CompiledGrammar(self, matcher, size, (spec.content, prefix))

    def new_matcher(self, compiled: Any) -> _LLGuidanceMatcher:
        """A copy of the matcher at the beginning."""
        return _LLGuidanceMatcher(compiled.deep_copy(), self)

    def _grammar_parts(self, spec: GrammarSpec) -> list[dict[str, Any]]:
        """The grammar in llguidance's JSON form, the start first."""
        kind, value = spec.kind, spec[spec.kind]
        if kind == "json_schema":
            return [_json_part(thaw(value))]
        if kind == "json":
            return [_json_part({"type": "object"})]
        if kind == "regex":
            text = self._library.LLMatcher.grammar_from_regex(value)
            return list(json.loads(text)["grammars"])
        if kind == "choice":
            return [_lark_part("start: " + " | ".join(map(_literal, value)))]
        if kind == "tools":
            return self._tool_parts(ToolGrammar.from_spec(spec))
        if _EBNF_ARROW in value:
            try:
                value = self._library.gbnf_to_lark.any_to_lark(value)
            except Exception as error:  # its parser is Python code of its own
                raise UnsupportedGrammar(_message(str(error))) from None
        return [_lark_part(value)]

    def _tool_parts(self, tools: ToolGrammar) -> list[dict[str, Any]]:
        """Calls between tags, each by its tool's schema."""
        bodies = [
            {**_json_part(schema), "name": f"call{index}"} for index, schema in enumerate(tools.schemas)
        ]
        begin, end = _literal(CALL_BEGIN), _literal(CALL_END)
        options = " | ".join(f"@call{index}" for index in range(len(bodies)))
        call = f"body: {options}\n"
        if tools.is_required:
            return [_lark_part(f"start: {begin} body {end}\n{call}"), *bodies]
        if tools.answer is not None:
            text = f'start: one ("\\n" one)* | @answer\none: {begin} body {end}\n{call}'
            return [_lark_part(text), *bodies, {**_json_part(tools.answer), "name": "answer"}]
        text = f"start: call* TEXT\ncall: head body {end}\nhead[lazy]: TEXT {begin}\n{call}TEXT: /(.|\\n)*/\n"
        return [_lark_part(text), *bodies]

    def fill_masks(self, matchers: Sequence[Any], masks: NDArray[Any], lines: Sequence[int]) -> None:
        """Fill the masks of all matchers in llguidance's threads."""
        running = []
        for matcher, line in zip(matchers, lines, strict=True):
            if matcher.matcher.is_stopped():
                masks[line] = 0  # the end alone may follow
            else:
                running.append((matcher.matcher, line))
        if len(running) == 1:
            matcher, line = running[0]
            matcher.unsafe_compute_mask_ptr(masks[line].ctypes.data, masks.shape[1] * 4)
        elif running:
            if self._executor is None:
                self._executor = self._library.LLExecutor(num_threads=torch.get_num_threads())
            self._executor.unsafe_compute_mask_ptr(
                running, masks.ctypes.data, masks.shape[1] * 4, masks.shape[0]
            )
        self.vocabulary.clear_unused(masks, lines)


class _LLGuidanceMatcher(GrammarMatcher):
    """An `LLMatcher`, which stops by itself where nothing can follow."""

    def accept(self, tokens: Sequence[int]) -> int:
        """Advance over the tokens that the grammar permits."""
        if self.matcher.is_stopped():
            return 0
        return int(self.matcher.try_consume_tokens(self.backend.vocabulary.leading_text(tokens)))

    def failure(self) -> str | None:
        """The bound of llguidance that is exceeded."""
        return _message(self.matcher.get_error()) if self.matcher.is_error() else None

    def copy(self) -> _LLGuidanceMatcher:
        """A deep copy."""
        return _LLGuidanceMatcher(self.matcher.deep_copy(), self.backend)

    def is_complete(self) -> bool:
        """Whether the grammar is satisfied."""
        return bool(self.matcher.is_accepting())

    def is_final(self) -> bool:
        """Whether nothing may follow."""
        return bool(self.matcher.is_stopped()) and self.is_complete()

    def forced_tokens(self) -> list[int]:
        """The tokens that llguidance derives from the forced bytes."""
        return [] if self.matcher.is_stopped() else [int(token) for token in self.matcher.compute_ff_tokens()]


class _TokenizerView:
    """A vocabulary with the names that llguidance reads."""

    bos_token_id = None

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.eos_token_id = vocabulary.end_token
        self.tokens = vocabulary.tokens
        self.special_token_ids = [token for token, text in enumerate(self.tokens) if not text]
        self._vocabulary = vocabulary

    def __call__(self, text: bytes | str) -> list[int]:
        """The tokens of a text."""
        return self._vocabulary.encode(text.encode() if isinstance(text, str) else text)


def _json_part(schema: Any) -> dict[str, Any]:
    for part in subschemas(schema):
        count = len(part["properties"]) if isinstance(part.get("properties"), Mapping) else 0
        if count > _MAX_PROPERTIES:
            raise UnsupportedGrammar(f"`properties` may have at most {_MAX_PROPERTIES} names, not {count}")
    for integer in integers(schema):
        if abs(integer) > _MAX_INTEGER:
            raise UnsupportedGrammar(f"the integer {integer} is not exact as a floating-point number")
    schema = prepare_schema(schema)
    if isinstance(schema, Mapping):
        return {"json_schema": {**schema, "x-guidance": _JSON_OPTIONS}}
    if schema is False:
        raise UnsupportedGrammar("no text matches the schema false")
    return {"json_schema": {"x-guidance": _JSON_OPTIONS}}


def _lark_part(text: str) -> dict[str, Any]:
    return {"lark_grammar": text}


def _literal(text: str) -> str:
    """A text as a literal of a Lark grammar, whose lexer takes no raw control characters."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _with_prefix(parts: list[dict[str, Any]], prefix: bytes) -> list[dict[str, Any]]:
    """The grammar after a fixed beginning."""
    start = {**parts[0], "name": "rest"}
    return [_lark_part(f"start: {_literal(decode_prefix(prefix))} @rest"), start, *parts[1:]]


def _message(text: str) -> str:
    """The message of llguidance on one line, without its dump of the parser's state."""
    words = text.partition("<state>")[0].split()
    if words[:1] and words[0].startswith("NoExtension"):
        return "no text matches it"
    return printable(" ".join(words)) if words else "it is invalid"

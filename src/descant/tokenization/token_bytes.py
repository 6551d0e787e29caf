"""The bytes of each token of a tokenizer.

A token's bytes are what it adds inside a text. The joined bytes of a token sequence are the UTF-8 of its
text, except for a space that some tokenizers add before the first word.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from descant.errors import InputError

DecoderStep = Mapping[str, Any]  # one decoder step, as in a tokenizer file

_METASPACE = "▁"  # sentencepiece's space
_MIN_FAST_VOCAB = 1000  # smaller vocabularies are read token by token
_NO_BYTE = 256  # marks a character outside of GPT-2's byte alphabet


def _gpt2_byte_table() -> NDArray[Any]:
    """The byte of each character of GPT-2's byte alphabet: printable bytes first, the rest from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    table = np.full(256 + len(hidden) + 1, _NO_BYTE, np.uint16)
    table[printable] = printable
    table[256 : 256 + len(hidden)] = hidden
    return table


_BYTE_OF_CHAR = _gpt2_byte_table()  # the last entry is for all other characters


class TokenBytes:
    """The bytes of every token by id; unused ids and ids beyond the last have no bytes."""

    def __init__(self, data: bytes, offsets: NDArray[Any], special: Iterable[int] = ()) -> None:
        self.special_ids = frozenset(special)  # tokens that are not text
        self.data = np.frombuffer(data, np.uint8)  # of all tokens, concatenated
        self.offsets = offsets  # [size + 1] start of each token
        self.size = len(offsets) - 1

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> TokenBytes:
        """The token bytes of a tokenizer, cached until tokens are added."""
        key, count = id(tokenizer), _vocab_size(tokenizer)
        cached = _by_tokenizer.get(key)
        if cached is not None and cached[0]() is tokenizer and cached[1] == count:
            return cached[2]
        result = cls(*_read_token_bytes(tokenizer))
        with contextlib.suppress(TypeError):  # an object without weak references is not cached
            _by_tokenizer[key] = weakref.ref(tokenizer, lambda _: _by_tokenizer.pop(key, None)), count, result
        return result

    def text(self, ids: Iterable[int], skip: int = 0) -> str:
        """The text of these tokens after `skip` bytes, without incomplete characters."""
        data = b"".join([self.bytes[token] for token in ids if 0 <= token < self.size])
        return data[skip:].decode(errors="ignore")

    @cached_property
    def without_special(self) -> TokenBytes:
        """The same token bytes, with no bytes for special tokens."""
        length = np.diff(self.offsets)
        special = [token for token in self.special_ids if token < self.size]
        is_text = np.ones(self.size, bool)
        is_text[special] = False
        data = self.data[np.repeat(is_text, length)].tobytes()
        return TokenBytes(data, np.append(np.int64(0), np.cumsum(np.where(is_text, length, 0))))

    @cached_property
    def bytes(self) -> list[bytes]:
        """The bytes of each token by id."""
        data, ends = self.data.tobytes(), self.offsets.tolist()
        return [data[start:end] for start, end in itertools.pairwise(ends)]


_by_tokenizer: dict[int, tuple[weakref.ref[Any], int, TokenBytes]] = {}


class _JoinedTokens:
    """The tokens in id order, joined by a separator that none of them contains."""

    def __init__(self, text: str, separator: str) -> None:
        self.text, self.separator = text, separator
        self.code_points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        self.is_separator = self.code_points == ord(separator)
        self.count = int(np.count_nonzero(self.is_separator)) + 1

    @classmethod
    def from_tokens(cls, tokens: Sequence[str]) -> _JoinedTokens:
        """Join a non-empty list of tokens."""
        letters = "".join(tokens)
        separator = next(char for char in map(chr, range(0x10FFFF, 0, -1)) if char not in letters)
        return cls(separator.join(tokens), separator)

    def to_bytes(
        self, swaps: Sequence[tuple[str, str]], bytewise: bool, patches: dict[int, bytes]
    ) -> tuple[bytes, NDArray[Any]]:
        """The bytes of all tokens and the start of each; `patches` are known bytes by token id."""
        ends = np.append(np.flatnonzero(self.is_separator), len(self.code_points))  # [count] in characters
        if bytewise:
            byte_values = _BYTE_OF_CHAR[np.minimum(self.code_points, len(_BYTE_OF_CHAR) - 1)]
            foreign = np.flatnonzero((byte_values == _NO_BYTE) & ~self.is_separator)
            for token in np.unique(np.searchsorted(ends, foreign)).tolist():
                # A token with a character outside of the byte alphabet is plain text.
                start = ends[token - 1] + 1 if token else 0
                patches.setdefault(token, self.text[start : ends[token]].encode("utf-8", "surrogateescape"))
            data = byte_values[~self.is_separator].astype(np.uint8).tobytes()
            ends -= np.arange(self.count)
        else:
            points = self.code_points.copy()
            for old, new in swaps:
                points[points == ord(old)] = ord(new)
            width = (points >= 0x80).view(np.uint8) + (points >= 0x800) + (points >= 0x10000) + np.uint8(1)
            width[(points >= 0xDC80) & (points <= 0xDCFF)] = 1  # a byte that is not valid UTF-8
            width[self.is_separator] = 0
            ends = np.append(np.int64(0), np.cumsum(width, dtype=np.int64))[ends]
            text = _apply_replacements(self.text.replace(self.separator, ""), swaps)
            data = text.encode("utf-8", "surrogateescape")
        return _apply_patches(data, np.append(np.int64(0), ends), patches)


def _apply_patches(
    data: bytes, offsets: NDArray[Any], patches: Mapping[int, bytes]
) -> tuple[bytes, NDArray[Any]]:
    """The same bytes with those of some tokens replaced, also beyond the last token."""
    missing = max(patches, default=-1) + 2 - len(offsets)
    offsets = np.append(offsets, np.full(max(missing, 0), offsets[-1]))
    length = np.diff(offsets)
    pieces, done = [], 0
    for token in sorted(patches):
        pieces += [data[done : offsets[token]], patches[token]]
        done = int(offsets[token + 1])
        length[token] = len(patches[token])
    return b"".join([*pieces, data[done:]]), np.append(np.int64(0), np.cumsum(length))


def _vocab_size(tokenizer: Any) -> int:
    for name in ("__len__", "get_vocab_size"):
        if hasattr(tokenizer, name):
            return int(getattr(tokenizer, name)())
    return -1


def _read_token_bytes(tokenizer: Any) -> tuple[bytes, NDArray[Any], list[int]]:
    """The bytes of all tokens, the start of each, and the special ids."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    steps, added = _decoder_steps(tokenizer, backend), _added_tokens(tokenizer, backend)
    step_types = {step["type"] for step in steps or ()}
    bytewise = "ByteLevel" in step_types
    swaps = [] if steps is None or bytewise else _leading_replacements(steps)
    joined = _join_fast_tokens(backend) if bytewise or swaps else None
    is_fast = joined is not None
    patches = _byte_fallback_tokens(backend) if is_fast and "ByteFallback" in step_types else {}
    if joined is None:
        tokens = _tokens_by_id(tokenizer, added)
        if not bytewise:
            tokens = (
                _decode_with_tokenizer(tokenizer, tokens)
                if steps is None
                else _decode_tokens(tokens, steps, backend)
            )
        joined, swaps = _JoinedTokens.from_tokens(tokens), []
    for token, (content, special) in added.items():
        if special or (bytewise and _is_missing_in_model(backend, token)):
            patches[token] = content.encode()
        elif is_fast and token >= joined.count:
            patches[token] = _apply_replacements(content, swaps).encode()
    special_ids = [token for token, (_, special) in added.items() if special]
    return *joined.to_bytes(swaps, bytewise, patches), special_ids


def _join_fast_tokens(backend: Any) -> _JoinedTokens | None:
    """The tokens of a fast tokenizer, joined by spaces by its own decode; None if that is ambiguous.

    It takes half the time of get_vocab(), which dominates otherwise.
    """
    if not (hasattr(backend, "model") and hasattr(backend, "get_vocab_size")):
        return None
    count = backend.get_vocab_size(with_added_tokens=False)
    plain = type(backend)(backend.model)  # the same model, with no decoder
    # If an id below `count` is unused, another one above it is used.
    if count < _MIN_FAST_VOCAB or plain.decode(list(range(count, 2 * count))):
        return None
    joined = _JoinedTokens(plain.decode(list(range(count))), " ")
    return joined if joined.count == count else None


def _byte_fallback_tokens(backend: Any) -> dict[int, bytes]:
    """Tokens such as <0x0A>, which are one byte."""
    ids = {byte: backend.model.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
    return {token: bytes([byte]) for byte, token in ids.items() if token is not None}


def _is_missing_in_model(backend: Any, token: int) -> bool:
    """Whether the tokenizer's model does not have the token itself."""
    return not hasattr(backend, "model") or backend.model.id_to_token(token) is None


def _tokens_by_id(tokenizer: Any, added: Mapping[int, tuple[str, bool]]) -> list[str]:
    """Every token by id as stored, "" for an unused id."""
    if not hasattr(tokenizer, "get_vocab"):
        do = "pass a tokenizer of transformers or tokenizers"
        raise InputError("tokenizer", "must have `get_vocab`", tokenizer, do)
    by_token: dict[Any, int] = tokenizer.get_vocab()
    tokens = [""] * (max([*by_token.values(), *added], default=-1) + 1)
    for token, index in by_token.items():
        tokens[index] = token.decode("utf-8", "surrogateescape") if isinstance(token, bytes) else token
    for index, (content, _) in added.items():
        tokens[index] = content
    return tokens


def _added_tokens(tokenizer: Any, backend: Any) -> dict[int, tuple[str, bool]]:
    """The added tokens: their text, and whether they are special."""
    if hasattr(backend, "get_added_tokens_decoder"):
        added = backend.get_added_tokens_decoder()
    else:
        added = getattr(tokenizer, "added_tokens_decoder", {})
    return {int(index): (str(token.content), bool(token.special)) for index, token in added.items()}


def _decoder_steps(tokenizer: Any, backend: Any) -> list[DecoderStep] | None:
    """The decoder steps from tokens to text; None if only the tokenizer itself can decode."""
    if hasattr(backend, "decoder") and hasattr(backend, "pre_tokenizer"):
        state = _serialized_state(backend.decoder)
        if backend.decoder is None:
            # Without a decoder, the pre-tokenizer says how bytes and spaces are written.
            pre_steps = _flatten_steps(_serialized_state(backend.pre_tokenizer) or {}, "pretokenizers")
            state = next(
                (s for s in pre_steps if s["type"] in ("ByteLevel", "Metaspace")), {"type": "Separate"}
            )
        steps = [] if state is None else _flatten_steps(state, "decoders")
        return steps if steps and all(_is_supported_step(step) for step in steps) else None
    if hasattr(tokenizer, "sp_model"):
        return [{"type": "Metaspace", "replacement": _METASPACE}, {"type": "ByteFallback"}]
    if hasattr(tokenizer, "byte_decoder"):
        return [{"type": "ByteLevel"}]
    if hasattr(tokenizer, "wordpiece_tokenizer"):
        return [{"type": "WordPiece", "prefix": "##", "cleanup": False}]
    return None


def _serialized_state(part: Any) -> DecoderStep | None:
    """A part of a tokenizer as in its file; None for one written in Python."""
    try:
        return dict(json.loads(part.__getstate__()))
    except Exception:
        return None


def _flatten_steps(step: DecoderStep, name: str) -> list[DecoderStep]:
    """The steps of a possibly nested sequence."""
    if step.get("type") != "Sequence":
        return [step] if step else []
    return [inner for part in step[name] for inner in _flatten_steps(part, name)]


def _is_supported_step(step: DecoderStep) -> bool:
    if step["type"] == "Replace":
        return "String" in step["pattern"]
    return step["type"] in {"BPEDecoder", "ByteFallback", "ByteLevel", "Fuse", "Metaspace"} | {
        "Separate", "Strip", "WordPiece",
    }  # fmt: skip


def _step_replacement(step: DecoderStep) -> tuple[str, str] | None:
    """The text that a step replaces, and its replacement."""
    match step:
        case {"type": "Metaspace", "replacement": mark}:
            return mark, " "
        case {"type": "Replace", "pattern": {"String": old}, "content": new}:
            return old, new
        case {"type": "BPEDecoder", "suffix": suffix}:
            return suffix, " "
    return None


def _apply_replacements(text: str, swaps: Iterable[tuple[str, str]]) -> str:
    for pair in swaps:
        text = text.replace(*pair)
    return text


def _leading_replacements(steps: Sequence[DecoderStep]) -> list[tuple[str, str]]:
    """The first steps, if they only replace single characters and so can be applied to the joined text."""
    first = []
    for pair in map(_step_replacement, steps):
        if pair is None:
            break
        first.append(pair)
    simple = all(len(old) == len(new) == 1 and old > "\x7f" for old, new in first)
    later = [step["type"] for step in steps[len(first) :]]
    return first if simple and later in ([], *_AFTER_REPLACEMENTS) else []


_AFTER_REPLACEMENTS = ["Fuse"], ["ByteFallback", "Fuse"], ["ByteFallback", "Fuse", "Strip"]


def _decode_tokens(tokens: list[str], steps: Sequence[DecoderStep], backend: Any) -> list[str]:
    """The tokens as text inside a sentence; invalid UTF-8 bytes are surrogates."""
    fused = False
    for step in steps:
        match step["type"]:
            case "Fuse":
                fused = True
            case "Strip" if not fused:  # after Fuse it applies to the whole text only
                tokens = [_strip_token(token, step) for token in tokens]
            case "ByteFallback":
                tokens = _decode_byte_tokens(tokens)
            case "Separate":
                tokens = [f" {token}" if token else "" for token in tokens]
            case "WordPiece":
                tokens = _decode_wordpiece(tokens, step, backend)
        pair = _step_replacement(step)
        if pair is not None:
            tokens = [_apply_replacements(token, [pair]) for token in tokens]
    return tokens


def _decode_byte_tokens(tokens: list[str]) -> list[str]:
    """Tokens such as <0x0A> as their bytes."""
    sizes = np.fromiter(map(len, tokens), np.int64, len(tokens))
    for index in np.flatnonzero(sizes == 6).tolist():
        token = tokens[index]
        if token.startswith("<0x") and token.endswith(">"):
            try:
                tokens[index] = bytes([int(token[3:5], 16)]).decode("utf-8", "surrogateescape")
            except ValueError:
                continue
    return tokens


def _strip_token(token: str, step: DecoderStep) -> str:
    content: str = step["content"]
    for _ in range(step["start"]):
        token = token.removeprefix(content)
    for _ in range(step["stop"]):
        token = token.removesuffix(content)
    return token


def _decode_wordpiece(tokens: list[str], step: DecoderStep, backend: Any) -> list[str]:
    """WordPiece tokens: one with the prefix continues a word, others start a word."""
    prefix = step["prefix"]
    texts = [t.removeprefix(prefix) if t.startswith(prefix) else f" {t}" if t else "" for t in tokens]
    if step["cleanup"]:
        # The decoder removes the space before some punctuation.
        for index, token in enumerate(tokens):
            if token and not token.isalnum() and not token.startswith(prefix):
                texts[index] = backend.decoder.decode(["a", token])[1:]
    return texts


def _decode_with_tokenizer(tokenizer: Any, tokens: list[str]) -> list[str]:
    """Each token decoded by the tokenizer itself after some text; for unknown tokenizer types."""
    if not hasattr(tokenizer, "convert_tokens_to_string"):
        do = "pass a tokenizer of transformers or tokenizers"
        raise InputError("tokenizer", "must have `convert_tokens_to_string`", tokenizer, do)
    lead = list(tokenizer.tokenize("abcdef")) if hasattr(tokenizer, "tokenize") else []
    start: str = tokenizer.convert_tokens_to_string(lead) if lead else ""
    texts = []
    for token in tokens:
        text: str = tokenizer.convert_tokens_to_string([*lead, token]) if token else ""
        text = text.removeprefix(start)
        if len(token) == 1 and ord(token) < 256 and (not text or "\ufffd" in text):
            # A byte written as the character of its value (ByT5), which is not text by itself.
            text = bytes([ord(token)]).decode("utf-8", "surrogateescape")
        texts.append(text)
    return texts

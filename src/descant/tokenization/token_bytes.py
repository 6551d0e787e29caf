"""What bytes each token of a tokenizer stands for.

A token's bytes are what it adds to a text that is already under way. So the bytes of a token sequence,
joined, are the text's UTF-8, but for a space that some tokenizers put before the first word.
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

from descant.errors import InputError

__all__ = ["TokenBytes"]

Array = np.ndarray[Any, np.dtype[Any]]
DecoderStep = Mapping[str, Any]  # one decoder, as a tokenizer file describes it

_METASPACE = "▁"  # how sentencepiece writes a space
_MIN_FAST_VOCAB = 1000  # tokens that are read one by one
_NO_BYTE = 256  # stands for a character that no byte is written as


def _gpt2_byte_table() -> Array:
    """Which byte each character of GPT-2's alphabet is: printable ones themselves, the rest from 256 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    table = np.full(256 + len(hidden) + 1, _NO_BYTE, np.uint16)
    table[shown] = shown
    table[256 : 256 + len(hidden)] = hidden
    return table


_BYTE_OF_CHAR = _gpt2_byte_table()  # the last entry stands for every character beyond


class TokenBytes:
    """The bytes of every token by id; an id without a token, and one beyond the last, stands for no bytes."""

    def __init__(self, data: bytes, offsets: Array, special: Iterable[int] = ()) -> None:
        self.special_ids = frozenset(special)  # tokens whose bytes are a name, not text
        self.data = np.frombuffer(data, np.uint8)  # of all tokens, one after the other
        self.offsets = offsets  # [size + 1] where each begins
        self.size = len(offsets) - 1

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> TokenBytes:
        """The vocabulary of a tokenizer, made once for each and anew when tokens were added."""
        key, count = id(tokenizer), _vocab_size(tokenizer)
        known = _by_tokenizer.get(key)
        if known is not None and known[0]() is tokenizer and known[1] == count:
            return known[2]
        made = cls(*_read_token_bytes(tokenizer))
        with contextlib.suppress(TypeError):  # an object that nobody can watch is read anew each time
            _by_tokenizer[key] = weakref.ref(tokenizer, lambda _: _by_tokenizer.pop(key, None)), count, made
        return made

    def text(self, ids: Iterable[int], skip: int = 0) -> str:
        """The text of these tokens after `skip` bytes; a character that is not whole yet is not there yet."""
        whole = b"".join([self.bytes[one] for one in ids if 0 <= one < self.size])
        return whole[skip:].decode(errors="ignore")

    @cached_property
    def without_special(self) -> TokenBytes:
        """The same, its special tokens standing for no bytes."""
        length = np.diff(self.offsets)
        special = [at for at in self.special_ids if at < self.size]
        kept = np.ones(self.size, bool)
        kept[special] = False
        data = self.data[np.repeat(kept, length)].tobytes()
        return TokenBytes(data, np.append(np.int64(0), np.cumsum(np.where(kept, length, 0))))

    @cached_property
    def bytes(self) -> list[bytes]:
        """The bytes of each token by id."""
        data, ends = self.data.tobytes(), self.offsets.tolist()
        return [data[start:end] for start, end in itertools.pairwise(ends)]


_by_tokenizer: dict[int, tuple[weakref.ref[Any], int, TokenBytes]] = {}


class _JoinedTokens:
    """The tokens in the order of their ids, joined by a character that none of them has."""

    def __init__(self, text: str, separator: str) -> None:
        self.text, self.separator = text, separator
        self.code_points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        self.is_separator = self.code_points == ord(separator)
        self.count = int(np.count_nonzero(self.is_separator)) + 1

    @classmethod
    def from_tokens(cls, tokens: Sequence[str]) -> _JoinedTokens:
        """Of a list of them, and not an empty one."""
        letters = "".join(tokens)
        separator = next(mark for mark in map(chr, range(0x10FFFF, 0, -1)) if mark not in letters)
        return cls(separator.join(tokens), separator)

    def to_bytes(
        self, swaps: Sequence[tuple[str, str]], bytewise: bool, patches: dict[int, bytes]
    ) -> tuple[bytes, Array]:
        """The bytes of all tokens and where each begins; `patches` are the bytes of those known already."""
        ends = np.append(np.flatnonzero(self.is_separator), len(self.code_points))  # [count] in characters
        if bytewise:
            found = _BYTE_OF_CHAR[np.minimum(self.code_points, len(_BYTE_OF_CHAR) - 1)]
            foreign = np.flatnonzero((found == _NO_BYTE) & ~self.is_separator)
            for at in np.unique(np.searchsorted(ends, foreign)).tolist():
                # A token with a character of no byte is text already.
                start = ends[at - 1] + 1 if at else 0
                patches.setdefault(at, self.text[start : ends[at]].encode("utf-8", "surrogateescape"))
            data = found[~self.is_separator].astype(np.uint8).tobytes()
            ends -= np.arange(self.count)
        else:
            points = self.code_points.copy()
            for old, new in swaps:
                points[points == ord(old)] = ord(new)
            width = (points >= 0x80).view(np.uint8) + (points >= 0x800) + (points >= 0x10000) + np.uint8(1)
            width[(points >= 0xDC80) & (points <= 0xDCFF)] = 1  # a byte that is no text
            width[self.is_separator] = 0
            ends = np.append(np.int64(0), np.cumsum(width, dtype=np.int64))[ends]
            text = _apply_replacements(self.text.replace(self.separator, ""), swaps)
            data = text.encode("utf-8", "surrogateescape")
        return _apply_patches(data, np.append(np.int64(0), ends), patches)


def _apply_patches(data: bytes, offsets: Array, patches: Mapping[int, bytes]) -> tuple[bytes, Array]:
    """The same with other bytes for some tokens, also beyond the last."""
    missing = max(patches, default=-1) + 2 - len(offsets)
    offsets = np.append(offsets, np.full(max(missing, 0), offsets[-1]))
    length = np.diff(offsets)
    pieces, done = [], 0
    for at in sorted(patches):
        pieces += [data[done : offsets[at]], patches[at]]
        done = int(offsets[at + 1])
        length[at] = len(patches[at])
    return b"".join([*pieces, data[done:]]), np.append(np.int64(0), np.cumsum(length))


def _vocab_size(tokenizer: Any) -> int:
    for name in ("__len__", "get_vocab_size"):
        if hasattr(tokenizer, name):
            return int(getattr(tokenizer, name)())
    return -1


def _read_token_bytes(tokenizer: Any) -> tuple[bytes, Array, list[int]]:
    """The bytes of all tokens, where each begins, and which are special."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    steps, added = _decoder_steps(tokenizer, backend), _added_tokens(tokenizer, backend)
    kinds = {step["type"] for step in steps or ()}
    bytewise = "ByteLevel" in kinds
    swaps = [] if steps is None or bytewise else _leading_replacements(steps)
    joined = _join_fast_tokens(backend) if bytewise or swaps else None
    fast = joined is not None
    patches = _byte_fallback_tokens(backend) if fast and "ByteFallback" in kinds else {}
    if joined is None:
        tokens = _tokens_by_id(tokenizer, added)
        if not bytewise:
            tokens = (
                _decode_with_tokenizer(tokenizer, tokens)
                if steps is None
                else _decode_tokens(tokens, steps, backend)
            )
        joined, swaps = _JoinedTokens.from_tokens(tokens), []
    for at, (content, special) in added.items():
        if special or (bytewise and _is_missing_in_model(backend, at)):
            patches[at] = content.encode()
        elif fast and at >= joined.count:
            patches[at] = _apply_replacements(content, swaps).encode()
    return *joined.to_bytes(swaps, bytewise, patches), [at for at, (_, special) in added.items() if special]


def _join_fast_tokens(backend: Any) -> _JoinedTokens | None:
    """The tokens of a fast tokenizer as it joins them, by spaces; None where they cannot be told apart so.

    Half the time of get_vocab(), which would be most of what a vocabulary costs.
    """
    if not (hasattr(backend, "model") and hasattr(backend, "get_vocab_size")):
        return None
    count = backend.get_vocab_size(with_added_tokens=False)
    plain = type(backend)(backend.model)  # the same model, with no decoder
    # Were an id below `count` free, another would be above.
    if count < _MIN_FAST_VOCAB or plain.decode(list(range(count, 2 * count))):
        return None
    joined = _JoinedTokens(plain.decode(list(range(count))), " ")
    return joined if joined.count == count else None


def _byte_fallback_tokens(backend: Any) -> dict[int, bytes]:
    """The tokens such as <0x0A> that stand for one byte."""
    ids = {byte: backend.model.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
    return {at: bytes([byte]) for byte, at in ids.items() if at is not None}


def _is_missing_in_model(backend: Any, at: int) -> bool:
    """Whether the model itself has no such token."""
    return not hasattr(backend, "model") or backend.model.id_to_token(at) is None


def _tokens_by_id(tokenizer: Any, added: Mapping[int, tuple[str, bool]]) -> list[str]:
    """Every token by id as it is stored, "" where there is none."""
    if not hasattr(tokenizer, "get_vocab"):
        do = "pass a tokenizer of transformers or tokenizers"
        raise InputError("tokenizer", "must know its tokens (get_vocab)", tokenizer, do)
    by_token: dict[Any, int] = tokenizer.get_vocab()
    tokens = [""] * (max([*by_token.values(), *added], default=-1) + 1)
    for token, at in by_token.items():
        tokens[at] = token.decode("utf-8", "surrogateescape") if isinstance(token, bytes) else token
    for at, (content, _) in added.items():
        tokens[at] = content
    return tokens


def _added_tokens(tokenizer: Any, backend: Any) -> dict[int, tuple[str, bool]]:
    """The tokens added to the model's own: their text, and whether they are special."""
    if hasattr(backend, "get_added_tokens_decoder"):
        added = backend.get_added_tokens_decoder()
    else:
        added = getattr(tokenizer, "added_tokens_decoder", {})
    return {int(at): (str(token.content), bool(token.special)) for at, token in added.items()}


def _decoder_steps(tokenizer: Any, backend: Any) -> list[DecoderStep] | None:
    """What turns tokens into text, step by step; None where only the tokenizer itself can tell."""
    if hasattr(backend, "decoder") and hasattr(backend, "pre_tokenizer"):
        stated = _serialized_state(backend.decoder)
        if backend.decoder is None:
            # A tokenizer that splits bytes or spaces in a known way means them so when it decodes, too.
            before = _flatten_steps(_serialized_state(backend.pre_tokenizer) or {}, "pretokenizers")
            stated = next(
                (s for s in before if s["type"] in ("ByteLevel", "Metaspace")), {"type": "Separate"}
            )
        steps = [] if stated is None else _flatten_steps(stated, "decoders")
        return steps if steps and all(_is_supported_step(step) for step in steps) else None
    if hasattr(tokenizer, "sp_model"):
        return [{"type": "Metaspace", "replacement": _METASPACE}, {"type": "ByteFallback"}]
    if hasattr(tokenizer, "byte_decoder"):
        return [{"type": "ByteLevel"}]
    if hasattr(tokenizer, "wordpiece_tokenizer"):
        return [{"type": "WordPiece", "prefix": "##", "cleanup": False}]
    return None


def _serialized_state(part: Any) -> DecoderStep | None:
    """A part of a tokenizer as its file describes it; None for one written in Python."""
    try:
        return dict(json.loads(part.__getstate__()))
    except Exception:
        return None


def _flatten_steps(step: DecoderStep, name: str) -> list[DecoderStep]:
    """A sequence of steps, sequences inside it opened."""
    if step.get("type") != "Sequence":
        return [step] if step else []
    return [one for part in step[name] for one in _flatten_steps(part, name)]


def _is_supported_step(step: DecoderStep) -> bool:
    if step["type"] == "Replace":
        return "String" in step["pattern"]
    return step["type"] in {"BPEDecoder", "ByteFallback", "ByteLevel", "Fuse", "Metaspace"} | {
        "Separate", "Strip", "WordPiece",
    }  # fmt: skip


def _step_replacement(step: DecoderStep) -> tuple[str, str] | None:
    """The text that a step replaces, and by what."""
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
    """The first steps, where they only put one character for another and can wait for the joined text."""
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
    """The tokens as text in mid-sentence; a byte that is no text is a surrogate."""
    fused = False
    for step in steps:
        match step["type"]:
            case "Fuse":
                fused = True
            case "Strip" if not fused:  # afterwards, only the ends of the whole text
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
    """Tokens such as <0x0A> as the bytes they are."""
    sizes = np.fromiter(map(len, tokens), np.int64, len(tokens))
    for at in np.flatnonzero(sizes == 6).tolist():
        token = tokens[at]
        if token.startswith("<0x") and token.endswith(">"):
            try:
                tokens[at] = bytes([int(token[3:5], 16)]).decode("utf-8", "surrogateescape")
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
    """Tokens of WordPiece: one with the prefix continues a word, another begins one."""
    prefix = step["prefix"]
    found = [t.removeprefix(prefix) if t.startswith(prefix) else f" {t}" if t else "" for t in tokens]
    if step["cleanup"]:
        # Punctuation loses the space before it: which, the decoder knows.
        for at, token in enumerate(tokens):
            if token and not token.isalnum() and not token.startswith(prefix):
                found[at] = backend.decoder.decode(["a", token])[1:]
    return found


def _decode_with_tokenizer(tokenizer: Any, tokens: list[str]) -> list[str]:
    """What the tokenizer itself writes for each token after some text; the way for unknown kinds."""
    if not hasattr(tokenizer, "convert_tokens_to_string"):
        do = "pass a tokenizer of transformers or tokenizers"
        raise InputError("tokenizer", "must decode its tokens (convert_tokens_to_string)", tokenizer, do)
    lead = list(tokenizer.tokenize("abcdef")) if hasattr(tokenizer, "tokenize") else []
    start: str = tokenizer.convert_tokens_to_string(lead) if lead else ""
    found = []
    for token in tokens:
        text: str = tokenizer.convert_tokens_to_string([*lead, token]) if token else ""
        text = text.removeprefix(start)
        if len(token) == 1 and ord(token) < 256 and (not text or "\ufffd" in text):
            # A byte under the character of its number (ByT5), which is no text by itself.
            text = bytes([ord(token)]).decode("utf-8", "surrogateescape")
        found.append(text)
    return found

"""Two tokenizers for one text: the tokens of the one that stand for the same bytes as those of the other.

Text is handled as bytes, since a token may end inside a character. Special tokens are no text: they cut it
into segments, and one tokenizer's stands for the other's of the same name, or the same office.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from descant.tokenization.token_bytes import TokenBytes

__all__ = ["AlignedRow", "ByteTokenizer", "LookbehindWindows", "TokenTranslator", "shared_tokens"]

_MIN_COMMON_RUN = (
    2  # so many tokens in a row must be the same in two encodings for these to be one from there on
)


class LookbehindWindows(NamedTuple):
    """How far back text is encoded again when it has grown, in tokens of each tokenizer."""

    target: int = 10
    assistant: int = 10


class ByteTokenizer:
    """A tokenizer over bytes: what its tokens stand for, and how it writes a text."""

    def __init__(self, tokenizer: Any) -> None:
        vocabulary = TokenBytes.from_tokenizer(tokenizer)
        self.token_bytes: list[bytes] = vocabulary.bytes
        self.special_ids = vocabulary.special_ids | frozenset(
            getattr(tokenizer, "all_special_ids", None) or ()
        )
        self.bos_token_id: int | None = getattr(tokenizer, "bos_token_id", None)
        self.eos_token_id: int | None = getattr(tokenizer, "eos_token_id", None)
        self.encode = _make_encoder(tokenizer)
        self.prefix_ids = _prompt_prefix_ids(tokenizer)  # the tokens that it puts before any prompt
        self.leading_space = self.decode_bytes(self.encode("a")).removesuffix(
            b"a"
        )  # the space that it puts before a text
        if self.leading_space != b" ":  # a tokenizer that writes its own kind of "a"
            self.leading_space = b""
        self._id_to_token = getattr(tokenizer, "convert_ids_to_tokens", None) or getattr(
            tokenizer, "id_to_token", None
        )

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """What these tokens stand for, one after the other."""
        known = self.token_bytes
        return b"".join([known[one] for one in ids if 0 <= one < len(known)])

    def is_text(self, token: int) -> bool:
        """Whether a token stands for text."""
        return (
            token not in self.special_ids
            and 0 <= token < len(self.token_bytes)
            and bool(self.token_bytes[token])
        )

    def encode_bytes(self, data: bytes) -> tuple[list[int], bool]:
        """The tokens of a text, and whether they stand for all of it.

        A character that is not whole yet is written byte by byte, where there are such tokens.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(data)
        begun: bytes = decoder.getstate()[0]
        ids = self.encode(text) if text else []
        while begun:
            size = next((size for size in range(len(begun), 0, -1) if begun[:size] in self.id_by_bytes), 0)
            if not size:
                return ids, False
            ids.append(self.id_by_bytes[begun[:size]])
            begun = begun[size:]
        return ids, True

    @cached_property
    def id_by_bytes(self) -> dict[bytes, int]:
        """The token of text that stands for just these bytes; of several, one that is no byte by itself."""
        found: dict[bytes, int] = {}
        for at, text in enumerate(self.token_bytes):
            if not text or at in self.special_ids:
                continue
            if text in found and len(text) == 1 and self._is_byte_token(at):
                continue
            found[text] = at
        return found

    def _is_byte_token(self, at: int) -> bool:
        """Whether a token is written as the number of its byte, <0x0A>."""
        name = None if self._id_to_token is None else self._id_to_token(at)
        return isinstance(name, str) and len(name) == 6 and name.startswith("<0x")


@dataclass
class AlignedRow:
    """One row: the target's decided tokens, and the assistant's tokens for the same text."""

    target_ids: list[int] = field(default_factory=list)  # the target's
    assistant_ids: list[int] = field(default_factory=list)  # the assistant's
    target_segment_start: int = 0  # where the last segment of text begins among the tokens
    assistant_segment_start: int = 0  # and among the ids
    is_complete: bool = True  # whether the ids stand for all of the text

    def fork(self) -> AlignedRow:
        """The same row once more."""
        return AlignedRow(
            list(self.target_ids),
            list(self.assistant_ids),
            self.target_segment_start,
            self.assistant_segment_start,
            self.is_complete,
        )


class TokenTranslator:
    """What brings rows of the target before the assistant, and its guesses back."""

    def __init__(self, target: ByteTokenizer, assistant: ByteTokenizer) -> None:
        self.target, self.assistant = target, assistant
        self._special_to_assistant = _matching_special_ids(target, assistant)
        for one, other in (
            (target.bos_token_id, assistant.bos_token_id),
            (target.eos_token_id, assistant.eos_token_id),
        ):
            if one is not None and other is not None:
                self._special_to_assistant.setdefault(one, other)
        self._special_to_target = _matching_special_ids(assistant, target)
        if assistant.eos_token_id is not None and target.eos_token_id is not None:
            self._special_to_target[assistant.eos_token_id] = (
                target.eos_token_id
            )  # what ends the one's text ends the other's

    def new_row(self) -> AlignedRow:
        """A row that has read nothing."""
        ids = list(self.assistant.prefix_ids)
        return AlignedRow(assistant_ids=ids, assistant_segment_start=len(ids))

    # -------------------------------------------------------------------- there
    def append_tokens(self, reading: AlignedRow, tokens: Sequence[int], windows: LookbehindWindows) -> int:
        """Take further decided tokens of the target; how many ids at the start are as they were."""
        kept, run = len(reading.assistant_ids), list[int]()
        special = self.target.special_ids
        for token in tokens:
            if token not in special:
                run.append(token)
                continue
            if run:
                kept = min(kept, self._append_text(reading, run, windows))
                run = []
            self._append_special(reading, token)
        if run:
            kept = min(kept, self._append_text(reading, run, windows))
        return kept

    def _append_special(self, reading: AlignedRow, token: int) -> None:
        """Take a special token, after which a new segment begins."""
        same = self._special_to_assistant.get(token)
        if not reading.target_ids:
            if token == self.target.bos_token_id and self.assistant.bos_token_id is not None:
                same = self.assistant.bos_token_id
            if same in self.assistant.prefix_ids:
                same = None  # it begins so already
        reading.target_ids.append(token)
        if same is not None:
            reading.assistant_ids.append(same)
        reading.target_segment_start, reading.assistant_segment_start = (
            len(reading.target_ids),
            len(reading.assistant_ids),
        )
        reading.is_complete = True

    def _append_text(self, reading: AlignedRow, run: Sequence[int], windows: LookbehindWindows) -> int:
        """Take tokens of text; how many ids are as they were."""
        known = len(reading.target_ids)
        reading.target_ids += run
        behind, look = windows
        while reading.is_complete and (start := known - behind) > reading.target_segment_start:
            before = self.target.decode_bytes(reading.target_ids[start:known])
            found = self._find_splice(reading, before, self.target.decode_bytes(run), look)
            if found is not None:
                at, ids, reading.is_complete = found
                reading.assistant_ids[at:] = ids
                return at
            behind, look = 2 * behind, 2 * look
        text = self.target.decode_bytes(reading.target_ids[reading.target_segment_start :]).removeprefix(
            self.target.leading_space
        )
        reading.assistant_ids[reading.assistant_segment_start :], reading.is_complete = (
            self.assistant.encode_bytes(text)
        )
        return reading.assistant_segment_start

    def _find_splice(
        self, reading: AlignedRow, before: bytes, new: bytes, look: int
    ) -> tuple[int, list[int], bool] | None:
        """Where the ids of the text `before` go over into those of `before + new`, and how they go on.

        The longest common subsequence of two encodings of one text are the tokens that stand at the same
        bytes in both. The seam is behind the longest run of these, so that neither the beginning of the
        window, where a word may be cut, nor the end of what was there, which may go on, decides.
        """
        skip = _num_continuation_bytes(before)
        before = before[skip:]
        text = before + new
        ids, whole = self.assistant.encode_bytes(text)
        said = self.assistant.decode_bytes(ids)
        if not (whole and said.endswith(text)):
            return None
        known, places, place = self.assistant.token_bytes, dict[int, int](), len(text) - len(said)
        for at, one in enumerate(ids):
            places[place] = at
            place += len(known[one])
        old, place, run, best, seam = reading.assistant_ids, len(before), 0, 0, (0, 0)
        for at in range(len(old) - 1, max(reading.assistant_segment_start, len(old) - look) - 1, -1):
            piece = known[old[at]]
            place -= len(piece)
            if place < 0:
                break
            if not before.startswith(piece, place):
                return None  # what was there is not the text itself
            there = places.get(place, -1)
            run = run + 1 if there >= 0 and ids[there] == old[at] else 0
            if run == 1:
                end = (at + 1, there + 1)
            if run > best:
                best, seam = run, end
        return None if best < _MIN_COMMON_RUN else (seam[0], ids[seam[1] :], True)

    # -------------------------------------------------------------------- and back
    def to_target_tokens(
        self, reading: AlignedRow, guesses: Sequence[int], windows: LookbehindWindows
    ) -> list[int]:
        """The target's tokens for what the assistant guesses to follow a row."""
        text, end = b"", None
        for token in guesses:
            if not self.assistant.is_text(token):
                end = self._special_to_target.get(token)
                break
            text += self.assistant.token_bytes[token]
        if len(reading.assistant_ids) == reading.assistant_segment_start:
            text = text.removeprefix(self.assistant.leading_space)
        start = max(reading.target_segment_start, len(reading.target_ids) - windows.target)
        before = self.target.decode_bytes(reading.target_ids[start:])
        found = (
            self._encode_continuation(before, text, len(reading.target_ids) == reading.target_segment_start)
            if text
            else []
        )
        if found is None:
            return []
        said = self.target.decode_bytes(found) if end is not None else b""
        return [*found, end] if end is not None and said.endswith(text) else found

    def _encode_continuation(self, before: bytes, text: bytes, fresh: bool) -> list[int] | None:
        """The target's tokens for a text that begin just where `before` ends; None where none do."""
        whole = before + text
        skip = _num_continuation_bytes(before)
        while True:
            try:
                line = whole[skip:].decode()
                break
            except UnicodeDecodeError as error:
                bad = skip + error.start
                if bad >= len(before) or skip + error.end > len(before):
                    whole = whole[:bad]  # what is no character, or not yet, is not guessed
                else:
                    skip += error.end  # what was decided is none: begin behind it
        new = len(whole) - len(before)
        if new <= 0:
            return None
        ids = self.target.encode(line)
        said = self.target.decode_bytes(ids)
        if not said.endswith(whole[skip:]):
            return None
        wanted, place = 0 if fresh else len(said) - new, 0
        for at, one in enumerate(ids):
            if place == wanted:
                rest = ids[at:]
                return rest if all(self.target.is_text(one) for one in rest) else None
            place += len(self.target.token_bytes[one])
        return None


def shared_tokens(target: ByteTokenizer, assistant: ByteTokenizer) -> dict[int, int]:
    """The tokens that both have: the target's id by the assistant's, one to one.

    Tokens of text are the same where their bytes are, special ones where their names are; ends are ends.
    """
    same = {
        at: target.id_by_bytes[text]
        for text, at in assistant.id_by_bytes.items()
        if text in target.id_by_bytes
    } | _matching_special_ids(assistant, target)
    one, other = assistant.eos_token_id, target.eos_token_id
    if one is not None and other is not None and one not in same and other not in same.values():
        same[one] = other
    return same


def _matching_special_ids(one: ByteTokenizer, other: ByteTokenizer) -> dict[int, int]:
    """The special tokens of `other` that have the names of special tokens of `one`."""
    names = {other.token_bytes[at]: at for at in sorted(other.special_ids) if at < len(other.token_bytes)}
    return {
        at: names[one.token_bytes[at]]
        for at in sorted(one.special_ids)
        if at < len(one.token_bytes) and one.token_bytes[at] in names
    }


def _num_continuation_bytes(text: bytes) -> int:
    """How many bytes at the start belong to a character that began before."""
    return next((at for at, byte in enumerate(text[:3]) if not 0x80 <= byte < 0xC0), min(len(text), 3))


def _make_encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    """What writes text in a tokenizer's tokens, special ones neither added nor read out of it."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not (hasattr(backend, "model") and hasattr(backend, "get_added_tokens_decoder")):
        return lambda text: [int(one) for one in tokenizer(text, add_special_tokens=False)["input_ids"]]
    added = backend.get_added_tokens_decoder()
    extra = [token for _, token in sorted(added.items()) if not token.special]
    # The same model without its special tokens, and without the padding and truncation that it may be set to.
    plain = type(backend)(backend.model)
    if backend.normalizer is not None:
        plain.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        plain.pre_tokenizer = backend.pre_tokenizer
    if extra:
        plain.add_tokens(extra)
    # A token outside the model gets a number anew; its text tells which it is.
    number = {plain.token_to_id(token.content): at for at, token in added.items() if not token.special}
    number = {mine: at for mine, at in number.items() if mine != at}
    if not number:
        return lambda text: list(plain.encode(text, add_special_tokens=False).ids)
    return lambda text: [number.get(one, one) for one in plain.encode(text, add_special_tokens=False).ids]


def _prompt_prefix_ids(tokenizer: Any) -> list[int]:
    """The tokens that a tokenizer puts before a prompt."""
    if callable(tokenizer):
        bare, full = (tokenizer("a", add_special_tokens=more)["input_ids"] for more in (False, True))
    else:
        bare, full = (tokenizer.encode("a", add_special_tokens=more).ids for more in (False, True))
    bare, full = list(bare), list(full)
    at = next((at for at in range(len(full)) if full[at : at + len(bare)] == bare), 0)
    return [int(one) for one in full[:at]]

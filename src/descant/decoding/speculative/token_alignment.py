"""Alignment of two tokenizers over one text: tokens that stand for the same bytes.

Text is handled as bytes, since a token may end inside a character. Special tokens are not text: they split
it into segments, and map to the other tokenizer's token of the same name or role.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from descant.tokenization.token_bytes import TokenBytes

_MIN_COMMON_RUN = 2  # consecutive equal tokens needed to splice two encodings


class LookbehindWindows(NamedTuple):
    """The number of last tokens of a grown text that are encoded again, per tokenizer."""

    target: int = 10
    assistant: int = 10


class ByteTokenizer:
    """A tokenizer over bytes: the bytes of its tokens, and the tokens of a text."""

    def __init__(self, tokenizer: Any) -> None:
        vocabulary = TokenBytes.from_tokenizer(tokenizer)
        self.token_bytes: list[bytes] = vocabulary.bytes
        self.special_ids = vocabulary.special_ids | frozenset(
            getattr(tokenizer, "all_special_ids", None) or ()
        )
        self.bos_token_id: int | None = getattr(tokenizer, "bos_token_id", None)
        self.eos_token_id: int | None = getattr(tokenizer, "eos_token_id", None)
        self.encode = _make_encoder(tokenizer)
        self.prefix_ids = _prompt_prefix_ids(tokenizer)  # tokens added before every prompt
        # The space that the tokenizer adds before a text.
        self.leading_space = self.decode_bytes(self.encode("a")).removesuffix(b"a")
        if self.leading_space != b" ":  # the tokenizer changes the text
            self.leading_space = b""
        self._id_to_token = getattr(tokenizer, "convert_ids_to_tokens", None) or getattr(
            tokenizer, "id_to_token", None
        )

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The concatenated bytes of these tokens."""
        token_bytes = self.token_bytes
        return b"".join([token_bytes[token] for token in ids if 0 <= token < len(token_bytes)])

    def is_text(self, token: int) -> bool:
        """Whether a token stands for text."""
        return (
            token not in self.special_ids
            and 0 <= token < len(self.token_bytes)
            and bool(self.token_bytes[token])
        )

    def encode_bytes(self, data: bytes) -> tuple[list[int], bool]:
        """The tokens of a text, and whether they cover all of it.

        An incomplete character is encoded byte by byte, if the vocabulary has such tokens.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(data)
        incomplete: bytes = decoder.getstate()[0]
        ids = self.encode(text) if text else []
        while incomplete:
            size = next(
                (size for size in range(len(incomplete), 0, -1) if incomplete[:size] in self.id_by_bytes), 0
            )
            if not size:
                return ids, False
            ids.append(self.id_by_bytes[incomplete[:size]])
            incomplete = incomplete[size:]
        return ids, True

    @cached_property
    def id_by_bytes(self) -> dict[bytes, int]:
        """The text token with exactly these bytes; of several, one that is not a byte token."""
        ids: dict[bytes, int] = {}
        for token, text in enumerate(self.token_bytes):
            if not text or token in self.special_ids:
                continue
            if text in ids and len(text) == 1 and self._is_byte_token(token):
                continue
            ids[text] = token
        return ids

    def _is_byte_token(self, token: int) -> bool:
        """Whether a token is named after its byte, such as <0x0A>."""
        name = None if self._id_to_token is None else self._id_to_token(token)
        return isinstance(name, str) and len(name) == 6 and name.startswith("<0x")


@dataclass
class AlignedRow:
    """One row: the target's committed tokens, and the assistant's tokens for the same text."""

    target_ids: list[int] = field(default_factory=list)
    assistant_ids: list[int] = field(default_factory=list)
    target_segment_start: int = 0  # start of the last text segment in `target_ids`
    assistant_segment_start: int = 0  # start of the last text segment in `assistant_ids`
    is_complete: bool = True  # whether `assistant_ids` cover all of the text

    def fork(self) -> AlignedRow:
        """An independent copy."""
        return replace(self, target_ids=list(self.target_ids), assistant_ids=list(self.assistant_ids))


class TokenTranslator:
    """Translates the target's rows to assistant tokens, and drafts back to target tokens."""

    def __init__(self, target: ByteTokenizer, assistant: ByteTokenizer) -> None:
        self.target, self.assistant = target, assistant
        self._special_to_assistant = _matching_special_ids(target, assistant)
        for name in ("bos_token_id", "eos_token_id"):
            target_id, assistant_id = getattr(target, name), getattr(assistant, name)
            if target_id is not None and assistant_id is not None:
                self._special_to_assistant.setdefault(target_id, assistant_id)
        self._special_to_target = _matching_special_ids(assistant, target)
        if assistant.eos_token_id is not None and target.eos_token_id is not None:
            self._special_to_target[assistant.eos_token_id] = target.eos_token_id

    def new_row(self) -> AlignedRow:
        """An empty row."""
        ids = list(self.assistant.prefix_ids)
        return AlignedRow(assistant_ids=ids, assistant_segment_start=len(ids))

    # -------------------------------------------------------------------- target to assistant
    def append_tokens(self, row: AlignedRow, tokens: Sequence[int], windows: LookbehindWindows) -> int:
        """Append committed target tokens; returns how many leading assistant ids are unchanged."""
        num_unchanged, text_tokens = len(row.assistant_ids), list[int]()
        special_ids = self.target.special_ids
        for token in tokens:
            if token not in special_ids:
                text_tokens.append(token)
                continue
            if text_tokens:
                num_unchanged = min(num_unchanged, self._append_text(row, text_tokens, windows))
                text_tokens = []
            self._append_special(row, token)
        if text_tokens:
            num_unchanged = min(num_unchanged, self._append_text(row, text_tokens, windows))
        return num_unchanged

    def _append_special(self, row: AlignedRow, token: int) -> None:
        """Append a special token, which starts a new segment."""
        assistant_id = self._special_to_assistant.get(token)
        if not row.target_ids:
            if token == self.target.bos_token_id and self.assistant.bos_token_id is not None:
                assistant_id = self.assistant.bos_token_id
            if assistant_id in self.assistant.prefix_ids:
                assistant_id = None  # already in the prefix
        row.target_ids.append(token)
        if assistant_id is not None:
            row.assistant_ids.append(assistant_id)
        row.target_segment_start, row.assistant_segment_start = len(row.target_ids), len(row.assistant_ids)
        row.is_complete = True

    def _append_text(self, row: AlignedRow, tokens: Sequence[int], windows: LookbehindWindows) -> int:
        """Append text tokens; returns how many leading assistant ids are unchanged."""
        num_known = len(row.target_ids)
        row.target_ids += tokens
        target_window, assistant_window = windows
        while row.is_complete and (start := num_known - target_window) > row.target_segment_start:
            before = self.target.decode_bytes(row.target_ids[start:num_known])
            splice = self._find_splice(row, before, self.target.decode_bytes(tokens), assistant_window)
            if splice is not None:
                position, ids, row.is_complete = splice
                row.assistant_ids[position:] = ids
                return position
            target_window, assistant_window = 2 * target_window, 2 * assistant_window
        text = self.target.decode_bytes(row.target_ids[row.target_segment_start :]).removeprefix(
            self.target.leading_space
        )
        row.assistant_ids[row.assistant_segment_start :], row.is_complete = self.assistant.encode_bytes(text)
        return row.assistant_segment_start

    def _find_splice(
        self, row: AlignedRow, before: bytes, new: bytes, assistant_window: int
    ) -> tuple[int, list[int], bool] | None:
        """Where the ids of `before` continue as those of `before + new`: (position, new ids, is complete).

        Tokens at the same bytes in both encodings are common. The splice is after the longest run of common
        tokens, so neither the start of the window, which may cut a word, nor the end of the old text, which
        may continue, decides it.
        """
        skip = _num_continuation_bytes(before)
        before = before[skip:]
        text = before + new
        ids, is_complete = self.assistant.encode_bytes(text)
        decoded = self.assistant.decode_bytes(ids)
        if not (is_complete and decoded.endswith(text)):
            return None
        token_bytes, index_by_byte = self.assistant.token_bytes, dict[int, int]()
        byte_position = len(text) - len(decoded)
        for index, token in enumerate(ids):
            index_by_byte[byte_position] = index
            byte_position += len(token_bytes[token])
        old_ids, byte_position, run, best_run, splice = row.assistant_ids, len(before), 0, 0, (0, 0)
        for index in range(
            len(old_ids) - 1, max(row.assistant_segment_start, len(old_ids) - assistant_window) - 1, -1
        ):
            old_bytes = token_bytes[old_ids[index]]
            byte_position -= len(old_bytes)
            if byte_position < 0:
                break
            if not before.startswith(old_bytes, byte_position):
                return None  # the old ids do not spell the text
            new_index = index_by_byte.get(byte_position, -1)
            run = run + 1 if new_index >= 0 and ids[new_index] == old_ids[index] else 0
            if run == 1:
                run_end = (index + 1, new_index + 1)
            if run > best_run:
                best_run, splice = run, run_end
        return None if best_run < _MIN_COMMON_RUN else (splice[0], ids[splice[1] :], True)

    # -------------------------------------------------------------------- assistant to target
    def to_target_tokens(
        self, row: AlignedRow, drafts: Sequence[int], windows: LookbehindWindows
    ) -> list[int]:
        """The target tokens for the assistant's drafts after a row."""
        text, end_token = b"", None
        for token in drafts:
            if not self.assistant.is_text(token):
                end_token = self._special_to_target.get(token)
                break
            text += self.assistant.token_bytes[token]
        if len(row.assistant_ids) == row.assistant_segment_start:
            text = text.removeprefix(self.assistant.leading_space)
        start = max(row.target_segment_start, len(row.target_ids) - windows.target)
        before = self.target.decode_bytes(row.target_ids[start:])
        target_ids = (
            self._encode_continuation(before, text, len(row.target_ids) == row.target_segment_start)
            if text
            else []
        )
        if target_ids is None:
            return []
        decoded = self.target.decode_bytes(target_ids) if end_token is not None else b""
        return [*target_ids, end_token] if end_token is not None and decoded.endswith(text) else target_ids

    def _encode_continuation(self, before: bytes, text: bytes, at_segment_start: bool) -> list[int] | None:
        """The target tokens of `text` that begin exactly where `before` ends; None if there are none."""
        data = before + text
        skip = _num_continuation_bytes(before)
        while True:
            try:
                decodable = data[skip:].decode()
                break
            except UnicodeDecodeError as error:
                bad_position = skip + error.start
                if bad_position >= len(before) or skip + error.end > len(before):
                    data = data[:bad_position]  # do not draft invalid or incomplete characters
                else:
                    skip += error.end  # invalid bytes in the committed text: start after them
        num_new = len(data) - len(before)
        if num_new <= 0:
            return None
        ids = self.target.encode(decodable)
        decoded = self.target.decode_bytes(ids)
        if not decoded.endswith(data[skip:]):
            return None
        start, byte_position = 0 if at_segment_start else len(decoded) - num_new, 0
        for index, token in enumerate(ids):
            if byte_position == start:
                continuation = ids[index:]
                return continuation if all(self.target.is_text(token) for token in continuation) else None
            byte_position += len(self.target.token_bytes[token])
        return None


def shared_tokens(target: ByteTokenizer, assistant: ByteTokenizer) -> dict[int, int]:
    """The tokens of both vocabularies: target id by assistant id, one to one.

    Text tokens match by their bytes, special tokens by their names, end tokens with each other.
    """
    target_by_assistant = {
        token: target.id_by_bytes[text]
        for text, token in assistant.id_by_bytes.items()
        if text in target.id_by_bytes
    } | _matching_special_ids(assistant, target)
    assistant_eos, target_eos = assistant.eos_token_id, target.eos_token_id
    if (
        assistant_eos is not None
        and target_eos is not None
        and assistant_eos not in target_by_assistant
        and target_eos not in target_by_assistant.values()
    ):
        target_by_assistant[assistant_eos] = target_eos
    return target_by_assistant


def _matching_special_ids(source: ByteTokenizer, target: ByteTokenizer) -> dict[int, int]:
    """Special tokens of `source` mapped to those of `target` with the same name."""
    names = {
        target.token_bytes[token]: token
        for token in sorted(target.special_ids)
        if token < len(target.token_bytes)
    }
    return {
        token: names[source.token_bytes[token]]
        for token in sorted(source.special_ids)
        if token < len(source.token_bytes) and source.token_bytes[token] in names
    }


def _num_continuation_bytes(text: bytes) -> int:
    """The number of leading bytes that belong to a character that began before."""
    return next((index for index, byte in enumerate(text[:3]) if not 0x80 <= byte < 0xC0), min(len(text), 3))


def _make_encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    """A function that encodes text, neither adding nor parsing special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not (hasattr(backend, "model") and hasattr(backend, "get_added_tokens_decoder")):
        return lambda text: [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
    added = backend.get_added_tokens_decoder()
    extra = [token for _, token in sorted(added.items()) if not token.special]
    # The same model without special tokens, padding and truncation.
    plain = type(backend)(backend.model)
    if backend.normalizer is not None:
        plain.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        plain.pre_tokenizer = backend.pre_tokenizer
    if extra:
        plain.add_tokens(extra)
    # Added tokens get new ids; map them back by their text.
    id_map = {
        plain.token_to_id(token.content): original for original, token in added.items() if not token.special
    }
    id_map = {own: original for own, original in id_map.items() if own != original}
    if not id_map:
        return lambda text: list(plain.encode(text, add_special_tokens=False).ids)
    return lambda text: [
        id_map.get(token, token) for token in plain.encode(text, add_special_tokens=False).ids
    ]


def _prompt_prefix_ids(tokenizer: Any) -> list[int]:
    """The tokens that a tokenizer adds before a prompt."""
    bare, full = (
        list(
            tokenizer("a", add_special_tokens=special)["input_ids"]
            if callable(tokenizer)
            else tokenizer.encode("a", add_special_tokens=special).ids
        )
        for special in (False, True)
    )
    index = next((index for index in range(len(full)) if full[index : index + len(bare)] == bare), 0)
    return [int(token) for token in full[:index]]

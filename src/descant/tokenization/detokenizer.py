"""Incremental detokenization: the text of a growing token sequence, in whole characters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

from descant.tokenization.stop_strings import StopStringBuffer

_REPLACEMENT_CHAR = "\ufffd"  # decoders write it for invalid or incomplete UTF-8
_MAX_PARTIAL_BYTES = 3  # of an incomplete UTF-8 character; a token has at least one
_CONTEXT_TOKENS = 8  # tokens kept as context when the window is trimmed
_WINDOW_TOKENS = 24  # trim the window at this length
_MAX_WINDOW_TOKENS = 64  # trim it at this length even if the text of the rest changes

# Ends of a text that `clean_up_tokenization_spaces` may still join with the next: " ", " '", " n'", " 'v".
_CLEANUP_TAIL = re.compile(r" (?:n ?'?|'[vr]?)?\Z")


class IncrementalDetokenizer:
    """The text of one growing token sequence: `put` returns text that is final, `end` the rest.

    The pieces add up to `tokenizer.decode(ids, **decode_kwargs)`, or with `prompt_ids` to the text that the
    ids add to the prompt's (which keeps sentencepiece's leading space). A character of several tokens is
    returned whole; invalid bytes become U+FFFD. With `stop_strings`, text that may be the beginning of one is
    held back, and `matched_string` is the one that ended the text. The first `skip` characters are omitted.

    Each `put` decodes only the last few tokens, so its cost does not depend on the length.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        prompt_ids: Iterable[int] = (),
        stop_strings: str | Sequence[str] = (),
        skip: int = 0,
        **decode_kwargs: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self.decode_kwargs = decode_kwargs
        cleanup = decode_kwargs.get("clean_up_tokenization_spaces")
        self._cleans_up_spaces = bool(
            getattr(tokenizer, "clean_up_tokenization_spaces", False) if cleanup is None else cleanup
        )
        self._stop_buffer = StopStringBuffer(stop_strings) if stop_strings else None
        self._skip_chars = skip  # characters still to omit
        self._window_ids: list[int] = []  # the last tokens
        self._window_text = ""  # the text of the window
        self._emitted_text = ""  # the prefix of the window's text that was returned
        self._num_emitted = 0  # tokens of the window whose text was returned completely
        self._num_prompt_ids = 0  # tokens of the prompt in the first window
        # The text of these tokens, while it ends in a character that the next token may complete.
        self._partial_prompt_text: str | None = None
        self._load_prompt(list(prompt_ids))

    @property
    def has_partial_character(self) -> bool:
        """Whether the prompt ends in an incomplete character and no token has followed."""
        return self._partial_prompt_text is not None

    @property
    def matched_string(self) -> str | None:
        """The stop string that ended the text."""
        return None if self._stop_buffer is None else self._stop_buffer.matched_string

    def put(self, ids: Iterable[int]) -> str:
        """Add tokens and return the text that is now final."""
        new = list(ids)
        text = self._decode(self._window_ids + new)
        if text == self._window_text and self.decode_kwargs.get("skip_special_tokens"):
            new = [token for token in new if not self._is_skipped_special(token)]
        self._window_ids += new
        self._window_text = text
        if self._partial_prompt_text is not None:
            if (
                text.endswith(_REPLACEMENT_CHAR)
                and len(self._window_ids) <= self._num_prompt_ids + _MAX_PARTIAL_BYTES
            ):
                return ""
            self._emitted_text, self._partial_prompt_text = self._known_prefix(text), None
        final = self._advance(text)
        if len(self._window_ids) > _WINDOW_TOKENS:
            final += self._trim_window()
        final = self._drop_skipped(final)
        return final if self._stop_buffer is None else self._stop_buffer.feed(final)

    def end(self) -> str:
        """The remaining text; no token may follow."""
        text = self._window_text
        known = self._known_prefix(text)
        new = (
            text[len(known) :]
            if text.startswith(known)
            else self._decode(self._window_ids[self._num_emitted :])
        )
        self._window_ids, self._window_text, self._emitted_text = [], "", ""
        self._num_emitted, self._partial_prompt_text = 0, None
        new = self._drop_skipped(new)
        return new if self._stop_buffer is None else self._stop_buffer.feed(new) + self._stop_buffer.flush()

    def restart(self, context_ids: Iterable[int]) -> None:
        """Go on after `end`, behind these tokens."""
        self._num_prompt_ids = 0
        self._load_prompt(list(context_ids))

    def _drop_skipped(self, text: str) -> str:
        """The text without characters that are still to omit."""
        skip = min(self._skip_chars, len(text))
        self._skip_chars -= skip
        return text[skip:]

    # -------------------------------------------------------------------- final text
    def _advance(self, text: str) -> str:
        """The newly final text, where `text` is that of the window."""
        result = self._final_text(text)
        if result is None and self._num_emitted:
            # Some decoders replace a whole run of bytes if one is invalid, which changes text that was
            # returned before: continue after the tokens of that text.
            self._window_ids = self._window_ids[self._num_emitted :]
            self._window_text, self._emitted_text, self._num_emitted = self._decode(self._window_ids), "", 0
            result = self._final_text(self._window_text)
        final, count = result or (text, 0)
        new = final[len(self._emitted_text) :]
        self._emitted_text = final
        self._num_emitted = max(self._num_emitted, count)
        return new

    def _final_text(self, text: str) -> tuple[str, int] | None:
        """The window's final text and the number of tokens it covers; None if returned text has changed."""
        size = len(self._window_ids)
        if not text.endswith(_REPLACEMENT_CHAR):
            final = _CLEANUP_TAIL.sub("", text) if self._cleans_up_spaces else text
            return (final, size if final == text else 0) if final.startswith(self._emitted_text) else None
        shorter = [text]
        options = [(text.rstrip(_REPLACEMENT_CHAR), 0)]
        for count in range(size - 1, max(size - _MAX_PARTIAL_BYTES, self._num_emitted) - 1, -1):
            shorter.append(self._decode(self._window_ids[:count]))
            if not shorter[-1].endswith(_REPLACEMENT_CHAR):
                options.append((shorter[-1], count))
                break
        else:
            # More tokens than an incomplete character can have: the bytes before are invalid.
            shortest = min(shorter, key=len)
            options.append((shortest, size + 1 - len(shorter) if shortest == shorter[-1] else 0))
        consistent = [option for option in options if option[0].startswith(self._emitted_text)]
        return max(consistent, key=lambda option: len(option[0]), default=None)

    # -------------------------------------------------------------------- the window
    def _load_prompt(self, prompt: list[int]) -> None:
        """Use the end of a prompt as context, with at least one whole character if there is one."""
        if not prompt:
            return
        size = _CONTEXT_TOKENS
        while True:
            self._window_ids = prompt[-size:]
            self._window_text = self._emitted_text = text = self._decode(self._window_ids)
            self._num_prompt_ids = self._num_emitted = len(self._window_ids)
            if text.endswith(_REPLACEMENT_CHAR):
                self._partial_prompt_text, self._emitted_text, self._num_emitted = text, "", 0
                self._emitted_text, self._num_emitted = self._final_text(text) or ("", 0)
            if (self._emitted_text and _REPLACEMENT_CHAR not in self._emitted_text) or size >= min(
                len(prompt), _MAX_WINDOW_TOKENS
            ):
                return
            self._partial_prompt_text = None
            size *= 2

    def _known_prefix(self, text: str) -> str:
        """The prefix of the window's text that was returned or belongs to the prompt.

        A prompt may end inside a character, which is then the first of the new text, or in invalid bytes,
        which belong to the prompt.
        """
        if self._partial_prompt_text is None:
            return self._emitted_text
        is_equal = (first == second for first, second in zip(self._partial_prompt_text, text, strict=False))
        common = self._partial_prompt_text[: sum(takewhile(bool, is_equal))]
        return max(common, self._emitted_text, key=len) if text.startswith(self._emitted_text) else common

    def _trim_window(self) -> str:
        """Drop the oldest tokens if the text of the rest does not change; returns text if forced."""
        text = self._window_text
        if text.startswith(self._emitted_text):
            num_pending = len(text) - len(self._emitted_text)
            for keep in range(_CONTEXT_TOKENS, _CONTEXT_TOKENS + _MAX_PARTIAL_BYTES + 1):
                short = self._decode(self._window_ids[-keep:])
                if len(short) > num_pending and text.endswith(short):
                    self._keep_last(keep, short, num_pending)
                    return ""
        if len(self._window_ids) <= _MAX_WINDOW_TOKENS:
            return ""
        new = text[len(self._emitted_text) :]
        self._keep_last(_CONTEXT_TOKENS, self._decode(self._window_ids[-_CONTEXT_TOKENS:]), 0)
        return new

    def _keep_last(self, count: int, text: str, num_pending: int) -> None:
        """Keep the last tokens; all of their text but `num_pending` characters was returned."""
        self._num_emitted = max(self._num_emitted - (len(self._window_ids) - count), 0)
        self._window_ids, self._window_text = self._window_ids[-count:], text
        self._emitted_text = text[: len(text) - num_pending]

    def _is_skipped_special(self, token: int) -> bool:
        """Whether decoding skips this token as a special token."""
        unskipped = {**self.decode_kwargs, "skip_special_tokens": False}
        return not self._decode([token]) and bool(self.tokenizer.decode([token], **unskipped))

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, **self.decode_kwargs)) if ids else ""

"""The text of a growing token sequence, piece by piece and never a broken character."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

from descant.tokenization.stop_strings import StopStringBuffer

__all__ = ["IncrementalDetokenizer"]

_REPLACEMENT_CHAR = "\ufffd"  # what decoders show for bytes that are no character, or not yet
_MAX_PARTIAL_BYTES = 3  # an unfinished UTF-8 character has at most so many bytes, and a token at least one
_CONTEXT_TOKENS = 8  # tokens that stay as context when the window is cut
_WINDOW_TOKENS = 24  # tokens at which the window is cut
_MAX_WINDOW_TOKENS = 64  # tokens at which it is cut even where no cut is clean

# Ends of a text that `clean_up_tokenization_spaces` may still join to what follows: " ", " '", " n'", " 'v".
_CLEANUP_TAIL = re.compile(r" (?:n ?'?|'[vr]?)?\Z")


class IncrementalDetokenizer:
    """The text of one token sequence as it grows: `put` gives what is final, `end` the rest.

    The pieces add up to `tokenizer.decode(ids, **decode_kwargs)` of all ids put, or with `prompt_ids` to what
    these add to the prompt's text (so that sentencepiece's leading space is there). A character of several
    tokens comes whole; bytes that never become one come out as U+FFFD. With `stop_strings`, text that may
    still become one is held back, and `matched` names the one at which the text ended. The first `skip`
    characters are left out.

    Only the last few tokens are decoded at each `put`, so a token costs the same at any length.
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
        cleans = decode_kwargs.get("clean_up_tokenization_spaces")
        self._cleans_up_spaces = bool(
            getattr(tokenizer, "clean_up_tokenization_spaces", False) if cleans is None else cleans
        )
        self._stop_buffer = StopStringBuffer(stop_strings) if stop_strings else None
        self._skip_chars = skip  # characters that the reader has already
        self._window_ids: list[int] = []  # the window: the last tokens put
        self._window_text = ""  # its text
        self._emitted_text = ""  # what was given out of the window's text: always its beginning
        self._num_emitted = 0  # how many of the window's tokens `_text` is the whole text of
        self._num_prompt_ids = 0  # how many tokens of the prompt the window began with
        self._partial_prompt_text: str | None = (
            None  # their text, while it ends in what the next token may mend
        )
        self._load_prompt(list(prompt_ids))

    @property
    def has_partial_character(self) -> bool:
        """Whether the prompt ends in what may be a character's first bytes, and nothing has followed."""
        return self._partial_prompt_text is not None

    @property
    def matched_string(self) -> str | None:
        """The stop string at which the text ended."""
        return None if self._stop_buffer is None else self._stop_buffer.matched_string

    def put(self, ids: Iterable[int]) -> str:
        """Take further tokens; the text that is now final."""
        new = list(ids)
        text = self._decode(self._window_ids + new)
        if text == self._window_text and self.decode_kwargs.get("skip_special_tokens"):
            new = [one for one in new if not self._is_skipped_special(one)]
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
        """The rest of the text, no token following."""
        text = self._window_text
        begun = self._known_prefix(text)
        new = (
            text[len(begun) :]
            if text.startswith(begun)
            else self._decode(self._window_ids[self._num_emitted :])
        )
        (
            self._window_ids,
            self._window_text,
            self._emitted_text,
            self._num_emitted,
            self._partial_prompt_text,
        ) = [], "", "", 0, None
        new = self._drop_skipped(new)
        return new if self._stop_buffer is None else self._stop_buffer.feed(new) + self._stop_buffer.flush()

    def _drop_skipped(self, text: str) -> str:
        """The text but for what the reader has already."""
        skip = min(self._skip_chars, len(text))
        self._skip_chars -= skip
        return text[skip:]

    # -------------------------------------------------------------------- what is final
    def _advance(self, text: str) -> str:
        """What has become final, `text` being the window's."""
        found = self._final_text(text)
        if found is None and self._num_emitted:
            # A decoder that shows a whole run of bytes as broken when one of them is takes back characters
            # that were given out already: go on behind them.
            self._window_ids = self._window_ids[self._num_emitted :]
            self._window_text, self._emitted_text, self._num_emitted = self._decode(self._window_ids), "", 0
            found = self._final_text(self._window_text)
        final, count = found or (text, 0)
        new = final[len(self._emitted_text) :]
        self._emitted_text = final
        self._num_emitted = max(self._num_emitted, count)
        return new

    def _final_text(self, text: str) -> tuple[str, int] | None:
        """The window's final text and how many tokens it is the whole text of; None where it went back."""
        size = len(self._window_ids)
        if not text.endswith(_REPLACEMENT_CHAR):
            final = _CLEANUP_TAIL.sub("", text) if self._cleans_up_spaces else text
            return (final, size if final == text else 0) if final.startswith(self._emitted_text) else None
        shorter = [text]
        found = [(text.rstrip(_REPLACEMENT_CHAR), 0)]
        for count in range(size - 1, max(size - _MAX_PARTIAL_BYTES, self._num_emitted) - 1, -1):
            shorter.append(self._decode(self._window_ids[:count]))
            if not shorter[-1].endswith(_REPLACEMENT_CHAR):
                found.append((shorter[-1], count))
                break
        else:
            # Nothing within reach was whole, so what came before is broken for good.
            least = min(shorter, key=len)
            found.append((least, size + 1 - len(shorter) if least == shorter[-1] else 0))
        fits = [one for one in found if one[0].startswith(self._emitted_text)]
        return max(fits, key=lambda one: len(one[0]), default=None)

    # -------------------------------------------------------------------- the window
    def _load_prompt(self, prompt: list[int]) -> None:
        """Take the end of a prompt as context, whole characters of it where there are any."""
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
        """What of the window's text has been given out, or was the prompt's.

        A prompt may end within a character, which then is the first one of the new text; or in bytes that
        nothing mends, which are the prompt's own.
        """
        if self._partial_prompt_text is None:
            return self._emitted_text
        alike = (one == other for one, other in zip(self._partial_prompt_text, text, strict=False))
        common = self._partial_prompt_text[: sum(takewhile(bool, alike))]
        return max(common, self._emitted_text, key=len) if text.startswith(self._emitted_text) else common

    def _trim_window(self) -> str:
        """Forget the window's oldest tokens where the rest reads the same without; text let go unjudged."""
        text = self._window_text
        if text.startswith(self._emitted_text):
            held = len(text) - len(self._emitted_text)
            for keep in range(_CONTEXT_TOKENS, _CONTEXT_TOKENS + _MAX_PARTIAL_BYTES + 1):
                short = self._decode(self._window_ids[-keep:])
                if len(short) > held and text.endswith(short):
                    self._keep_last(keep, short, held)
                    return ""
        if len(self._window_ids) <= _MAX_WINDOW_TOKENS:
            return ""
        new = text[len(self._emitted_text) :]
        self._keep_last(_CONTEXT_TOKENS, self._decode(self._window_ids[-_CONTEXT_TOKENS:]), 0)
        return new

    def _keep_last(self, count: int, text: str, held: int) -> None:
        """Keep the last tokens, whose text is given but for so many characters not given out yet."""
        self._num_emitted = max(self._num_emitted - (len(self._window_ids) - count), 0)
        self._window_ids, self._window_text, self._emitted_text = (
            self._window_ids[-count:],
            text,
            text[: len(text) - held],
        )

    def _is_skipped_special(self, token: int) -> bool:
        """Whether decoding leaves out this token, as a special one."""
        alone = {**self.decode_kwargs, "skip_special_tokens": False}
        return not self._decode([token]) and bool(self.tokenizer.decode([token], **alone))

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, **self.decode_kwargs)) if ids else ""

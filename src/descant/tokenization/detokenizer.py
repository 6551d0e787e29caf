"""The text of a growing token sequence, piece by piece and never a broken character."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

from descant.tokenization.stop_strings import Holdback

__all__ = ["TextStream"]

_LOST = "\ufffd"  # what decoders show for bytes that are no character, or not yet
_BYTES = 3  # an unfinished UTF-8 character has at most so many bytes, and a token at least one
_KEEP = 8  # tokens that stay as context when the window is cut
_FULL = 24  # tokens at which the window is cut
_OVERFULL = 64  # tokens at which it is cut even where no cut is clean

# Ends of a text that `clean_up_tokenization_spaces` may still join to what follows: " ", " '", " n'", " 'v".
_UNCLEANED = re.compile(r" (?:n ?'?|'[vr]?)?\Z")


class TextStream:
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
        self._cleans = bool(
            getattr(tokenizer, "clean_up_tokenization_spaces", False) if cleans is None else cleans
        )
        self._hold = Holdback(stop_strings) if stop_strings else None
        self._skip = skip  # characters that the reader has already
        self._ids: list[int] = []  # the window: the last tokens put
        self._seen = ""  # its text
        self._text = ""  # what was given out of the window's text: always its beginning
        self._done = 0  # how many of the window's tokens `_text` is the whole text of
        self._context = 0  # how many tokens of the prompt the window began with
        self._before: str | None = None  # their text, while it ends in what the next token may mend
        self._begin(list(prompt_ids))

    @property
    def mends(self) -> bool:
        """Whether the prompt ends in what may be a character's first bytes, and nothing has followed."""
        return self._before is not None

    @property
    def matched(self) -> str | None:
        """The stop string at which the text ended."""
        return None if self._hold is None else self._hold.matched

    def put(self, ids: Iterable[int]) -> str:
        """Take further tokens; the text that is now final."""
        new = list(ids)
        text = self._decoded(self._ids + new)
        if text == self._seen and self.decode_kwargs.get("skip_special_tokens"):
            new = [one for one in new if not self._skipped(one)]
        self._ids += new
        self._seen = text
        if self._before is not None:
            if text.endswith(_LOST) and len(self._ids) <= self._context + _BYTES:
                return ""
            self._text, self._before = self._begun(text), None
        final = self._advanced(text)
        if len(self._ids) > _FULL:
            final += self._cut()
        final = self._unread(final)
        return final if self._hold is None else self._hold.feed(final)

    def end(self) -> str:
        """The rest of the text, no token following."""
        text = self._seen
        begun = self._begun(text)
        new = text[len(begun) :] if text.startswith(begun) else self._decoded(self._ids[self._done :])
        self._ids, self._seen, self._text, self._done, self._before = [], "", "", 0, None
        new = self._unread(new)
        return new if self._hold is None else self._hold.feed(new) + self._hold.flush()

    def _unread(self, text: str) -> str:
        """The text but for what the reader has already."""
        skip = min(self._skip, len(text))
        self._skip -= skip
        return text[skip:]

    # -------------------------------------------------------------------- what is final
    def _advanced(self, text: str) -> str:
        """What has become final, `text` being the window's."""
        found = self._final(text)
        if found is None and self._done:
            # A decoder that shows a whole run of bytes as broken when one of them is takes back characters
            # that were given out already: go on behind them.
            self._ids = self._ids[self._done :]
            self._seen, self._text, self._done = self._decoded(self._ids), "", 0
            found = self._final(self._seen)
        final, count = found or (text, 0)
        new = final[len(self._text) :]
        self._text = final
        self._done = max(self._done, count)
        return new

    def _final(self, text: str) -> tuple[str, int] | None:
        """The window's final text and how many tokens it is the whole text of; None where it went back."""
        size = len(self._ids)
        if not text.endswith(_LOST):
            final = _UNCLEANED.sub("", text) if self._cleans else text
            return (final, size if final == text else 0) if final.startswith(self._text) else None
        shorter = [text]
        found = [(text.rstrip(_LOST), 0)]
        for count in range(size - 1, max(size - _BYTES, self._done) - 1, -1):
            shorter.append(self._decoded(self._ids[:count]))
            if not shorter[-1].endswith(_LOST):
                found.append((shorter[-1], count))
                break
        else:
            # Nothing within reach was whole, so what came before is broken for good.
            least = min(shorter, key=len)
            found.append((least, size + 1 - len(shorter) if least == shorter[-1] else 0))
        fits = [one for one in found if one[0].startswith(self._text)]
        return max(fits, key=lambda one: len(one[0]), default=None)

    # -------------------------------------------------------------------- the window
    def _begin(self, prompt: list[int]) -> None:
        """Take the end of a prompt as context, whole characters of it where there are any."""
        if not prompt:
            return
        size = _KEEP
        while True:
            self._ids = prompt[-size:]
            self._seen = self._text = text = self._decoded(self._ids)
            self._context = self._done = len(self._ids)
            if text.endswith(_LOST):
                self._before, self._text, self._done = text, "", 0
                self._text, self._done = self._final(text) or ("", 0)
            if (self._text and _LOST not in self._text) or size >= min(len(prompt), _OVERFULL):
                return
            self._before = None
            size *= 2

    def _begun(self, text: str) -> str:
        """What of the window's text has been given out, or was the prompt's.

        A prompt may end within a character, which then is the first one of the new text; or in bytes that
        nothing mends, which are the prompt's own.
        """
        if self._before is None:
            return self._text
        alike = (one == other for one, other in zip(self._before, text, strict=False))
        common = self._before[: sum(takewhile(bool, alike))]
        return max(common, self._text, key=len) if text.startswith(self._text) else common

    def _cut(self) -> str:
        """Forget the window's oldest tokens where the rest reads the same without; text let go unjudged."""
        text = self._seen
        if text.startswith(self._text):
            held = len(text) - len(self._text)
            for keep in range(_KEEP, _KEEP + _BYTES + 1):
                short = self._decoded(self._ids[-keep:])
                if len(short) > held and text.endswith(short):
                    self._keep(keep, short, held)
                    return ""
        if len(self._ids) <= _OVERFULL:
            return ""
        new = text[len(self._text) :]
        self._keep(_KEEP, self._decoded(self._ids[-_KEEP:]), 0)
        return new

    def _keep(self, count: int, text: str, held: int) -> None:
        """Keep the last tokens, whose text is given but for so many characters not given out yet."""
        self._done = max(self._done - (len(self._ids) - count), 0)
        self._ids, self._seen, self._text = self._ids[-count:], text, text[: len(text) - held]

    def _skipped(self, token: int) -> bool:
        """Whether decoding leaves out this token, as a special one."""
        alone = {**self.decode_kwargs, "skip_special_tokens": False}
        return not self._decoded([token]) and bool(self.tokenizer.decode([token], **alone))

    def _decoded(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, **self.decode_kwargs)) if ids else ""

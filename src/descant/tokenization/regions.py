"""The regions of a response: its thought, its tool calls and its content, as the response grows.

One machine finds them in bytes. It reads texts for parsers and streams, and the bytes of tokens for budgets
and grammars, so that all of them agree where a thought ends, in whatever tokens its markers are written.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from descant.tokenization.detokenizer import IncrementalDetokenizer
from descant.tokenization.response_syntax import (
    CallSyntax,
    ResponseSyntax,
    ThoughtMarkers,
    ToolCall,
    is_in_markers,
)
from descant.tokenization.token_bytes import TokenBytes

REGIONS: Final = ("reasoning", "content", "tool_calls")


class ResponsePart(NamedTuple):
    """Text of one region, or the calls that a tool call's last text completes."""

    region: str  # one of `REGIONS`
    text: str
    calls: tuple[ToolCall, ...] = ()


class RegionState(NamedTuple):
    """A position in a response: the region, and the bytes behind it that may begin a marker."""

    region: str = "start"  # one of `REGIONS`; "start": a thought may begin, and nothing else has
    pending: bytes = b""


class _Piece(NamedTuple):
    """Bytes of one region, and the marker behind them; None: more of it may follow."""

    region: str
    data: bytes
    marker: bytes | None = None


class RegionMachine:
    """The regions of a text with the markers of a format, piece by piece."""

    def __init__(self, form: ResponseSyntax) -> None:
        thought, calls = form.thought or ThoughtMarkers((), ()), form.calls or CallSyntax((), ())
        self._opens = _encoded(thought.open)
        call_opens = dict.fromkeys(_encoded(calls.open), "tool_calls")
        self._ends_with_text = not calls.close  # whether the end of the text ends a call
        # By region, what each of its markers leads to.
        self._markers: dict[str, dict[bytes, str]] = {
            "content": {
                **dict.fromkeys(_encoded((*form.ignored, *calls.ignored)), "content"),
                **call_opens,
                **dict.fromkeys(self._opens if thought.reopens else (), "reasoning"),
            },
            "reasoning": dict.fromkeys(_encoded(thought.close), "content"),
            "tool_calls": dict.fromkeys(_encoded(calls.close), "content") or call_opens,
        }
        self._patterns = {
            region: re.compile(b"|".join(map(re.escape, sorted(markers, key=len, reverse=True))))
            for region, markers in self._markers.items()
            if markers
        }

    def advance(
        self, state: RegionState, data: bytes, *, is_end: bool = False
    ) -> tuple[RegionState, list[_Piece]]:
        """The state after further bytes, and the pieces that are certain by then."""
        region, buffer = state.region, state.pending + data
        pieces: list[_Piece] = []
        if region == "start":
            text = buffer.lstrip()
            opened = next((marker for marker in self._opens if text.startswith(marker)), None)
            if opened is not None:
                pieces.append(_Piece("content", buffer[: len(buffer) - len(text)], opened))
                region, buffer = "reasoning", text[len(opened) :]
            elif not is_end and any(marker.startswith(text) for marker in self._opens):
                return RegionState(region, buffer), pieces
            else:
                region = "content"
        while True:
            keep = 0 if is_end else self._held_back(region, buffer)
            pattern = self._patterns.get(region)
            match = None if pattern is None else pattern.search(buffer)
            if match is None or match.start() >= len(buffer) - keep:  # it may be part of a longer one
                break
            pieces.append(_Piece(region, buffer[: match.start()], match[0]))
            region, buffer = self._markers[region][match[0]], buffer[match.end() :]
        final = buffer[: len(buffer) - keep]
        is_last = is_end and (region != "tool_calls" or self._ends_with_text)
        if final or is_end:
            pieces.append(_Piece(region, final, b"" if is_last else None))
        return RegionState(region, buffer[len(final) :]), pieces

    def _held_back(self, region: str, buffer: bytes) -> int:
        """The length of the longest end of the bytes that begins a marker and is no whole one."""
        longest = 0
        for marker in self._markers[region]:
            sizes = range(min(len(marker) - 1, len(buffer)), longest, -1)
            longest = next((size for size in sizes if buffer.endswith(marker[:size])), longest)
        return longest


def _encoded(texts: Iterable[str]) -> tuple[bytes, ...]:
    return tuple(text.encode() for text in texts)


class RegionReader:
    """Splits a growing text into the parts of a response; the parts of a text are those of all its splits.

    The thought and the content have no white space at their ends. A call is given when it is whole; one that
    is cut off or has another form is content.
    """

    def __init__(self, form: ResponseSyntax, region: str = "start") -> None:
        self._machine, self._calls = RegionMachine(form), form.calls
        self._state = RegionState(region)
        self._num_read, self._num_given = 0, 0  # bytes that were put, and those that pieces have
        self._special: list[tuple[int, int]] = []  # of the bytes to come, those that are text in markers only
        self._spaces = {"reasoning": "", "content": ""}  # which only further text releases
        self._has_text = {"reasoning": False, "content": False}
        self._call, self._opened = "", b""  # the text of a call so far, and the marker before the region

    def put(self, text: str, *, is_special: bool = False) -> list[ResponsePart]:
        """The parts that a further text makes certain; a special one is text in markers only."""
        if is_special:
            self._special.append((self._num_read, self._num_read + len(text.encode())))
        return self._advance(text, is_end=False)

    def end(self) -> list[ResponsePart]:
        """The parts of what was held back."""
        parts = self._advance("", is_end=True)
        if self._call or (self._opened and self._state.region == "tool_calls"):  # it is cut off
            parts += self._text("content", self._opened.decode() + self._call)
        return parts

    def _advance(self, text: str, *, is_end: bool) -> list[ResponsePart]:
        if not text and not is_end:
            return []
        data = text.encode("utf-8", "surrogatepass")
        self._num_read += len(data)
        self._state, pieces = self._machine.advance(self._state, data, is_end=is_end)
        parts: list[ResponsePart] = []
        for region, found, marker in pieces:
            if region == "tool_calls":
                parts += self._call_parts(found.decode("utf-8", "surrogatepass"), marker)
            else:
                plain = self._without_special(found) if self._special else found
                parts += self._text(region, plain.decode("utf-8", "surrogatepass"))
            self._num_given += len(found) + len(marker or b"")
            if marker is not None:
                self._opened = marker
                if region == "reasoning" and self._has_text[region]:
                    self._spaces[region] = "\n"  # before a further thought
        return parts

    def _without_special(self, data: bytes) -> bytes:
        """The next bytes of a text without those that are special."""
        start, end = self._num_given, self._num_given + len(data)
        kept, done = b"", 0
        for first, last in self._special:
            if start <= first and last <= end:
                kept, done = kept + data[done : first - start], last - start
        self._special = [span for span in self._special if span[1] > end]
        return kept + data[done:]

    def _call_parts(self, text: str, marker: bytes | None) -> list[ResponsePart]:
        """The parts by more of a call."""
        self._call += text
        if marker is None:
            return []
        body, self._call = self._call, ""
        assert self._calls is not None
        calls = self._calls.calls(body)
        if calls is None:
            is_open = marker.decode() in self._calls.open  # of the next call
            return self._text("content", self._opened.decode() + body + ("" if is_open else marker.decode()))
        return [ResponsePart("tool_calls", body, tuple(calls))]

    def _text(self, region: str, text: str) -> list[ResponsePart]:
        """Text without the white space at the ends of the whole region."""
        text = self._spaces[region] + text
        released = text.rstrip() if self._has_text[region] else text.strip()
        if not released:
            self._spaces[region] = text if self._has_text[region] else ""
            return []
        self._spaces[region] = text[len(text.rstrip()) :]
        self._has_text[region] = True
        return [ResponsePart(region, released)]


class ResponseReader:
    """The parts of a response by its tokens, as they come.

    Tokens that are part of a marker count as its text, also where decoding skips them as special tokens.
    """

    def __init__(
        self,
        form: ResponseSyntax,
        prompt: Sequence[int],
        detokenizer: IncrementalDetokenizer,
        region: str | None = None,
    ) -> None:
        tokenizer = detokenizer.tokenizer
        self._vocabulary = TokenBytes.from_tokenizer(tokenizer)
        self._markers, self._detokenizer = form.markers, detokenizer
        region = form.opening_region(tokenizer, prompt) if region is None else region
        special = self._vocabulary.special_ids
        self._literals = {
            token: data
            for token in special
            if token < self._vocabulary.size
            and is_in_markers(data := self._vocabulary.bytes[token], form.markers)
        }
        self._reader = RegionReader(form, region)
        self._machine, self._state = RegionMachine(form), RegionState(region)
        self._last = list(prompt[-_CONTEXT_TOKENS:])
        self.num_reasoning_tokens = 0  # of the thought, the tokens that close it included

    def put(self, ids: Iterable[int]) -> list[ResponsePart]:
        """The parts that further tokens make certain."""
        parts: list[ResponsePart] = []
        run: list[int] = []  # of text
        for token in ids:
            self._count(token)
            self._last.append(token)
            if token not in self._literals:
                run.append(token)
                continue
            parts += self._reader.put(self._detokenizer.put(run) + self._detokenizer.end())
            parts += self._reader.put(self._literals[token].decode(), is_special=True)
            del self._last[:-_CONTEXT_TOKENS]
            self._detokenizer.restart(self._last)
            run = []
        parts += self._reader.put(self._detokenizer.put(run))
        return _joined(parts)

    def end(self) -> list[ResponsePart]:
        """The parts of what was held back; no token may follow."""
        return _joined([*self._reader.put(self._detokenizer.end()), *self._reader.end()])

    def _count(self, token: int) -> None:
        """Count a token if it is part of the thought."""
        self.num_reasoning_tokens += self._state.region == "reasoning"
        is_text = token < self._vocabulary.size and (
            token in self._literals or token not in self._vocabulary.special_ids
        )
        if is_text:
            self._state = self._machine.advance(self._state, self._vocabulary.bytes[token])[0]


_CONTEXT_TOKENS: Final = 64  # of which a detokenizer reads the last


def _joined(parts: Sequence[ResponsePart]) -> list[ResponsePart]:
    """The parts with neighbouring texts of one region as one."""
    joined: list[ResponsePart] = []
    for part in parts:
        if joined and joined[-1].region == part.region and not part.calls and not joined[-1].calls:
            part = ResponsePart(part.region, joined.pop().text + part.text)
        joined.append(part)
    return joined


# ------------------------------------------------------------------------ tokens
class ThoughtState(NamedTuple):
    """Where a row is: in its thought, behind it, or undecided."""

    state: RegionState
    begin: int  # new tokens before the region

    @property
    def region(self) -> str:
        """`reasoning`, `content` or `start`."""
        return self.state.region


Array = NDArray[Any]
_MAX_STATES: Final = 64


# The masks of each vocabulary, which requests share.
_masks: weakref.WeakKeyDictionary[TokenBytes, dict[Any, Array]] = weakref.WeakKeyDictionary()


class ThoughtTracker:
    """The thought of each row of a request, as a function of its new tokens.

    So forks, drafts, rejections and rows that take tokens back need no bookkeeping.
    """

    def __init__(
        self, markers: ThoughtMarkers, tokenizer: Any, region: str, budget: int | None = None
    ) -> None:
        self.markers, self.budget = markers, budget
        self._vocabulary = TokenBytes.from_tokenizer(tokenizer)
        self._machine = RegionMachine(ResponseSyntax(replace(markers, reopens=False)))
        self._first = ThoughtState(RegionState(region), 0)
        self._states: dict[bytes, ThoughtState] = {}  # the least recently used first
        self._masks = _masks.setdefault(self._vocabulary, {})

    def at(self, text: Array) -> ThoughtState:
        """The state after some new tokens."""
        key = text.tobytes()
        found = self._states.pop(key, None)
        if found is None:
            found = self._states.get(text[:-1].tobytes()) if len(text) else self._first
            start = len(text) - 1
            if found is None:
                found, start = self._first, 0
            for index in range(max(start, 0), len(text)):
                found = self._advance(found, int(text[index]), index + 1)
        self._states[key] = found
        if len(self._states) > _MAX_STATES:
            del self._states[next(iter(self._states))]
        return found

    def _advance(self, before: ThoughtState, token: int, length: int) -> ThoughtState:
        if before.region == "content" or not 0 <= token < self._vocabulary.size:
            return before
        state, pieces = self._machine.advance(before.state, self._vocabulary.bytes[token])
        if state.region == before.region:
            return ThoughtState(state, before.begin)
        is_skipped = state.region == "content" and all(piece.region == "content" for piece in pieces)
        return ThoughtState(state, 0 if is_skipped else length)

    def mask(self, found: ThoughtState, num_words: int) -> Array:
        """The tokens that may follow in a thought before a grammar, or begin one [W], a bit each."""
        key = self.markers, found.region, found.state.pending, num_words
        if key not in self._masks:
            self._masks[key] = self._make_mask(found.region, found.state.pending, num_words)
            if len(self._masks) > _MAX_STATES:
                del self._masks[next(iter(self._masks))]
        return self._masks[key]

    def _make_mask(self, region: str, pending: bytes, num_words: int) -> Array:
        allowed = np.zeros(32 * num_words, bool)
        if region == "reasoning":
            allowed[: self._vocabulary.size] = True
            # None may close it and begin the answer, which the grammar would not see.
            for marker in _encoded(self.markers.close):
                for size in range(len(marker)):
                    if pending.endswith(marker[:size]):
                        allowed[self._find_tokens_behind(marker, size)] = False
        else:
            begun = pending.lstrip()
            for marker in _encoded(self.markers.open):
                if marker.startswith(begun):
                    allowed[self._find_opening_tokens(marker[len(begun) :])] = True
        return np.packbits(allowed, bitorder="little").view(np.uint32)

    def _find_tokens_behind(self, marker: bytes, size: int) -> list[int]:
        """The tokens with bytes behind a marker, of which the first `size` bytes are there already."""
        rest = marker[size:]
        if size:
            return [token for token, data in self._texts if len(data) > len(rest) and data.startswith(rest)]
        return [token for token, data in self._texts if rest in data and not data.endswith(rest)]

    def _find_opening_tokens(self, rest: bytes) -> list[int]:
        """The tokens that begin with the rest of a marker, or are a beginning of it."""
        return [
            token for token, data in self._texts if data and (rest.startswith(data) or data.startswith(rest))
        ]

    @property
    def _texts(self) -> Iterable[tuple[int, bytes]]:
        return enumerate(self._vocabulary.bytes)

"""Consumers of a call's tokens as they come: anything with `put` and `end`, and the documented ones."""

from __future__ import annotations

import asyncio
import queue
import sys
from typing import Any

from descant.errors import InputError
from descant.tokenization.detokenizer import IncrementalDetokenizer

__all__ = ["AsyncTextIteratorStreamer", "BaseStreamer", "TextIteratorStreamer", "TextStreamer"]

# Unified ideographs, their extensions A to E, and the compatibility forms: each is a word of its own.
# Kana and Hangul are not here: their words are told by spaces, or by nothing at all.
_IDEOGRAPHS = (
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2CEAF),
    (0x2F800, 0x2FA1F),
)


class BaseStreamer:
    """What `generate(streamer=...)` calls: `put` with the prompts, then each step's tokens; `end` once."""

    def put(self, value: Any) -> None:
        """Take tokens: the prompts [B, L] first, then a step's [B]."""
        raise NotImplementedError(f"{type(self).__name__} must define `put`")

    def end(self) -> None:
        """The call has ended."""
        raise NotImplementedError(f"{type(self).__name__} must define `end`")


class TextStreamer(BaseStreamer):
    """The text of a single sequence, word by word, to `on_finalized_text`, which prints it to stdout.

    With `skip_prompt` the prompt is not shown. `decode_kwargs` go to the tokenizer's `decode`, for instance
    `skip_special_tokens=True`. A word is shown when a space, a line break or an ideograph has ended it.
    """

    def __init__(self, tokenizer: Any, skip_prompt: bool = False, **decode_kwargs: Any) -> None:
        self.tokenizer = tokenizer
        self.skip_prompt = skip_prompt
        self.decode_kwargs = decode_kwargs
        self._detokenizer: IncrementalDetokenizer | None = None  # None: the prompt comes next
        self._pending_text = ""  # text that is final but may not be a whole word

    def put(self, value: Any) -> None:
        """Take the prompt, or further tokens, and hand on the words they end."""
        ids = _single_sequence_ids(value)
        if self._detokenizer is None:
            self._detokenizer = IncrementalDetokenizer(self.tokenizer, **self.decode_kwargs)
            if self.skip_prompt:
                # The text is that of the new tokens alone, unless the first of them end a character.
                after = IncrementalDetokenizer(self.tokenizer, prompt_ids=ids, **self.decode_kwargs)
                self._detokenizer = after if after.has_partial_character else self._detokenizer
                return
        self._pending_text += self._detokenizer.put(ids)
        whole = _complete_length(self._pending_text)
        text, self._pending_text = self._pending_text[:whole], self._pending_text[whole:]
        self.on_finalized_text(text)

    def end(self) -> None:
        """Hand on what is left; the next `put` is another call's prompt."""
        text = self._pending_text + ("" if self._detokenizer is None else self._detokenizer.end())
        self._detokenizer, self._pending_text = None, ""
        self.on_finalized_text(text, stream_end=True)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Take text that is whole words: here, print it, and a line break at the end of the stream."""
        sys.stdout.write(text + "\n" if stream_end else text)
        sys.stdout.flush()


class TextIteratorStreamer(TextStreamer):
    """The text of a single sequence as an iterator, for a reader in another thread than generate's.

    Each next text is waited for `timeout` seconds (None: for ever), then `queue.Empty` is raised: the sign
    that the call failed in its thread.
    """

    def __init__(
        self, tokenizer: Any, skip_prompt: bool = False, timeout: float | None = None, **decode_kwargs: Any
    ) -> None:
        super().__init__(tokenizer, skip_prompt, **decode_kwargs)
        self.text_queue: queue.Queue[str | None] = queue.Queue()
        self.stop_signal: str | None = None
        self.timeout = timeout

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Queue the text for the reader, and the stop signal behind the last."""
        self.text_queue.put(text)
        if stream_end:
            self.text_queue.put(self.stop_signal)

    def __iter__(self) -> TextIteratorStreamer:
        return self

    def __next__(self) -> str:
        text = self.text_queue.get(timeout=self.timeout)
        if text is None or text == self.stop_signal:
            raise StopIteration
        return text


class AsyncTextIteratorStreamer(TextStreamer):
    """The text of a single sequence as an async iterator, for a reader in the event loop it is made in.

    It must be made inside a coroutine, and generate run in another thread. Each next text is waited for
    `timeout` seconds (None: for ever), then TimeoutError is raised: the sign that the call failed.
    """

    def __init__(
        self, tokenizer: Any, skip_prompt: bool = False, timeout: float | None = None, **decode_kwargs: Any
    ) -> None:
        super().__init__(tokenizer, skip_prompt, **decode_kwargs)
        self.loop = asyncio.get_running_loop()
        self.text_queue: asyncio.Queue[str | None] = asyncio.Queue()
        self.stop_signal: str | None = None
        self.timeout = timeout

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Queue the text for the reader, and the stop signal behind the last; from any thread."""
        self.loop.call_soon_threadsafe(self.text_queue.put_nowait, text)
        if stream_end:
            self.loop.call_soon_threadsafe(self.text_queue.put_nowait, self.stop_signal)

    def __aiter__(self) -> AsyncTextIteratorStreamer:
        return self

    async def __anext__(self) -> str:
        async with asyncio.timeout(self.timeout):
            text = await self.text_queue.get()
        if text is None or text == self.stop_signal:
            raise StopAsyncIteration
        return text


def _single_sequence_ids(value: Any) -> list[int]:
    """The token ids of one sequence, from [L] or [1, L]."""
    shape = tuple(getattr(value, "shape", (len(value),) if isinstance(value, list | tuple) else ()))
    if len(shape) not in (1, 2) or (len(shape) == 2 and shape[0] != 1):
        do = "use descant.stream(...) for several sequences, or generate without a streamer"
        raise InputError("streamer", "must be given one sequence of text at a time", value, do)
    listed = value.tolist() if hasattr(value, "tolist") else list(value)
    ids: list[int] = listed[0] if len(shape) == 2 else listed
    return ids


def _complete_length(text: str) -> int:
    """How many characters of a text are whole words: all up to a line break, an ideograph or a space."""
    if text and (text[-1] == "\n" or any(low <= ord(text[-1]) <= high for low, high in _IDEOGRAPHS)):
        return len(text)
    return text.rfind(" ") + 1

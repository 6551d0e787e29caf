"""The documented streamers: consumers of a call's tokens, with `put` and `end`."""

from __future__ import annotations

import asyncio
import queue
import sys
from typing import Any

from descant.errors import InputError
from descant.tokenization.detokenizer import IncrementalDetokenizer

# CJK unified ideographs, extensions A to E, and compatibility forms: each counts as a word. Kana and Hangul
# are not included, as their words are separated by spaces or not at all.
_IDEOGRAPHS = (
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2CEAF),
    (0x2F800, 0x2FA1F),
)


class BaseStreamer:
    """Interface of `generate(streamer=...)`: `put` gets the prompts, then the tokens of each step."""

    def put(self, value: Any) -> None:
        """Receive the prompts [B, L] first, then the tokens of each step [B]."""
        raise NotImplementedError(f"{type(self).__name__} must define `put`")

    def end(self) -> None:
        """Called once, after the last token."""
        raise NotImplementedError(f"{type(self).__name__} must define `end`")


class TextStreamer(BaseStreamer):
    """Passes the text of a single sequence, word by word, to `on_finalized_text`, which prints it to stdout.

    With `skip_prompt` the prompt is not printed. `decode_kwargs` are arguments of the tokenizer's `decode`,
    for instance `skip_special_tokens=True`. A space, a line break or an ideograph completes a word.
    """

    def __init__(self, tokenizer: Any, skip_prompt: bool = False, **decode_kwargs: Any) -> None:
        self.tokenizer = tokenizer
        self.skip_prompt = skip_prompt
        self.decode_kwargs = decode_kwargs
        self._detokenizer: IncrementalDetokenizer | None = None  # None: the prompt comes next
        self._pending_text = ""  # final text of an incomplete word

    def put(self, value: Any) -> None:
        """Receive the prompt or new tokens, and pass on the words they complete."""
        ids = _single_sequence_ids(value)
        if self._detokenizer is None:
            self._detokenizer = IncrementalDetokenizer(self.tokenizer, **self.decode_kwargs)
            if self.skip_prompt:
                # New tokens are decoded alone, unless they complete a character of the prompt.
                after = IncrementalDetokenizer(self.tokenizer, prompt_ids=ids, **self.decode_kwargs)
                self._detokenizer = after if after.has_partial_character else self._detokenizer
                return
        self._pending_text += self._detokenizer.put(ids)
        whole = _complete_length(self._pending_text)
        text, self._pending_text = self._pending_text[:whole], self._pending_text[whole:]
        self.on_finalized_text(text)

    def end(self) -> None:
        """Pass on the remaining text; the next `put` gets the prompt of another call."""
        text = self._pending_text + ("" if self._detokenizer is None else self._detokenizer.end())
        self._detokenizer, self._pending_text = None, ""
        self.on_finalized_text(text, stream_end=True)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print text of whole words, and a line break at the end of the stream."""
        sys.stdout.write(text + "\n" if stream_end else text)
        sys.stdout.flush()


class TextIteratorStreamer(TextStreamer):
    """The text of a single sequence as an iterator, read in another thread than that of generate().

    Raises `queue.Empty` if no text arrives within `timeout` seconds (None: no limit), for instance because
    the call failed in its thread.
    """

    def __init__(
        self, tokenizer: Any, skip_prompt: bool = False, timeout: float | None = None, **decode_kwargs: Any
    ) -> None:
        super().__init__(tokenizer, skip_prompt, **decode_kwargs)
        self.text_queue: queue.Queue[str | None] = queue.Queue()
        self.stop_signal: str | None = None
        self.timeout = timeout

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Queue the text, and the stop signal at the end."""
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
    """The text of a single sequence as an async iterator, read in the event loop that created it.

    Create it inside a coroutine, and run generate() in another thread. Raises TimeoutError if no text arrives
    within `timeout` seconds (None: no limit), for instance because the call failed.
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
        """Queue the text, and the stop signal at the end; callable from any thread."""
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
        raise InputError("streamer", "must get one sequence of text at a time", value, do)
    values = value.tolist() if hasattr(value, "tolist") else list(value)
    ids: list[int] = values[0] if len(shape) == 2 else values
    return ids


def _complete_length(text: str) -> int:
    """The number of characters of complete words: up to a line break, an ideograph or a space at the end."""
    if text and (text[-1] == "\n" or any(low <= ord(text[-1]) <= high for low, high in _IDEOGRAPHS)):
        return len(text)
    return text.rfind(" ") + 1

"""Streamers as generate() and readers in other threads and event loops use them."""

from __future__ import annotations

import asyncio
import queue
import time
from threading import Thread
from typing import Any

import pytest
import torch

import descant
from descant.api.compat.streamers import (
    AsyncTextIteratorStreamer,
    BaseStreamer,
    TextIteratorStreamer,
    TextStreamer,
)
from descant.errors import InputError


class Letters:
    """A tokenizer for tiny models: a letter a token, and every fifth one a space."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        special = "" if skip_special_tokens else "#"
        return "".join(special if one < 3 else " " if one % 5 == 0 else chr(96 + one % 26) for one in ids)


LETTERS = Letters()
PROMPT = torch.tensor([[7, 12, 30, 5, 9]])


def call(tiny: Any, **arguments: Any) -> torch.Tensor:
    return descant.generate(tiny("llama").model, PROMPT, min_new_tokens=12, max_new_tokens=12, **arguments)


class Kept(TextStreamer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.texts: list[tuple[str, bool]] = []

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.texts.append((text, stream_end))


# ------------------------------------------------------------------------ by hand
def test_words_as_they_end():
    streamer = Kept(LETTERS)
    for ids in ([[3, 4, 5, 6]], [7], [10, 8]):
        streamer.put(torch.tensor(ids))
    streamer.end()
    assert streamer.texts == [("cd ", False), ("", False), ("fg ", False), ("h", True)]


def test_lists_are_taken_too():
    streamer = Kept(LETTERS)
    streamer.put([3, 4, 5])
    streamer.end()
    assert streamer.texts == [("cd ", False), ("", True)]


def test_a_streamer_serves_one_call_after_another():
    streamer = Kept(LETTERS, skip_prompt=True)
    for _ in range(2):
        streamer.put(torch.tensor([[3, 4]]))
        streamer.put(torch.tensor([6]))
        streamer.end()
    assert streamer.texts == [("", False), ("f", True)] * 2
    streamer.end()
    assert streamer.texts[-1] == ("", True)


@pytest.mark.parametrize("value", [torch.ones(2, 3, dtype=torch.long), torch.ones(1, 1, 1), torch.tensor(3)])
def test_one_sequence_only(value):
    with pytest.raises(InputError, match="one sequence"):
        TextStreamer(LETTERS).put(value)


def test_a_base_streamer_says_what_to_define():
    class Half(BaseStreamer):
        def put(self, value: Any) -> None: ...

    with pytest.raises(NotImplementedError, match="Half must define `end`"):
        Half().end()
    with pytest.raises(NotImplementedError, match="BaseStreamer must define `put`"):
        BaseStreamer().put([1])


# ------------------------------------------------------------------------ in generate()
def test_printed(tiny, capsys):
    sequences = call(tiny, streamer=TextStreamer(LETTERS))
    assert capsys.readouterr().out == LETTERS.decode(sequences[0].tolist()) + "\n"


def test_printed_without_the_prompt_and_special_tokens(tiny, capsys):
    sequences = call(tiny, streamer=TextStreamer(LETTERS, skip_prompt=True, skip_special_tokens=True))
    new = sequences[0, PROMPT.shape[1] :].tolist()
    assert capsys.readouterr().out == LETTERS.decode(new, skip_special_tokens=True) + "\n"


def test_on_finalized_text_of_a_subclass(tiny):
    streamer = Kept(LETTERS)
    sequences = call(tiny, streamer=streamer)
    assert "".join(text for text, _ in streamer.texts) == LETTERS.decode(sequences[0].tolist())
    assert len(streamer.texts) == 1 + 12 + 1
    assert [last for _, last in streamer.texts] == [False] * 13 + [True]
    assert all(text.endswith(" ") for text, _ in streamer.texts[:-1] if text)


def test_a_batch_is_refused(tiny):
    with pytest.raises(InputError, match="one sequence"):
        descant.generate(tiny("llama").model, PROMPT.repeat(2, 1), streamer=TextStreamer(LETTERS))
    with pytest.raises(InputError, match="one sequence"):
        call(tiny, streamer=TextStreamer(LETTERS), do_sample=True, num_return_sequences=2)


# ------------------------------------------------------------------------ across threads
def in_thread(function: Any) -> tuple[Thread, list[Any]]:
    """Run something in a thread; what it returned or raised."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(function())
        except Exception as error:
            found.append(error)

    thread = Thread(target=run)
    thread.start()
    return thread, found


@pytest.mark.parametrize("skip", [False, True])
def test_iterated_while_generate_runs_in_a_thread(skip, tiny):
    streamer = TextIteratorStreamer(LETTERS, skip_prompt=skip, timeout=20)
    thread, found = in_thread(lambda: call(tiny, streamer=streamer))
    texts = list(streamer)
    thread.join()
    assert "".join(texts) == LETTERS.decode(found[0][0, PROMPT.shape[1] if skip else 0 :].tolist())
    assert len(texts) == 14 - skip


def test_an_error_in_generate_ends_the_wait(tiny):
    def fail(input_ids: Any, scores: Any) -> Any:
        raise RuntimeError("broken")

    streamer = TextIteratorStreamer(LETTERS, timeout=0.2)
    thread, found = in_thread(lambda: call(tiny, streamer=streamer, logits_processor=[fail]))
    assert next(streamer) == LETTERS.decode(PROMPT[0, :4].tolist())  # which ends in a space
    with pytest.raises(queue.Empty):
        next(streamer)
    thread.join()
    assert isinstance(found[0], RuntimeError)


def test_nothing_in_time():
    begun = time.monotonic()
    with pytest.raises(queue.Empty):
        next(TextIteratorStreamer(LETTERS, timeout=0.01))
    assert time.monotonic() - begun < 4


def test_a_reader_can_be_stopped_by_hand():
    """What applications do when their call fails."""
    streamer = TextIteratorStreamer(LETTERS)
    streamer.on_finalized_text("a ")
    streamer.text_queue.put(streamer.stop_signal)
    assert list(streamer) == ["a "]


# ------------------------------------------------------------------------ in an event loop
@pytest.mark.parametrize("skip", [False, True])
def test_awaited_while_generate_runs_in_a_thread(skip, tiny):
    async def main() -> tuple[list[str], Any, int]:
        streamer = AsyncTextIteratorStreamer(LETTERS, skip_prompt=skip, timeout=20)
        thread, found = in_thread(lambda: call(tiny, streamer=streamer))
        beats = 0

        async def heart() -> None:
            nonlocal beats
            while True:
                beats += 1
                await asyncio.sleep(0.001)

        beating = asyncio.create_task(heart())
        texts = [text async for text in streamer]
        beating.cancel()
        thread.join()
        return texts, found[0], beats

    # In debug mode a loop refuses to be touched from another thread.
    texts, sequences, beats = asyncio.run(main(), debug=True)
    assert "".join(texts) == LETTERS.decode(sequences[0, PROMPT.shape[1] if skip else 0 :].tolist())
    assert len(texts) == 14 - skip
    assert beats > 1, "the loop goes on meanwhile"


def test_nothing_in_time_for_an_event_loop():
    async def main() -> None:
        await anext(AsyncTextIteratorStreamer(LETTERS, timeout=0.01))

    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        asyncio.run(main())
    assert time.monotonic() - begun < 4


def test_an_error_in_generate_ends_the_wait_in_an_event_loop(tiny):
    def fail(input_ids: Any, scores: Any) -> Any:
        raise RuntimeError("broken")

    async def main() -> Any:
        streamer = AsyncTextIteratorStreamer(LETTERS, timeout=0.2)
        thread, found = in_thread(lambda: call(tiny, streamer=streamer, logits_processor=[fail]))
        assert await anext(streamer) == LETTERS.decode(PROMPT[0, :4].tolist())
        with pytest.raises(TimeoutError):
            await anext(streamer)
        thread.join()
        return found[0]

    assert isinstance(asyncio.run(main()), RuntimeError)


def test_an_async_streamer_belongs_to_an_event_loop():
    with pytest.raises(RuntimeError, match="event loop"):
        AsyncTextIteratorStreamer(LETTERS)

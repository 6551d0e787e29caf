"""Streamers."""

from __future__ import annotations

import asyncio
import contextlib
import io
import queue
from threading import Thread

import torch

from tests.reference.spec_sentences.library import refused
from tests.reference.spec_sentences.sentence import CONFIG, STRATEGIES, STREAMERS, UTILITIES, page

older, says, api, field = page(STRATEGIES), page(UTILITIES), page(STREAMERS), page(CONFIG)


class Recorder:
    """A streamer of one's own."""

    def __init__(self):
        self.put_values, self.ends = [], 0

    def put(self, value):
        self.put_values.append(value.tolist())

    def end(self):
        self.ends += 1


def text_of(lib, ids):
    return lib.tokenizer.decode(ids)


@older("stream_any", 149, "Any object with `put` and `end` is a streamer: prompt, tokens, one end.")
def _(lib):
    made = Recorder()
    found = lib.model().generate(lib.ids(), streamer=made, max_new_tokens=4, eos_token_id=None)
    assert made.ends == 1
    assert made.put_values[0] == lib.ids().tolist()
    new = [one if isinstance(one, list) else [one] for one in made.put_values[1:]]
    assert [token for one in new for token in one] == found[0, 6:].tolist()
    return len(made.put_values)


@older("stream_text", 171, "TextStreamer prints the text while generate returns the usual output.")
def _(lib):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        found = lib.model().generate(
            lib.ids(), streamer=lib.TextStreamer(lib.tokenizer), max_new_tokens=6, eos_token_id=None
        )
    assert printed.getvalue().rstrip("\n") == text_of(lib, found[0]).rstrip("\n")
    return found


@api("stream_beams", 41, "A streamer with beams is an error.")
def _(lib):
    with refused(ValueError):
        lib.model().generate(lib.ids(), streamer=Recorder(), num_beams=2, max_new_tokens=3)


@api("stream_batch", 89, "TextStreamer takes one sequence at a time.")
def _(lib):
    with refused(ValueError), contextlib.redirect_stdout(io.StringIO()):
        lib.model().generate(lib.ids(rows=2), streamer=lib.TextStreamer(lib.tokenizer), max_new_tokens=3)


def pieces(lib, streamer, tokens):
    """What a streamer finalizes, token by token."""
    found = []
    streamer.on_finalized_text = lambda text, stream_end=False: found.append([text, stream_end])
    streamer.put(lib.tokenizer("one ", return_tensors="pt").input_ids)
    for token in tokens:
        streamer.put(torch.tensor([lib.tokenizer.get_vocab()[token]]))
    streamer.end()
    return found


@says("ts_words", 1860, "TextStreamer prints as soon as entire words are formed.")
def _(lib):
    found = pieces(lib, lib.TextStreamer(lib.tokenizer), ["st", "op", "Ġ", "to", "Ġ", "one", "Ċ", "two"])
    assert "".join(text for text, _ in found) == "one stop to one\ntwo"
    return found


@says("ts_skip", 1871, "`skip_prompt` leaves the prompt out.")
def _(lib):
    found = pieces(lib, lib.TextStreamer(lib.tokenizer, skip_prompt=True), ["st", "op"])
    assert "".join(text for text, _ in found) == "stop"
    return found


@says("ts_decode", 1873, "Further keywords go to the tokenizer's decode.")
def _(lib):
    made = lib.TextStreamer(lib.tokenizer, skip_prompt=True, skip_special_tokens=True)
    found = pieces(lib, made, ["st", "op", "</s>"])
    assert "".join(text for text, _ in found) == "stop"
    return found


@api("ts_attrs", 75, "A streamer keeps its tokenizer, `skip_prompt` and `decode_kwargs`.")
def _(lib):
    made = lib.TextStreamer(lib.tokenizer, skip_prompt=True, skip_special_tokens=True)
    assert made.tokenizer is lib.tokenizer
    return made.skip_prompt, made.decode_kwargs


@says("tis", 1925, "TextIteratorStreamer gives the text of a call in another thread.")
def _(lib):
    streamer = lib.TextIteratorStreamer(lib.tokenizer, timeout=20)
    inputs = lib.tokenizer(["one, "], return_tensors="pt", return_token_type_ids=False)
    given = dict(inputs, streamer=streamer, max_new_tokens=6, eos_token_id=None)
    thread = Thread(target=lib.model().generate, kwargs=given)
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text.startswith("one, ")
    return text


@says("tis_skip", 1906, "TextIteratorStreamer can leave the prompt out.")
def _(lib):
    streamer = lib.TextIteratorStreamer(lib.tokenizer, skip_prompt=True, timeout=20)
    found = lib.model().generate(lib.ids(), streamer=streamer, max_new_tokens=4, eos_token_id=None)
    assert "".join(streamer) == text_of(lib, found[0, 6:])


@says("tis_timeout", 1908, "With a timeout the queue raises when nothing comes.")
def _(lib):
    with refused(queue.Empty):
        next(iter(lib.TextIteratorStreamer(lib.tokenizer, timeout=0.01)))


@says("ats", 1973, "AsyncTextIteratorStreamer gives the text to a coroutine.")
def _(lib):
    async def main():
        streamer = lib.AsyncTextIteratorStreamer(lib.tokenizer)
        inputs = lib.tokenizer(["one, "], return_tensors="pt", return_token_type_ids=False)
        given = dict(inputs, streamer=streamer, max_new_tokens=5, eos_token_id=None)
        thread = Thread(target=lib.model().generate, kwargs=given)
        thread.start()
        text = ""
        async for piece in streamer:
            text += piece
        thread.join()
        return text

    return asyncio.run(main())


@says("ats_timeout", 1960, "It raises TimeoutError when generation takes longer than the timeout.")
def _(lib):
    async def main():
        streamer = lib.AsyncTextIteratorStreamer(lib.tokenizer, timeout=0.01)
        async for _ in streamer:
            pass

    with refused(TimeoutError, asyncio.TimeoutError):
        asyncio.run(main())


@says("ats_outside", 1975, "It must be made inside a coroutine.")
def _(lib):
    with refused(RuntimeError):
        lib.AsyncTextIteratorStreamer(lib.tokenizer)


@older("st_rows", 150, "A streamer gets the tokens of all sampled sequences of a step.")
def _(lib):
    made = Recorder()
    lib.model().generate(
        lib.ids(), streamer=made, do_sample=True, num_return_sequences=3, max_new_tokens=3, eos_token_id=None
    )
    return [len(one) for one in made.put_values[1:]]


@api("base_streamer", 27, "BaseStreamer's `put` and `end` are not implemented.")
def _(lib):
    with refused(NotImplementedError):
        lib.BaseStreamer().put(None)
    with refused(NotImplementedError):
        lib.BaseStreamer().end()

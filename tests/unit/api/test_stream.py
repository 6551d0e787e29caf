"""stream(): its events add up to what generate() returns, and closing it frees what ran."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections import defaultdict
from typing import Any

import pytest
import torch
import transformers

import descant
from descant.api.stream import Stream, StreamEvent, stream
from descant.errors import ConfigError, DescantError, InputError, RowError
from tests.support import pretrained
from tests.support.tiny_models import pad, prompts

NEW = 14


@functools.cache
def tokenizer(name: str = "smollm2") -> Any:
    """A real tokenizer: its first tokens, single characters, are what a tiny model writes."""
    return transformers.AutoTokenizer.from_pretrained(pretrained.folder(name))


def batch(tiny: Any, seed: int = 100) -> dict[str, torch.Tensor]:
    """Prompts of different lengths."""
    rows = prompts(tiny.arch, (5, 9, 1, 6), seed=seed)
    ids, mask = pad(rows, tiny.pad, "right" if tiny.encoder_decoder else "left")
    return {"input_ids": ids, "attention_mask": mask}


class StreamRecord:
    """The events of a stream by prompt and sequence."""

    def __init__(self, events: Any) -> None:
        self.events: list[StreamEvent] = list(events)
        self.by: dict[tuple[int, int], list[StreamEvent]] = defaultdict(list)
        for event in self.events:
            self.by[event.row, event.sequence].append(event)
        for mine in self.by.values():
            assert [one.finish_reason is None for one in mine] == [True] * (len(mine) - 1) + [False]
            assert [one.hypothesis is None for one in mine[:-1]] == [True] * (len(mine) - 1)

    def ids(self, row: int, sequence: int = 0) -> list[int]:
        return [token for one in self.by[row, sequence] for token in one.token_ids]

    def text(self, row: int, sequence: int = 0) -> str:
        return "".join(one.text or "" for one in self.by[row, sequence])

    def law(self, name: str, row: int, sequence: int = 0) -> list[float]:
        return [value for one in self.by[row, sequence] for value in getattr(one, name)]


def same(record: StreamRecord, model: Any, given: dict[str, Any], each: int, **options: Any) -> None:
    """The events' tokens are the sequences of generate()."""
    sequences = descant.generate(model.model, **given, **options)
    new = sequences[:, 1 if model.encoder_decoder else given["input_ids"].shape[1] :].tolist()
    assert len(record.by) == len(new)
    for line, whole in enumerate(new):
        ids = record.ids(*divmod(line, each))
        assert ids == whole[: len(ids)]
        assert set(whole[len(ids) :]) <= {model.pad}


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "seed": 5, "temperature": 1.3},
    "several": {"do_sample": True, "seed": 5, "temperature": 1.3, "num_return_sequences": 3},
    "beams": {"num_beams": 4},
    "several beams": {"num_beams": 4, "num_return_sequences": 3},
    "beams that sample": {"num_beams": 3, "do_sample": True, "seed": 9, "num_return_sequences": 2},
}


# ------------------------------------------------------------------------ tokens and text
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "bart"])
def test_tokens_and_text(name, kind, tiny):
    model, options = tiny(name), {**KINDS[kind], "max_new_tokens": NEW}
    given, each = batch(model), options.get("num_return_sequences", 1)
    events = stream(model.model, **given, tokenizer=tokenizer(), **options)
    record = StreamRecord(events)
    same(record, model, given, each, **options)
    assert len({len(record.ids(*key)) for key in record.by}) > 1, "sequences of different lengths"
    for row, sequence in record.by:
        mask = given["attention_mask"][row].bool()
        prompt = [model.arch.start] if model.encoder_decoder else given["input_ids"][row][mask].tolist()
        before = tokenizer().decode(prompt, skip_special_tokens=True)
        whole = tokenizer().decode(prompt + record.ids(row, sequence), skip_special_tokens=True)
        assert record.text(row, sequence) == whole[len(before) :]
    assert (len(events.session), events.session.rows) == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_why_each_sequence_ended(kind, tiny):
    model, reasons = tiny("llama"), set()
    for limit in (3, NEW):
        record = StreamRecord(stream(model.model, **batch(model), max_new_tokens=limit, **KINDS[kind]))
        for (row, sequence), events in record.by.items():
            ids, last = record.ids(row, sequence), events[-1]
            assert last.finish_reason == ("eos" if ids[-1] == model.eos else "length")
            assert last.hypothesis is not None
            assert last.hypothesis.tokens.tolist() == ids
            assert all(one.text is None for one in events), "without a tokenizer"
            reasons.add(last.finish_reason)
    assert reasons == {"eos", "length"}


def test_without_seeds_the_noise_is_that_of_generate(tiny):
    model, options = tiny("llama"), {"do_sample": True, "max_new_tokens": NEW, "num_return_sequences": 2}
    torch.manual_seed(3)
    record = StreamRecord(stream(model.model, **batch(model), **options))
    torch.manual_seed(3)
    same(record, model, batch(model), 2, **options)


def test_tokens_come_one_by_one(tiny):
    model = tiny("llama")
    record = StreamRecord(stream(model.model, **batch(model), max_new_tokens=NEW))
    assert all(len(one.token_ids) == 1 for one in record.events)
    assert [one.row for one in record.events[:4]] == [0, 1, 2, 3]
    assert max(len(mine) for mine in record.by.values()) > 2


def test_beams_bring_what_they_agree_on_at_once(tiny):
    model, options = tiny("llama"), {"num_beams": 4, "num_return_sequences": 3, "max_new_tokens": NEW}
    early = 0
    for seed in range(100, 108):
        events = stream(model.model, **batch(model, seed), **options)
        record = StreamRecord(events)
        for row in range(4):
            mine = [[one.token_ids for one in record.by[row, n][:-1]] for n in range(3)]
            assert mine[0] == mine[1] == mine[2], "the same deltas for every sequence"
            assert () not in mine[0]
            early += len(mine[0])
    assert early > 10


def test_each_prompt_may_have_its_own_config(tiny):
    model = tiny("llama")
    given = batch(model)
    configs = [
        descant.GenerationConfig(max_new_tokens=3),
        descant.GenerationConfig(max_new_tokens=9, do_sample=True, seed=4, num_return_sequences=2),
        descant.GenerationConfig(max_new_tokens=6, num_beams=3, num_return_sequences=2),
        descant.GenerationConfig(max_new_tokens=5, do_sample=True, seed=8),
    ]
    record = StreamRecord(stream(model.model, **given, generation_config=configs))
    assert sorted(record.by) == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)]
    for row, config in enumerate(configs):
        mask = given["attention_mask"][row].bool()
        alone = {"input_ids": given["input_ids"][row : row + 1, mask]}
        expected = StreamRecord(stream(model.model, **alone, generation_config=config))
        for sequence in range(config.num_return_sequences):
            assert record.ids(row, sequence) == expected.ids(0, sequence)


# ------------------------------------------------------------------------ text in
def test_texts_in(real):
    model = real("stories15m")
    texts = ["Once upon a time there was a little dog", "Lily", "One day, Tom and his mum went to the"]
    record = StreamRecord(stream(model.model, texts, tokenizer=model.tokenizer, max_new_tokens=12))
    for row, text in enumerate(texts):
        ids = torch.tensor([model.tokens(text)])
        whole = descant.generate(model.model, ids, max_new_tokens=12)[0]
        assert record.ids(row) == whole[ids.shape[1] :].tolist()
        shown = model.tokenizer.decode(whole, skip_special_tokens=True)
        assert text + record.text(row) == shown
        assert record.text(row).startswith((" ", ",", "."))
    alone = StreamRecord(stream(model.model, texts[1], tokenizer=model.tokenizer, max_new_tokens=12))
    assert alone.text(0) == record.text(1)


def test_texts_in_for_an_encoder(real):
    model = real("flan-t5-small-titles")
    texts = ["The president of the country met the people of the city.", "A dog ran."]
    record = StreamRecord(stream(model.model, texts, tokenizer=model.tokenizer, max_new_tokens=8))
    for row, text in enumerate(texts):
        whole = descant.generate(model.model, torch.tensor([model.tokens(text)]), max_new_tokens=8)[0]
        assert record.ids(row) == whole[1 : 1 + len(record.ids(row))].tolist()
        assert record.text(row) == model.tokenizer.decode(whole, skip_special_tokens=True)


def test_a_stop_string_is_in_the_tokens_and_not_in_the_text(real):
    model = real("stories15m")
    text = "Once upon a time there was a little dog"
    free = StreamRecord(stream(model.model, text, tokenizer=model.tokenizer, max_new_tokens=30)).text(0)
    stop = free[12:17]
    record = StreamRecord(
        stream(model.model, text, tokenizer=model.tokenizer, max_new_tokens=30, stop_strings=[stop])
    )
    assert record.events[-1].finish_reason == "stop"
    assert record.text(0) == free[: free.index(stop)]
    assert stop in model.tokenizer.decode(model.tokens(text) + record.ids(0))
    almost = free[-3:] + "..."
    waited = StreamRecord(
        stream(model.model, text, tokenizer=model.tokenizer, max_new_tokens=30, stop_strings=almost)
    )
    assert waited.text(0) == free, "what did not become a stop string comes at the end"


# ------------------------------------------------------------------------ log-probabilities
@pytest.mark.parametrize("kind", KINDS)
def test_logprobs(kind, tiny):
    model = tiny("llama")
    options = {**KINDS[kind], "max_new_tokens": NEW, "repetition_penalty": 1.4}
    given, each = batch(model), options.get("num_return_sequences", 1)
    record = StreamRecord(stream(model.model, **given, logprobs=2, **options))
    output = descant.generate(model.model, **given, logprobs=2, return_dict_in_generate=True, **options)
    for line, found in enumerate(output.logprobs):
        row, sequence = divmod(line, each)
        mine = record.by[row, sequence]
        assert mine[-1].hypothesis is not None
        assert mine[-1].hypothesis.logprobs is not None
        assert mine[-1].hypothesis.logprobs.top.shape == found.top.shape
        late = len(mine[-1].token_ids) if "beams" in kind else len(found.raw)
        if "beams" not in kind:
            assert all(one.logprob is not None for one in mine)
        else:
            assert all(one.logprob is None for one in mine[:-1])
            mine[:-1] = []
        torch.testing.assert_close(torch.tensor(record.law("raw_logprob", row, sequence)), found.raw[-late:])
        torch.testing.assert_close(
            torch.tensor(record.law("logprob", row, sequence)), found.processed[-late:]
        )
        assert found.raw.tolist() != found.processed.tolist()


def test_no_logprobs_unless_asked_for(tiny):
    model = tiny("llama")
    configs = [
        descant.GenerationConfig(min_new_tokens=4, max_new_tokens=4, logprobs=n) for n in (None, 0, None, 1)
    ]
    record = StreamRecord(stream(model.model, **batch(model), generation_config=configs))
    for one in record.events:
        assert (one.logprob is None) == (one.raw_logprob is None) == (one.row % 2 == 0)


# ------------------------------------------------------------------------ closing
def started(tiny: Any, **options: Any) -> Stream:
    model = tiny("llama")
    return stream(model.model, **batch(model), max_new_tokens=NEW, min_new_tokens=NEW, **options)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=str)
def test_closing_frees(options, tiny):
    for taken in (0, 1, 5):
        events = started(tiny, **options)
        for _ in range(taken):
            next(events)
        assert len(events.session) == 4
        events.close()
        assert (len(events.session), events.session.rows) == (0, 0)
        assert list(events) == []
        events.close()


def test_leaving_with_frees(tiny):
    with started(tiny) as events:
        for _ in events:
            break
        assert events.session.rows == 4
    assert (len(events.session), events.session.rows) == (0, 0)
    with contextlib.closing(started(tiny)) as closed:
        next(closed)
    assert closed.session.rows == 0


def test_an_error_in_a_step_frees_and_is_raised(tiny):
    def fail(input_ids: Any, scores: Any) -> Any:
        if input_ids.shape[1] > 11:
            raise RuntimeError("broken")
        return scores

    events = started(tiny, logits_processor=[fail])
    record = []
    with pytest.raises(RuntimeError, match="broken"):
        record.extend(events)
    assert len(events.session) == 0
    assert list(events) == []


# ------------------------------------------------------------------------ one prompt that fails
def test_a_prompt_that_fails_leaves_the_others(tiny):
    model, given = tiny("llama"), batch(tiny("llama"))
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "tokenizer": tokenizer()}
    plain = StreamRecord(stream(model.model, **given, **options))
    shown = "".join(one.text or "" for one in plain.by[1, 0][:3])
    assert shown
    # What is held back of the text, as it may become a stop string, is let go.
    held = {"stop_strings": shown + "\x00"}
    record = StreamRecord(stream(model.model, **given, logits_processor=[Once(given, 1)], **options, **held))
    last = record.by[1, 0][-1]
    assert (last.finish_reason, last.token_ids) == ("error", ())
    assert isinstance(last.error, RowError)
    assert record.ids(1) == plain.ids(1)[:3], "no token of the step that failed"
    assert record.text(1) == last.text == shown
    for row in (0, 2, 3):
        assert record.ids(row) == plain.ids(row)


class Once:
    """Rules everything out for one prompt of a batch when it has three new tokens."""

    def __init__(self, given: dict[str, torch.Tensor], row: int) -> None:
        self.prompt = given["input_ids"][row]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        width = len(self.prompt)
        mine = (input_ids[:, :width] == self.prompt).all(1) & (input_ids.shape[1] == width + 3)
        return scores.masked_fill(mine[:, None], -torch.inf)


# ------------------------------------------------------------------------ event loops
def test_async_events_are_the_same(tiny):
    model, options = (
        tiny("llama"),
        {"max_new_tokens": NEW, "num_return_sequences": 2, "do_sample": True, "seed": 1},
    )

    async def main() -> tuple[list[StreamEvent], int]:
        beats = 0

        async def heart() -> None:
            nonlocal beats
            while True:
                beats += 1
                await asyncio.sleep(0)

        beating = asyncio.create_task(heart())
        events = [one async for one in stream(model.model, **batch(model), **options)]
        beating.cancel()
        return events, beats

    events, beats = asyncio.run(main())
    assert events == StreamRecord(stream(model.model, **batch(model), **options)).events
    assert beats > NEW, "the loop goes on during every step"


def test_async_closing_frees(tiny):
    async def main() -> None:
        async with started(tiny) as events:
            async for _ in events:
                break
            assert events.session.rows == 4
        assert (len(events.session), events.session.rows) == (0, 0)
        assert [one async for one in events] == []
        async with contextlib.aclosing(started(tiny)) as closed:
            await anext(closed)
        assert closed.session.rows == 0

    asyncio.run(main())


def test_a_reader_that_gives_up_during_a_step(tiny):
    """A cancelled wait loses nothing, and closing waits for the step that is under way."""

    async def main() -> list[int]:
        go = threading.Event()

        def wait(input_ids: Any, scores: Any) -> Any:
            go.wait(10)
            return scores

        model = tiny("llama")
        ids = batch(model)["input_ids"][:1]
        events = stream(model.model, ids, max_new_tokens=4, min_new_tokens=4, logits_processor=[wait])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(events), 0.05)
        go.set()
        tokens = [token async for one in events for token in one.token_ids]
        go.clear()
        again = stream(model.model, ids, max_new_tokens=4, min_new_tokens=4, logits_processor=[wait])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(again), 0.05)
        closing = asyncio.create_task(again.aclose())
        await asyncio.sleep(0.05)
        assert not closing.done()
        go.set()
        await closing
        assert (len(again.session), again.session.rows) == (0, 0)
        assert (
            tokens
            == descant.generate(model.model, ids, max_new_tokens=4, min_new_tokens=4)[
                0, ids.shape[1] :
            ].tolist()
        )
        return tokens

    assert len(asyncio.run(main())) == 4


# ------------------------------------------------------------------------ what is refused
@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"inputs": "text"}, "tokenizer"),
        ({"inputs": ["a", 3], "tokenizer": "given"}, "inputs"),
        ({"inputs": "", "tokenizer": "given"}, "inputs"),
        ({"inputs": []}, "inputs"),
        ({"inputs": torch.ones(3, dtype=torch.long)}, "inputs"),
        ({"inputs": torch.ones(1, 3, dtype=torch.long), "input_ids": torch.ones(1, 3)}, "input_ids"),
        ({"inputs": "a", "tokenizer": "given", "attention_mask": torch.ones(1, 1)}, "attention_mask"),
        ({"input_ids": torch.ones(1, 3, dtype=torch.long), "logits_processor": 3}, "logits_processor"),
        ({"input_ids": torch.ones(1, 3, dtype=torch.long), "streamer": len}, "streamer"),
        ({"input_ids": torch.ones(1, 3, dtype=torch.long), "output_scores": True}, "output_scores"),
    ],
)
def test_refused(given, field, tiny):
    if given.get("tokenizer") == "given":
        given = {**given, "tokenizer": tokenizer()}
    with pytest.raises((InputError, ConfigError)) as caught:
        stream(tiny("llama").model, **given)
    assert caught.value.field == field


def test_a_config_that_asks_for_a_record(tiny):
    config = descant.GenerationConfig(return_dict_in_generate=True)
    with pytest.raises(DescantError, match="has no use in a stream"):
        stream(tiny("llama").model, torch.ones(1, 3, dtype=torch.long), generation_config=config)


def test_a_sequence_that_ends_before_its_siblings_says_so_at_once(tiny):
    """Its reason, its rest and its log-probabilities come with its last token, and only once."""
    model = tiny("llama")
    asked = {
        "do_sample": True,
        "seed": 3,
        "num_return_sequences": 4,
        "max_new_tokens": 24,
        "temperature": 2.0,
    }
    ids = torch.tensor([[5, 6, 7]])
    events = list(stream(model.model, ids, **asked))
    ends = [place for place, event in enumerate(events) if event.finish_reason]
    assert sorted(events[place].sequence for place in ends) == [0, 1, 2, 3]
    assert "eos" in {events[place].finish_reason for place in ends}
    for place in ends:
        mine = [event for event in events if event.sequence == events[place].sequence]
        assert mine[-1] is events[place]
        told = [token for event in mine for token in event.token_ids]
        assert told == mine[-1].hypothesis.tokens.tolist()
        laws = [value for event in mine for value in event.raw_logprob]
        assert laws == pytest.approx(mine[-1].hypothesis.logprobs.raw.tolist())
    first = min(ends)
    assert events[first].finish_reason == "eos"
    assert any(not event.finish_reason for event in events[first:])  # others went on


def test_log_probabilities_come_unless_declined(tiny):
    ids = torch.tensor([[5, 6, 7]])
    assert all(event.logprob for event in stream(tiny("llama").model, ids, max_new_tokens=2))
    assert not any(
        event.logprob for event in stream(tiny("llama").model, ids, max_new_tokens=2, logprobs=None)
    )

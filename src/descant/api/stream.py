"""stream(): a call whose tokens and text are events, for loops and event loops alike."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from descant.api.call import Asked, Call, listed, placed, recipe_of
from descant.api.inputs import encoded
from descant.config.generation_config import FIELDS, GenerationConfig
from descant.core.interfaces import Peers
from descant.core.records import Hypothesis
from descant.engine.session import Event, Failed, Finished, Session, Tokens
from descant.errors import ConfigError, DescantError, InputError, RankError, UnsupportedModel
from descant.models.rank_group import together
from descant.models.whisper import hears
from descant.tokenization.detokenizer import TextStream
from descant.tokenization.token_healing import Tail
from descant.trace.trace import Trace
from descant.trace.tracer import Tracer

__all__ = ["Stream", "StreamEvent", "stream"]

# Fields of a call's returned record, which a stream does not have.
_RECORD = (
    "return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states",
)  # fmt: skip


@dataclass(frozen=True)
class StreamEvent:
    """What became known of one sequence: new tokens, the text that is now final, and at last why it ended.

    `logprob` and `raw_logprob` are the log-probabilities of the tokens after and before the processors,
    unless `logprobs` is None; of tokens that beams agree on early they are known at the end only, in
    `hypothesis`, which the last event of a sequence brings with its score and all of its tokens.
    """

    row: int  # which prompt
    sequence: int  # which of the prompt's `num_return_sequences`
    token_ids: tuple[int, ...] = ()
    text: str | None = None  # None without a tokenizer
    logprob: tuple[float, ...] | None = None
    raw_logprob: tuple[float, ...] | None = None
    finish_reason: str | None = None  # "eos", "length", "time", "stop", "error"; None: more may come
    error: DescantError | None = None
    hypothesis: Hypothesis | None = field(default=None, compare=False, repr=False)
    tried: int = 0  # how many tokens were guessed in this step, with speculation
    accepted: int = 0  # how many of `token_ids` are such guesses


def stream(
    model: Any,
    inputs: Any = None,
    tokenizer: Any = None,
    generation_config: Any = None,
    logits_processor: Sequence[Any] | None = None,
    stopping_criteria: Sequence[Any] | None = None,
    **kwargs: Any,
) -> Stream:
    """Continue prompts, event by event: `for event in stream(model, "Once", tokenizer, max_new_tokens=20):`.

    Takes what `generate` takes, but no `recipe` that is a function, and with a `tokenizer` also a text or a
    list of texts. The events of all
    prompts and sequences are mingled; a sequence of beams brings what all beams agree on at once, and the
    rest when it is decided. Iterate with `for` or `async for`; `close`, or leaving `with`, cancels what runs.
    With `trace=True`, or a `descant.Tracer`, the stream's `trace` is the record of its steps so far.
    """
    if hears(model):
        kind = type(model).__name__
        raise UnsupportedModel(
            f"{kind} hears by windows: use descant.generate, with a streamer for short audio"
        )
    recipe, kwargs = recipe_of(kwargs)
    assistant = {name: kwargs.pop(name, None) for name in ("assistant_model", "assistant_tokenizer")}
    past = kwargs.pop("past_key_values", None)
    tracer = Tracer.of(kwargs.pop("trace", None), tokenizer)
    with together(model):
        call = {name: kwargs.pop(name) for name in list(kwargs) if name in FIELDS}
        _refuse_record(call, generation_config)
        given = generation_config if isinstance(generation_config, list | tuple) else (generation_config,)
        if all(getattr(one, "logprobs", None) is None for one in given):
            call = {"logprobs": 0, **call}
        processors = listed("logits_processor", logits_processor)
        criteria = listed("stopping_criteria", stopping_criteria)
        parts: dict[str, Any] = {"processors": processors, "criteria": criteria, "tokenizer": tokenizer}
        parts |= {**assistant, "past": past, "recipe": recipe, "tracer": tracer}
        asked = Asked.of(model, generation_config, call, **parts)
        return Stream(model, asked, inputs, kwargs)


class Stream:
    """The events of a call, as an iterator and an async iterator; its requests end when it is closed."""

    def __init__(self, model: Any, asked: Asked, inputs: Any, others: Mapping[str, Any]) -> None:
        call = self._call = Call(model, asked)
        self.session: Session = call.session
        self._ends: dict[int, Finished] = {}
        self._ready: deque[StreamEvent] = deque()
        self._over = False
        # A step that an event loop no longer waits for goes on in its thread; whoever is next waits for it.
        self._lock = threading.Lock()
        self._peers: Peers | None = getattr(self.session.model, "peers", None)
        with torch.no_grad():
            prompts = self._prompts = call.admit(_given(model, inputs, asked.tokenizer, others))
        self._asked = {
            number: _Asker(line, config, asked.tokenizer, prompts.prompt(line), call.healed[line])
            for line, (number, config) in enumerate(zip(call.numbers, call.configs, strict=True))
        }

    @property
    def trace(self) -> Trace | None:
        """What was recorded so far, with `trace=True`; None without."""
        return self.session.trace

    def __iter__(self) -> Iterator[StreamEvent]:
        return self

    def __next__(self) -> StreamEvent:
        while not self._ready:
            if self._over:
                raise StopIteration
            self._advance()
        return self._ready.popleft()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamEvent:
        while not self._ready:
            if self._over:
                raise StopAsyncIteration
            await asyncio.to_thread(self._advance)
        return self._ready.popleft()

    def close(self) -> None:
        """Cancel what still runs and free it; nothing comes thereafter."""
        with self._lock:
            if self._asked and self._peers is not None:
                self._peers.leave()
            self._drop()
            self._ready.clear()

    async def aclose(self) -> None:
        """Close, without holding up the event loop should a step be under way."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # -------------------------------------------------------------------- the loop
    def _advance(self) -> None:
        """Take one step, if there is one to take and nobody has found events meanwhile."""
        with self._lock, torch.no_grad():
            if self._ready or self._over:
                return
            try:
                told = self._told(self.session.step())
                self._ready.extend(sorted(told, key=lambda one: (one.row, one.sequence)))
            except BaseException as error:
                if self._peers is not None and not isinstance(error, RankError):
                    self._peers.leave()
                self._drop()
                raise
            self._over = not self._asked
            if self._over:
                self._give_back()

    def _give_back(self) -> None:
        """Have the user's cache hold what all sequences hold, if none has failed."""
        if all(number in self._ends for number in self._call.numbers):
            ends = [self._ends[number] for number in self._call.numbers]
            found = [one for end in ends for one in end.hypotheses]
            self._call.cache([past for end in ends for past in end.pasts], found, self._prompts)

    def _drop(self) -> None:
        """Cancel all requests that are left."""
        self._over = True
        while self._asked:
            number, _ = self._asked.popitem()
            self.session.cancel(number)

    def _told(self, events: Sequence[Event]) -> Iterator[StreamEvent]:
        """A step's events by prompt and sequence."""
        ends = {one.request: one for one in events if not isinstance(one, Tokens)}
        for one in events:
            if isinstance(one, Tokens):
                yield from self._chosen(one, ends)
        for number, end in ends.items():
            asker = self._asked.pop(number)
            if isinstance(end, Finished):
                self._ends[number] = end
            yield from asker.failed(end.error) if isinstance(end, Failed) else asker.finished(end)
        for number, asker in self._asked.items():
            if asker.config.num_beams > 1:
                yield from asker.agreed(self.session.agreed(number))

    def _chosen(self, event: Tokens, ends: Mapping[int, Any]) -> Iterator[StreamEvent]:
        """The tokens of requests that go on; those that end are told with their end."""
        for run in _runs(event):
            asker = self._asked[run.request]
            asker.guesses[run.slot] = (run.tried, run.accepted)
            if run.request in ends:
                continue
            yield asker.chosen(run) if run.ended is None else asker.ended(run.slot, run.ended)
            asker.guesses.clear()


@dataclass
class _Run:
    """What one sequence says in a step: a token, or with guesses a run of them."""

    request: int
    slot: int
    tokens: list[int]
    raw: list[float]
    processed: list[float]
    ended: Hypothesis | None
    tried: int
    accepted: int


def _runs(event: Tokens) -> Iterator[_Run]:
    """The tokens of a step by sequence, token by token where nothing was guessed."""
    requests, slots, tokens = (part.tolist() for part in (event.request, event.slot, event.token))
    raw, processed = (
        [[]] * len(tokens) if part is None else [[one] for one in part.tolist()]
        for part in (event.raw, event.processed)
    )
    guessed = None if event.guessed is None else event.guessed.tolist()
    tried = None if event.tried is None else event.tried.tolist()
    run: _Run | None = None
    for place, (request, slot, token) in enumerate(zip(requests, slots, tokens, strict=True)):
        if run is not None and guessed is not None and (run.request, run.slot) == (request, slot):
            run.tokens.append(token)
            run.raw += raw[place]
            run.processed += processed[place]
        else:
            if run is not None:
                yield run
            count = 0 if tried is None else tried[place]
            run = _Run(request, slot, [token], [*raw[place]], [*processed[place]], None, count, 0)
        run.ended = event.ended.get(place)
        run.accepted += 0 if guessed is None else int(guessed[place])
    if run is not None:
        yield run


class _Asker:
    """One prompt and its sequences as far as they have been told."""

    def __init__(
        self, row: int, config: GenerationConfig, tokenizer: Any, prompt: Tensor, healed: Tail
    ) -> None:
        self.row, self.config = row, config
        count = config.num_return_sequences
        self.told = [0] * count  # how many tokens of each sequence
        self.over: set[int] = set()  # the sequences that have ended while others go on
        self.guesses: dict[int, tuple[int, int]] = {}  # tried and accepted in this step, by sequence
        ids = [] if tokenizer is None else prompt.tolist()
        stops = config.stop_strings or ()
        # What token healing says again is in the prompt that the reader has.
        skip = len(healed.text.decode(errors="ignore"))
        self.texts = [
            None
            if tokenizer is None
            else TextStream(
                tokenizer, prompt_ids=ids, stop_strings=stops, skip=skip, skip_special_tokens=True
            )
            for _ in range(count)
        ]

    def chosen(self, run: _Run) -> StreamEvent:
        """What a sequence has chosen in a step."""
        slot, ids = run.slot, tuple(run.tokens)
        self.told[slot] += len(ids)
        known = self.config.logprobs is not None and len(run.raw) == len(ids)
        return StreamEvent(
            self.row,
            slot,
            ids,
            self._text(slot, ids),
            tuple(run.processed) if known else None,
            tuple(run.raw) if known else None,
            tried=run.tried,
            accepted=run.accepted,
        )

    def agreed(self, tokens: Tensor) -> Iterator[StreamEvent]:
        """What all beams begin with: the same for every sequence."""
        for slot, told in enumerate(self.told):
            ids = tuple(tokens[told:].tolist())
            if ids:
                self.told[slot] += len(ids)
                yield StreamEvent(self.row, slot, ids, self._text(slot, ids))

    def finished(self, event: Finished) -> Iterator[StreamEvent]:
        """The rest of every sequence that was not over yet."""
        for slot, one in enumerate(event.hypotheses):
            if slot not in self.over:
                yield self.ended(slot, one)

    def ended(self, slot: int, one: Hypothesis) -> StreamEvent:
        """The rest of a sequence."""
        told, laws = self.told[slot], one.logprobs
        ids = tuple(one.tokens[told:].tolist())
        self.over.add(slot)
        tried, accepted = self.guesses.get(slot, (0, 0))
        return StreamEvent(
            self.row,
            slot,
            ids,
            self._text(slot, ids, last=True),
            None if laws is None else tuple(laws.processed[told:].tolist()),
            None if laws is None else tuple(laws.raw[told:].tolist()),
            one.reason,
            hypothesis=one,
            tried=tried,
            accepted=accepted,
        )

    def failed(self, error: DescantError) -> Iterator[StreamEvent]:
        """No more of any sequence that was not over yet."""
        for slot in range(len(self.told)):
            if slot not in self.over:
                text = self._text(slot, (), last=True)
                yield StreamEvent(self.row, slot, (), text, finish_reason="error", error=error)

    def _text(self, slot: int, ids: Sequence[int], last: bool = False) -> str | None:
        growing = self.texts[slot]
        if growing is None:
            return None
        text = growing.put(ids)
        return text + growing.end() if last else text


# ------------------------------------------------------------------------ what was given
def _given(model: Any, inputs: Any, tokenizer: Any, others: Mapping[str, Any]) -> dict[str, Any]:
    """The model's inputs, `inputs` among them under their own name."""
    if isinstance(inputs, str):
        inputs = [inputs]
    if not isinstance(inputs, list | tuple) or not inputs:
        return placed(model, inputs, others)
    new = encoded("inputs", inputs, tokenizer)
    for name in new:
        if others.get(name) is not None:
            raise InputError(name, "must not be given beside `inputs`, which has it", others[name])
    return {**others, **new}


def _refuse_record(call: Mapping[str, Any], argument: Any) -> None:
    """Raise for fields of the record that generate() returns and a stream does not."""
    configs = argument if isinstance(argument, list | tuple) else (argument,)
    for name in _RECORD:
        asked = [call.get(name), *(getattr(config, name, None) for config in configs)]
        if any(asked):
            do = "use `logprobs`, or generate(..., return_dict_in_generate=True)"
            raise ConfigError(name, "has no use in a stream", True, do)

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

from descant.api.call import Call, CallOptions, as_tuple, bind_inputs, pop_recipe
from descant.api.inputs import encode_texts
from descant.config.generation_config import FIELDS, GenerationConfig
from descant.core.interfaces import RankGroup
from descant.core.records import Hypothesis
from descant.engine.session import Event, Failed, Finished, Session, Tokens
from descant.errors import ConfigError, DescantError, InputError, RankError, UnsupportedModel
from descant.models.rank_group import all_ranks_or_none
from descant.models.whisper import is_whisper
from descant.tokenization.detokenizer import IncrementalDetokenizer
from descant.tokenization.token_healing import HealedSuffix
from descant.trace.trace import Trace
from descant.trace.tracer import Tracer

__all__ = ["Stream", "StreamEvent", "stream"]

# Fields of a call's returned record, which a stream does not have.
_RECORD_FIELDS = (
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
    num_drafts: int = 0  # how many tokens were guessed in this step, with speculation
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
    if is_whisper(model):
        kind = type(model).__name__
        raise UnsupportedModel(
            f"{kind} hears by windows: use descant.generate, with a streamer for short audio"
        )
    recipe, kwargs = pop_recipe(kwargs)
    assistant = {name: kwargs.pop(name, None) for name in ("assistant_model", "assistant_tokenizer")}
    past = kwargs.pop("past_key_values", None)
    tracer = Tracer.from_argument(kwargs.pop("trace", None), tokenizer)
    with all_ranks_or_none(model):
        call = {name: kwargs.pop(name) for name in list(kwargs) if name in FIELDS}
        _validate_no_record_fields(call, generation_config)
        given = generation_config if isinstance(generation_config, list | tuple) else (generation_config,)
        if all(getattr(one, "logprobs", None) is None for one in given):
            call = {"logprobs": 0, **call}
        processors = as_tuple("logits_processor", logits_processor)
        criteria = as_tuple("stopping_criteria", stopping_criteria)
        parts: dict[str, Any] = {"processors": processors, "criteria": criteria, "tokenizer": tokenizer}
        parts |= {**assistant, "past": past, "recipe": recipe, "tracer": tracer}
        asked = CallOptions.from_call(model, generation_config, call, **parts)
        return Stream(model, asked, inputs, kwargs)


class Stream:
    """The events of a call, as an iterator and an async iterator; its requests end when it is closed."""

    def __init__(self, model: Any, asked: CallOptions, inputs: Any, others: Mapping[str, Any]) -> None:
        call = self._call = Call(model, asked)
        self.session: Session = call.session
        self._results: dict[int, Finished] = {}
        self._event_queue: deque[StreamEvent] = deque()
        self._finished = False
        # A step that an event loop no longer waits for goes on in its thread; whoever is next waits for it.
        self._lock = threading.Lock()
        self._rank_group: RankGroup | None = getattr(self.session.model, "rank_group", None)
        with torch.no_grad():
            prompts = self._prompts = call.admit(_model_inputs(model, inputs, asked.tokenizer, others))
        self._prompt_streams = {
            number: _PromptStream(
                line, config, asked.tokenizer, prompts.prompt(line), call.healed_suffixes[line]
            )
            for line, (number, config) in enumerate(zip(call.request_ids, call.configs, strict=True))
        }

    @property
    def trace(self) -> Trace | None:
        """What was recorded so far, with `trace=True`; None without."""
        return self.session.trace

    def __iter__(self) -> Iterator[StreamEvent]:
        return self

    def __next__(self) -> StreamEvent:
        while not self._event_queue:
            if self._finished:
                raise StopIteration
            self._advance()
        return self._event_queue.popleft()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamEvent:
        while not self._event_queue:
            if self._finished:
                raise StopAsyncIteration
            await asyncio.to_thread(self._advance)
        return self._event_queue.popleft()

    def close(self) -> None:
        """Cancel what still runs and free it; nothing comes thereafter."""
        with self._lock:
            if self._prompt_streams and self._rank_group is not None:
                self._rank_group.abort()
            self._cancel_all()
            self._event_queue.clear()

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
            if self._event_queue or self._finished:
                return
            try:
                told = self._stream_events(self.session.step())
                self._event_queue.extend(sorted(told, key=lambda one: (one.row, one.sequence)))
            except BaseException as error:
                if self._rank_group is not None and not isinstance(error, RankError):
                    self._rank_group.abort()
                self._cancel_all()
                raise
            self._finished = not self._prompt_streams
            if self._finished:
                self._return_cache()

    def _return_cache(self) -> None:
        """Have the user's cache hold what all sequences hold, if none has failed."""
        if all(number in self._results for number in self._call.request_ids):
            ends = [self._results[number] for number in self._call.request_ids]
            found = [one for end in ends for one in end.hypotheses]
            self._call.result_cache(
                [past for end in ends for past in end.past_key_values], found, self._prompts
            )

    def _cancel_all(self) -> None:
        """Cancel all requests that are left."""
        self._finished = True
        while self._prompt_streams:
            number, _ = self._prompt_streams.popitem()
            self.session.cancel(number)

    def _stream_events(self, events: Sequence[Event]) -> Iterator[StreamEvent]:
        """A step's events by prompt and sequence."""
        ends = {one.request: one for one in events if not isinstance(one, Tokens)}
        for one in events:
            if isinstance(one, Tokens):
                yield from self._token_events(one, ends)
        for number, end in ends.items():
            asker = self._prompt_streams.pop(number)
            if isinstance(end, Finished):
                self._results[number] = end
            yield from (
                asker.failure_events(end.error) if isinstance(end, Failed) else asker.finish_events(end)
            )
        for number, asker in self._prompt_streams.items():
            if asker.config.num_beams > 1:
                yield from asker.common_prefix_events(self.session.common_prefix(number))

    def _token_events(self, event: Tokens, ends: Mapping[int, Any]) -> Iterator[StreamEvent]:
        """The tokens of requests that go on; those that end are told with their end."""
        for run in _group_by_sequence(event):
            asker = self._prompt_streams[run.request]
            asker.draft_counts[run.slot] = (run.num_drafts, run.accepted)
            if run.request in ends:
                continue
            yield (
                asker.token_event(run)
                if run.hypothesis is None
                else asker.final_event(run.slot, run.hypothesis)
            )
            asker.draft_counts.clear()


@dataclass
class _StepTokens:
    """What one sequence says in a step: a token, or with guesses a run of them."""

    request: int
    slot: int
    tokens: list[int]
    raw_logprobs: list[float]
    processed_logprobs: list[float]
    hypothesis: Hypothesis | None
    num_drafts: int
    accepted: int


def _group_by_sequence(event: Tokens) -> Iterator[_StepTokens]:
    """The tokens of a step by sequence, token by token where nothing was guessed."""
    requests, slots, tokens = (part.tolist() for part in (event.request, event.slot, event.token))
    raw, processed = (
        [[]] * len(tokens) if part is None else [[one] for one in part.tolist()]
        for part in (event.raw, event.processed)
    )
    guessed = None if event.is_draft is None else event.is_draft.tolist()
    tried = None if event.num_drafts is None else event.num_drafts.tolist()
    run: _StepTokens | None = None
    for place, (request, slot, token) in enumerate(zip(requests, slots, tokens, strict=True)):
        if run is not None and guessed is not None and (run.request, run.slot) == (request, slot):
            run.tokens.append(token)
            run.raw_logprobs += raw[place]
            run.processed_logprobs += processed[place]
        else:
            if run is not None:
                yield run
            count = 0 if tried is None else tried[place]
            run = _StepTokens(request, slot, [token], [*raw[place]], [*processed[place]], None, count, 0)
        run.hypothesis = event.finished.get(place)
        run.accepted += 0 if guessed is None else int(guessed[place])
    if run is not None:
        yield run


class _PromptStream:
    """One prompt and its sequences as far as they have been told."""

    def __init__(
        self, row: int, config: GenerationConfig, tokenizer: Any, prompt: Tensor, healed: HealedSuffix
    ) -> None:
        self.row, self.config = row, config
        count = config.num_return_sequences
        self.num_emitted = [0] * count  # how many tokens of each sequence
        self.finished_slots: set[int] = set()  # the sequences that have ended while others go on
        self.draft_counts: dict[int, tuple[int, int]] = {}  # tried and accepted in this step, by sequence
        ids = [] if tokenizer is None else prompt.tolist()
        stops = config.stop_strings or ()
        # What token healing says again is in the prompt that the reader has.
        skip = len(healed.text.decode(errors="ignore"))
        self.detokenizers = [
            None
            if tokenizer is None
            else IncrementalDetokenizer(
                tokenizer, prompt_ids=ids, stop_strings=stops, skip=skip, skip_special_tokens=True
            )
            for _ in range(count)
        ]

    def token_event(self, run: _StepTokens) -> StreamEvent:
        """What a sequence has chosen in a step."""
        slot, ids = run.slot, tuple(run.tokens)
        self.num_emitted[slot] += len(ids)
        known = self.config.logprobs is not None and len(run.raw_logprobs) == len(ids)
        return StreamEvent(
            self.row,
            slot,
            ids,
            self._decode(slot, ids),
            tuple(run.processed_logprobs) if known else None,
            tuple(run.raw_logprobs) if known else None,
            num_drafts=run.num_drafts,
            accepted=run.accepted,
        )

    def common_prefix_events(self, tokens: Tensor) -> Iterator[StreamEvent]:
        """What all beams begin with: the same for every sequence."""
        for slot, told in enumerate(self.num_emitted):
            ids = tuple(tokens[told:].tolist())
            if ids:
                self.num_emitted[slot] += len(ids)
                yield StreamEvent(self.row, slot, ids, self._decode(slot, ids))

    def finish_events(self, event: Finished) -> Iterator[StreamEvent]:
        """The rest of every sequence that was not over yet."""
        for slot, one in enumerate(event.hypotheses):
            if slot not in self.finished_slots:
                yield self.final_event(slot, one)

    def final_event(self, slot: int, one: Hypothesis) -> StreamEvent:
        """The rest of a sequence."""
        told, laws = self.num_emitted[slot], one.logprobs
        ids = tuple(one.tokens[told:].tolist())
        self.finished_slots.add(slot)
        tried, accepted = self.draft_counts.get(slot, (0, 0))
        return StreamEvent(
            self.row,
            slot,
            ids,
            self._decode(slot, ids, last=True),
            None if laws is None else tuple(laws.processed[told:].tolist()),
            None if laws is None else tuple(laws.raw[told:].tolist()),
            one.reason,
            hypothesis=one,
            num_drafts=tried,
            accepted=accepted,
        )

    def failure_events(self, error: DescantError) -> Iterator[StreamEvent]:
        """No more of any sequence that was not over yet."""
        for slot in range(len(self.num_emitted)):
            if slot not in self.finished_slots:
                text = self._decode(slot, (), last=True)
                yield StreamEvent(self.row, slot, (), text, finish_reason="error", error=error)

    def _decode(self, slot: int, ids: Sequence[int], last: bool = False) -> str | None:
        growing = self.detokenizers[slot]
        if growing is None:
            return None
        text = growing.put(ids)
        return text + growing.end() if last else text


# ------------------------------------------------------------------------ what was given
def _model_inputs(model: Any, inputs: Any, tokenizer: Any, others: Mapping[str, Any]) -> dict[str, Any]:
    """The model's inputs, `inputs` among them under their own name."""
    if isinstance(inputs, str):
        inputs = [inputs]
    if not isinstance(inputs, list | tuple) or not inputs:
        return bind_inputs(model, inputs, others)
    new = encode_texts("inputs", inputs, tokenizer)
    for name in new:
        if others.get(name) is not None:
            raise InputError(name, "must not be given beside `inputs`, which has it", others[name])
    return {**others, **new}


def _validate_no_record_fields(call: Mapping[str, Any], argument: Any) -> None:
    """Raise for fields of the record that generate() returns and a stream does not."""
    configs = argument if isinstance(argument, list | tuple) else (argument,)
    for name in _RECORD_FIELDS:
        asked = [call.get(name), *(getattr(config, name, None) for config in configs)]
        if any(asked):
            do = "use `logprobs`, or generate(..., return_dict_in_generate=True)"
            raise ConfigError(name, "has no use in a stream", True, do)

"""stream(): a call whose tokens and text are events, for synchronous and asynchronous iteration."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from descant.api.call import Call, CallOptions, engine_or_model
from descant.api.inputs import bind_prompts
from descant.config.generation_config import STEP_OUTPUT_FIELDS, GenerationConfig
from descant.core.interfaces import RankGroup
from descant.core.records import Hypothesis
from descant.engine.protocol import Engine, is_engine
from descant.engine.session import Event, Failed, Finished, Tokens
from descant.errors import ConfigError, DescantError, InputError, RankError, UnsupportedModel
from descant.models.audio.whisper import is_whisper
from descant.models.distributed import all_ranks_or_none
from descant.models.wrapping.wrapped_model import unwrap_model
from descant.tokenization.detokenizer import IncrementalDetokenizer
from descant.tokenization.regions import ResponsePart, ResponseReader
from descant.trace.trace import Trace

# Fields of the output object, which a stream does not return.
_RECORD_FIELDS = ("return_dict_in_generate", *STEP_OUTPUT_FIELDS)


@dataclass(frozen=True)
class StreamEvent:
    """New tokens and final text of one sequence, and in its last event the finish reason.

    `logprob` and `raw_logprob` are the log-probabilities of the tokens after and before the processors,
    unless `logprobs` is None or an `engine` runs the call. For tokens of a common prefix of beams they are
    None: `hypothesis`, in the last event of a sequence, has them with the score and all tokens.
    """

    row: int  # index of the prompt
    sequence: int  # index among those that the prompt returns
    token_ids: tuple[int, ...] = ()
    text: str | None = None  # None without a tokenizer
    logprob: tuple[float, ...] | None = None
    raw_logprob: tuple[float, ...] | None = None
    finish_reason: str | None = None  # "eos", "length", "time", "stop", "error"; None: more may come
    error: DescantError | None = None
    hypothesis: Hypothesis | None = field(default=None, compare=False, repr=False)
    num_drafts: int = 0  # draft tokens verified in this step, with speculation
    accepted: int = 0  # how many of `token_ids` are accepted drafts
    # The text by regions; text that may be a marker comes with a later event.
    parts: tuple[ResponsePart, ...] = ()


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

    Takes the arguments of `generate`, except `progress` and a function as `recipe`. Events of all prompts and
    sequences are interleaved. With beam search, tokens are emitted once all beams share them. Iterate with
    `for` or `async for`; `close`, or leaving `with`, cancels the running and waiting requests. With a
    `scheduler`, prompts wait until its limits have room for them. With an `engine`, such as `descant.VLLM`,
    `model` is None. With `trace=True` or a `descant.Tracer`, `Stream.trace` is the trace so far.
    """
    model = unwrap_model(model)
    if is_whisper(model):
        name = type(model).__name__
        raise UnsupportedModel(
            f"`stream` does not support {name}: use descant.generate, with a streamer for short audio"
        )
    model = engine_or_model(model, kwargs.pop("engine", None))
    given = {
        "tokenizer": tokenizer,
        "generation_config": generation_config,
        "logits_processor": logits_processor,
        "stopping_criteria": stopping_criteria,
    }
    options = CallOptions.parse({**kwargs, **given})
    options.check_unused("streamer", "progress", must="has no use in a stream", error=InputError)
    with all_ranks_or_none(model):
        _validate_no_record_fields(options.fields, generation_config)
        configs = generation_config if isinstance(generation_config, list | tuple) else (generation_config,)
        if not is_engine(model) and all(getattr(config, "logprobs", None) is None for config in configs):
            options = options.merged(model, **{"logprobs": 0, **options.fields})
        else:
            options = options.merged(model)
        return Stream(model, options, inputs, options.others)


class Stream:
    """The events of a call, as an iterator and an async iterator; closing it cancels its requests."""

    def __init__(self, model: Any, options: CallOptions, inputs: Any, others: Mapping[str, Any]) -> None:
        call = self._call = Call(model, options)
        self.session: Engine = call.session
        self._results: dict[int, Finished] = {}
        self._event_queue: deque[StreamEvent] = deque()
        self._finished = False
        # A cancelled `__anext__` leaves its step running in a thread; the next caller waits for it.
        self._lock = threading.Lock()
        self._rank_group: RankGroup | None = self.session.rank_group
        with torch.no_grad():
            call.admit(bind_prompts(model, inputs, others, options.tokenizer))
        has_tokenizer = options.tokenizer is not None
        self._prompt_streams = {
            request: _PromptStream(
                index,
                config,
                partial(call.detokenizer, index) if has_tokenizer else None,
                None if call.response_syntax(index) is None else partial(call.response_reader, index),
            )
            for index, (request, config) in enumerate(zip(call.request_ids, call.configs, strict=True))
        }

    @property
    def trace(self) -> Trace | None:
        """The trace so far, with `trace=True`; None without."""
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
        """Cancel the running requests and free their memory; no further events follow."""
        with self._lock:
            if self._prompt_streams and self._rank_group is not None:
                self._rank_group.abort()
            self._cancel_all()
            self._event_queue.clear()

    async def aclose(self) -> None:
        """Close without blocking the event loop while a step is running."""
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
        """Run one step, unless the stream is finished or another thread has queued events meanwhile."""
        with self._lock, torch.no_grad():
            if self._event_queue or self._finished:
                return
            try:
                events = self._stream_events(self.session.step())
                self._event_queue.extend(sorted(events, key=lambda event: (event.row, event.sequence)))
            except BaseException as error:
                if self._rank_group is not None and not isinstance(error, RankError):
                    self._rank_group.abort()
                self._cancel_all()
                raise
            self._finished = not self._prompt_streams
            if self._finished:
                self._return_cache()

    def _return_cache(self) -> None:
        """Write the returned sequences into the user's cache, if no request has failed."""
        if all(request in self._results for request in self._call.request_ids):
            results = [self._results[request] for request in self._call.request_ids]
            self._call.result_cache(results)

    def _cancel_all(self) -> None:
        """Cancel all running requests."""
        self._finished = True
        while self._prompt_streams:
            request, _ = self._prompt_streams.popitem()
            self.session.cancel(request)

    def _stream_events(self, events: Sequence[Event]) -> Iterator[StreamEvent]:
        """The stream events of a session's events."""
        last_events = {event.request: event for event in events if not isinstance(event, Tokens)}
        for event in events:
            if isinstance(event, Tokens):
                yield from self._token_events(event, last_events)
        for request, event in last_events.items():
            prompt_stream = self._prompt_streams.pop(request)
            if isinstance(event, Failed):
                if event.error.__cause__ is not None:  # a user's own exception, as it was raised
                    for ended in last_events:
                        self._prompt_streams.pop(ended, None)
                    self._cancel_all()
                    raise event.error.__cause__
                yield from prompt_stream.failure_events(event.error)
            else:
                self._results[request] = event
                yield from prompt_stream.finish_events(event)
        for request in self.session.beam_requests:
            yield from self._prompt_streams[request].common_prefix_events(self.session.common_prefix(request))

    def _token_events(self, event: Tokens, last_events: Mapping[int, Any]) -> Iterator[StreamEvent]:
        """The tokens of running requests; those of ending requests are part of their last event."""
        for step_tokens in _group_by_sequence(event):
            prompt_stream = self._prompt_streams[step_tokens.request]
            prompt_stream.draft_counts[step_tokens.slot] = (step_tokens.num_drafts, step_tokens.accepted)
            if step_tokens.request in last_events:
                continue
            yield (
                prompt_stream.token_event(step_tokens)
                if step_tokens.hypothesis is None
                else prompt_stream.final_event(step_tokens.slot, step_tokens.hypothesis)
            )
            prompt_stream.draft_counts.clear()


@dataclass
class _StepTokens:
    """The tokens of one sequence in a step: one, or several with accepted drafts."""

    request: int
    slot: int
    tokens: list[int]
    raw_logprobs: list[float]
    processed_logprobs: list[float]
    hypothesis: Hypothesis | None
    num_drafts: int
    accepted: int


def _group_by_sequence(event: Tokens) -> Iterator[_StepTokens]:
    """The tokens of a step grouped by sequence; one token per group without drafts."""
    requests, slots, tokens = (part.tolist() for part in (event.request, event.slot, event.token))
    raw, processed = (
        [[]] * len(tokens) if part is None else [[value] for value in part.tolist()]
        for part in (event.raw, event.processed)
    )
    is_draft = None if event.is_draft is None else event.is_draft.tolist()
    num_drafts = None if event.num_drafts is None else event.num_drafts.tolist()
    group: _StepTokens | None = None
    for index, (request, slot, token) in enumerate(zip(requests, slots, tokens, strict=True)):
        if group is not None and is_draft is not None and (group.request, group.slot) == (request, slot):
            group.tokens.append(token)
            group.raw_logprobs += raw[index]
            group.processed_logprobs += processed[index]
        else:
            if group is not None:
                yield group
            count = 0 if num_drafts is None else num_drafts[index]
            group = _StepTokens(request, slot, [token], [*raw[index]], [*processed[index]], None, count, 0)
        group.hypothesis = event.finished.get(index)
        group.accepted += 0 if is_draft is None else int(is_draft[index])
    if group is not None:
        yield group


class _PromptStream:
    """The streaming state of one prompt and its sequences."""

    def __init__(
        self,
        row: int,
        config: GenerationConfig,
        new_detokenizer: Callable[[], IncrementalDetokenizer] | None,
        new_reader: Callable[[], Any] | None,
    ) -> None:
        self.row, self.config = row, config
        # Tokens of each sequence in events so far; a recipe may return more sequences than are asked for.
        self.num_emitted = defaultdict(int, dict.fromkeys(range(config.num_return_sequences), 0))
        self.finished_slots: set[int] = set()  # sequences that finished before the request
        self.draft_counts: dict[int, tuple[int, int]] = {}  # drafts and accepted drafts of this step
        # Of each sequence; None without a tokenizer.
        self.detokenizers: dict[int, IncrementalDetokenizer] | None
        self.detokenizers = None if new_detokenizer is None else defaultdict(new_detokenizer)
        # Of each sequence; None where a response is content alone.
        self.readers: dict[int, ResponseReader] | None
        self.readers = None if new_reader is None else defaultdict(new_reader)

    def token_event(self, group: _StepTokens) -> StreamEvent:
        """The event of a sequence's tokens in a step."""
        slot, ids = group.slot, tuple(group.tokens)
        self.num_emitted[slot] += len(ids)
        has_logprobs = self.config.logprobs is not None and len(group.raw_logprobs) == len(ids)
        text = self._decode(slot, ids)
        return StreamEvent(
            self.row,
            slot,
            ids,
            text,
            tuple(group.processed_logprobs) if has_logprobs else None,
            tuple(group.raw_logprobs) if has_logprobs else None,
            num_drafts=group.num_drafts,
            accepted=group.accepted,
            parts=self._parts(slot, ids, text),
        )

    def common_prefix_events(self, tokens: Tensor) -> Iterator[StreamEvent]:
        """The new tokens of the common prefix of all beams, for every sequence."""
        for slot, num_emitted in self.num_emitted.items():
            ids = tuple(tokens[num_emitted:].tolist())
            if ids:
                self.num_emitted[slot] += len(ids)
                text = self._decode(slot, ids)
                yield StreamEvent(self.row, slot, ids, text, parts=self._parts(slot, ids, text))

    def finish_events(self, event: Finished) -> Iterator[StreamEvent]:
        """The last events of the sequences that have none yet."""
        for slot, hypothesis in enumerate(event.hypotheses):
            if slot not in self.finished_slots:
                yield self.final_event(slot, hypothesis)

    def final_event(self, slot: int, hypothesis: Hypothesis) -> StreamEvent:
        """The last event of a sequence, with its remaining tokens."""
        start, logprobs = self.num_emitted[slot], hypothesis.logprobs
        ids = tuple(hypothesis.tokens[start:].tolist())
        self.finished_slots.add(slot)
        num_drafts, accepted = self.draft_counts.get(slot, (0, 0))
        text = self._decode(slot, ids, last=True)
        return StreamEvent(
            self.row,
            slot,
            ids,
            text,
            None if logprobs is None else tuple(logprobs.processed[start:].tolist()),
            None if logprobs is None else tuple(logprobs.raw[start:].tolist()),
            hypothesis.reason,
            hypothesis=hypothesis,
            num_drafts=num_drafts,
            accepted=accepted,
            parts=self._parts(slot, ids, text, last=True),
        )

    def failure_events(self, error: DescantError) -> Iterator[StreamEvent]:
        """The last events of the sequences that have none yet, with the error."""
        for slot in self.num_emitted:
            if slot not in self.finished_slots:
                text = self._decode(slot, (), last=True)
                parts = self._parts(slot, (), text, last=True)
                yield StreamEvent(self.row, slot, (), text, finish_reason="error", error=error, parts=parts)

    def _decode(self, slot: int, ids: Sequence[int], last: bool = False) -> str | None:
        if self.detokenizers is None:
            return None
        detokenizer = self.detokenizers[slot]
        text = detokenizer.put(ids)
        return text + detokenizer.end() if last else text

    def _parts(
        self, slot: int, ids: Sequence[int], text: str | None, last: bool = False
    ) -> tuple[ResponsePart, ...]:
        if self.readers is None:
            return (ResponsePart("content", text),) if text else ()
        reader = self.readers[slot]
        parts = reader.put(ids)
        return tuple([*parts, *reader.end()] if last else parts)


def _validate_no_record_fields(fields: Mapping[str, Any], argument: Any) -> None:
    """Raise for fields of the output object of generate(), which a stream does not return."""
    configs = argument if isinstance(argument, list | tuple) else (argument,)
    for name in _RECORD_FIELDS:
        values = [fields.get(name), *(getattr(config, name, None) for config in configs)]
        if any(values):
            do = "use `logprobs`, or generate(..., return_dict_in_generate=True)"
            raise ConfigError(name, "has no use in a stream", True, do)

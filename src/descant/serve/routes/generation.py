"""The base of the endpoints that generate: the runs of a request, and its answer, whole or as events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, NamedTuple

import torch
from starlette.requests import Request as HttpRequest

from descant.core.records import Hypothesis, Logprobs
from descant.engine.protocol import AgreedTokens, Failed, Finished, NewToken, TokenLogprobs, TraceRecords
from descant.engine.request import MERGED, Request
from descant.engine.serving.async_engine import AsyncEngine
from descant.serve.bodies import GenerationBody, StreamOptions, parse_body
from descant.serve.http.errors import ApiError, JsonResponse, encode_json
from descant.serve.http.request import EventStream, RequestState, read_json, until_disconnect
from descant.serve.model.served_model import BodyParameters, ServedModel, max_new_tokens
from descant.serve.settings import check_model_name
from descant.tokenization.detokenizer import IncrementalDetokenizer
from descant.tokenization.regions import ResponsePart, ResponseReader
from descant.tokenization.response_syntax import ResponseSyntax
from descant.trace.records import to_json_line
from descant.trace.tracer import Tracer

_PROMPTS_OF_A_LEVEL: Final = 4  # prompts of a body with the same priority


class ChoiceUpdate(NamedTuple):
    """The gain of a sequence since its last update."""

    choice: int  # of all that the HTTP request asks for
    text: str
    tokens: tuple[int, ...] = ()
    parts: tuple[ResponsePart, ...] = ()  # of an answer with regions
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None  # "stop", "length"; None: more may come


class TraceUpdate(NamedTuple):
    """New records of a trace."""

    records: tuple[Any, ...]


@dataclass
class _Choice:
    """One sequence of a prompt."""

    detokenizer: IncrementalDetokenizer
    reader: ResponseReader | None = None  # of an answer with regions, in place of the detokenizer
    num_tokens: int = 0  # that the detokenizer has
    held: tuple[int, ...] = ()  # the last of them, which have no update yet

    def put(self, tokens: Sequence[int], *, is_end: bool = False) -> tuple[str, tuple[ResponsePart, ...]]:
        """The text that is final, or the parts of an answer with regions."""
        if self.reader is None:
            text = self.detokenizer.put(tokens)
            return text + self.detokenizer.end() if is_end else text, ()
        parts = self.reader.put(tokens)
        return "", tuple([*parts, *self.reader.end()] if is_end else parts)


@dataclass
class PromptRun:
    """A request on its way through the engine; counts what it has used."""

    engine: AsyncEngine
    request: Request
    first_choice: int  # of those of the HTTP request
    num_choices: int
    trace: Tracer | None = None
    skip_special_tokens: bool = True
    syntax: ResponseSyntax | None = None  # of an answer with regions
    num_new_tokens: int = 0
    num_cached_tokens: int | None = None  # of its prompt; None: unknown until it has ended
    prompt_logprobs: Logprobs | None = None
    _choices: list[_Choice] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        """The tokens of its prompt and of the negative one."""
        return len(self.request.prompt) + len(self.request.inputs.get("negative_prompt_ids", ()))

    @property
    def max_new_tokens(self) -> int:
        """The most new tokens of all its sequences."""
        most = max_new_tokens(self.request.generation_config, len(self.request.prompt))
        return self.num_choices * max(0, most)

    async def updates(self) -> AsyncIterator[ChoiceUpdate | TraceUpdate]:
        """The updates of all sequences, the last of each with its finish reason; raises if it fails."""
        self._choices = [self._new_choice() for _ in range(self.num_choices)]
        stream = self.engine.stream(self.request, trace=self.trace)
        async with aclosing(stream) as events:
            async for event in events:
                if isinstance(event, NewToken):
                    logprobs = () if event.logprobs is None else (event.logprobs,)
                    for index in self._choices_of(event.slot):
                        for update in self._add(index, (event.token,), logprobs):
                            yield update
                elif isinstance(event, AgreedTokens):
                    if self.request.generation_config.logprobs is None:  # else they come with the end
                        for index in range(self.num_choices):
                            for update in self._add(index, event.tokens, ()):
                                yield update
                elif isinstance(event, TraceRecords):
                    yield TraceUpdate(event.records)
                elif isinstance(event, Finished):
                    self.prompt_logprobs = event.prompt_logprobs
                    self.num_cached_tokens = event.cached_tokens
                    for update in self._end(event.hypotheses):
                        yield update
                elif isinstance(event, Failed):
                    raise event.error

    @property
    def _is_repeated(self) -> bool:
        """Whether all choices are the one sequence of the request."""
        return (self.request.generation_config.num_return_sequences or 1) < self.num_choices

    def _choices_of(self, slot: int) -> Sequence[int]:
        """The choices that a sequence of the request belongs to."""
        return range(self.num_choices) if self._is_repeated else (slot,)

    @property
    def num_reasoning_tokens(self) -> int:
        """The tokens of the thoughts of all sequences."""
        readers = [choice.reader for choice in self._choices if choice.reader is not None]
        return sum(reader.num_reasoning_tokens for reader in readers)

    def _new_choice(self) -> _Choice:
        config = self.request.generation_config
        detokenizer = IncrementalDetokenizer(
            self.request.tokenizer,
            prompt_ids=self.request.prompt,
            stop_strings=config.stop_strings or (),
            skip_special_tokens=self.skip_special_tokens,
        )
        if self.syntax is None:
            return _Choice(detokenizer)
        prompt = torch.as_tensor(self.request.prompt).tolist()
        return _Choice(detokenizer, ResponseReader(self.syntax, prompt, detokenizer))

    def _add(
        self, index: int, tokens: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]
    ) -> Sequence[ChoiceUpdate]:
        """The updates by new tokens of one sequence."""
        choice = self._choices[index]
        choice.num_tokens += len(tokens)
        self.num_new_tokens += len(tokens)
        text, parts = choice.put(tokens)
        tokens = choice.held + tokens
        # Part of a character, or of a text that may be a stop or a marker.
        is_held = not text and not parts and not logprobs
        choice.held = tokens if is_held else ()
        return () if is_held else [ChoiceUpdate(self.first_choice + index, text, tokens, parts, logprobs)]

    def _end(self, hypotheses: Sequence[Hypothesis]) -> list[ChoiceUpdate]:
        """The last updates: what was not streamed, and the finish reasons."""
        updates = []
        for index, choice in enumerate(self._choices):
            hypothesis = hypotheses[0 if self._is_repeated else index]
            tokens = hypothesis.tokens.tolist()
            rest = tuple(tokens[choice.num_tokens :])
            logprobs = sequence_logprobs(hypothesis.logprobs, choice.num_tokens)
            self.num_new_tokens += len(rest)
            text, parts = choice.put(rest, is_end=True)
            reason = "length" if hypothesis.reason in ("length", "time") else "stop"
            index += self.first_choice
            updates.append(ChoiceUpdate(index, text, choice.held + rest, parts, logprobs, reason))
        return updates


def sequence_logprobs(logprobs: Logprobs | None, start: int = 0) -> tuple[TokenLogprobs, ...]:
    """The log-probabilities of a sequence from a token on, as plain numbers."""
    if logprobs is None:
        return ()
    tables = (logprobs.raw, logprobs.processed, logprobs.top, logprobs.top_raw, logprobs.top_processed)
    columns = (table[start:].tolist() for table in tables)
    return tuple(
        TokenLogprobs(raw, processed, tuple(zip(top, top_raw, top_processed, strict=True)))
        for raw, processed, top, top_raw, top_processed in zip(*columns, strict=True)
    )


class GenerationCall:
    """The prompts of one HTTP request on their way through the engine; an endpoint says how answers look."""

    body_type: ClassVar[type[GenerationBody]]
    is_chat: ClassVar[bool]
    id_prefix: ClassVar[str]
    kind: ClassVar[str]  # of the answer
    chunk_kind: ClassVar[str]

    def __init__(self, model: ServedModel, state: RequestState, body: Any) -> None:
        self.model, self.state, self.body = model, state, body
        self.id = f"{self.id_prefix}{state.id}"
        self.created = int(time.time())
        self.runs: list[PromptRun] = []
        self.choices: list[Any] = []  # each with a finish reason, None as long as it grows
        self.trace_id: str | None = None

    @classmethod
    async def handle(cls, http: HttpRequest) -> Any:
        """The response to a request."""
        model: ServedModel = http.app.state.model
        state = RequestState.of(http.scope)
        body = parse_body(cls.body_type, await read_json(http, model.settings.max_body_bytes))
        state.field_names = body.field_names
        call = cls(model, state, body)
        if body.stream:
            return EventStream(call.events(), call.error_event)
        return JsonResponse(await until_disconnect(http.receive, call.answer()))

    # ------------------------------------------------------------------------ of an endpoint
    async def encode(self) -> list[PromptRun]:
        """The run of each prompt; raises for parameters that cannot run."""
        raise NotImplementedError

    def new_choice(self, run: PromptRun) -> Any:
        """An answer without text."""
        raise NotImplementedError

    def piece(self, choice: Any, update: ChoiceUpdate) -> dict[str, Any]:
        """Add an update to an answer; returns its JSON values that a stream sends, none to send nothing."""
        raise NotImplementedError

    def choice_json(self, index: int, choice: Any) -> dict[str, Any]:
        """A whole answer."""
        raise NotImplementedError

    def chunk_json(self, index: int, piece: dict[str, Any]) -> dict[str, Any]:
        """A piece of an answer in a stream."""
        raise NotImplementedError

    # ------------------------------------------------------------------------ runs
    async def start(self) -> None:
        """Encode the prompts, check all parameters, and reserve the most tokens that may be used."""
        check_model_name(self.model.settings, self.body.model)
        self.runs = await self.encode()
        prompts = [run.num_prompt_tokens for run in self.runs]
        self.state.reserve(sum(prompts), sum(run.max_new_tokens for run in self.runs))
        self.choices = [self.new_choice(run) for run in self.runs for _ in range(run.num_choices)]

    def read_parameters(self, grammar: Mapping[str, Any] | None) -> BodyParameters:
        """The generation parameters of the body, with the grammar that other fields stand for."""
        assert self.state.key is not None
        self.state.model_name = self.body.model
        scheduler = self.model.engine.scheduler_config
        pool = None if scheduler.num_blocks is None else scheduler.num_blocks * scheduler.block_size
        tokens = {"pool_tokens": pool, "key_tokens": self.state.key.limits.tokens_per_minute}
        implied = {} if grammar is None else {"grammar": grammar}
        return self.model.parameters.read(self.body, implied, is_chat=self.is_chat, **tokens)

    def make_runs(
        self,
        parameters: BodyParameters,
        prompts: Sequence[list[int]],
        negative: list[int] | None = None,
        num_logprobs: int | None = None,
        syntax: ResponseSyntax | None = None,
    ) -> list[PromptRun]:
        """The run of each prompt; `negative` of `guidance_scale`, `num_logprobs` of each prompt token."""
        body, model = self.body, self.model
        if body.priority is not None and body.priority < 0:
            raise ApiError(400, f"`priority` must be >= 0, got {body.priority}", param="priority")
        salt = self.state.salt + (body.cache_salt or "").encode("utf-8", "surrogatepass")
        runs = []
        for index, whole in enumerate(prompts):
            prompt = parameters.truncate(whole, body.truncate_prompt_tokens)
            config = parameters.config(max(len(prompt), len(negative or ())))
            request = Request(
                prompt,
                config,
                inputs={} if negative is None else {"negative_prompt_ids": negative},
                tokenizer=model.tokenizer,
                # So that a body of many prompts does not make the requests behind it wait for all of them.
                priority=(body.priority or 0) + index // _PROMPTS_OF_A_LEVEL,
                deadline=model.settings.max_request_seconds,
                cache_salt=salt,
                _call=MERGED,
                prompt_logprobs=num_logprobs,
                **model.extras(config),
            )
            trace = model.traces.new_tracer(model.tokenizer) if body.trace else None
            count = parameters.num_choices
            runs.append(
                PromptRun(
                    model.engine, request, index * count, count, trace, body.skip_special_tokens, syntax
                )
            )
        return runs

    @property
    def usage(self) -> dict[str, Any]:
        """The tokens used so far, and once it is known how many of them were cached."""
        prompt = sum(run.num_prompt_tokens for run in self.runs)
        new = sum(run.num_new_tokens for run in self.runs)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
        }
        if any(run.syntax is not None and run.syntax.thought is not None for run in self.runs):
            thought = sum(run.num_reasoning_tokens for run in self.runs)
            usage["completion_tokens_details"] = {"reasoning_tokens": thought}
        cached = [run.num_cached_tokens for run in self.runs if run.num_cached_tokens is not None]
        if len(cached) < len(self.runs):
            return usage
        return {**usage, "prompt_tokens_details": {"cached_tokens": sum(cached)}}

    async def _updates(self) -> AsyncIterator[ChoiceUpdate | TraceUpdate]:
        """The updates of all prompts; leaving early cancels all."""
        try:
            source = self.runs[0].updates() if len(self.runs) == 1 else _merged(self.runs)
            async with aclosing(source) as updates:  # type: ignore[type-var]
                async for update in updates:
                    if isinstance(update, ChoiceUpdate):
                        if self.state.first_output_at is None:
                            self.state.first_output_at = time.monotonic()
                        if update.finish_reason is not None:
                            self.state.finish_reasons.append(update.finish_reason)
                    yield update
        finally:
            self.state.num_new_tokens = sum(run.num_new_tokens for run in self.runs)

    async def pieces(self) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        """The pieces of all answers, by the index of the answer; trace records have the index -1."""
        num_open = len(self.choices)
        async with aclosing(self._updates()) as updates:  # type: ignore[type-var]
            async for update in updates:
                if isinstance(update, TraceUpdate):
                    yield -1, {"trace": update.records}
                    continue
                choice = self.choices[update.choice]
                if choice.finish_reason is not None:
                    continue  # it has ended after its first call
                piece = self.piece(choice, update)
                num_open -= choice.finish_reason is not None
                if piece:
                    yield update.choice, piece
                if not num_open:
                    break
        if (trace := self.runs[0].trace) is not None:
            assert self.state.key is not None
            self.trace_id = self.model.traces.add(self.state.key, trace)

    # ------------------------------------------------------------------------ answers
    def _head(self, kind: str) -> dict[str, Any]:
        name = self.model.settings.model_name
        head = {"id": self.id, "object": kind, "created": self.created, "model": name}
        return head if self.trace_id is None else {**head, "trace_id": self.trace_id}

    async def answer(self) -> dict[str, Any]:
        """The response without streaming."""
        await self.start()
        async for _ in self.pieces():
            pass
        choices = [self.choice_json(index, choice) for index, choice in enumerate(self.choices)]
        return {**self._head(self.kind), "choices": choices, "usage": self.usage}

    async def events(self) -> AsyncIterator[bytes]:
        """The response as server-sent events."""
        await self.start()
        # The JSON object of a chunk up to its choices, left open.
        head = json.dumps(self._head(self.chunk_kind))[:-1].encode()
        options = self.body.stream_options or StreamOptions()
        async with aclosing(self.pieces()) as pieces:  # type: ignore[type-var]
            async for index, piece in pieces:
                if index < 0:
                    lines = ", ".join(to_json_line(record) for record in piece["trace"])
                    yield b'data: %b, "choices": [], "trace": [%b]}\n\n' % (head, lines.encode())
                    continue
                choice = encode_json(self.chunk_json(index, piece))
                usage = b', "usage": %b' % json.dumps(self.usage).encode() if options.usage_in_chunks else b""
                yield b'data: %b, "choices": [%b]%b}\n\n' % (head, choice, usage)
        fields = {"trace_id": self.trace_id, "usage": self.usage if options.include_usage else None}
        last = {name: value for name, value in fields.items() if value is not None}
        if last:
            yield b'data: %b, "choices": [], %b}\n\n' % (head, json.dumps(last)[1:-1].encode())
        yield b"data: [DONE]\n\n"

    def error_event(self, error: ApiError) -> bytes:
        """An error after the first event."""
        return b"data: %b\n\n" % error.encode()


async def _merged(runs: Sequence[PromptRun]) -> AsyncIterator[ChoiceUpdate | TraceUpdate]:
    """The updates of several prompts as they come; the first error ends all."""
    queue: asyncio.Queue[ChoiceUpdate | TraceUpdate | None] = asyncio.Queue()

    async def forward(run: PromptRun) -> None:
        try:
            async with aclosing(run.updates()) as updates:  # type: ignore[type-var]
                async for update in updates:
                    queue.put_nowait(update)
        finally:
            queue.put_nowait(None)

    tasks = [asyncio.ensure_future(forward(run)) for run in runs]
    try:
        num_ended = 0
        while num_ended < len(tasks):
            update = await queue.get()
            if update is not None:
                yield update
                continue
            num_ended += 1
            for task in tasks:
                if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                    raise error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

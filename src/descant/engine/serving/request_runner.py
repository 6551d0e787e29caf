"""The requests of an engine: the sessions they run in, their steps, and the events of each."""

from __future__ import annotations

import asyncio
import queue
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, repeat
from typing import Any, Final

import torch

from descant.core.interfaces import ModelTraits, SelectableCache
from descant.core.records import Logprobs, Tokens
from descant.engine.protocol import (
    AgreedTokens,
    Engine,
    Event,
    Failed,
    Finished,
    NewToken,
    Report,
    RequestEvent,
    TraceRecords,
    is_engine,
    request_error,
    token_logprobs,
)
from descant.engine.request import Request
from descant.engine.scheduling.config import SchedulerConfig, check_count
from descant.engine.scoring import ScoringSession
from descant.engine.serving.metrics import Histogram
from descant.engine.session import Session
from descant.errors import EngineFull, InputError
from descant.models.forward.no_cache import NoCache
from descant.trace.tracer import Tracer

_MAX_ROWS: Final = 4  # prompts in a forward: it returns a logit for each token of each


def empty_logprobs(num_top: int) -> Logprobs:
    """The log-probabilities of a prompt of one token."""
    values, top = torch.zeros(0), torch.zeros(0, num_top)
    return Logprobs(values, values, top.long(), top, top)


def check_prompt_logprobs(request: Request, traits: ModelTraits) -> Request:
    """The request without `prompt_logprobs`; raises where these are not defined."""
    count = request.prompt_logprobs
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= traits.vocab_size:
        raise InputError("prompt_logprobs", f"must be an integer from 0 to {traits.vocab_size}", count)
    if traits.is_encoder_decoder:
        must = "must be None for an encoder-decoder model, whose prompt the decoder does not predict"
        raise InputError("prompt_logprobs", must, count)
    others = sorted(request.inputs.keys() - {"negative_prompt_ids"})
    if others:
        must = f"must be None with `{others[0]}`: only prompts of tokens are scored"
        raise InputError("prompt_logprobs", must, count)
    return replace(request, prompt_logprobs=None)


class Receiver:
    """Where the events of a request go: to a task of an event loop, or to a thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.loop = loop  # that waits for them; None: a thread does
        self.events: Any = queue.SimpleQueue() if loop is None else asyncio.Queue()

    def put(self, event: RequestEvent) -> None:
        """Hand an event over, in the loop or in the engine's thread."""
        self.events.put_nowait(event)


_Letter = tuple[int, Receiver, RequestEvent]


class Delivery:
    """The events of a step, which reach every event loop in one call: waking a loop costs a system call."""

    def __init__(self) -> None:
        self._by_loop: dict[asyncio.AbstractEventLoop, list[_Letter]] = {}

    def add(self, request_id: int, receiver: Receiver, event: RequestEvent) -> None:
        """Hand an event of a request to a thread at once, to a loop with the next `send`."""
        if receiver.loop is None:
            receiver.put(event)
        else:
            self._by_loop.setdefault(receiver.loop, []).append((request_id, receiver, event))

    def send(self) -> list[int]:
        """Hand the events over; the requests whose loop is closed."""
        unreached: dict[int, None] = {}
        by_loop, self._by_loop = self._by_loop, {}
        for loop, letters in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put_all, letters)
            except RuntimeError:
                unreached |= dict.fromkeys(request_id for request_id, _, _ in letters)
        return list(unreached)


def _put_all(letters: Sequence[_Letter]) -> None:
    for _, receiver, event in letters:
        receiver.put(event)


_COUNTERS = (
    *("requests", "finished", "failed", "cancelled", "refused", "undelivered"),
    *("tokens", "drafts", "accepted_drafts", "failed_steps"),
)
_NO_ROWS = torch.zeros(0, dtype=torch.long)
_MAX_FAILED_STEPS: Final = 3  # in a row, after which the running requests of a session fail


@dataclass(eq=False)
class _Place:
    """A session of the engine."""

    session: Engine
    tracer: Tracer | None = None
    num_records: int = 0  # of the tracer that are delivered
    num_failed_steps: int = 0  # in a row


@dataclass(eq=False)
class EngineRequest:
    """A request of an engine, who waits for it, and how far it is."""

    given: Request
    receiver: Receiver
    streams: bool  # whether its caller wants what is certain before the end
    trace: Tracer | None = None
    arrival: float = field(default_factory=time.monotonic)
    request: Request = field(init=False)  # as it generates
    target: _Place = field(init=False)  # in which it generates
    place: _Place | None = None  # in which it is now; None: in `_delayed`
    last_token: float = 0.0  # the time of its last token; 0: it has none
    num_agreed: int = 0  # tokens of a beam search that are delivered
    prompt_logprobs: Logprobs | None = None


class RequestRunner:
    """Runs requests in sessions, and hands their events over; for one thread.

    A traced request has a session of its own, and prompts are scored in another, since both would slow down
    the steps of all others. The sessions take turns.
    """

    def __init__(
        self, model: Any, scheduler: SchedulerConfig, max_traced: int, session: Mapping[str, Any]
    ) -> None:
        check_count("max_traced", max_traced, 0)
        self._model, self._arguments = model, dict(session)
        self._scheduler, self._max_traced = scheduler, max_traced
        self._is_session = not is_engine(model)
        self._main = _Place(Session(model, scheduler=scheduler, **session) if self._is_session else model)
        self._places = [self._main]
        # By all sessions: it has the interface.
        self._shares_model = getattr(self._main.session, "model", None) is model
        self._scores: ScoringSession | None = None  # made for the first request that needs it
        self._score_place: _Place | None = None
        self._delayed: list[int] = []  # requests with a scored prompt that wait for room
        self._request_ids = count()
        self._live: dict[int, EngineRequest] = {}
        self._delivery = Delivery()
        self.counters: Counter[str] = Counter(dict.fromkeys(_COUNTERS, 0))
        self.histograms = {
            name: Histogram() for name in ("time_to_first_token", "time_between_tokens", "step", "request")
        }

    @property
    def session(self) -> Engine:
        """The engine of all requests that are not traced."""
        return self._main.session

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return any(len(place.session) for place in self._places)

    @property
    def is_idle(self) -> bool:
        """Whether no request is left."""
        return not self._live and not self.has_work

    @property
    def is_healthy(self) -> bool:
        """Whether the last step of no session failed."""
        return not any(place.num_failed_steps for place in self._places)

    def report(self) -> Report:
        """The content of the sessions, and the work of the main one."""
        sessions = [place.session for place in self._places]
        return replace(
            self.session.report(),
            requests=sum(map(len, sessions)),
            rows=sum(session.rows for session in sessions),
        )

    # -------------------------------------------------------------------- requests come and go
    def admit(self, live: EngineRequest) -> int:
        """Add a request; its id. A request that is refused leaves nothing."""
        try:
            request_id = self._admit(live)
        except Exception:
            self.counters["refused"] += 1
            raise
        self.counters["requests"] += 1
        return request_id

    def _admit(self, live: EngineRequest) -> int:
        request_id, num_top = next(self._request_ids), live.given.prompt_logprobs
        if not self._is_session:
            _check_plain(live)
        live.request = live.given
        if num_top is not None:
            live.request = check_prompt_logprobs(live.given, self.session.traits)
        live.target = target = self._main if live.trace is None else self._traced_place(live.trace)
        if num_top is not None and len(live.given.prompt) > 1:
            self._score(request_id, live)
        else:
            target.session.admit(live.request, numbers=[request_id])
            live.place = target
            if num_top is not None:
                live.prompt_logprobs = empty_logprobs(num_top)
        if target is not self._main:
            self._places.append(target)
        self._live[request_id] = live
        return request_id

    def _traced_place(self, tracer: Tracer) -> _Place:
        """A session for one traced request, on a cache of the main one's type."""
        traced = sum(live.trace is not None for live in self._live.values())
        if traced >= self._max_traced:
            raise EngineFull(traced, self._max_traced, "max_traced")
        cache = self._arguments.get("cache")
        if isinstance(cache, NoCache):
            cache = NoCache()
        elif cache is not None:
            cache = cache.select(_NO_ROWS) if isinstance(cache, SelectableCache) else None
        states = self._arguments.get("states", ())
        own = Session(self._model, states=states, cache=cache, trace=tracer, scheduler=self._traced_scheduler)
        return _Place(own, tracer)

    @property
    def _traced_scheduler(self) -> SchedulerConfig:
        """The limits of a traced request: a share of the pool's size for each, beside the pool itself."""
        size = self._scheduler.num_blocks
        share = None if size is None else max(1, size // self._max_traced)
        return SchedulerConfig(num_blocks=share, block_size=self._scheduler.block_size)

    def _score(self, request_id: int, live: EngineRequest) -> None:
        """Let a request wait until its prompt is scored."""
        error = live.target.session.supports(live.request)
        if error is not None:
            raise error
        if self._scores is None:
            self._scores = ScoringSession(self._model, scheduler=SchedulerConfig(max_running_rows=_MAX_ROWS))
            self._score_place = _Place(self._scores.session)
            self._places.append(self._score_place)
        limit, waiting = self._scheduler.max_waiting, self.session.report().waiting
        waiting += self._scores.session.report().waiting
        if limit is not None and waiting >= limit:
            raise EngineFull(waiting, limit)
        prompt = torch.as_tensor(live.given.prompt).long().cpu()
        scored = Request(
            prompt[:1],
            return_past_key_values=self._scores.has_keys,
            priority=live.given.priority,
            deadline=live.given.deadline,
            adapter_name=live.given.adapter_name,
        )
        self._scores.admit(request_id, scored, [prompt[1:]], live.given.prompt_logprobs or 0)
        live.place = self._score_place

    def _admit_scored(self, request_id: int, live: EngineRequest) -> None:
        """Let a request generate whose prompt is scored, or wait until there is room."""
        live.place, deadline = None, live.request.deadline
        request = live.request
        if deadline is not None:
            deadline = max(deadline - (time.monotonic() - live.arrival), 1e-6)
            request = replace(request, deadline=deadline)
        try:
            live.target.session.admit(request, numbers=[request_id])
        except EngineFull:
            self._delayed.append(request_id)
            return
        except Exception as error:
            self._end(Failed(request_id, request_error(request_id, error)), time.monotonic())
            return
        live.place = live.target

    def cancel(self, request_id: int) -> None:
        """Remove a request; nothing happens if it has ended."""
        live = self._live.pop(request_id, None)
        if live is None:
            return
        self.counters["cancelled"] += 1
        try:
            if live.place is self._score_place and self._scores is not None:
                self._scores.cancel(request_id)
            elif live.place is not None:
                live.place.session.cancel(request_id)
        except Exception:  # code of the request raised when it was released, which is done
            self.counters["failed"] += 1
        self._drop_place(live)

    def end_all(self, error: Exception) -> None:
        """Fail all requests."""
        self._fail(error, lambda _: True)
        self.counters["undelivered"] += len(self._delivery.send())

    def _fail(self, error: Exception, is_failed: Callable[[EngineRequest], bool]) -> None:
        for request_id, live in list(self._live.items()):
            if is_failed(live):
                self.cancel(request_id)
                self._deliver_records(request_id, live)
                failed = Failed(request_id, request_error(request_id, error))
                self._delivery.add(request_id, live.receiver, failed)

    def _drop_place(self, live: EngineRequest) -> None:
        """Drop the session of a traced request that has ended."""
        if live.target is not self._main:
            self._places.remove(live.target)

    # -------------------------------------------------------------------- steps
    def step(self) -> None:
        """One step of each session; their events reach each event loop in one call."""
        for place in list(self._places):
            if len(place.session):
                self._step_place(place)
        delayed, self._delayed = self._delayed, []
        for request_id in delayed:
            if request_id in self._live:
                self._admit_scored(request_id, self._live[request_id])
        for request_id in self._delivery.send():  # their callers are gone
            self.cancel(request_id)

    def _step_place(self, place: _Place) -> None:
        """One step; after several failed ones in a row all requests fail, so that callers do not wait."""
        began = time.monotonic()
        try:
            if len(self._places) > 1 and self._shares_model:
                assert isinstance(place.session, Session)
                place.session.apply_output_states()
            events = place.session.step()
        except Exception as error:
            place.num_failed_steps += 1
            self.counters["failed_steps"] += 1
            if place.num_failed_steps >= _MAX_FAILED_STEPS:
                self._fail(error, lambda live: live.place is place)
                place.num_failed_steps = 0
            return
        place.num_failed_steps = 0
        now = time.monotonic()
        self.histograms["step"].add(now - began)
        if place.tracer is not None:
            for request_id, live in self._live.items():
                if live.place is place:
                    self._deliver_records(request_id, live)
        for event in events:
            self._deliver(event, now)
        self._deliver_agreed(place.session)

    def _deliver(self, event: Event, now: float) -> None:
        """Give an event to the requests it belongs to."""
        if isinstance(event, Tokens):
            logprobs = token_logprobs(event) or repeat(None)
            columns = event.request.tolist(), event.slot.tolist(), event.token.tolist()
            for request_id, slot, token, own in zip(*columns, logprobs, strict=False):
                live = self._live.get(request_id)
                if live is not None:
                    self._note_token(live, now)
                    self._delivery.add(request_id, live.receiver, NewToken(request_id, slot, token, own))
            return
        live = self._live.get(event.request)
        if live is not None and live.place is self._score_place:
            if isinstance(event, Finished):
                live.prompt_logprobs = event.hypotheses[0].logprobs
                live.request = self._with_cached_prompt(live, event)
                self._admit_scored(event.request, live)
                return
            assert self._scores is not None
            self._scores.forget(event.request)
        if live is not None and live.prompt_logprobs is not None and isinstance(event, Finished):
            event = replace(event, prompt_logprobs=live.prompt_logprobs)
        self._end(event, now)

    def _with_cached_prompt(self, live: EngineRequest, scored: Finished) -> Request:
        """The request with the keys and values of its scored prompt, which need not be computed again.

        Only where it would have the same ones by itself: on the default cache, without cached prefixes.
        """
        request, config = live.request, live.request.generation_config
        has_own = request.past_key_values is not None or config.cache_implementation is not None
        if has_own or self._arguments.keys() & {"cache", "prefix_cache"} or not scored.past_key_values:
            return request
        cached = replace(request, past_key_values=scored.past_key_values[0])
        return request if live.target.session.supports(cached) is not None else cached

    def _end(self, event: Finished | Failed, now: float) -> None:
        """Give a request its last event."""
        live = self._live.pop(event.request, None)
        if isinstance(event, Finished):
            self.counters["finished"] += 1
            self._count_drafts(event)
        else:
            self.counters["failed"] += 1
        if live is not None:
            self.histograms["request"].add(now - live.arrival)
            self._delivery.add(event.request, live.receiver, event)
            self._drop_place(live)

    def _deliver_agreed(self, session: Engine) -> None:
        """Give the beam searches that stream the further tokens that all their sequences begin with."""
        for request_id in session.beam_requests:
            live = self._live.get(request_id)
            if live is not None and live.streams:
                tokens = session.common_prefix(request_id)[live.num_agreed :].tolist()
                if tokens:
                    live.num_agreed += len(tokens)
                    self._delivery.add(request_id, live.receiver, AgreedTokens(request_id, tuple(tokens)))

    def _deliver_records(self, request_id: int, live: EngineRequest) -> None:
        """Give a traced request the records that are new."""
        place = live.target
        if place.tracer is None:
            return
        records = place.tracer.records_from(place.num_records)
        if records and live.streams:
            place.num_records += len(records)
            self._delivery.add(request_id, live.receiver, TraceRecords(request_id, records))

    def _note_token(self, live: EngineRequest, now: float) -> None:
        self.counters["tokens"] += 1
        if live.last_token:
            self.histograms["time_between_tokens"].add(now - live.last_token)
        else:
            self.histograms["time_to_first_token"].add(now - live.arrival)
        live.last_token = now

    def _count_drafts(self, event: Finished) -> None:
        for sequence in event.hypotheses:
            if sequence.speculation is not None:
                self.counters["drafts"] += sum(sequence.speculation.drafted)
                self.counters["accepted_drafts"] += sum(sequence.speculation.accepted)


def _check_plain(live: EngineRequest) -> None:
    """Raise for what only a session of the runner's own can do."""
    for name, value in (("trace", live.trace), ("prompt_logprobs", live.given.prompt_logprobs)):
        if value is not None:
            raise InputError(name, "must be None on another engine than a session", "a value", "leave it out")

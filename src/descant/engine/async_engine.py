"""An engine for many callers: one thread owns the model, any thread or event loop sends it requests."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from descant.core.records import Tokens
from descant.engine.events import Event, Failed, Finished
from descant.engine.metrics import EngineMetrics, Histogram
from descant.engine.request import Request
from descant.engine.scheduling.config import SchedulerConfig
from descant.engine.session import Session
from descant.engine.step_faults import request_error
from descant.errors import EngineClosed

__all__ = ["AsyncEngine", "NewToken", "RequestEvent", "RequestHandle"]

_MAX_FAILED_STEPS: Final = 3  # in a row, after which the running requests fail


class NewToken(NamedTuple):
    """A token of a running request; the tokens of beams come with its end only."""

    request: int
    slot: int  # the index of the sequence in its request
    token: int


RequestEvent = NewToken | Finished | Failed
Sink = Callable[[RequestEvent], None]  # called in the engine's thread, so it must return at once


@dataclass(eq=False)
class RequestHandle:
    """A request of an engine: an iterator over its events, for one thread."""

    number: int
    engine: AsyncEngine
    _events: queue.SimpleQueue[RequestEvent] = field(default_factory=queue.SimpleQueue)

    def __iter__(self) -> Iterator[RequestEvent]:
        """Its events until it has ended; a loop that is left early cancels it."""
        ended = False
        try:
            while not ended:
                event = self._events.get()
                ended = not isinstance(event, NewToken)
                yield event
        finally:
            if not ended:
                self.cancel()

    def result(self) -> Finished:
        """Wait for its end; raises the error of a failed request."""
        for event in self:
            if isinstance(event, Finished):
                return event
            if isinstance(event, Failed):
                raise event.error
        raise EngineClosed

    def cancel(self) -> None:
        """Remove it, and free its rows and blocks before the next step."""
        self.engine.cancel(self.number)


@dataclass(eq=False)
class _LiveRequest:
    """A request that has not ended, in the engine's thread."""

    sink: Sink
    arrival: float
    last_token: float = 0.0  # the time of its last token; 0: it has none


class AsyncEngine:
    """A session in a thread of its own: `await generate(...)`, `async for ... in stream(...)`, `submit`.

    Calls are safe from any thread and any event loop. A request runs until it ends, or until its task or its
    loop over events is cancelled. With a `scheduler`, `max_waiting` bounds the queue: a call beyond it raises
    `EngineFull`. Further arguments are those of `Session`. Use it in a `with` block, or call `close`.
    """

    def __init__(self, model: Any, *, scheduler: SchedulerConfig | None = None, **session: Any) -> None:
        self._session = Session(model, scheduler=scheduler or SchedulerConfig(), **session)
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._live: dict[int, _LiveRequest] = {}
        self._counters: Counter[str] = Counter()
        self._histograms = {
            name: Histogram() for name in ("time_to_first_token", "time_between_tokens", "step", "request")
        }
        self._is_draining = self._is_closed = False
        self._num_failed_steps = 0
        self._thread = threading.Thread(target=self._run, name="descant-engine", daemon=True)
        self._thread.start()

    # -------------------------------------------------------------------- callers
    def submit(self, request: Request) -> RequestHandle:
        """Add a request and return at once after it is accepted; for threads without an event loop."""
        handle = RequestHandle(-1, self)
        request = self._session.compile_grammar(request)
        handle.number = self._admit(request, handle._events.put).result()
        return handle

    async def generate(self, request: Request) -> Finished:
        """The result of a request; cancelling the task cancels the request."""
        async for event in self.stream(request):
            if isinstance(event, Finished):
                return event
            if isinstance(event, Failed):
                raise event.error
        raise EngineClosed

    async def stream(self, request: Request) -> AsyncIterator[RequestEvent]:
        """The events of a request, the last of which is `Finished` or `Failed`."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[RequestEvent] = asyncio.Queue()
        if self._session.has_grammar(request):  # a compilation must delay neither this loop nor a step
            request = await asyncio.to_thread(self._session.compile_grammar, request)
        admission = self._admit(request, lambda event: _put_threadsafe(loop, events, event))
        ended, number = False, None
        try:
            number = await asyncio.wrap_future(admission)
            while not ended:
                event = await events.get()
                ended = not isinstance(event, NewToken)
                yield event
        finally:
            if number is None:  # the task was cancelled while it was admitted
                admission.add_done_callback(self._cancel_admitted)
            elif not ended:
                self.cancel(number)

    def cancel(self, number: int) -> None:
        """Remove a request before the next step; nothing happens if it has ended."""
        self._send(lambda: self._cancel(number))

    def drain(self) -> None:
        """Accept no further request, and wait until all have ended."""
        with self._wake:
            self._is_draining = True
            self._wake.notify_all()
            self._wake.wait_for(lambda: self._is_idle or not self._thread.is_alive())

    def close(self) -> None:
        """Cancel all requests and end the thread; waiting callers get `EngineClosed`."""
        with self._wake:
            self._is_closed = True
            self._wake.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> AsyncEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    @property
    def is_healthy(self) -> bool:
        """Whether its thread runs, and its last step did not fail."""
        return self._thread.is_alive() and not self._is_closed and not self._num_failed_steps

    def metrics(self) -> EngineMetrics:
        """Counters, gauges and histograms, as of the end of the last step."""
        future: Future[EngineMetrics] = Future()
        self._send(lambda: future.set_result(self._read_metrics()))
        return future.result()

    def _admit(self, request: Request, sink: Sink) -> Future[int]:
        """The number of a request, once the engine's thread has admitted it."""
        future: Future[int] = Future()
        arrival = time.monotonic()

        def admit() -> None:
            if self._is_draining:
                future.set_exception(EngineClosed())
                return
            try:
                number = self._session.admit(request)[0]
            except Exception as error:
                self._counters["refused"] += 1
                future.set_exception(error)
                return
            self._live[number] = _LiveRequest(sink, arrival)
            self._counters["requests"] += 1
            future.set_result(number)

        self._send(admit)
        return future

    def _cancel_admitted(self, admission: Future[int]) -> None:
        if not admission.cancelled() and admission.exception() is None:
            self.cancel(admission.result())

    def _send(self, command: Callable[[], None]) -> None:
        """Have the engine's thread call a function before its next step."""
        with self._wake:
            if self._is_closed or not self._thread.is_alive():
                raise EngineClosed
            self._commands.append(command)
            self._wake.notify_all()

    # -------------------------------------------------------------------- the engine's thread
    @property
    def _is_idle(self) -> bool:
        return not self._commands and not self._live and not len(self._session)

    def _run(self) -> None:
        """Admit, step and deliver until it is closed."""
        while True:
            with self._wake:
                if self._is_idle:
                    self._wake.notify_all()  # for `drain`
                self._wake.wait_for(lambda: self._is_closed or self._commands or len(self._session))
                if self._is_closed:
                    break
                commands = list(self._commands)
                self._commands.clear()
            for command in commands:
                command()
            if len(self._session):
                self._step()
        self._end_all(EngineClosed())

    def _step(self) -> None:
        """One step; after several failed ones in a row all requests fail, so that callers do not wait."""
        began = time.monotonic()
        try:
            events = self._session.step()
        except Exception as error:
            self._num_failed_steps += 1
            self._counters["failed_steps"] += 1
            if self._num_failed_steps >= _MAX_FAILED_STEPS:
                self._end_all(error)
                self._num_failed_steps = 0
            return
        self._num_failed_steps = 0
        now = time.monotonic()
        self._histograms["step"].add(now - began)
        for event in events:
            self._deliver(event, now)

    def _deliver(self, event: Event, now: float) -> None:
        """Give an event to the requests it belongs to."""
        if isinstance(event, Tokens):
            tokens = zip(event.request.tolist(), event.slot.tolist(), event.token.tolist(), strict=True)
            for number, slot, token in tokens:
                live = self._live.get(number)
                if live is not None:
                    self._note_token(live, now)
                    self._put(number, live, NewToken(number, slot, token))
            return
        live = self._live.pop(event.request, None)
        if isinstance(event, Finished):
            self._counters["finished"] += 1
            self._count_drafts(event)
        else:
            self._counters["failed"] += 1
        if live is not None:
            self._histograms["request"].add(now - live.arrival)
            self._put(event.request, live, event)

    def _put(self, number: int, live: _LiveRequest, event: RequestEvent) -> None:
        """Hand an event over; a caller that is gone, such as a closed event loop, cancels its request."""
        try:
            live.sink(event)
        except Exception:
            self._cancel(number)

    def _note_token(self, live: _LiveRequest, now: float) -> None:
        self._counters["tokens"] += 1
        if live.last_token:
            self._histograms["time_between_tokens"].add(now - live.last_token)
        else:
            self._histograms["time_to_first_token"].add(now - live.arrival)
        live.last_token = now

    def _count_drafts(self, event: Finished) -> None:
        for sequence in event.hypotheses:
            if sequence.speculation is not None:
                self._counters["drafts"] += sum(sequence.speculation.drafted)
                self._counters["accepted_drafts"] += sum(sequence.speculation.accepted)

    def _cancel(self, number: int) -> None:
        if self._live.pop(number, None) is None:
            return
        self._counters["cancelled"] += 1
        try:
            self._session.cancel(number)
        except Exception:  # code of the request raised when it was released, which is done
            self._counters["failed"] += 1

    def _end_all(self, error: Exception) -> None:
        """Fail all requests."""
        for number, live in list(self._live.items()):
            self._cancel(number)
            try:
                live.sink(Failed(number, request_error(number, error)))
            except Exception:
                self._counters["undelivered"] += 1
        with self._wake:
            commands = list(self._commands) if self._is_closed else []
            if self._is_closed:
                self._is_draining = True
                self._commands.clear()
            self._wake.notify_all()
        for command in commands:  # refused, since it is draining
            command()

    def _read_metrics(self) -> EngineMetrics:
        histograms = {name: histogram.copy() for name, histogram in self._histograms.items()}
        return EngineMetrics(self._session.report(), dict(self._counters), histograms, len(self._commands))


def _put_threadsafe(
    loop: asyncio.AbstractEventLoop, events: asyncio.Queue[RequestEvent], event: RequestEvent
) -> None:
    loop.call_soon_threadsafe(events.put_nowait, event)

"""An engine for many callers: one thread owns the model, any thread or event loop sends it requests."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from descant.core.interfaces import ModelTraits
from descant.engine.protocol import Failed, Finished, NewToken, RequestEvent, is_engine
from descant.engine.request import Request
from descant.engine.scheduling.config import SchedulerConfig
from descant.engine.serving.metrics import EngineMetrics
from descant.engine.serving.request_runner import EngineRequest, Receiver, RequestRunner
from descant.errors import EngineClosed, InputError
from descant.trace.tracer import Tracer

__all__ = ["AsyncEngine", "NewToken", "RequestEvent", "RequestHandle"]


@dataclass(eq=False)
class RequestHandle:
    """A request of an engine: an iterator over its events, for one thread."""

    number: int
    engine: AsyncEngine
    _receiver: Receiver = field(default_factory=Receiver)

    def __iter__(self) -> Iterator[RequestEvent]:
        """Its events until it has ended; a loop that is left early cancels it."""
        ended = False
        try:
            while not ended:
                event: RequestEvent = self._receiver.events.get()
                ended = isinstance(event, Finished | Failed)
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


class AsyncEngine:
    """A session in a thread of its own: `await generate(...)`, `async for ... in stream(...)`, `submit`.

    Calls are safe from any thread and any event loop. A request runs until it ends, or until its task or its
    loop over events is cancelled. With a `scheduler`, `max_waiting` bounds the queue: a call beyond it raises
    `EngineFull`, as does a traced request beyond `max_traced` at once. Further arguments are those of
    `Session`. An engine such as `descant.VLLM` may take the model's place, without further arguments. Use it
    in a `with` block, or call `close`.
    """

    def __init__(
        self, model: Any, *, scheduler: SchedulerConfig | None = None, max_traced: int = 4, **session: Any
    ) -> None:
        own = getattr(model, "scheduler_config", None) if is_engine(model) else None
        self._scheduler_config = scheduler or own or SchedulerConfig()
        if is_engine(model) and (scheduler is not None or session):
            name = "scheduler" if scheduler is not None else next(iter(session))
            raise InputError(name, "must be left out for an engine, which has its own", "a value")
        self._runner = RequestRunner(model, self._scheduler_config, max_traced, session)
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._is_draining = self._is_closed = self._is_full = False
        self._thread = threading.Thread(target=self._run, name="descant-engine", daemon=True)
        self._thread.start()

    # -------------------------------------------------------------------- callers
    def submit(self, request: Request) -> RequestHandle:
        """Add a request and return at once after it is accepted; for threads without an event loop."""
        handle = RequestHandle(-1, self)
        call = EngineRequest(self._compile_grammar(request), handle._receiver, streams=True)
        handle.number = self._admit(call).result()
        return handle

    async def generate(self, request: Request, trace: Tracer | None = None) -> Finished:
        """The result of a request; cancelling the task cancels the request."""
        async for event in self._events(request, trace, streams=False):
            if isinstance(event, Finished):
                return event
            if isinstance(event, Failed):
                raise event.error
        raise EngineClosed

    def stream(self, request: Request, trace: Tracer | None = None) -> AsyncGenerator[RequestEvent]:
        """The events of a request, the last of which is `Finished` or `Failed`.

        With `trace`, its steps are recorded there, and `TraceRecords` has what each step has added.
        """
        return self._events(request, trace, streams=True)

    async def _events(
        self, request: Request, trace: Tracer | None, *, streams: bool
    ) -> AsyncGenerator[RequestEvent]:
        receiver = Receiver(asyncio.get_running_loop())
        arrival = time.monotonic()
        if self._runner.session.has_grammar(request):  # a compilation must delay neither this loop nor a step
            request = await asyncio.to_thread(self._compile_grammar, request)
        admission = self._admit(EngineRequest(request, receiver, streams, trace, arrival))
        ended, number = False, None
        try:
            number = await asyncio.wrap_future(admission)
            while not ended:
                event: RequestEvent = await receiver.events.get()
                ended = isinstance(event, Finished | Failed)
                yield event
        finally:
            if number is None:  # the task was cancelled while it was admitted
                admission.add_done_callback(self._cancel_admitted)
            elif not ended:
                self.cancel(number)

    def cancel(self, number: int) -> None:
        """Remove a request before the next step; nothing happens if it has ended."""
        with suppress(EngineClosed):  # all have ended
            self._send(lambda: self._runner.cancel(number))

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
    def traits(self) -> ModelTraits:
        """The traits of its model, with which prompts are prepared."""
        return self._runner.session.traits

    @property
    def scheduler_config(self) -> SchedulerConfig:
        """The limits of its scheduler."""
        return self._scheduler_config

    @property
    def is_healthy(self) -> bool:
        """Whether its thread runs, and its last step did not fail."""
        return self._thread.is_alive() and not self._is_closed and self._runner.is_healthy

    @property
    def is_full(self) -> bool:
        """Whether the queue was full after the last step: a request would be refused until the next one."""
        return self._is_full

    def metrics(self) -> EngineMetrics:
        """Counters, gauges and histograms, as of the end of the last step."""
        future: Future[EngineMetrics] = Future()
        self._send(lambda: future.set_result(self._read_metrics()))
        return future.result()

    def _compile_grammar(self, request: Request) -> Request:
        """The request with its grammar compiled."""
        try:
            return self._runner.session.compile_grammar(request)
        except Exception:
            with suppress(EngineClosed):
                self._send(lambda: self._runner.counters.update(refused=1))
            raise

    def _admit(self, call: EngineRequest) -> Future[int]:
        """The number of a request, once the engine's thread has admitted it."""
        future: Future[int] = Future()

        def admit() -> None:
            if not future.set_running_or_notify_cancel():
                return  # the caller has left meanwhile
            if self._is_draining:
                future.set_exception(EngineClosed())
                return
            try:
                number = self._runner.admit(call)
            except Exception as error:
                future.set_exception(error)
            else:
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
        return not self._commands and self._runner.is_idle

    def _run(self) -> None:
        """Run until it is closed; then no caller is left waiting, whatever has happened."""
        error: Exception = EngineClosed()
        try:
            self._run_steps()
        except Exception as unexpected:
            error = unexpected
        with self._wake:
            self._is_closed = self._is_draining = True
            commands = list(self._commands)
            self._commands.clear()
        self._runner.end_all(error)
        for command in commands:  # refused, since it is draining
            command()
        with self._wake:
            self._wake.notify_all()

    def _run_steps(self) -> None:
        """Admit, step and deliver until it is closed."""
        runner = self._runner
        while True:
            with self._wake:
                if self._is_idle:
                    self._wake.notify_all()  # for `drain`
                self._wake.wait_for(lambda: self._is_closed or self._commands or runner.has_work)
                if self._is_closed:
                    return
                commands = list(self._commands)
                self._commands.clear()
            for command in commands:
                command()
            runner.step()
            limit = self._scheduler_config.max_waiting
            self._is_full = limit is not None and runner.session.num_waiting >= limit

    def _read_metrics(self) -> EngineMetrics:
        runner = self._runner
        histograms = {name: histogram.copy() for name, histogram in runner.histograms.items()}
        return EngineMetrics(runner.report(), dict(runner.counters), histograms, len(self._commands))

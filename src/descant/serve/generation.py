"""One prompt through the engine: the text and the tokens of each of its sequences as they come."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from descant.core.records import Hypothesis, Logprobs
from descant.engine.async_engine import AsyncEngine
from descant.engine.events import AgreedTokens, Failed, Finished, NewToken, TokenLogprobs, TraceRecords
from descant.engine.request import Request
from descant.tokenization.detokenizer import IncrementalDetokenizer
from descant.trace.tracer import Tracer

__all__ = ["ChoiceUpdate", "PromptRun", "TraceUpdate"]


class ChoiceUpdate(NamedTuple):
    """What a sequence has gained since its last update."""

    choice: int
    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None  # "stop", "length"; None: more may come
    hypothesis: Hypothesis | None = None  # of the last update


class TraceUpdate(NamedTuple):
    """What a trace has gained."""

    records: tuple[Any, ...]


@dataclass
class _Choice:
    """One sequence of a prompt."""

    detokenizer: IncrementalDetokenizer
    num_tokens: int = 0  # that the detokenizer has
    held: tuple[int, ...] = ()  # the last of them, which have no update yet


@dataclass
class PromptRun:
    """A request on its way through the engine; counts what it has used."""

    engine: AsyncEngine
    request: Request
    num_choices: int
    trace: Tracer | None = None
    skip_special_tokens: bool = True
    num_new_tokens: int = 0
    num_cached_tokens: int | None = None  # of its prompt; None: unknown until it has ended
    prompt_logprobs: Logprobs | None = None
    _choices: list[_Choice] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        """The tokens of its prompt and of the negative one."""
        return len(self.request.prompt) + len(self.request.inputs.get("negative_prompt_ids", ()))

    async def updates(self) -> AsyncIterator[ChoiceUpdate | TraceUpdate]:
        """The updates of all sequences, the last of each with its finish reason; raises if it fails."""
        self._choices = [_Choice(self._detokenizer()) for _ in range(self.num_choices)]
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

    def _detokenizer(self) -> IncrementalDetokenizer:
        config = self.request.generation_config
        return IncrementalDetokenizer(
            self.request.tokenizer,
            prompt_ids=self.request.prompt,
            stop_strings=config.stop_strings or (),
            skip_special_tokens=self.skip_special_tokens,
        )

    def _add(
        self, index: int, tokens: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]
    ) -> Sequence[ChoiceUpdate]:
        """The updates by new tokens of one sequence."""
        choice = self._choices[index]
        choice.num_tokens += len(tokens)
        self.num_new_tokens += len(tokens)
        text = choice.detokenizer.put(tokens)
        tokens = choice.held + tokens
        is_held = not text and not logprobs  # part of a character, or of a text that may be a stop
        choice.held = tokens if is_held else ()
        return () if is_held else [ChoiceUpdate(index, text, tokens, logprobs)]

    def _end(self, hypotheses: Sequence[Hypothesis]) -> list[ChoiceUpdate]:
        """The last updates: what was not streamed, and the finish reasons."""
        updates = []
        for index, choice in enumerate(self._choices):
            hypothesis = hypotheses[0 if self._is_repeated else index]
            tokens = hypothesis.tokens.tolist()
            rest = tuple(tokens[choice.num_tokens :])
            logprobs = sequence_logprobs(hypothesis.logprobs, choice.num_tokens)
            self.num_new_tokens += len(rest)
            text = choice.detokenizer.put(rest) + choice.detokenizer.end()
            reason = "length" if hypothesis.reason in ("length", "time") else "stop"
            updates.append(ChoiceUpdate(index, text, choice.held + rest, logprobs, reason, hypothesis))
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

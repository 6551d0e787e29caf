"""The stop conditions that Descant checks around another engine: texts, regular expressions and time."""

from __future__ import annotations

import time
from collections.abc import Sequence

from descant.config.generation_config import GenerationConfig
from descant.decoding.processors.base import as_id_list
from descant.engine.request import Request, TextMatchers, build_text_matchers

__all__ = ["SequenceStops"]


class SequenceStops:
    """The stop conditions of a request's sequences, checked token by token."""

    def __init__(self, request: Request, config: GenerationConfig) -> None:
        self._matchers: TextMatchers = build_text_matchers(request, config)
        self._deadline = None if config.max_time is None else time.monotonic() + config.max_time
        self._eos = frozenset(as_id_list(config.eos_token_id))
        self._stops = frozenset(as_id_list(config.stop_token_ids))
        matcher = self._matchers.stop_strings
        # A stop string may begin in the prompt.
        self.first_state = 0 if matcher is None else matcher.state_after([int(one) for one in request.prompt])

    def next_state(self, state: int, token: int) -> int:
        """The state of the stop strings after a token."""
        matcher = self._matchers.stop_strings
        if matcher is None or token >= matcher.vocab_size:
            return state
        return int(matcher.transition[token, state])

    def reason(self, state: int, tokens: Sequence[int], max_tokens: int) -> str | None:
        """Why a sequence of these new tokens ends, in `state` before the last one; None: it does not."""
        token = tokens[-1]
        if token in self._eos:
            return "eos"
        if token in self._stops:
            return "stop"
        if len(tokens) >= max_tokens:
            return "length"
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return "time"
        strings, regex = self._matchers.stop_strings, self._matchers.stop_regex
        if strings is not None and token < strings.vocab_size and bool(strings.matches[token, state]):
            return "stop"
        return "stop" if regex is not None and regex.matches(tokens) else None

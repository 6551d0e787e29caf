"""An engine without a model: every request ends with one token in the step after its admission."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from descant.core.interfaces import ModelTraits, RankGroup
from descant.core.records import Hypothesis, Tokens
from descant.engine.protocol import Event, Finished, Report
from descant.engine.request import Request
from descant.errors import DescantError
from descant.trace.trace import Trace

__all__ = ["InstantEngine"]


class InstantEngine:
    """Answers at once, so that what is measured is all that is not the engine."""

    rank_group: RankGroup | None = None
    trace: Trace | None = None

    def __init__(self, traits: ModelTraits, token: int, on_finished: Callable[[int], None]) -> None:
        """`on_finished` is called after each step with the number of requests that have ended."""
        self.traits, self.device = traits, torch.device("cpu")
        self._token, self._on_finished = torch.tensor([token]), on_finished
        self._admitted: dict[int, None] = {}
        self._steps = self._finished = 0

    @property
    def rows(self) -> int:
        return len(self._admitted)

    @property
    def running(self) -> Iterable[int]:
        return self._admitted.keys()

    @property
    def num_waiting(self) -> int:
        return 0

    @property
    def beam_requests(self) -> Collection[int]:
        return ()

    def __len__(self) -> int:
        return len(self._admitted)

    def supports(self, request: Request) -> DescantError | None:  # noqa: ARG002
        return None

    def has_grammar(self, request: Request) -> bool:  # noqa: ARG002
        return False

    def compile_grammar(self, request: Request) -> Request:
        return request

    def admit(
        self,
        *requests: Request,  # noqa: ARG002
        noise_rows: int = 0,  # noqa: ARG002
        numbers: Sequence[int] | None = None,
    ) -> list[int]:
        if numbers is None:
            raise ValueError("the caller must choose the numbers of requests")
        self._admitted.update(dict.fromkeys(numbers))
        return list(numbers)

    def step(self) -> list[Event]:
        ended = list(self._admitted)
        self._admitted.clear()
        self._steps += 1
        self._finished += len(ended)
        self._on_finished(self._finished)
        requests, zeros = torch.tensor(ended), torch.zeros(len(ended), dtype=torch.long)
        tokens = Tokens(requests, zeros, self._token.expand(len(ended)))
        return [tokens, *(Finished(one, [Hypothesis(self._token, "length")]) for one in ended)]

    def cancel(self, request: int) -> None:
        self._admitted.pop(request, None)

    def drain(self) -> Iterator[Event]:
        while len(self):
            yield from self.step()

    def common_prefix(self, request: int) -> Tensor:  # noqa: ARG002
        return self._token[:0]

    def report(self) -> Report:
        return Report(self._steps, len(self), len(self), None, None)

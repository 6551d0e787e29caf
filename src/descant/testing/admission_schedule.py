"""Admission schedules: the steps at which requests are admitted and cancelled."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from descant.engine.session import Request

__all__ = ["Schedule", "failing_request"]


@dataclass(frozen=True)
class Schedule:
    """The requests, by index, that are admitted and cancelled before each step.

    Requests of one step are admitted in the given order, in one call or one by one (`admit_together`).
    """

    admissions: Mapping[int, Sequence[int]]
    cancellations: Mapping[int, Sequence[int]] = field(default_factory=dict)
    admit_together: bool = True

    @classmethod
    def at_once(cls, order: Sequence[int]) -> Schedule:
        """All requests before the first step, in this order."""
        return cls({0: list(order)})

    @classmethod
    def random(
        cls, rng: random.Random, requests: int, cancelled: Sequence[int] = (), latest: int = 8
    ) -> Schedule:
        """A random schedule of `requests` requests; those in `cancelled` are cancelled some steps later."""
        order = list(range(requests))
        rng.shuffle(order)
        admissions: dict[int, list[int]] = {}
        cancels: dict[int, list[int]] = {}
        for index in order:
            step = rng.randint(0, latest)
            admissions.setdefault(step, []).append(index)
            if index in cancelled:
                cancels.setdefault(step + rng.randint(0, latest), []).append(index)
        return cls(admissions, cancels, rng.random() < 0.5)

    @property
    def last_step(self) -> int:
        """The last step with an admission or cancellation."""
        return max((*self.admissions, *self.cancellations), default=0)


class _BlockAllProcessor:
    """A callable processor that masks every token after `steps` calls."""

    def __init__(self, steps: int) -> None:
        self._steps_left = steps

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # noqa: ARG002
        self._steps_left -= 1
        return scores if self._steps_left >= 0 else torch.full_like(scores, -torch.inf)


def failing_request(request: Request, steps: int) -> Request:
    """The request, changed to fail after `steps` steps: every score is -inf then."""
    processors: tuple[Any, ...] = (*request.logits_processor, _BlockAllProcessor(steps))
    return replace(request, logits_processor=processors)

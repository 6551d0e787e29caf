"""Schedules: when each request of a session comes, and when one is cancelled."""

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
    """Which requests (by place in a list) are admitted before each step, and which cancelled.

    Requests admitted at one step come in the order given, in one call or one by one (`together`).
    """

    admissions: Mapping[int, Sequence[int]]
    cancellations: Mapping[int, Sequence[int]] = field(default_factory=dict)
    admit_together: bool = True

    @classmethod
    def at_once(cls, order: Sequence[int]) -> Schedule:
        """Everything before the first step, in that order."""
        return cls({0: list(order)})

    @classmethod
    def random(
        cls, rng: random.Random, requests: int, cancelled: Sequence[int] = (), latest: int = 8
    ) -> Schedule:
        """A random one for so many requests, of which `cancelled` are, some steps after they came."""
        order = list(range(requests))
        rng.shuffle(order)
        admissions: dict[int, list[int]] = {}
        cancels: dict[int, list[int]] = {}
        for one in order:
            begin = rng.randint(0, latest)
            admissions.setdefault(begin, []).append(one)
            if one in cancelled:
                cancels.setdefault(begin + rng.randint(0, latest), []).append(one)
        return cls(admissions, cancels, rng.random() < 0.5)

    @property
    def last_step(self) -> int:
        """The last step before which something is admitted or cancelled."""
        return max((*self.admissions, *self.cancellations), default=0)


class _BlockAllProcessor:
    """A processor of the documented face that leaves no token to choose after `steps` calls."""

    def __init__(self, steps: int) -> None:
        self._steps_left = steps

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # noqa: ARG002
        self._steps_left -= 1
        return scores if self._steps_left >= 0 else torch.full_like(scores, -torch.inf)


def failing_request(request: Request, steps: int) -> Request:
    """The same request, made to fail in the step after so many steps: every score is -inf there."""
    processors: tuple[Any, ...] = (*request.logits_processor, _BlockAllProcessor(steps))
    return replace(request, logits_processor=processors)

"""The law of drafters: whatever is guessed, what comes out is what would have come without."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import sqrt
from typing import Any, Final

import torch
from torch import Tensor

from descant.core.interfaces import Drafter
from descant.core.records import DraftContext, Proposal
from descant.core.rows import Rows
from descant.engine.session import Request, Session
from descant.errors import InputError
from descant.testing.admission_schedule import Schedule
from descant.testing.outcome import TOLERANCE, Outcome, compare, outcomes

__all__ = ["check_drafter"]

_NUM_SAMPLES: Final = 2000  # drawn to look at a drafter's law
_SIGMAS: Final = 5.0  # how far a sum of squares may be off by chance


def check_drafter(
    model: Any,
    make: Callable[[], Drafter],
    requests: Sequence[Request],
    sizes: Sequence[int] = (1, 2, 5),
    tolerance: float = TOLERANCE,
) -> None:
    """A drafter leaves what greedy and seeded requests say as it was, and tells the truth about its law.

    `make` makes a drafter, a new one for each session. Tokens, ends and streams must equal those without
    drafts, whatever number of tokens is guessed, in a batch and for requests that come one after the other;
    logits must be within the tolerance. Guesses drawn without a seed after the first request's prompt must
    look as if they came from the law that the drafter gives with them, if it gives any.
    """
    for place, request in enumerate(requests):
        config = request.generation_config
        if config.do_sample and config.seed is None:
            raise InputError("requests", f"must be seeded where they sample, number {place} is not", config)
    alone = [outcomes(model, [request])[0] for request in requests]
    rng = random.Random(len(requests))
    for size in sizes:
        for schedule in ("constant", "heuristic", "adaptive"):
            for when in (Schedule.at_once(range(len(requests))), Schedule.random(rng, len(requests))):
                found = outcomes(model, _with_drafter(requests, make(), size, schedule), when)
                for place, expected in enumerate(alone):
                    where = f"request {place} with up to {size} guesses, {schedule}, {when}"
                    compare(_restrict_logits(expected, found[place], where), found[place], where, tolerance)
    _check_draft_probs(model, make, requests[0])


class _RecordingDrafter:
    """A drafter that keeps the first guesses of another."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter, self.is_model_free = drafter, drafter.is_model_free
        self.first_proposal: Proposal | None = None

    def add_requests(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        """Hand on."""
        self._drafter.add_requests(requests, inputs)

    def remove_requests(self, requests: Sequence[int]) -> None:
        """Hand on."""
        self._drafter.remove_requests(requests)

    def commit(self, parents: Tensor, lengths: Tensor) -> None:
        """Hand on."""
        self._drafter.commit(parents, lengths)

    def draft(self, rows: Rows, most: Tensor, aid: DraftContext) -> Proposal:
        """What the other guesses."""
        guessed = self._drafter.draft(rows, most, aid)
        self.first_proposal = guessed if self.first_proposal is None else self.first_proposal
        return guessed


def _with_drafter(
    requests: Sequence[Request], drafter: Drafter, size: int, schedule: str = "constant"
) -> list[Request]:
    """The same requests, for which a drafter guesses."""
    how = {"num_assistant_tokens": size, "num_assistant_tokens_schedule": schedule}
    configs = [one.generation_config.replace(**how) for one in requests]
    return [
        replace(one, generation_config=config, assistant_model=drafter)
        for one, config in zip(requests, configs, strict=True)
    ]


def _restrict_logits(alone: Outcome, found: Outcome, where: str) -> Outcome:
    """What is to be seen of a request for which tokens are guessed: not every place on its way."""
    odd = [prefix for prefix in found.logits if prefix not in alone.logits]
    if odd:
        raise AssertionError(f"{where}: stood at {list(odd[0])}, where it never was alone")
    return replace(alone, logits={prefix: alone.logits[prefix] for prefix in found.logits})


def _check_draft_probs(model: Any, make: Callable[[], Drafter], request: Request) -> None:
    """A drafter's guesses are drawn from the law that it gives."""
    config = request.generation_config.replace(do_sample=True, seed=None, logprobs=None)
    listener = _RecordingDrafter(make())
    copies = _with_drafter([replace(request, generation_config=config)] * _NUM_SAMPLES, listener, 1)
    state = torch.get_rng_state()
    try:
        torch.manual_seed(0)
        session = Session(model)
        session.admit(*(replace(one, noise_row=at) for at, one in enumerate(copies)), noise_rows=_NUM_SAMPLES)
        session.step()
    finally:
        torch.set_rng_state(state)
    heard = listener.first_proposal
    if heard is None or heard.drafts is None or heard.draft_probs is None:
        return
    tried = (
        (torch.as_tensor(heard.draft_counts()).expand(_NUM_SAMPLES) > 0)
        .nonzero()
        .squeeze(1)
        .to(heard.drafts.device)
    )
    law = heard.draft_probs[tried, 0].double()
    if bool(((law.sum(1) - 1).abs() > 1e-3).any()) or bool((law < 0).any()):
        raise AssertionError("a drafter's law must sum to 1 and have nothing below 0")
    expected = law.sum(0)
    counts = torch.bincount(heard.drafts[tried, 0], minlength=len(expected)).double()
    # What is seldom expected is counted together.
    often = expected >= 5
    cells = [torch.cat((one[often], one[~often].sum()[None])) for one in (counts, expected)]
    apart = ((cells[0] - cells[1]) ** 2 / cells[1].clamp(min=1.0)).sum()
    free = max(int(often.sum()), 1)
    if float(apart) > free + _SIGMAS * sqrt(2 * free) + _SIGMAS:
        told = f"{float(apart):.0f} on {free} degrees of freedom"
        raise AssertionError(
            f"a drafter's guesses are not drawn from the law that it gives: chi-square {told}"
        )

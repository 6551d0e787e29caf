"""The contract of drafters: drafts do not change the output."""

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

_NUM_SAMPLES: Final = 2000  # samples for the test of the draft probabilities
_SIGMAS: Final = 5.0  # allowed deviation of the chi-square statistic


def check_drafter(
    model: Any,
    make: Callable[[], Drafter],
    requests: Sequence[Request],
    sizes: Sequence[int] = (1, 2, 5),
    tolerance: float = TOLERANCE,
) -> None:
    """A drafter does not change greedy and seeded output, and samples from the `draft_probs` that it reports.

    `make` returns a new drafter for each session. Tokens, finish reasons and streams must equal those without
    drafts, for any number of draft tokens, in a batch and for requests admitted one after the other; logits
    must be within the tolerance. If the drafter reports `draft_probs`, unseeded drafts after the first
    request's prompt must follow them (chi-square test).
    """
    for index, request in enumerate(requests):
        config = request.generation_config
        if config.do_sample and config.seed is None:
            raise InputError("requests", f"must be seeded where they sample, number {index} is not", config)
    alone = [outcomes(model, [request])[0] for request in requests]
    rng = random.Random(len(requests))
    for size in sizes:
        for schedule in ("constant", "heuristic", "adaptive"):
            for admissions in (Schedule.at_once(range(len(requests))), Schedule.random(rng, len(requests))):
                actual = outcomes(model, _with_drafter(requests, make(), size, schedule), admissions)
                for index, expected in enumerate(alone):
                    label = f"request {index} with up to {size} drafts, {schedule}, {admissions}"
                    compare(_restrict_logits(expected, actual[index], label), actual[index], label, tolerance)
    _check_draft_probs(model, make, requests[0])


class _RecordingDrafter:
    """A drafter that records the first proposal of another."""

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

    def draft(self, rows: Rows, max_drafts: Tensor, context: DraftContext) -> Proposal:
        """What the other guesses."""
        proposal = self._drafter.draft(rows, max_drafts, context)
        self.first_proposal = proposal if self.first_proposal is None else self.first_proposal
        return proposal


def _with_drafter(
    requests: Sequence[Request], drafter: Drafter, size: int, schedule: str = "constant"
) -> list[Request]:
    """The same requests with a drafter."""
    settings = {"num_assistant_tokens": size, "num_assistant_tokens_schedule": schedule}
    configs = [request.generation_config.replace(**settings) for request in requests]
    return [
        replace(request, generation_config=config, assistant_model=drafter)
        for request, config in zip(requests, configs, strict=True)
    ]


def _restrict_logits(alone: Outcome, actual: Outcome, label: str) -> Outcome:
    """The expected outcome with the logits that speculative decoding computes, which skips positions."""
    unexpected = [prefix for prefix in actual.logits if prefix not in alone.logits]
    if unexpected:
        raise AssertionError(f"{label}: had the tokens {list(unexpected[0])}, which it did not have alone")
    return replace(alone, logits={prefix: alone.logits[prefix] for prefix in actual.logits})


def _check_draft_probs(model: Any, make: Callable[[], Drafter], request: Request) -> None:
    """Draft tokens are sampled from the reported `draft_probs`."""
    config = request.generation_config.replace(do_sample=True, seed=None, logprobs=None)
    recorder = _RecordingDrafter(make())
    copies = _with_drafter([replace(request, generation_config=config)] * _NUM_SAMPLES, recorder, 1)
    state = torch.get_rng_state()
    try:
        torch.manual_seed(0)
        session = Session(model)
        session.admit(
            *(replace(copy, noise_row=index) for index, copy in enumerate(copies)),
            noise_rows=_NUM_SAMPLES,
        )
        session.step()
    finally:
        torch.set_rng_state(state)
    proposal = recorder.first_proposal
    if proposal is None or proposal.drafts is None or proposal.draft_probs is None:
        return
    drafted = (
        (torch.as_tensor(proposal.draft_counts()).expand(_NUM_SAMPLES) > 0)
        .nonzero()
        .squeeze(1)
        .to(proposal.drafts.device)
    )
    probs = proposal.draft_probs[drafted, 0].double()
    if bool(((probs.sum(1) - 1).abs() > 1e-3).any()) or bool((probs < 0).any()):
        raise AssertionError("`draft_probs` must sum to 1 and must not be negative")
    expected = probs.sum(0)
    counts = torch.bincount(proposal.drafts[drafted, 0], minlength=len(expected)).double()
    # Rare tokens are counted together.
    is_frequent = expected >= 5
    cells = [torch.cat((one[is_frequent], one[~is_frequent].sum()[None])) for one in (counts, expected)]
    chi_square = ((cells[0] - cells[1]) ** 2 / cells[1].clamp(min=1.0)).sum()
    degrees = max(int(is_frequent.sum()), 1)
    if float(chi_square) > degrees + _SIGMAS * sqrt(2 * degrees) + _SIGMAS:
        detail = f"{float(chi_square):.0f} on {degrees} degrees of freedom"
        raise AssertionError(f"drafts must be sampled from `draft_probs`, got chi-square {detail}")

"""The contract of drafters: drafts do not change the output."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from descant.core.interfaces import DraftContext, Drafter, RowCache
from descant.core.records import Proposal
from descant.core.rows import Rows, index_rows
from descant.engine.planning.planner import as_model
from descant.engine.request import CallPlace
from descant.engine.session import Request, Session
from descant.kv_cache.stores.dense import DenseStore
from descant.testing.outcome import TOLERANCE, Outcome, Schedule, compare, outcomes, run_alone

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
    alone = run_alone(model, requests)
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
        """The proposal of the other drafter."""
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
            *(replace(copy, _call=CallPlace(noise_row=index)) for index, copy in enumerate(copies)),
            noise_rows=_NUM_SAMPLES,
        )
        session.step()
    finally:
        torch.set_rng_state(state)
    proposal = recorder.first_proposal
    if proposal is None or proposal.drafts is None or proposal.draft_probs is None:
        return
    counts = torch.as_tensor(proposal.draft_counts()).expand(_NUM_SAMPLES)
    drafted = (counts > 0).nonzero().squeeze(1).to(proposal.drafts.device)
    probs = proposal.draft_probs[drafted, 0].double()
    if bool(((probs.sum(1) - 1).abs() > 1e-3).any()) or bool((probs < 0).any()):
        raise AssertionError("`draft_probs` must sum to 1 and must not be negative")
    expected = probs.sum(0)
    counts = torch.bincount(proposal.drafts[drafted, 0], minlength=len(expected)).double()
    # Rare tokens are counted together.
    is_frequent = expected >= 5
    cells = [
        torch.cat((column[is_frequent], column[~is_frequent].sum()[None])) for column in (counts, expected)
    ]
    chi_square = ((cells[0] - cells[1]) ** 2 / cells[1].clamp(min=1.0)).sum()
    degrees = max(int(is_frequent.sum()), 1)
    if float(chi_square) > degrees + _SIGMAS * sqrt(2 * degrees) + _SIGMAS:
        detail = f"{float(chi_square):.0f} on {degrees} degrees of freedom"
        raise AssertionError(f"drafts must be sampled from `draft_probs`, got chi-square {detail}")


class _RandomDrafts(NamedTuple):
    """Ragged drafts, one list per row."""

    drafts: Tensor  # [R, K]
    num_drafts: Tensor  # [R] (host)


@dataclass
class _SequentialReference:
    """A model that computes the expected logits token by token."""

    model: Any
    prompts: Sequence[Sequence[int]]
    make_cache: Callable[[], RowCache]

    def prompt_rows(self) -> Rows:
        """The prompts as a new table."""
        length = torch.tensor([len(prompt) for prompt in self.prompts])
        tokens = torch.zeros(len(length), int(length.max()), dtype=torch.long)
        for row, prompt in enumerate(self.prompts):
            tokens[row, : len(prompt)] = torch.tensor(prompt)
        zeros, numbers = torch.zeros_like(length), torch.arange(len(length))
        return Rows(
            tokens.to(self.model.device), length, zeros, zeros.clone(), length.clone(), numbers, zeros.clone()
        )

    def sequential_logits(self, row: int, sequence: Sequence[int]) -> dict[int, Tensor]:
        """The logits after each prefix of a sequence, from the prompt on, by prefix length."""
        rows, cache = self.prompt_rows().take(torch.tensor([row])), self.make_cache()
        cache.extend(1)
        logits = {}
        for token in [*sequence[int(rows.length[0]) :], None]:
            logits[int(rows.length[0])] = self.model.forward(rows, Proposal(), cache).logits[0, 0]
            rows = replace(rows, cached_length=rows.position)
            cache.commit(None, rows.cached_length)
            if token is not None:
                rows = rows.append(rows.tokens.new_tensor([[token]]), rows.length + 1)
        return logits


def check_drafts(
    model: Any,
    requests: Sequence[Request],
    make_cache: Callable[[], RowCache] = DenseStore,
    rounds: int = 4,
    tolerance: float = TOLERANCE,
) -> None:
    """Verifying ragged drafts at once equals one by one, and rejected drafts leave no trace.

    Feeds the model random drafts, 0 to 4 per row, accepts some of each, forks and drops rows, and repeats;
    all logits must equal those of feeding the same tokens one at a time with an empty cache.
    """
    model = as_model(model)
    rng = random.Random(len(requests))
    reference = _SequentialReference(
        model, [torch.as_tensor(request.prompt).tolist() for request in requests], make_cache
    )
    numbers = list(range(len(requests)))
    model.add_requests(numbers, _collate_inputs([request.inputs for request in requests]))
    try:
        rows, cache = reference.prompt_rows(), make_cache()
        cache.extend(len(rows))
        for _ in range(rounds):
            proposed = _random_drafts(rows, rng, model.traits.vocab_size)
            proposal = Proposal(None, *proposed) if proposed.drafts.shape[1] else Proposal()
            logits = model.forward(rows, proposal, cache).logits
            _compare_logits(reference, rows, proposed, logits, tolerance)
            rows = _commit_some(rows, proposed, cache, rng, model.traits.vocab_size)
    finally:
        model.remove_requests(numbers)


def _random_drafts(rows: Rows, rng: random.Random, vocabulary: int) -> _RandomDrafts:
    """Random drafts, a random number per row."""
    num_drafts = torch.tensor([rng.randint(0, 4) for _ in range(len(rows))])
    width = int(num_drafts.max())
    drafts = torch.tensor([rng.randrange(vocabulary) for _ in range(len(rows) * width)], dtype=torch.long)
    return _RandomDrafts(drafts.view(len(rows), width).to(rows.tokens.device), num_drafts)


def _compare_logits(
    reference: _SequentialReference, rows: Rows, proposed: _RandomDrafts, logits: Tensor, tolerance: float
) -> None:
    for row in range(len(rows)):
        row_drafts = proposed.drafts[row, : int(proposed.num_drafts[row])].tolist()
        length = int(rows.length[row])
        sequence = rows.tokens[row, :length].tolist() + row_drafts
        expected = reference.sequential_logits(int(rows.request[row]), sequence)
        for slot in range(len(row_drafts) + 1):
            difference = (logits[row, slot] - expected[length + slot]).abs().max()
            if not difference <= tolerance:
                raise AssertionError(
                    f"row {row}: the logits after {sequence[: length + slot]} "
                    f"(draft {slot} of {len(row_drafts)}) differ by {difference:.3g} from those of one by one"
                )


def _commit_some(
    rows: Rows, proposed: _RandomDrafts, cache: RowCache, rng: random.Random, vocabulary: int
) -> Rows:
    """Accept some drafts of each row and append one token; fork one row, and maybe drop one."""
    parent_list = [*range(len(rows)), rng.randrange(len(rows))]
    if len(rows) > 3:
        parent_list.remove(rng.randrange(len(rows)))
    rng.shuffle(parent_list)
    parents = torch.tensor(parent_list)
    accepted = torch.tensor([rng.randint(0, int(proposed.num_drafts[row])) for row in parent_list])
    rows = rows.take(parents)
    cached = rows.position + accepted
    rows = rows.append(index_rows(proposed.drafts, parents), rows.length + accepted)
    next_tokens = rows.tokens.new_tensor([[rng.randrange(vocabulary)] for _ in parent_list])
    rows = replace(rows.append(next_tokens, rows.length + 1), cached_length=cached)
    cache.commit(parents, cached)
    return rows


def _collate_inputs(inputs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for given in inputs for name in given)
    return {name: [given.get(name) for given in inputs] for name in names}

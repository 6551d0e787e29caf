"""The contract of verification: all drafts at once give the logits of one by one."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from descant.core.interfaces import RowCache
from descant.core.records import Proposal
from descant.core.rows import Rows, index_rows
from descant.engine.planner import as_model
from descant.engine.session import Request
from descant.kv_cache.dense import DenseStore
from descant.testing.outcome import TOLERANCE

__all__ = ["check_drafts"]


@dataclass(frozen=True)
class _RandomDrafts:
    """Ragged drafts, one list per row."""

    drafts: Tensor  # [R, K]
    num_drafts: Tensor  # [R] (host)

    @property
    def proposal(self) -> Proposal:
        """The drafts as a proposal."""
        return Proposal(None, self.drafts, self.num_drafts) if self.drafts.shape[1] else Proposal()


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
            logits = model.forward(rows, proposed.proposal, cache).logits
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
    names = dict.fromkeys(name for one in inputs for name in one)
    return {name: [one.get(name) for one in inputs] for name in names}

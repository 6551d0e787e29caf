"""The law of drafts: tried all at once, a row's drafts are judged as they would be one by one."""

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
    """Drafts for every row, ragged."""

    drafts: Tensor  # [R, K]
    num_drafts: Tensor  # [R] (host)

    @property
    def proposal(self) -> Proposal:
        """The same as the loop would say it."""
        return Proposal(None, self.drafts, self.num_drafts) if self.drafts.shape[1] else Proposal()


@dataclass
class _SequentialReference:
    """A model with a few open requests, and the sequences it has been asked about."""

    model: Any
    prompts: Sequence[Sequence[int]]
    make_cache: Callable[[], RowCache]

    def prompt_rows(self) -> Rows:
        """The prompts as a fresh table."""
        length = torch.tensor([len(prompt) for prompt in self.prompts])
        tokens = torch.zeros(len(length), int(length.max()), dtype=torch.long)
        for line, prompt in enumerate(self.prompts):
            tokens[line, : len(prompt)] = torch.tensor(prompt)
        zeros, numbers = torch.zeros_like(length), torch.arange(len(length))
        return Rows(
            tokens.to(self.model.device), length, zeros, zeros.clone(), length.clone(), numbers, zeros.clone()
        )

    def sequential_logits(self, line: int, sequence: Sequence[int]) -> dict[int, Tensor]:
        """The logits after each prefix of a request's sequence from its prompt on, by the prefix's length."""
        rows, cache = self.prompt_rows().take(torch.tensor([line])), self.make_cache()
        cache.extend(1)
        found = {}
        for token in [*sequence[int(rows.length[0]) :], None]:
            found[int(rows.length[0])] = self.model.forward(rows, Proposal(), cache).logits[0, 0]
            rows = replace(rows, cached_length=rows.position)
            cache.commit(None, rows.cached_length)
            if token is not None:
                rows = rows.append(rows.tokens.new_tensor([[token]]), rows.length + 1)
        return found


def check_drafts(
    model: Any,
    requests: Sequence[Request],
    make_cache: Callable[[], RowCache] = DenseStore,
    rounds: int = 4,
    tolerance: float = TOLERANCE,
) -> None:
    """All drafts at once equals one by one, ragged, and those that are cut off leave no trace.

    Feeds the Model port random drafts, 0 to 4 a row, keeps some of each, forks and drops rows, and goes
    on; every line of logits must equal that of feeding the same tokens one at a time to an empty cache.
    """
    model = as_model(model)
    rng = random.Random(len(requests))
    desk = _SequentialReference(
        model, [torch.as_tensor(request.prompt).tolist() for request in requests], make_cache
    )
    numbers = list(range(len(requests)))
    model.add_requests(numbers, _collate_inputs([request.inputs for request in requests]))
    try:
        rows, cache = desk.prompt_rows(), make_cache()
        cache.extend(len(rows))
        for _ in range(rounds):
            guess = _random_drafts(rows, rng, model.traits.vocab_size)
            logits = model.forward(rows, guess.proposal, cache).logits
            _compare_logits(desk, rows, guess, logits, tolerance)
            rows = _commit_some(rows, guess, cache, rng, model.traits.vocab_size)
    finally:
        model.remove_requests(numbers)


def _random_drafts(rows: Rows, rng: random.Random, vocabulary: int) -> _RandomDrafts:
    """Random drafts, a random number for each row."""
    n = torch.tensor([rng.randint(0, 4) for _ in range(len(rows))])
    wide = int(n.max())
    drafts = torch.tensor([rng.randrange(vocabulary) for _ in range(len(rows) * wide)], dtype=torch.long)
    return _RandomDrafts(drafts.view(len(rows), wide).to(rows.tokens.device), n)


def _compare_logits(
    desk: _SequentialReference, rows: Rows, guess: _RandomDrafts, logits: Tensor, tolerance: float
) -> None:
    for row in range(len(rows)):
        tried = guess.drafts[row, : int(guess.num_drafts[row])].tolist()
        length = int(rows.length[row])
        sequence = rows.tokens[row, :length].tolist() + tried
        expected = desk.sequential_logits(int(rows.request[row]), sequence)
        for slot in range(len(tried) + 1):
            far = (logits[row, slot] - expected[length + slot]).abs().max()
            if not far <= tolerance:
                raise AssertionError(
                    f"row {row}: the logits after {sequence[: length + slot]} "
                    f"(draft {slot} of {len(tried)}) differ by {far:.3g} from those of one by one"
                )


def _commit_some(
    rows: Rows, guess: _RandomDrafts, cache: RowCache, rng: random.Random, vocabulary: int
) -> Rows:
    """Rows that keep some of their drafts and take one more token; one is forked, maybe one dropped."""
    whence = [*range(len(rows)), rng.randrange(len(rows))]
    if len(rows) > 3:
        whence.remove(rng.randrange(len(rows)))
    rng.shuffle(whence)
    parents = torch.tensor(whence)
    accepted = torch.tensor([rng.randint(0, int(guess.num_drafts[row])) for row in whence])
    rows = rows.take(parents)
    cached = rows.position + accepted
    rows = rows.append(index_rows(guess.drafts, parents), rows.length + accepted)
    more = rows.tokens.new_tensor([[rng.randrange(vocabulary)] for _ in whence])
    rows = replace(rows.append(more, rows.length + 1), cached_length=cached)
    cache.commit(parents, cached)
    return rows


def _collate_inputs(inputs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for one in inputs for name in one)
    return {name: [one.get(name) for one in inputs] for name in names}

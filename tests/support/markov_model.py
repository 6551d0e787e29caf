"""A model small enough to compute by hand: a Markov chain with the Model interface."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from descant.core.interfaces import ModelTraits, RowCache
from descant.core.records import ForwardOutput, Proposal
from descant.core.rows import Rows
from descant.kv_cache.stores.dense import DenseStore


class Chain:
    """Logits by the position and the last token alone: nothing to cache, nothing to encode.

    A table [V, V] is the same at every position; one of [S, V, V] is not, so that no two paths tie.
    """

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits.float().view(-1, *logits.shape[-2:])  # [S, V, V]
        self.traits = ModelTraits(
            is_encoder_decoder=False,
            supports_position_ids=True,
            supports_logits_to_keep=False,
            supports_inputs_embeds=False,
            vocab_size=logits.shape[-1],
            num_layers=0,
            attn_implementation="eager",
            sliding_windows={},
            max_positions=None,
            context_length=None,
        )
        self.fed: list[int] = []  # rows of every forward
        self.opened: set[int] = set()

    @classmethod
    def chance(cls, vocabulary: int, seed: int, spread: float = 1.0, positions: int = 16) -> Chain:
        generator = torch.Generator().manual_seed(seed)
        return cls(torch.randn(positions, vocabulary, vocabulary, generator=generator) * spread)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    network = None
    rank_group = None

    def new_cache(self) -> RowCache:
        return DenseStore()

    def set_output_states(self, states: Sequence[str]) -> None:
        pass

    def add_requests(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        self.opened |= set(requests)

    def remove_requests(self, requests: Sequence[int]) -> None:
        self.opened -= set(requests)

    def forward(self, rows: Rows, proposal: Proposal, cache: RowCache) -> ForwardOutput:
        self.fed.append(len(rows))
        last = rows.tokens.gather(1, rows.length[:, None] - 1)
        if proposal.drafts is not None:
            last = torch.cat((last, proposal.drafts), 1)
        return ForwardOutput(self.after(rows.length[:, None] + torch.arange(last.shape[1]), last))

    def after(self, length: Tensor | int, last: Tensor | int) -> Tensor:
        """The logits after so many tokens of which `last` is the last [..., V]."""
        return self.logits[(length - 1) % len(self.logits), last]

    def paths(
        self, start: int, steps: int, ends: Sequence[int] = ()
    ) -> Iterator[tuple[tuple[int, ...], float]]:
        """Every sequence of at most `steps` tokens after `start` that ends at an end token or the limit."""
        vocabulary = self.logits.shape[-1]
        for length in range(1, steps + 1):
            for path in product(range(vocabulary), repeat=length):
                if any(token in ends for token in path[:-1]) or (length < steps and path[-1] not in ends):
                    continue
                yield path, self.score(start, path)

    def score(self, start: int, path: Sequence[int]) -> float:
        """The log-probability of a path after a prompt of one token."""
        lasts = (start, *path)
        return sum(
            float(self.after(at + 1, lasts[at]).log_softmax(-1)[token]) for at, token in enumerate(path)
        )

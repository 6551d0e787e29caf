"""The tournament: the keyed coins of SynthID-Text, and which of its contexts have come up before."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from descant.decoding.watermark.schemes.config import SynthIDTextWatermarkingConfig

__all__ = ["Tournament", "before_eos_mask", "get_tournament", "lcg_hash", "repetition_mask", "sampling_table"]

LCG_MULTIPLIER: Final = 6364136223846793005  # of Knuth's generator, which newlib and musl use
_MAX_TABLE_BYTES: Final = 2**25  # bytes


def lcg_hash(hashes: Tensor, data: Tensor, multiplier: int = LCG_MULTIPLIER, increment: int = 1) -> Tensor:
    """The hashes [...] after the numbers [..., W], by a linear congruential generator modulo 2^64."""
    for place in range(data.shape[-1]):
        hashes = (hashes + data[..., place]) * multiplier + increment
    return hashes


def repetition_mask(hashes: Tensor, history: int) -> Tensor:
    """Which of the hashes [N, C] are among the `history` ones before them in their line [N, C]."""
    ordered, order = hashes.sort(dim=1, stable=True)
    near = (ordered[:, 1:] == ordered[:, :-1]) & (order[:, 1:] - order[:, :-1] <= history)
    return torch.zeros_like(hashes, dtype=torch.bool).scatter_(1, order[:, 1:], near)


def before_eos_mask(input_ids: Tensor, end: int) -> Tensor:
    """Which ids [N, L] stand before the first `end` of their line [N, L]."""
    return (input_ids == end).cumsum(1) == 0


@lru_cache(maxsize=8)
def sampling_table(size: int, seed: int) -> Tensor:
    """The coins that all questions are answered from [S] uint8, of the host's generator on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (size,), generator=generator).to(torch.uint8)


class Tournament:
    """The g-values of SynthID-Text (Dathathri et al. 2024, Nature 634): for each token a coin a round.

    A token is hashed after the `width` ones before it, then with each round's key, and the remainder by the
    table's size says which coin of the table it gets. If that size is a power of two, only the low bits of
    all this matter: then the coins of token `v` after a context with the hash `c` are those of `c + v`, and
    the coins of a whole vocabulary stand side by side on one board for all contexts.
    """

    def __init__(self, settings: SynthIDTextWatermarkingConfig) -> None:
        self.settings = settings
        self.context_size = settings.ngram_len - 1
        self.depth = len(settings.keys)
        self.table_size = settings.sampling_table_size
        self.sampling_table = sampling_table(self.table_size, settings.sampling_table_seed)
        self.ones_fraction = float(self.sampling_table.double().mean())  # of ones
        self.is_power_of_two = self.table_size & (self.table_size - 1) == 0
        self._has_g_value_table = self.is_power_of_two and self.table_size * self.depth <= _MAX_TABLE_BYTES
        self._device_tensors: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._g_value_tables: dict[torch.device, Tensor] = {}

    @property
    def distinct_rounds(self) -> list[int]:
        """The rounds without those that repeat another's coins, having the same key."""
        modulus = self.table_size if self.is_power_of_two else 2**64
        first = {key % modulus: depth for depth, key in reversed(list(enumerate(self.settings.keys)))}
        return sorted(first.values())

    def context_hashes(self, tokens: Tensor) -> Tensor:
        """The hashes of all runs of `width` tokens [..., L] -> [..., L - width + 1]."""
        count = tokens.shape[-1] - self.context_size + 1
        hashes = tokens.new_ones((*tokens.shape[:-1], count))
        # Place by place for all runs at once, which needs no copy of each run.
        for place in range(self.context_size):
            hashes = (hashes + tokens[..., place : place + count]) * LCG_MULTIPLIER + 1
        return hashes

    def current_contexts(
        self, tokens: Tensor, length: Tensor, new: Tensor, most: int
    ) -> tuple[Tensor, Tensor]:
        """The hash of each line's context [N, 1], and whether it may be marked there [N, 1].

        A line follows `tokens[i, :length[i]]` [N, L], [N, 1], the last `new` [N, 1] of which, `most` in any
        line, were generated. Only these are in a context, after zeros. It is marked unless the context is
        one of the last `context_history_size`.
        """
        back = min(most, self.settings.context_history_size)
        at = length + torch.arange(-back - self.context_size, 0, device=tokens.device)
        known = tokens.gather(1, at.clamp(0, tokens.shape[1] - 1)) if tokens.shape[1] else at
        hashes = self.context_hashes(torch.where(at >= length - new, known, 0))  # [N, back + 1]
        first = self.context_size if self.settings.skip_first_ngram_calls else 0
        there = new - torch.arange(back, 0, -1, device=tokens.device) >= first
        seen = ((hashes[:, :-1] == hashes[:, -1:]) & there).any(1, keepdim=True)
        return hashes[:, -1:], ~seen & (new >= first)

    def g_value_inputs(self, contexts: Tensor, tokens: Tensor) -> Tensor:
        """What the coins of the tokens [...] hang on: where it is equal they are, whatever the key."""
        return (contexts + tokens) & (self.table_size - 1) if self.is_power_of_two else contexts + tokens

    def ngram_keys(self, ngrams: Tensor) -> Tensor:
        """The hashes of runs with the token after them [...], hashed with every round's key [..., D]."""
        return (ngrams[..., None] + self._on_device(ngrams.device)[0]) * LCG_MULTIPLIER + 1

    def lookup_g_values(self, ngram_keys: Tensor) -> Tensor:
        """The coins to those hashes [...], 0 or 1."""
        return self._on_device(ngram_keys.device)[1][ngram_keys % self.table_size]

    def g_values(self, contexts: Tensor, tokens: Tensor) -> Tensor:
        """The coins of tokens [...] after contexts [...], round by round [..., D]."""
        return self.lookup_g_values(self.ngram_keys((contexts + tokens) * LCG_MULTIPLIER + 1))

    def iter_g_values(self, contexts: Tensor, tokens: Tensor) -> Iterator[Tensor]:
        """The same round after round, of tokens [N, K] or [K] after contexts [N, 1]: `depth` times [N, K]."""
        if self._has_g_value_table:
            board = self._g_value_table(contexts.device, 0)
            place = (contexts + tokens) & (self.table_size - 1)
            yield from (board[depth][place] for depth in range(self.depth))
            return
        ngrams = (contexts + tokens) * LCG_MULTIPLIER + 1
        keys, table = self._on_device(contexts.device)
        for key in keys.unbind():
            yield table[((ngrams + key) * LCG_MULTIPLIER + 1) % self.table_size]

    def vocab_g_values(self, context: int, vocabulary: int) -> Tensor | None:
        """The coins of the whole vocabulary after one context [D, V], a view; None: they have no board."""
        if not self._has_g_value_table:
            return None
        start = context & (self.table_size - 1)
        return self._g_value_table(torch.device("cpu"), vocabulary)[:, start : start + vocabulary]

    def _on_device(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The keys [D] and the table [S] on a device."""
        if device not in self._device_tensors:
            keys = torch.tensor(self.settings.keys, dtype=torch.long)
            self._device_tensors[device] = keys.to(device), self.sampling_table.to(device)
        return self._device_tensors[device]

    def _g_value_table(self, device: torch.device, vocabulary: int) -> Tensor:
        """The coins of each remainder, and from the first on again as many as a window needs [D, S + V]."""
        board = self._g_value_tables.get(device)
        if board is None or board.shape[1] < self.table_size + vocabulary:
            places = torch.arange(self.table_size, device=device)
            ngrams = places * LCG_MULTIPLIER + 1
            coins = [
                self.lookup_g_values((ngrams + key) * LCG_MULTIPLIER + 1)
                for key in self._on_device(device)[0].unbind()
            ]
            again = torch.arange(self.table_size + vocabulary, device=device) & (self.table_size - 1)
            board = torch.stack([one[again] for one in coins])
            self._g_value_tables[device] = board
        return board


@lru_cache(maxsize=32)
def get_tournament(settings: SynthIDTextWatermarkingConfig) -> Tournament:
    """The tournament of those settings, made once."""
    return Tournament(settings)

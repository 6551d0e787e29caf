"""Keyed g-values of SynthID-Text, and the detection of repeated contexts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from descant.config.watermarking_config import SynthIDTextWatermarkingConfig

__all__ = ["Tournament", "before_eos_mask", "get_tournament", "lcg_hash", "repetition_mask", "sampling_table"]

LCG_MULTIPLIER: Final = 6364136223846793005  # Knuth's generator, as in newlib and musl
_MAX_TABLE_BYTES: Final = 2**25


def lcg_hash(hashes: Tensor, data: Tensor, multiplier: int = LCG_MULTIPLIER, increment: int = 1) -> Tensor:
    """Update the hashes [...] with the numbers [..., W], by a linear congruential generator modulo 2^64."""
    for index in range(data.shape[-1]):
        hashes = (hashes + data[..., index]) * multiplier + increment
    return hashes


def repetition_mask(hashes: Tensor, history: int) -> Tensor:
    """Mask of the hashes [N, C] that equal one of the previous `history` in their row."""
    ordered, order = hashes.sort(dim=1, stable=True)
    repeats = (ordered[:, 1:] == ordered[:, :-1]) & (order[:, 1:] - order[:, :-1] <= history)
    return torch.zeros_like(hashes, dtype=torch.bool).scatter_(1, order[:, 1:], repeats)


def before_eos_mask(input_ids: Tensor, eos_token_id: int) -> Tensor:
    """Mask of the ids [N, L] before the first end token of their row."""
    return (input_ids == eos_token_id).cumsum(1) == 0


@lru_cache(maxsize=8)
def sampling_table(size: int, seed: int) -> Tensor:
    """The table of random bits that g-values are looked up in [S] uint8, from the CPU generator."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (size,), generator=generator).to(torch.uint8)


class Tournament:
    """G-values of SynthID-Text (Dathathri et al. 2024, Nature 634): one bit per token and round.

    A token is hashed with the `context_size` tokens before it and with the round's key; the hash modulo the
    table size is its index in the sampling table. If that size is a power of two, only the low bits matter:
    the g-values of token `v` after a context with hash `c` depend on `c + v` only, so that those of a whole
    vocabulary are a slice of one precomputed table.
    """

    def __init__(self, settings: SynthIDTextWatermarkingConfig) -> None:
        self.settings = settings
        self.context_size = settings.ngram_len - 1
        self.depth = len(settings.keys)
        self.table_size = settings.sampling_table_size
        self.sampling_table = sampling_table(self.table_size, settings.sampling_table_seed)
        self.ones_fraction = float(self.sampling_table.double().mean())
        self.is_power_of_two = self.table_size & (self.table_size - 1) == 0
        self._has_g_value_table = self.is_power_of_two and self.table_size * self.depth <= _MAX_TABLE_BYTES
        self._device_tensors: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._g_value_tables: dict[torch.device, Tensor] = {}

    @property
    def distinct_rounds(self) -> list[int]:
        """The rounds without repetitions of an earlier round's key."""
        modulus = self.table_size if self.is_power_of_two else 2**64
        first = {key % modulus: depth for depth, key in reversed(list(enumerate(self.settings.keys)))}
        return sorted(first.values())

    def context_hashes(self, tokens: Tensor) -> Tensor:
        """Hashes of all runs of `context_size` tokens [..., L] -> [..., L - context_size + 1]."""
        count = tokens.shape[-1] - self.context_size + 1
        hashes = tokens.new_ones((*tokens.shape[:-1], count))
        # Position by position for all runs, which avoids copying the runs.
        for offset in range(self.context_size):
            hashes = (hashes + tokens[..., offset : offset + count]) * LCG_MULTIPLIER + 1
        return hashes

    def current_contexts(
        self, tokens: Tensor, length: Tensor, generated: Tensor, max_generated: int
    ) -> tuple[Tensor, Tensor]:
        """Return the hash of each row's context [N, 1], and whether it may be marked [N, 1].

        A row is `tokens[i, :length[i]]` [N, L], [N, 1], of which the last `generated` [N, 1] are generated,
        at most `max_generated`. Only these are part of a context, padded with zeros. A row is marked unless
        the context is one of the last `context_history_size`.
        """
        history = min(max_generated, self.settings.context_history_size)
        positions = length + torch.arange(-history - self.context_size, 0, device=tokens.device)
        gathered = tokens.gather(1, positions.clamp(0, tokens.shape[1] - 1)) if tokens.shape[1] else positions
        hashes = self.context_hashes(
            torch.where(positions >= length - generated, gathered, 0)
        )  # [N, back + 1]
        first = self.context_size if self.settings.skip_first_ngram_calls else 0
        exists = generated - torch.arange(history, 0, -1, device=tokens.device) >= first
        repeated = ((hashes[:, :-1] == hashes[:, -1:]) & exists).any(1, keepdim=True)
        return hashes[:, -1:], ~repeated & (generated >= first)

    def g_value_inputs(self, contexts: Tensor, tokens: Tensor) -> Tensor:
        """The input of the g-values of tokens [...]: equal inputs have equal g-values under any key."""
        return (contexts + tokens) & (self.table_size - 1) if self.is_power_of_two else contexts + tokens

    def ngram_keys(self, ngrams: Tensor) -> Tensor:
        """Combine n-gram hashes [...] with the key of every round [..., D]."""
        return (ngrams[..., None] + self._on_device(ngrams.device)[0]) * LCG_MULTIPLIER + 1

    def lookup_g_values(self, ngram_keys: Tensor) -> Tensor:
        """Look up the g-values, 0 or 1, of keyed hashes [...]."""
        return self._on_device(ngram_keys.device)[1][ngram_keys % self.table_size]

    def g_values(self, contexts: Tensor, tokens: Tensor) -> Tensor:
        """G-values of tokens [...] after contexts [...], per round [..., D]."""
        return self.lookup_g_values(self.ngram_keys((contexts + tokens) * LCG_MULTIPLIER + 1))

    def iter_g_values(self, contexts: Tensor, tokens: Tensor) -> Iterator[Tensor]:
        """Yield each round's g-values [N, K], for tokens [N, K] or [K] after contexts [N, 1]."""
        if self._has_g_value_table:
            g_value_table = self._g_value_table(contexts.device, 0)
            index = (contexts + tokens) & (self.table_size - 1)
            yield from (g_value_table[depth][index] for depth in range(self.depth))
            return
        ngrams = (contexts + tokens) * LCG_MULTIPLIER + 1
        keys, table = self._on_device(contexts.device)
        for key in keys.unbind():
            yield table[((ngrams + key) * LCG_MULTIPLIER + 1) % self.table_size]

    def vocab_g_values(self, context: int, vocab_size: int) -> Tensor | None:
        """G-values of the whole vocabulary after one context [D, V], a view; None if there is no table."""
        if not self._has_g_value_table:
            return None
        start = context & (self.table_size - 1)
        return self._g_value_table(torch.device("cpu"), vocab_size)[:, start : start + vocab_size]

    def _on_device(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The keys [D] and the sampling table [S] on a device."""
        if device not in self._device_tensors:
            keys = torch.tensor(self.settings.keys, dtype=torch.long)
            self._device_tensors[device] = keys.to(device), self.sampling_table.to(device)
        return self._device_tensors[device]

    def _g_value_table(self, device: torch.device, vocab_size: int) -> Tensor:
        """G-values of each residue, extended periodically by the vocabulary size [D, S + V]."""
        table = self._g_value_tables.get(device)
        if table is None or table.shape[1] < self.table_size + vocab_size:
            residues = torch.arange(self.table_size, device=device)
            ngrams = residues * LCG_MULTIPLIER + 1
            g_values = [
                self.lookup_g_values((ngrams + key) * LCG_MULTIPLIER + 1)
                for key in self._on_device(device)[0].unbind()
            ]
            periodic = torch.arange(self.table_size + vocab_size, device=device) & (self.table_size - 1)
            table = torch.stack([values[periodic] for values in g_values])
            self._g_value_tables[device] = table
        return table


@lru_cache(maxsize=32)
def get_tournament(settings: SynthIDTextWatermarkingConfig) -> Tournament:
    """Return the cached tournament of the settings."""
    return Tournament(settings)

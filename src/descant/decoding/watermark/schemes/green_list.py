"""Green lists: the keyed share of the vocabulary after a context, identical on every device."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from descant.config.watermarking_config import WatermarkingConfig
from descant.core.interfaces import Array
from descant.errors import ConfigError

__all__ = ["GreenList", "get_green_list"]


LIST_CACHE_BYTES: Final = 64 << 20  # cached lists, one bit per token
ANSWER_CACHE_SIZE: Final = 1 << 17  # cached single lookups
MAX_VOCAB_SIZE: Final = 1 << 27  # above, torch's shuffle would use wider random words
UINT32_MASK: Final = 0xFFFFFFFF
BUILD_BATCH_SIZE: Final = 16  # lists built at once
MAX_SINGLE_QUERIES: Final = 3  # lookups per seed below which no list is built
HASH_TABLE_SIZE: Final = 1_000_003  # size of selfhash's hash table


class GreenList:
    """The keyed share of a vocabulary, a pure function of a 32-bit seed and the sizes.

    It is the prefix of a Fisher-Yates shuffle by MT19937, as torch's CPU generator shuffles. `lefthash` seeds
    it with the previous token, `selfhash` with the previous tokens and the candidate (Kirchenbauer et al.
    2023, arXiv 2306.04634). It uses numpy's generator, whose stream numpy guarantees, and not torch's, which
    depends on the device and may change: marks must stay detectable for years.
    """

    def __init__(self, settings: WatermarkingConfig, vocab_size: int, max_lists: int | None = None) -> None:
        """`max_lists` lists are cached; None: a cache shared by all instances."""
        self.vocab_size = vocab_size
        self.num_green = int(vocab_size * settings.greenlist_ratio)
        if not 0 < self.num_green < vocab_size <= MAX_VOCAB_SIZE:
            must = f"must have a `greenlist_ratio` that makes some, not all, of {vocab_size} tokens green"
            raise ConfigError("watermarking_config", must, settings.greenlist_ratio)
        self._hashing_key = settings.hashing_key
        self._is_lefthash = settings.seeding_scheme == "lefthash"
        # Number of preceding tokens that determine whether a token is green.
        self.context_size = 1 if self._is_lefthash else settings.context_width - 1
        self._lock = threading.Lock()
        self._bit_generator = np.random.MT19937(0)
        self._random_state = np.random.RandomState(self._bit_generator)
        self._swap_index = np.arange(self.num_green, dtype=np.uint32)
        self._swap_number = (self._swap_index + 1).astype(np.min_scalar_type(self.num_green))
        self._num_remaining = np.uint32(vocab_size) - self._swap_index  # positions a swap chooses from
        self._last_swap = np.zeros(vocab_size, dtype=self._swap_number.dtype)
        self._list_cache = _LIST_CACHE if max_lists is None else _LRUCache(max_lists * -(-vocab_size // 8))

    def green_mask(self, last: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """Mask of the green tokens after each last token, by lefthash [N, V]."""
        seeds = self._lefthash_seeds(np.asarray(last, dtype=np.int64)).tolist()
        known = self._get_lists(seeds)
        packed = np.concatenate([known[seed] for seed in seeds])
        bits = np.unpackbits(packed).reshape(len(seeds), -1)[:, : self.vocab_size]
        return torch.from_numpy(bits).to(device).view(torch.bool)

    def seeds(self, before: Array, tokens: Array) -> Array:
        """Seeds (uint32) of candidate tokens [N, C] after the preceding tokens [N, B].

        Of the preceding tokens the last `context_size` are used, and at least as many must be given.
        """
        if self._is_lefthash:
            return np.broadcast_to(self._lefthash_seeds(before[:, -1])[:, None], tokens.shape)
        table = _hash_table(self._hashing_key)
        token_hash = table[tokens % HASH_TABLE_SIZE].astype(np.int64)
        keyed = token_hash * np.int64(self._hashing_key)
        lowest = keyed * token_hash
        # Products wrap around, so the smallest cannot be found from the factors alone.
        for position in range(before.shape[1] - self.context_size, before.shape[1]):
            np.minimum(lowest, keyed * table[before[:, position] % HASH_TABLE_SIZE, None], out=lowest)
        # torch takes seeds modulo 2^64 - 1, of which MT19937 uses the low half.
        seeds: Array = ((lowest - (lowest < 0)) & UINT32_MASK).astype(np.uint32)
        return seeds

    def is_green(self, seeds: Array, tokens: Array) -> Array:
        """Whether each token [M] is green under its seed [M]; ids out of range are not."""
        green = np.zeros(len(tokens), dtype=np.bool_)
        known = np.flatnonzero((tokens >= 0) & (tokens < self.vocab_size))
        inputs = (seeds[known].astype(np.uint64) << np.uint64(32)) | tokens[known].astype(np.uint64)
        queries, inverse = np.unique(inputs, return_inverse=True)
        green[known] = (self._query_lists(queries) if self._is_lefthash else self._query_each(queries))[
            inverse
        ]
        return green

    def _lefthash_seeds(self, last: Array) -> Array:
        """Lefthash seeds of last tokens [N], in Python integers because the product exceeds 64 bits."""
        tokens, inverse = np.unique(last, return_inverse=True)
        seeds = [self._hashing_key * token % (2**64 - 1) & UINT32_MASK for token in tokens.tolist()]
        return np.array(seeds, dtype=np.uint32)[inverse]

    def _query_lists(self, queries: Array) -> Array:
        """Answer sorted queries, with a list for seeds that are queried often."""
        seeds, starts = np.unique(queries >> np.uint64(32), return_index=True)
        bounds = list(pairwise([*starts.tolist(), len(queries)]))
        frequent = [
            (seed, slice(*bound))
            for seed, bound in zip(seeds.tolist(), bounds, strict=True)
            if not self._is_rarely_queried(seed, bound[1] - bound[0])
        ]
        answers = np.empty(len(queries), dtype=np.bool_)
        single = np.ones(len(queries), dtype=np.bool_)
        tokens = (queries & np.uint64(UINT32_MASK)).astype(np.int64)
        lists = self._get_lists([seed for seed, _ in frequent])
        for seed, group in frequent:
            answers[group] = (lists[seed][tokens[group] >> 3] << (tokens[group] & 7) & 128) != 0
            single[group] = False
        answers[single] = self._query_each(queries[single])
        return answers

    def _is_rarely_queried(self, seed: int, count: int) -> bool:
        """Whether a seed has no list, and too few queries to build one."""
        key = (self.vocab_size, self.num_green, seed)
        if self._list_cache.get(key) is not None:
            return False
        count += _QUERY_COUNTS.get(key) or 0
        _QUERY_COUNTS.put(key, count, 1)
        return count <= MAX_SINGLE_QUERIES

    def _query_each(self, queries: Array) -> Array:
        """Answer queries one by one."""
        return np.array([self._query_one(query) for query in queries.tolist()], dtype=np.bool_)

    def _query_one(self, query: int) -> bool:
        key = (self.vocab_size, self.num_green, query)
        answer: bool | None = _ANSWER_CACHE.get(key)
        if answer is None:
            with self._lock:
                swaps = self._draw_swaps([query >> 32])
            answer = self._is_swapped_in(swaps[0], query & UINT32_MASK)
            _ANSWER_CACHE.put(key, answer, 1)
        return answer

    def _get_lists(self, seeds: Sequence[int]) -> dict[int, Array]:
        """The packed lists of the seeds, one bit per token [V / 8]."""
        lists: dict[int, Any] = {
            seed: self._list_cache.get((self.vocab_size, self.num_green, seed)) for seed in seeds
        }
        missing = [seed for seed, bits in lists.items() if bits is None]
        for start in range(0, len(missing), BUILD_BATCH_SIZE):
            batch = missing[start : start + BUILD_BATCH_SIZE]
            with self._lock:
                packed = np.packbits(self._build_masks(self._draw_swaps(batch)), axis=1)
            for seed, bits in zip(batch, packed, strict=True):
                lists[seed] = bits.copy()  # copied, so that the batch's memory is released
                self._list_cache.put((self.vocab_size, self.num_green, seed), lists[seed], bits.nbytes)
        return lists

    def _draw_swaps(self, seeds: Sequence[int]) -> Array:
        """The swap partner of each position of the seeds' lists, in order [N, num_green]."""
        drawn = np.empty((len(seeds), self.num_green), dtype=np.uint32)
        for row, seed in zip(drawn, seeds, strict=True):
            self._random_state.seed(seed)
            row[:] = self._bit_generator.random_raw(self.num_green)
        np.remainder(drawn, self._num_remaining, out=drawn)
        drawn += self._swap_index
        return drawn

    def _build_masks(self, swaps: Array) -> Array:
        """Mask of the tokens that the swaps [N, num_green] bring into the lists [N, V]."""
        count, size = swaps.shape
        green = np.empty((count, self.vocab_size), dtype=np.bool_)
        returns = np.empty(swaps.shape, dtype=np.bool_)
        targets = swaps.astype(np.intp)
        last_swap = self._last_swap  # last swap of each position, counted from 1
        for row, target in enumerate(targets):
            last_swap.fill(0)
            last_swap[target] = self._swap_number
            np.greater(last_swap, 0, out=green[row])  # swapped in by another position, or by none
            np.not_equal(last_swap.take(target), self._swap_number, out=returns[row])
        # A token swapped out by its own position returns if its new position is swapped again later.
        # Otherwise that position is outside the list, or swaps it out in turn.
        returns |= swaps == self._swap_index
        in_list = swaps < size
        targets += np.arange(0, count * size, size)[:, None]
        pending = np.flatnonzero(in_list & ~returns)
        position, flat_returns = targets.take(pending), returns.reshape(-1)
        while len(pending):
            returned = flat_returns.take(position)
            flat_returns[pending[returned]] = True
            active = np.flatnonzero(~returned & in_list.take(position))
            pending, position = pending.take(active), targets.take(position.take(active))
        green[:, :size] |= returns
        return green

    def _is_swapped_in(self, swaps: Array, token: int) -> bool:
        """Whether the swaps bring the token into the list."""
        step, position = -1, token
        while True:
            hits = np.flatnonzero(swaps[step + 1 : position + 1] == position)
            if len(hits):
                return True
            if position >= self.num_green:
                return False
            step, position = position, int(swaps[position])


class _LRUCache:
    """A thread-safe cache of the most recently used entries, up to a cost budget."""

    def __init__(self, budget: int) -> None:
        self._free = budget
        self._entries: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Any:
        """Return the value, None if it is not cached."""
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def put(self, key: Hashable, value: Any, cost: int) -> None:
        """Store a value and evict the least recently used ones over the budget."""
        with self._lock:
            self._free += self._entries.pop(key, (None, 0))[1] - cost
            self._entries[key] = value, cost
            while self._free < 0:
                self._free += self._entries.popitem(last=False)[1][1]


_LIST_CACHE: Final = _LRUCache(LIST_CACHE_BYTES)
_ANSWER_CACHE: Final = _LRUCache(ANSWER_CACHE_SIZE)
_QUERY_COUNTS: Final = _LRUCache(ANSWER_CACHE_SIZE)


def get_green_list(settings: WatermarkingConfig, vocab_size: int) -> GreenList:
    """Return the cached green list of the settings; the bias does not matter."""
    return _cached_green_list(replace(settings, bias=0.0), vocab_size)


@lru_cache(maxsize=64)
def _cached_green_list(settings: WatermarkingConfig, vocab_size: int) -> GreenList:
    return GreenList(settings, vocab_size)


@lru_cache(maxsize=32)
def _hash_table(key: int) -> Array:
    """Shuffled numbers from 1 that selfhash hashes tokens with, int32 to save memory."""
    bits = np.random.MT19937(0)
    np.random.RandomState(bits).seed(key & UINT32_MASK)
    index = np.arange(HASH_TABLE_SIZE, dtype=np.uint32)
    swaps = np.zeros_like(index)  # the last position has no choice
    swaps[:-1] = bits.random_raw(HASH_TABLE_SIZE - 1)
    swaps = swaps % (np.uint32(HASH_TABLE_SIZE) - index) + index
    return (_apply_swaps(swaps.astype(np.int64)) + 1).astype(np.int32)


def _apply_swaps(swaps: Array) -> Array:
    """Apply sequential swaps of each position with its partner to the numbers from 0, without a loop."""
    index = np.arange(len(swaps))
    ordered = np.sort(swaps * len(swaps) + index)
    partner, step = np.divmod(ordered, len(swaps))  # steps that swap each position, in order
    same_partner = partner[1:] == partner[:-1]
    previous = np.full(len(swaps), -1)  # previous step that swapped the same position
    previous[step[1:][same_partner]] = step[:-1][same_partner]
    # The value at a position when its step comes is that of the last step that swapped it.
    origin = index.copy()
    is_other = step != partner
    origin[partner[is_other]] = step[is_other]
    while not np.array_equal(doubled := origin[origin], origin):
        origin = doubled
    return np.where(previous >= 0, origin[previous], np.where(swaps == index, origin, swaps))

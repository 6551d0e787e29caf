"""The green list: which tokens the key favours after a context, the same on every device."""

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

from descant.decoding.watermark.schemes.config import WatermarkingConfig
from descant.errors import ConfigError

__all__ = ["GreenList", "get_green_list"]

Array = np.ndarray[Any, np.dtype[Any]]

LIST_CACHE_BYTES: Final = 64 << 20  # bytes of lists that are remembered, one bit a token
ANSWER_CACHE_SIZE: Final = 1 << 17  # single answers that are remembered
MAX_VOCAB_SIZE: Final = 1 << 27  # tokens: above, a permutation would be drawn from longer words
UINT32_MASK: Final = 0xFFFFFFFF
BUILD_BATCH_SIZE: Final = 16  # lists that are made at once
MAX_SINGLE_QUERIES: Final = 3  # questions that are sooner answered one by one than by making a list
HASH_TABLE_SIZE: Final = 1_000_003  # places of the table that selfhash hashes tokens with


class GreenList:
    """The keyed share of a vocabulary, a pure function of a seed of 32 bits and of how large both are.

    It is the beginning of a Fisher-Yates shuffle by MT19937, as torch's CPU generator shuffles. `lefthash`
    makes the seed of the token before, `selfhash` of the tokens before and the candidate (Kirchenbauer et
    al. 2023, arXiv 2306.04634). Made here of numpy's generator, whose stream numpy has promised to keep, and
    not by torch's, whose stream hangs on the device and may change: marks must be found years later.
    """

    def __init__(self, settings: WatermarkingConfig, vocabulary: int, most: int | None = None) -> None:
        """`most` lists are remembered; None: what there is room for, shared with all other lists."""
        self.vocab_size = vocabulary
        self.num_green = int(vocabulary * settings.greenlist_ratio)
        if not 0 < self.num_green < vocabulary <= MAX_VOCAB_SIZE:
            must = f"must have a `greenlist_ratio` that makes some of {vocabulary} tokens green"
            raise ConfigError("watermarking_config", must, settings.greenlist_ratio)
        self._hashing_key = settings.hashing_key
        self._is_lefthash = settings.seeding_scheme == "lefthash"
        # How many tokens before a token decide whether it is green.
        self.context_size = 1 if self._is_lefthash else settings.context_width - 1
        self._lock = threading.Lock()
        self._bit_generator = np.random.MT19937(0)
        self._random_state = np.random.RandomState(self._bit_generator)
        self._swap_index = np.arange(self.num_green, dtype=np.uint32)
        self._swap_number = (self._swap_index + 1).astype(np.min_scalar_type(self.num_green))
        self._num_remaining = np.uint32(vocabulary) - self._swap_index  # places that a turn chooses from
        self._last_swap = np.zeros(vocabulary, dtype=self._swap_number.dtype)
        self._list_cache = _LIST_CACHE if most is None else _LRUCache(most * -(-vocabulary // 8))

    def green_mask(self, last: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """Which tokens are green after each of the last tokens, by lefthash [N, V]."""
        seeds = self._lefthash_seeds(np.asarray(last, dtype=np.int64)).tolist()
        known = self._get_lists(seeds)
        packed = np.concatenate([known[seed] for seed in seeds])
        bits = np.unpackbits(packed).reshape(len(seeds), -1)[:, : self.vocab_size]
        return torch.from_numpy(bits).to(device).view(torch.bool)

    def seeds(self, before: Array, tokens: Array) -> Array:
        """The seed that decides about each token [N, C] after the tokens before it [N, B], uint32.

        Of those before, in the order of the text, the last `width` count, and there must be so many.
        """
        if self._is_lefthash:
            return np.broadcast_to(self._lefthash_seeds(before[:, -1])[:, None], tokens.shape)
        table = _hash_table(self._hashing_key)
        own = table[tokens % HASH_TABLE_SIZE].astype(np.int64)
        keyed = own * np.int64(self._hashing_key)
        least = keyed * own
        # Products wrap, so that no factor tells which is the least of them.
        for at in range(before.shape[1] - self.context_size, before.shape[1]):
            np.minimum(least, keyed * table[before[:, at] % HASH_TABLE_SIZE, None], out=least)
        # A generator takes them modulo 2^64 - 1, of which it keeps the low half.
        seeds: Array = ((least - (least < 0)) & UINT32_MASK).astype(np.uint32)
        return seeds

    def is_green(self, seeds: Array, tokens: Array) -> Array:
        """Whether each token [M] is green by the seed beside it [M]; what is no token of the list is not."""
        answer = np.zeros(len(tokens), dtype=np.bool_)
        real = np.flatnonzero((tokens >= 0) & (tokens < self.vocab_size))
        asked = (seeds[real].astype(np.uint64) << np.uint64(32)) | tokens[real].astype(np.uint64)
        questions, back = np.unique(asked, return_inverse=True)
        answer[real] = (self._query_lists(questions) if self._is_lefthash else self._query_each(questions))[
            back
        ]
        return answer

    def _lefthash_seeds(self, last: Array) -> Array:
        """The seeds that lefthash makes of last tokens [N]: in whole numbers, since the key fills a word."""
        tokens, back = np.unique(last, return_inverse=True)
        seeds = [self._hashing_key * token % (2**64 - 1) & UINT32_MASK for token in tokens.tolist()]
        return np.array(seeds, dtype=np.uint32)[back]

    def _query_lists(self, questions: Array) -> Array:
        """The answers to sorted questions, by lists where a seed is asked about often, as by lefthash."""
        seeds, starts = np.unique(questions >> np.uint64(32), return_index=True)
        bounds = list(pairwise([*starts.tolist(), len(questions)]))
        often = [
            (seed, slice(*ends))
            for seed, ends in zip(seeds.tolist(), bounds, strict=True)
            if not self._is_rarely_queried(seed, ends[1] - ends[0])
        ]
        answers = np.empty(len(questions), dtype=np.bool_)
        alone = np.ones(len(questions), dtype=np.bool_)
        tokens = (questions & np.uint64(UINT32_MASK)).astype(np.int64)
        known = self._get_lists([seed for seed, _ in often])
        for seed, some in often:
            answers[some] = (known[seed][tokens[some] >> 3] << (tokens[some] & 7) & 128) != 0
            alone[some] = False
        answers[alone] = self._query_each(questions[alone])
        return answers

    def _is_rarely_queried(self, seed: int, count: int) -> bool:
        """Whether a seed has no list, and so few questions that answering each is less than making one."""
        asked = (self.vocab_size, self.num_green, seed)
        if self._list_cache.get(asked) is not None:
            return False
        count += _QUERY_COUNTS.get(asked) or 0
        _QUERY_COUNTS.put(asked, count, 1)
        return count <= MAX_SINGLE_QUERIES

    def _query_each(self, questions: Array) -> Array:
        """The answers one by one."""
        return np.array([self._query_one(one) for one in questions.tolist()], dtype=np.bool_)

    def _query_one(self, question: int) -> bool:
        asked = (self.vocab_size, self.num_green, question)
        answer: bool | None = _ANSWER_CACHE.get(asked)
        if answer is None:
            with self._lock:
                swaps = self._draw_swaps([question >> 32])
            answer = self._is_swapped_in(swaps[0], question & UINT32_MASK)
            _ANSWER_CACHE.put(asked, answer, 1)
        return answer

    def _get_lists(self, seeds: Sequence[int]) -> dict[int, Array]:
        """The lists of some seeds, one bit a token [V / 8]."""
        found: dict[int, Any] = {
            seed: self._list_cache.get((self.vocab_size, self.num_green, seed)) for seed in seeds
        }
        new = [seed for seed, bits in found.items() if bits is None]
        for start in range(0, len(new), BUILD_BATCH_SIZE):
            some = new[start : start + BUILD_BATCH_SIZE]
            with self._lock:
                made = np.packbits(self._build_masks(self._draw_swaps(some)), axis=1)
            for seed, bits in zip(some, made, strict=True):
                found[seed] = bits.copy()  # alone, for the others' memory to be given back
                self._list_cache.put((self.vocab_size, self.num_green, seed), found[seed], bits.nbytes)
        return found

    def _draw_swaps(self, seeds: Sequence[int]) -> Array:
        """With which place each place of the seeds' lists is swapped, in turn [N, size]."""
        drawn = np.empty((len(seeds), self.num_green), dtype=np.uint32)
        for line, seed in zip(drawn, seeds, strict=True):
            self._random_state.seed(seed)
            line[:] = self._bit_generator.random_raw(self.num_green)
        np.remainder(drawn, self._num_remaining, out=drawn)
        drawn += self._swap_index
        return drawn

    def _build_masks(self, swaps: Array) -> Array:
        """Which tokens the swaps [N, size] bring into the lists [N, V]."""
        count, size = swaps.shape
        green = np.empty((count, self.vocab_size), dtype=np.bool_)
        back = np.empty(swaps.shape, dtype=np.bool_)
        goes = swaps.astype(np.intp)
        last = self._last_swap  # the turn that swaps a place for the last time, counted from 1
        for line, to in enumerate(goes):
            last.fill(0)
            last[to] = self._swap_number
            np.greater(last, 0, out=green[line])  # another's turn brings the token, or its own leaves it
            np.not_equal(last.take(to), self._swap_number, out=back[line])
        # A token that its own turn takes away comes back if its new place is swapped again. Otherwise that
        # place is outside, or takes it away in its own turn.
        back |= swaps == self._swap_index
        inside = swaps < size
        goes += np.arange(0, count * size, size)[:, None]
        away = np.flatnonzero(inside & ~back)
        place, flat = goes.take(away), back.reshape(-1)
        while len(away):
            comes = flat.take(place)
            flat[away[comes]] = True
            on = np.flatnonzero(~comes & inside.take(place))
            away, place = away.take(on), goes.take(place.take(on))
        green[:, :size] |= back
        return green

    def _is_swapped_in(self, swaps: Array, token: int) -> bool:
        """Whether the swaps bring that token into the list."""
        turn, place = -1, token
        while True:
            taken = np.flatnonzero(swaps[turn + 1 : place + 1] == place)
            if len(taken):
                return True
            if place >= self.num_green:
                return False
            turn, place = place, int(swaps[place])


class _LRUCache:
    """What was asked for last, up to a budget; threads may share it."""

    def __init__(self, budget: int) -> None:
        self._free = budget
        self._entries: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Any:
        """It, or None if it is not known."""
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def put(self, key: Hashable, value: Any, cost: int) -> None:
        """Remember it, and forget what was asked for longest ago."""
        with self._lock:
            self._free += self._entries.pop(key, (None, 0))[1] - cost
            self._entries[key] = value, cost
            while self._free < 0:
                self._free += self._entries.popitem(last=False)[1][1]


_LIST_CACHE: Final = _LRUCache(LIST_CACHE_BYTES)
_ANSWER_CACHE: Final = _LRUCache(ANSWER_CACHE_SIZE)
_QUERY_COUNTS: Final = _LRUCache(ANSWER_CACHE_SIZE)


def get_green_list(settings: WatermarkingConfig, vocabulary: int) -> GreenList:
    """The green list of the settings, one for all calls; the bias is none of its business."""
    return _cached_green_list(replace(settings, bias=0.0), vocabulary)


@lru_cache(maxsize=64)
def _cached_green_list(settings: WatermarkingConfig, vocabulary: int) -> GreenList:
    return GreenList(settings, vocabulary)


@lru_cache(maxsize=32)
def _hash_table(key: int) -> Array:
    """The shuffled numbers from 1 with which selfhash hashes tokens, int32 as many keys may be in use."""
    bits = np.random.MT19937(0)
    np.random.RandomState(bits).seed(key & UINT32_MASK)
    turn = np.arange(HASH_TABLE_SIZE, dtype=np.uint32)
    swaps = np.zeros_like(turn)  # the last turn has nothing to choose from
    swaps[:-1] = bits.random_raw(HASH_TABLE_SIZE - 1)
    swaps = swaps % (np.uint32(HASH_TABLE_SIZE) - turn) + turn
    return (_apply_swaps(swaps.astype(np.int64)) + 1).astype(np.int32)


def _apply_swaps(swaps: Array) -> Array:
    """The numbers from 0 after each was swapped in turn with the place it names, without going by turns."""
    turn = np.arange(len(swaps))
    ordered = np.sort(swaps * len(swaps) + turn)
    place, at = np.divmod(ordered, len(swaps))  # the turns that swap each place, in order
    again = place[1:] == place[:-1]
    before = np.full(len(swaps), -1)  # the turn that swapped the same place before
    before[at[1:][again]] = at[:-1][again]
    # What stands at a place when its turn comes is what stood at that of the last turn that swapped it.
    stands = turn.copy()
    others = at != place
    stands[place[others]] = at[others]
    while not np.array_equal(further := stands[stands], stands):
        stands = further
    return np.where(before >= 0, stands[before], np.where(swaps == turn, stands, swaps))

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

__all__ = ["GreenList", "green_list"]

Array = np.ndarray[Any, np.dtype[Any]]

BUDGET: Final = 64 << 20  # bytes of lists that are remembered, one bit a token
ANSWERS: Final = 1 << 17  # single answers that are remembered
LARGEST: Final = 1 << 27  # tokens: above, a permutation would be drawn from longer words
WORD: Final = 0xFFFFFFFF
TOGETHER: Final = 16  # lists that are made at once
FEW: Final = 3  # questions that are sooner answered one by one than by making a list
HASHED: Final = 1_000_003  # places of the table that selfhash hashes tokens with


class GreenList:
    """The keyed share of a vocabulary, a pure function of a seed of 32 bits and of how large both are.

    It is the beginning of a Fisher-Yates shuffle by MT19937, as torch's CPU generator shuffles. `lefthash`
    makes the seed of the token before, `selfhash` of the tokens before and the candidate (Kirchenbauer et
    al. 2023, arXiv 2306.04634). Made here of numpy's generator, whose stream numpy has promised to keep, and
    not by torch's, whose stream hangs on the device and may change: marks must be found years later.
    """

    def __init__(self, settings: WatermarkingConfig, vocabulary: int, most: int | None = None) -> None:
        """`most` lists are remembered; None: what there is room for, shared with all other lists."""
        self.vocabulary = vocabulary
        self.size = int(vocabulary * settings.greenlist_ratio)
        if not 0 < self.size < vocabulary <= LARGEST:
            must = f"must have a `greenlist_ratio` that makes some of {vocabulary} tokens green"
            raise ConfigError("watermarking_config", must, settings.greenlist_ratio)
        self._key = settings.hashing_key
        self._left = settings.seeding_scheme == "lefthash"
        # How many tokens before a token decide whether it is green.
        self.width = 1 if self._left else settings.context_width - 1
        self._lock = threading.Lock()
        self._bits = np.random.MT19937(0)
        self._seeder = np.random.RandomState(self._bits)
        self._turn = np.arange(self.size, dtype=np.uint32)
        self._count = (self._turn + 1).astype(np.min_scalar_type(self.size))
        self._open = np.uint32(vocabulary) - self._turn  # places that a turn chooses from
        self._last = np.zeros(vocabulary, dtype=self._count.dtype)
        self._lists = _LISTS if most is None else _Memory(most * -(-vocabulary // 8))

    def mask(self, last: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """Which tokens are green after each of the last tokens, by lefthash [N, V]."""
        seeds = self._left_seeds(np.asarray(last, dtype=np.int64)).tolist()
        known = self._known(seeds)
        packed = np.concatenate([known[seed] for seed in seeds])
        bits = np.unpackbits(packed).reshape(len(seeds), -1)[:, : self.vocabulary]
        return torch.from_numpy(bits).to(device).view(torch.bool)

    def seeds(self, before: Array, tokens: Array) -> Array:
        """The seed that decides about each token [N, C] after the tokens before it [N, B], uint32.

        Of those before, in the order of the text, the last `width` count, and there must be so many.
        """
        if self._left:
            return np.broadcast_to(self._left_seeds(before[:, -1])[:, None], tokens.shape)
        table = _hashed(self._key)
        own = table[tokens % HASHED].astype(np.int64)
        keyed = own * np.int64(self._key)
        least = keyed * own
        # Products wrap, so that no factor tells which is the least of them.
        for at in range(before.shape[1] - self.width, before.shape[1]):
            np.minimum(least, keyed * table[before[:, at] % HASHED, None], out=least)
        # A generator takes them modulo 2^64 - 1, of which it keeps the low half.
        seeds: Array = ((least - (least < 0)) & WORD).astype(np.uint32)
        return seeds

    def member(self, seeds: Array, tokens: Array) -> Array:
        """Whether each token [M] is green by the seed beside it [M]; what is no token of the list is not."""
        answer = np.zeros(len(tokens), dtype=np.bool_)
        real = np.flatnonzero((tokens >= 0) & (tokens < self.vocabulary))
        asked = (seeds[real].astype(np.uint64) << np.uint64(32)) | tokens[real].astype(np.uint64)
        questions, back = np.unique(asked, return_inverse=True)
        answer[real] = (self._listed(questions) if self._left else self._followed(questions))[back]
        return answer

    def _left_seeds(self, last: Array) -> Array:
        """The seeds that lefthash makes of last tokens [N]: in whole numbers, since the key fills a word."""
        tokens, back = np.unique(last, return_inverse=True)
        seeds = [self._key * token % (2**64 - 1) & WORD for token in tokens.tolist()]
        return np.array(seeds, dtype=np.uint32)[back]

    def _listed(self, questions: Array) -> Array:
        """The answers to sorted questions, by lists where a seed is asked about often, as by lefthash."""
        seeds, starts = np.unique(questions >> np.uint64(32), return_index=True)
        bounds = list(pairwise([*starts.tolist(), len(questions)]))
        often = [
            (seed, slice(*ends))
            for seed, ends in zip(seeds.tolist(), bounds, strict=True)
            if not self._seldom(seed, ends[1] - ends[0])
        ]
        answers = np.empty(len(questions), dtype=np.bool_)
        alone = np.ones(len(questions), dtype=np.bool_)
        tokens = (questions & np.uint64(WORD)).astype(np.int64)
        known = self._known([seed for seed, _ in often])
        for seed, some in often:
            answers[some] = (known[seed][tokens[some] >> 3] << (tokens[some] & 7) & 128) != 0
            alone[some] = False
        answers[alone] = self._followed(questions[alone])
        return answers

    def _seldom(self, seed: int, count: int) -> bool:
        """Whether a seed has no list, and so few questions that answering each is less than making one."""
        asked = (self.vocabulary, self.size, seed)
        if self._lists.get(asked) is not None:
            return False
        count += _ASKED.get(asked) or 0
        _ASKED.put(asked, count, 1)
        return count <= FEW

    def _followed(self, questions: Array) -> Array:
        """The answers one by one."""
        return np.array([self._followed_one(one) for one in questions.tolist()], dtype=np.bool_)

    def _followed_one(self, question: int) -> bool:
        asked = (self.vocabulary, self.size, question)
        answer: bool | None = _ANSWERS.get(asked)
        if answer is None:
            with self._lock:
                swaps = self._swaps([question >> 32])
            answer = self._follow(swaps[0], question & WORD)
            _ANSWERS.put(asked, answer, 1)
        return answer

    def _known(self, seeds: Sequence[int]) -> dict[int, Array]:
        """The lists of some seeds, one bit a token [V / 8]."""
        found: dict[int, Any] = {seed: self._lists.get((self.vocabulary, self.size, seed)) for seed in seeds}
        new = [seed for seed, bits in found.items() if bits is None]
        for start in range(0, len(new), TOGETHER):
            some = new[start : start + TOGETHER]
            with self._lock:
                made = np.packbits(self._whole(self._swaps(some)), axis=1)
            for seed, bits in zip(some, made, strict=True):
                found[seed] = bits.copy()  # alone, for the others' memory to be given back
                self._lists.put((self.vocabulary, self.size, seed), found[seed], bits.nbytes)
        return found

    def _swaps(self, seeds: Sequence[int]) -> Array:
        """With which place each place of the seeds' lists is swapped, in turn [N, size]."""
        drawn = np.empty((len(seeds), self.size), dtype=np.uint32)
        for line, seed in zip(drawn, seeds, strict=True):
            self._seeder.seed(seed)
            line[:] = self._bits.random_raw(self.size)
        np.remainder(drawn, self._open, out=drawn)
        drawn += self._turn
        return drawn

    def _whole(self, swaps: Array) -> Array:
        """Which tokens the swaps [N, size] bring into the lists [N, V]."""
        count, size = swaps.shape
        green = np.empty((count, self.vocabulary), dtype=np.bool_)
        back = np.empty(swaps.shape, dtype=np.bool_)
        goes = swaps.astype(np.intp)
        last = self._last  # the turn that swaps a place for the last time, counted from 1
        for line, to in enumerate(goes):
            last.fill(0)
            last[to] = self._count
            np.greater(last, 0, out=green[line])  # another's turn brings the token, or its own leaves it
            np.not_equal(last.take(to), self._count, out=back[line])
        # A token that its own turn takes away comes back if its new place is swapped again. Otherwise that
        # place is outside, or takes it away in its own turn.
        back |= swaps == self._turn
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

    def _follow(self, swaps: Array, token: int) -> bool:
        """Whether the swaps bring that token into the list."""
        turn, place = -1, token
        while True:
            taken = np.flatnonzero(swaps[turn + 1 : place + 1] == place)
            if len(taken):
                return True
            if place >= self.size:
                return False
            turn, place = place, int(swaps[place])


class _Memory:
    """What was asked for last, up to a budget; threads may share it."""

    def __init__(self, budget: int) -> None:
        self._room = budget
        self._kept: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Any:
        """It, or None if it is not known."""
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def put(self, key: Hashable, value: Any, cost: int) -> None:
        """Remember it, and forget what was asked for longest ago."""
        with self._lock:
            self._room += self._kept.pop(key, (None, 0))[1] - cost
            self._kept[key] = value, cost
            while self._room < 0:
                self._room += self._kept.popitem(last=False)[1][1]


_LISTS: Final = _Memory(BUDGET)
_ANSWERS: Final = _Memory(ANSWERS)
_ASKED: Final = _Memory(ANSWERS)


def green_list(settings: WatermarkingConfig, vocabulary: int) -> GreenList:
    """The green list of the settings, one for all calls; the bias is none of its business."""
    return _shared(replace(settings, bias=0.0), vocabulary)


@lru_cache(maxsize=64)
def _shared(settings: WatermarkingConfig, vocabulary: int) -> GreenList:
    return GreenList(settings, vocabulary)


@lru_cache(maxsize=32)
def _hashed(key: int) -> Array:
    """The shuffled numbers from 1 with which selfhash hashes tokens, int32 as many keys may be in use."""
    bits = np.random.MT19937(0)
    np.random.RandomState(bits).seed(key & WORD)
    turn = np.arange(HASHED, dtype=np.uint32)
    swaps = np.zeros_like(turn)  # the last turn has nothing to choose from
    swaps[:-1] = bits.random_raw(HASHED - 1)
    swaps = swaps % (np.uint32(HASHED) - turn) + turn
    return (_shuffled(swaps.astype(np.int64)) + 1).astype(np.int32)


def _shuffled(swaps: Array) -> Array:
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

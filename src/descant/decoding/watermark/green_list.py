"""The green list watermark: the keyed lists, the processor, the detection scheme and its detector."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from descant.config.watermarking_config import WatermarkingConfig, as_watermarking_config
from descant.core.context import Context
from descant.core.interfaces import Array
from descant.decoding.processors.base import check_number
from descant.decoding.watermark.keys import warn_if_public
from descant.decoding.watermark.processor import BaseWatermarkProcessor
from descant.decoding.watermark.statistics import (
    PaddingTokens,
    TokenScores,
    WatermarkScheme,
    binomial_tail,
    proportion_interval,
)
from descant.errors import ConfigError, InputError

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


SELFHASH_CANDIDATES: Final = 40  # best tokens per row that selfhash evaluates, as in transformers


class WatermarkLogitsProcessor(BaseWatermarkProcessor):
    """Adds `bias` to the green tokens of a row (Kirchenbauer et al. 2023, arXiv 2306.04634).

    Rows shorter than `context_width` are unchanged. In a direct call the vocabulary size is given, and scores
    beyond it are never green. `device` is accepted for compatibility and has no effect: the list is the same
    on every device.
    """

    vocab_size: int | None = None  # None in the engine: the width of the scores

    def __init__(  # noqa: PLR0913 - transformers' signature
        self,
        vocab_size: int,
        device: str | torch.device,
        greenlist_ratio: float = 0.25,
        bias: float = 2.0,
        hashing_key: int = 15485863,
        seeding_scheme: str = "lefthash",
        context_width: int = 1,
    ) -> None:
        torch.device(device)
        self.vocab_size = check_number("vocab_size", vocab_size, 2, integer=True)
        self.watermark = WatermarkingConfig(greenlist_ratio, bias, hashing_key, seeding_scheme, context_width)
        warn_if_public(self.watermark)
        get_green_list(self.watermark, self.vocab_size)  # raises if no token would be green

    def _apply_watermark(self, context: Context, scores: Tensor, settings: WatermarkingConfig) -> Tensor:
        """Add the bias to the green tokens."""
        vocab_size = self.vocab_size or scores.shape[1]
        if vocab_size > scores.shape[1]:
            raise InputError(
                "vocab_size", f"must be at most {scores.shape[1]}, the width of the scores", vocab_size
            )
        if context.tokens.shape[1] < settings.context_width:
            return scores
        green_list = get_green_list(settings, vocab_size)
        if settings.seeding_scheme == "selfhash":
            return _apply_selfhash(context, scores, settings, green_list)
        return _apply_lefthash(context, scores, settings, green_list)


def _apply_lefthash(
    context: Context, scores: Tensor, settings: WatermarkingConfig, green_list: GreenList
) -> Tensor:
    """Add the bias to every green token."""
    last, length = _context_on_host(context, 1)
    mask = green_list.green_mask(last[:, -1].tolist(), scores.device)
    if (length < settings.context_width).any():
        mask &= torch.from_numpy(length >= settings.context_width).to(scores.device)[:, None]
    # Addition instead of `torch.where`, which is ten times slower on the CPU with a random mask.
    bias_mask = mask.view(torch.uint8).to(scores.dtype)
    if bias_mask.shape == scores.shape:
        return torch.add(
            scores, bias_mask, alpha=settings.bias, out=None if scores.requires_grad else bias_mask
        )
    biased = scores.clone()
    biased[:, : bias_mask.shape[1]].add_(bias_mask, alpha=settings.bias)
    return biased


def _apply_selfhash(
    context: Context, scores: Tensor, settings: WatermarkingConfig, green_list: GreenList
) -> Tensor:
    """Add the bias to those of the best tokens that are green under their own seed."""
    best, tokens = scores.topk(min(SELFHASH_CANDIDATES, scores.shape[1]))
    before, length = _context_on_host(context, green_list.context_size)
    candidates = tokens.cpu().numpy()
    # Masked tokens stay masked, and evaluating a token is expensive.
    evaluated = (best > -torch.inf).cpu().numpy() & (length >= settings.context_width)[:, None]
    green = np.zeros_like(evaluated)
    green[evaluated] = green_list.is_green(
        green_list.seeds(before, candidates)[evaluated], candidates[evaluated]
    )
    biased = torch.from_numpy(green).to(scores.device)
    return scores.scatter(1, tokens, torch.where(biased, best + settings.bias, best))


def _context_on_host(context: Context, width: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the last tokens of each row [N, width] and its length [N], on the host.

    This synchronises with the device: the list is a sequential shuffle that only the host computes.
    """
    length = context.length
    positions = (length - width + torch.arange(width, device=length.device)).clamp(min=0)
    packed = torch.cat((context.tokens.gather(1, positions), length), 1).cpu().numpy()
    return packed[:, :width], packed[:, width]


# If only the bias decides, a bias of d turns a green share g into e^d g / (1 - g + e^d g) of the text; where
# the model is certain, the share stays g. Of 300 texts by SmolLM2-135M with a bias of 2, the least free one
# was free at 36 % of its tokens, and half of them at 65 % or more. Less than a quarter is taken as no
# watermark.
MIN_FREE_SHARE: Final = 0.25
ROUNDING_SLACK: Final = 1e-6


class GreenListScheme(WatermarkScheme):
    """One key of the green list: a token's value is 1 if it is green.

    Without the key, a token is green with probability `num_green / V`, independently between seeds. Tokens
    of one seed are drawn without replacement, which only makes the test conservative. Equal inputs are scored
    once: lefthash depends on the last token and the token, whatever the `context_width`. A seed of 0, as
    after token 0, gives the same list for all keys and is not scored. With a negative bias, red tokens count.
    """

    name = WatermarkingConfig.scheme
    settings: WatermarkingConfig

    def __init__(self, settings: WatermarkingConfig, vocabulary: int) -> None:
        self.settings = settings
        self._green_list = get_green_list(settings, vocabulary)
        share = self._green_list.num_green / vocabulary
        self.null_mean = share if settings.bias >= 0 else 1.0 - share
        self.null_std = math.sqrt(share * (1.0 - share))
        self.context_size = self.prompt_reach = self._green_list.context_size
        odds = math.exp(min(abs(settings.bias), 100.0))
        biased_share = odds * self.null_mean / (1.0 - self.null_mean + odds * self.null_mean)
        self.min_marked_mean = self.null_mean + MIN_FREE_SHARE * (biased_share - self.null_mean)

    def score_tokens(self, ids: Array) -> TokenScores:
        """Score the tokens [L] that have a context and a new input."""
        ids = np.asarray(ids, dtype=np.int64)
        first, seeds = _context_seeds(self._green_list, ids, self.context_size)
        inputs = (seeds.astype(np.uint64) << np.uint64(32)) | (ids[first:] & 0xFFFFFFFF).astype(np.uint64)
        is_new = np.zeros(len(inputs), dtype=np.bool_)
        is_new[np.unique(inputs, return_index=True)[1]] = True
        known = (ids[first:] >= 0) & (ids[first:] < self._green_list.vocab_size)
        positions = first + np.flatnonzero(is_new & known & (seeds != 0))
        green = self._green_list.is_green(seeds[positions - first], ids[positions])
        return TokenScores.at(positions, green if self.settings.bias >= 0 else ~green, len(ids))

    def p_value(self, count: int, total: float) -> float:
        """Binomial probability of `total` or more green tokens among `count`."""
        return binomial_tail(count, math.ceil(total - ROUNDING_SLACK), self.null_mean)

    def confidence_interval(self, values: Array) -> tuple[float, float]:
        """Exact 95 % interval of the share of green tokens."""
        return proportion_interval(len(values), round(float(values.sum())))


def _context_seeds(green_list: GreenList, ids: Array, width: int) -> tuple[int, Array]:
    """Return the first position with a context, and the seeds from there on [L - first]."""
    if len(ids) <= width:
        return len(ids), np.zeros(0, dtype=np.uint32)
    windows = np.lib.stride_tricks.sliding_window_view(ids, width + 1)
    return width, green_list.seeds(windows[:, :width], windows[:, width:])[:, 0]


@dataclass
class WatermarkDetectorOutput:
    """Result of the documented detector, one array [N] per field."""

    num_tokens_scored: Array | None = None
    num_green_tokens: Array | None = None
    green_fraction: Array | None = None
    z_score: Array | None = None
    p_value: Array | None = None
    prediction: Array | None = None
    confidence: Array | None = None


class WatermarkDetector:
    """The documented green list detector: counts green tokens and returns their z-score.

    It needs the settings the text was marked with. `device` has no effect: the lists are the same on every
    device. The p-value is exact (binomial). With `ignore_repeated_ngrams`, each sequence of `context_width`
    tokens and the next one counts once; otherwise repeats count every time, and a repetitive unmarked text
    may appear marked. Padding on either side is not text: the config's pad token, else its end tokens.
    Up to `max_cache_size` green lists are cached between calls.
    """

    def __init__(
        self,
        model_config: Any,
        device: str | torch.device,
        watermarking_config: WatermarkingConfig | Mapping[str, Any],
        ignore_repeated_ngrams: bool = False,
        max_cache_size: int = 128,
    ) -> None:
        torch.device(device)
        if type(max_cache_size) is not int or max_cache_size < 0:
            raise InputError("max_cache_size", "must be an integer >= 0", max_cache_size)
        settings = as_watermarking_config(_to_mapping(watermarking_config))
        if not isinstance(settings, WatermarkingConfig):
            raise InputError("watermarking_config", "must be the settings of a green list", settings)
        warn_if_public(settings)
        self.settings = replace(settings)  # the user may update the given one
        self.ignore_repeated_ngrams = ignore_repeated_ngrams
        self.bos_token_id = _start_token_id(model_config)
        self._padding = PaddingTokens.of(model_config)
        self._green_list = GreenList(settings, _required_vocab_size(model_config), max_cache_size)
        # Length of an n-gram: the context that must precede a scored token, and the token.
        self._ngram_size = settings.context_width + (settings.seeding_scheme == "lefthash")

    def __call__(
        self, input_ids: Tensor, z_threshold: float = 3.0, return_dict: bool = False
    ) -> WatermarkDetectorOutput | Array:
        """Whether each text [N, L] is marked [N]; padding and a leading start token are ignored.

        A padded text without a whole n-gram has no score: its z-score is NaN and it is not marked.
        """
        ids = torch.as_tensor(input_ids).cpu().numpy()
        if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer) or not len(ids):
            raise InputError("input_ids", "must be token ids [batch, length]", input_ids)
        rows = list(ids.astype(np.int64))
        texts = [row[slice(*self._padding.text_span(row))] for row in rows]
        texts = [text[int(len(text) > 0 and text[0] == self.bos_token_id) :] for text in texts]
        width = ids.shape[1] - int(any(len(row) > 0 and row[0] == self.bos_token_id for row in rows))
        if width <= self.settings.context_width:
            must = f"must have more than {self.settings.context_width} tokens per text, the context width"
            raise InputError("input_ids", must, input_ids, "a leading start token does not count")
        scored, hits = self._count_green(texts)
        share = self.settings.greenlist_ratio
        with np.errstate(invalid="ignore"):  # 0 / 0 where nothing is scored
            z_score = (hits - share * scored) / np.sqrt(scored * share * (1.0 - share))
            green_fraction = hits / scored
        prediction: Array = z_score > z_threshold
        if not return_dict:
            return prediction
        green_prob = self._green_list.num_green / self._green_list.vocab_size
        counts = zip(scored.tolist(), hits.tolist(), strict=True)
        p_value = np.array([binomial_tail(int(count), int(green), green_prob) for count, green in counts])
        return WatermarkDetectorOutput(
            num_tokens_scored=scored,
            num_green_tokens=hits,
            green_fraction=green_fraction,
            z_score=z_score,
            p_value=p_value,
            prediction=prediction,
            confidence=1.0 - p_value,
        )

    def _count_green(self, texts: list[Array]) -> tuple[Array, Array]:
        """Return the number of scored tokens and of green ones per text [N]."""
        size = self._ngram_size
        ngrams = [
            np.lib.stride_tricks.sliding_window_view(text, size)
            if len(text) >= size
            else np.zeros((0, size), dtype=np.int64)
            for text in texts
        ]
        if self.ignore_repeated_ngrams:
            ngrams = [np.unique(windows, axis=0) for windows in ngrams]
        scored = np.array([len(windows) for windows in ngrams])
        flat = np.concatenate(ngrams)
        seeds = self._green_list.seeds(flat[:, :-1], flat[:, -1:])[:, 0]
        green = self._green_list.is_green(seeds, flat[:, -1])
        totals = np.concatenate(([0.0], np.cumsum(green, dtype=np.float64)))
        stops = np.cumsum(scored)
        return scored.astype(np.float64), totals[stops] - totals[stops - scored]


def _to_mapping(settings: Any) -> Any:
    """Convert settings of another library to a dict, if they have `to_dict`."""
    if isinstance(settings, WatermarkingConfig | Mapping):
        return settings
    if not callable(to_dict := getattr(settings, "to_dict", None)):
        raise InputError("watermarking_config", "must be a WatermarkingConfig or a dict", settings)
    return to_dict()


def config_vocab_size(config: Any) -> int | None:
    """Vocabulary size in a model config, None if it has none."""
    if callable(get_text_config := getattr(config, "get_text_config", None)):
        config = get_text_config()
    size = getattr(config, "vocab_size", None)
    return size if isinstance(size, int) and not isinstance(size, bool) else None


def _required_vocab_size(config: Any) -> int:
    size = config_vocab_size(config)
    if size is None:
        raise InputError("model_config", "must have a `vocab_size`", config)
    return size


def _start_token_id(config: Any) -> int | None:
    """The token that starts every text of the model, if there is one."""
    name = "decoder_start_token_id" if getattr(config, "is_encoder_decoder", False) else "bos_token_id"
    token: int | None = getattr(config, name, None)
    return token

"""The Gumbel watermark: keyed uniforms, the processor, and detection by small uniforms of marked tokens."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from typing import Final

import numpy as np
import torch
from torch import Tensor

from descant.config.watermarking_config import GumbelWatermarkingConfig
from descant.core.context import UINT32_MASK, Context, murmur_mix
from descant.core.interfaces import Array
from descant.decoding.processors.base import check_number
from descant.decoding.processors.filters import NEG_INF
from descant.decoding.processors.penalties import suffix_match_lengths
from descant.decoding.watermark.processor import BaseWatermarkProcessor
from descant.decoding.watermark.statistics import TokenScores, WatermarkScheme, gamma_interval, gamma_tail
from descant.errors import InputError

_WORDS_PER_DIGEST: Final = 8  # 64-bit words per digest
_PERSONALIZATION: Final = b"descant race"
_GOLDEN_RATIO: Final = 0x9E3779B1


class KeyedUniforms:
    """Keyed uniform numbers; the token with the smallest -log(1 - u) / p wins the draw.

    A context and a nonce are hashed to two words by multilinear hashing with secret factors (Lemire and Kaser
    2014, "Strongly universal string hashing is fast"): two inputs collide with probability 2**-63. The words
    then permute the 2**32 values assigned secretly to tokens. All operations are on integers, so every device
    agrees. This is mixing, not encryption: an observer of very many marked tokens with known probabilities
    might learn something about the key.
    """

    def __init__(self, settings: GumbelWatermarkingConfig) -> None:
        self.context_size = settings.context_width
        secret = _key_stream(settings.key, 2 * (self.context_size + 4))
        self._token_keys = [int(word) & UINT32_MASK for word in secret[:2].tolist()]
        self._hash_factors = secret[2:].reshape(2, -1)  # [2, W + 3]: tokens, two for the nonce, a constant
        # Cached per device: hash factors under size 0, token words under the vocabulary size.
        self._device_tensors: dict[tuple[str, int], Tensor] = {}

    def context_states(self, contexts: Tensor, nonce: Tensor | int) -> Tensor:
        """Two words per context [N, W], for one nonce or one below 2**32 per row [N, 1]: [N, 2]."""
        factors = self._device_factors(contexts.device)
        sums = (contexts[:, None] * factors[:, : self.context_size]).sum(-1)  # int64 wraps on every device
        if isinstance(nonce, Tensor):
            sums = sums + nonce * factors[:, -3] + factors[:, -1]
        else:
            offset = torch.from_numpy(self._nonce_offset(nonce).view(np.int64))
            sums = sums + offset.to(contexts.device, non_blocking=True)
        return (sums >> 32) & UINT32_MASK

    def context_states_on_host(self, contexts: Array, nonce: int) -> Array:
        """The same on the host, as uint32."""
        sums = contexts.astype(np.uint64) @ self._hash_factors[:, : self.context_size].T + self._nonce_offset(
            nonce
        )
        return (sums >> np.uint64(32)).astype(np.uint32)

    def vocab_uniforms(self, states: Tensor, vocab_size: int) -> Tensor:
        """Uniforms of all tokens as float32 [N, V], in (0, 1]; exact near 0."""
        token_words = self._token_words(states.device, vocab_size)
        bits = murmur_mix(((token_words ^ states[:, :1]) * (states[:, 1:] | 1)) & UINT32_MASK)
        return bits.float().add_(0.5).mul_(2.0**-32)

    def iter_vocab_uniforms(self, states: Array, vocab_size: int) -> Iterator[Array]:
        """The same on the host, yielded row by row [V] in one reused buffer.

        As uint32 a row stays in the L1 cache, which is ten times as fast.
        """
        token_words = self._token_words(torch.device("cpu"), vocab_size).numpy().astype(np.uint32)
        bits, spare = np.empty_like(token_words), np.empty_like(token_words)
        uniforms = np.empty(vocab_size, np.float32)
        for first, second in states:
            np.bitwise_xor(token_words, first, out=bits)
            bits *= second | np.uint32(1)
            _mix_inplace(bits, spare)
            np.add(bits, np.float32(0.5), out=uniforms, casting="unsafe", dtype=np.float32)
            uniforms *= np.float32(2.0**-32)
            yield uniforms

    def token_uniforms(self, states: Array, tokens: Array) -> Array:
        """Uniforms of one token [M] per state [M, 2], as float64 in (0, 1) [M]."""
        bits = tokens.astype(np.uint32) * np.uint32(_GOLDEN_RATIO) + np.uint32(self._token_keys[0])
        spare = np.empty_like(bits)
        _mix_inplace(bits, spare)
        bits ^= np.uint32(self._token_keys[1])
        _mix_inplace(bits, spare)
        bits ^= states[:, 0]
        bits *= states[:, 1] | np.uint32(1)
        _mix_inplace(bits, spare)
        return (bits + 0.5) * 2.0**-32

    def _token_words(self, device: torch.device, vocab_size: int) -> Tensor:
        """A distinct secret word per token [V]."""
        key = (str(device), vocab_size)
        if key not in self._device_tensors:
            first, second = self._token_keys
            sequence = (torch.arange(vocab_size) * _GOLDEN_RATIO + first) & UINT32_MASK
            self._device_tensors[key] = murmur_mix(murmur_mix(sequence) ^ second).to(device)
        return self._device_tensors[key]

    def _device_factors(self, device: torch.device) -> Tensor:
        key = (str(device), 0)
        if key not in self._device_tensors:
            self._device_tensors[key] = torch.from_numpy(self._hash_factors.view(np.int64)).to(device)
        return self._device_tensors[key]

    def _nonce_offset(self, nonce: int) -> Array:
        """Contribution of a nonce to the hash sums [2]."""
        low, high = np.uint64(nonce & UINT32_MASK), np.uint64(nonce >> 32)
        return self._hash_factors[:, -3] * low + self._hash_factors[:, -2] * high + self._hash_factors[:, -1]


def _mix_inplace(words: Array, spare: Array) -> None:
    """`murmur_mix` in place, on uint32."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        np.right_shift(words, np.uint32(shift), out=spare)
        words ^= spare
        words *= np.uint32(factor)
    np.right_shift(words, np.uint32(16), out=spare)
    words ^= spare


def _key_stream(key: int, count: int) -> Array:
    """Pseudorandom 64-bit words derived from the key."""
    secret = key.to_bytes(8, "little")
    blocks = [
        blake2b(block.to_bytes(8, "little"), key=secret, person=_PERSONALIZATION).digest()
        for block in range(-(-count // _WORDS_PER_DIGEST))
    ]
    return np.frombuffer(b"".join(blocks), "<u8")[:count].astype(np.uint64)


@lru_cache(maxsize=64)
def _cached_uniforms(key: int, context_width: int) -> KeyedUniforms:
    return KeyedUniforms(GumbelWatermarkingConfig(key, context_width))


def get_keyed_uniforms(settings: GumbelWatermarkingConfig) -> KeyedUniforms:
    """Return the cached uniforms of the settings, one object per key and width."""
    return _cached_uniforms(settings.key, settings.context_width)


_SMALL_VOCAB = 1024  # up to this vocabulary size, rows are not pre-filtered
_SPARSE_RATIO = 64  # if fewer than one token in this many is unmasked, only those are evaluated
_SHORT_CONTEXT = 16  # up to this length, contexts are compared token by token
_BELOW_ONE = 1.0 - 2.0**-24  # largest float32 below 1
_ROUNDING_SLACK = 1.0 - 2.0**-10  # bound on the float32 rounding error


class GumbelWatermarkLogitsProcessor(BaseWatermarkProcessor):
    """Keeps only the winner of a keyed Gumbel-max draw (Aaronson 2022; Kuditipudi et al. 2023).

    Each probability is divided by an exponential variable that depends on the key, the sequence's nonce, its
    last `context_width` generated tokens and the token. The largest quotient wins, so that over random keys
    every token is drawn with its own probability. A row whose context is too short or has occurred before is
    unchanged, because the same random numbers would repeat the same text. In a direct call, the first
    `prompt_length` ids are the prompt, and without a `nonce` one is drawn for all rows.
    """

    is_random = True
    SALT = 2

    def __init__(
        self,
        key: int,
        context_width: int = 4,
        nonce: int | None = None,
        nonces: int = 16,
        prompt_length: int = 0,
    ) -> None:
        settings = GumbelWatermarkingConfig(key, context_width, nonce, nonces)
        self.watermark = replace(settings, nonce=secrets.randbelow(nonces)) if nonce is None else settings
        self.prompt_length = check_number("prompt_length", prompt_length, 0, integer=True)

    def _apply_watermark(
        self, context: Context, scores: Tensor, settings: GumbelWatermarkingConfig
    ) -> Tensor:
        """Score 0 for the winner and -inf for all others; unmarked rows keep their scores."""
        width = settings.context_width
        if max(context.generated_on_host) < width:
            return scores.clone()
        uniforms, last = get_keyed_uniforms(settings), _last_tokens(context, width)
        states = uniforms.context_states(last, self._get_nonce(context, settings))
        is_new = (context.generated >= width) & ~_is_repeated_context(context, last)  # [N, 1]
        if scores.device.type == "cpu" and scores.shape[1] > _SMALL_VOCAB:
            winner = _gumbel_argmax_on_host(uniforms, states, scores.float(), is_new)
        else:
            winner = torch.where(is_new, _gumbel_argmax(uniforms, states, scores), -1)
        one_hot = torch.full_like(scores, NEG_INF).scatter_(1, winner.clamp(min=0), 0.0)
        if scores.device.type == "cpu" and bool((winner >= 0).all()):
            return one_hot
        return torch.where(winner >= 0, one_hot, scores)

    def _get_nonce(self, context: Context, settings: GumbelWatermarkingConfig) -> Tensor | int:
        """Return the configured nonce, or one drawn per sequence [N, 1]."""
        if settings.nonce is not None:
            return settings.nonce
        drawn = (context.uniform_per_sequence(self.SALT) * settings.nonces).long()
        return drawn.clamp(max=settings.nonces - 1)  # float32 may round up to 1


def _last_tokens(context: Context, width: int) -> Tensor:
    """The last tokens of each row [N, W]; positions before its first token hold arbitrary ids."""
    positions = context.length - width + torch.arange(width, device=context.length.device)
    return context.tokens.gather(1, positions.clamp(min=0))


def _is_repeated_context(context: Context, last: Tensor) -> Tensor:
    """Whether the row's context occurred earlier in its generated tokens [N, 1]."""
    tokens, length, width = context.tokens, context.length, last.shape[1]
    first = length - context.generated
    if width > _SHORT_CONTEXT:
        match = suffix_match_lengths(tokens, torch.zeros_like(tokens, dtype=torch.bool), first, length)
        return (match >= width).any(1, keepdim=True)
    start = torch.arange(max(tokens.shape[1] - width, 0), device=tokens.device)
    matches = (start >= first) & (start < length - width)
    for offset in range(width):
        matches &= tokens[:, offset : offset + len(start)] == last[:, offset : offset + 1]
    return matches.any(1, keepdim=True)


def _gumbel_argmax(uniforms: KeyedUniforms, states: Tensor, scores: Tensor) -> Tensor:
    """The winner of each row, -1 if all tokens are masked [N, 1], without device synchronisation."""
    noise = uniforms.vocab_uniforms(states, scores.shape[1]).clamp_(max=_BELOW_ONE)
    best, winner = (scores.float().softmax(-1) / noise.neg_().log1p_().neg_()).max(-1, keepdim=True)
    return torch.where(best > 0, winner, -1)


def _gumbel_argmax_on_host(uniforms: KeyedUniforms, states: Tensor, scores: Tensor, is_new: Tensor) -> Tensor:
    """The same for rows with a new context, on the CPU: only possible winners are evaluated exactly."""
    new_rows = np.flatnonzero(is_new.numpy())
    row_states, row_scores = states.numpy()[new_rows].astype(np.uint32), scores.numpy()
    tokens = _possible_winners(uniforms, row_states, [row_scores[row] for row in new_rows])
    owner = np.repeat(np.arange(len(new_rows)), [len(candidates) for candidates in tokens])
    token = np.concatenate([*tokens, np.empty(0, np.int64)])
    exponential = -np.log1p(-uniforms.token_uniforms(row_states[owner], token))
    perturbed = row_scores[new_rows[owner], token].astype(np.float64) - np.log(exponential)
    order = np.lexsort((perturbed, owner))
    best = order[np.diff(owner, append=-1) != 0]  # the last entry of each row
    best = best[np.isfinite(perturbed[best])]
    winner = np.full((len(scores), 1), -1)
    winner[new_rows[owner[best]], 0] = token[best]
    return torch.from_numpy(winner)


def _possible_winners(uniforms: KeyedUniforms, row_states: Array, scores: Sequence[Array]) -> list[Array]:
    """The tokens of each row [V] that can win."""
    size = max(map(len, scores), default=0)
    is_sparse = [np.count_nonzero(row != NEG_INF) * _SPARSE_RATIO <= size for row in scores]
    row_uniforms = uniforms.iter_vocab_uniforms(
        row_states[[index for index, sparse in enumerate(is_sparse) if not sparse]], size
    )
    quotient = np.empty(size, np.float32)
    winners = []
    for row, sparse in zip(scores, is_sparse, strict=True):
        if sparse:
            winners.append(np.flatnonzero(row != NEG_INF))
            continue
        uniform = next(row_uniforms)
        with np.errstate(invalid="ignore"):  # a row that is all NaN or fully masked has no winner
            np.subtract(row, row.max(), out=quotient)
        np.exp(quotient, out=quotient)
        quotient /= uniform
        # -log(1 - u) is at least u, which is cheaper: a token that cannot win with u cannot win at all.
        first = int(quotient.argmax())
        best_uniform = min(float(uniform[first]), _BELOW_ONE)
        lower_bound = float(quotient[first]) * best_uniform / -math.log1p(-best_uniform)
        winners.append(np.flatnonzero(quotient >= np.float32(lower_bound * _ROUNDING_SLACK)))
    return winners


# A token of probability p that won the draw has the harmonic number of 1/p as its expected value, about 1 +
# 0.8 times the entropy in nats. This is the mean at a quarter of a nat per token, less than source code has.
_MIN_MARKED_MEAN: Final = 1.2


class GumbelScheme(WatermarkScheme):
    """One key and one nonce of the Gumbel watermark.

    A token's value is -log u, u being its keyed uniform. Without the key this is a unit exponential draw; in
    marked text it is larger. The sum is the best statistic if the token probabilities are unknown (Aaronson
    2022). A token is scored if it was drawn by the watermark: after `context_width` tokens that have not
    occurred in that order before.
    """

    name = GumbelWatermarkingConfig.scheme
    null_mean = 1.0
    null_std = 1.0
    min_marked_mean = _MIN_MARKED_MEAN
    nonce: int

    def __init__(self, settings: GumbelWatermarkingConfig, nonce: int | None = None) -> None:
        nonce = settings.nonce if nonce is None else nonce
        if nonce is None:
            do = "create one scheme per nonce below `nonces`"
            raise InputError("nonce", "must be given if the settings have no nonce", None, do)
        self.settings = settings
        self.nonce = nonce
        self.context_size = settings.context_width
        self._uniforms = get_keyed_uniforms(settings)

    def score_tokens(self, ids: Array) -> TokenScores:
        """Score each token [L] whose context is complete and new."""
        ids = np.ascontiguousarray(ids, dtype=np.int64)
        positions = np.flatnonzero(_first_occurrences(ids.tobytes(), self.context_size))
        contexts = ids[positions[:, None] + np.arange(-self.context_size, 0)]
        states = self._uniforms.context_states_on_host(contexts, self.nonce)
        values = -np.log(self._uniforms.token_uniforms(states, ids[positions]))
        return TokenScores.at(positions, values, len(ids))

    def p_value(self, count: int, total: float) -> float:
        """Probability that `count` unit exponential draws sum to `total` or more."""
        return gamma_tail(count, total)

    def confidence_interval(self, values: Array) -> tuple[float, float]:
        """95 % interval of the mean, exact for exponential values."""
        return gamma_interval(len(values), float(values.sum()))


@lru_cache(maxsize=256)  # several keys and nonces are tested on one text
def _first_occurrences(ids: bytes, width: int) -> Array:
    """Mask of the tokens [L] that follow a context for the first time; `ids` are int64 bytes."""
    count, size = len(ids) // 8, 8 * width
    scored = np.zeros(count, dtype=bool)
    contexts: set[bytes] = set()
    for position in range(width, count):
        context = ids[8 * position - size : 8 * position]
        scored[position] = context not in contexts
        contexts.add(context)
    return scored

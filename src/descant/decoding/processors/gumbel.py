"""The Gumbel watermark: a keyed race chooses the token, and over all keys no token's chances change."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from descant.core.context import Context
from descant.decoding.processors.base import check_number
from descant.decoding.processors.filters import NEG_INF
from descant.decoding.processors.repetition import suffix_match_lengths
from descant.decoding.processors.watermark import BaseWatermarkProcessor
from descant.decoding.watermark.schemes import GumbelWatermarkingConfig
from descant.decoding.watermark.schemes.gumbel import KeyedUniforms, get_keyed_uniforms

__all__ = ["GumbelWatermarkLogitsProcessor"]

Array = np.ndarray[Any, np.dtype[Any]]

_SMALL_VOCAB = 1024  # vocabularies up to here are not worth a look at each line
_SPARSE_RATIO = 64  # where fewer than one token in so many is possible, only those are asked
_SHORT_CONTEXT = 16  # contexts up to here are compared token by token
_BELOW_ONE = 1.0 - 2.0**-24  # the largest number below 1
_ROUNDING_SLACK = 1.0 - 2.0**-10  # more than float32 can be wrong


class GumbelWatermarkLogitsProcessor(BaseWatermarkProcessor):
    """Leaves a line only the winner of its keyed race (Aaronson 2022; Kuditipudi et al. 2023).

    Each probability is divided by an exponential variable that hangs on the key, the sequence's nonce, its
    last `context_width` new tokens and the token; the largest wins, so that over all keys every token wins
    as often as it would be drawn. A line whose context is too short, or has been there before, is left as
    it is: the same chance twice would be a repetition. By hand, the first `prompt_length` ids are the
    prompt, and a `nonce` not given is drawn once, for all lines.
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
        made = GumbelWatermarkingConfig(key, context_width, nonce, nonces)
        self.watermark = replace(made, nonce=secrets.randbelow(nonces)) if nonce is None else made
        self.prompt_length = check_number("prompt_length", prompt_length, 0, integer=True)

    def _apply_watermark(
        self, context: Context, scores: Tensor, settings: GumbelWatermarkingConfig
    ) -> Tensor:
        """0 for the winner and -inf for all others, or the scores as they were."""
        width = settings.context_width
        if max(context.generated_on_host) < width:
            return scores.clone()
        race, last = get_keyed_uniforms(settings), _last_tokens(context, width)
        states = race.context_states(last, self._get_nonce(context, settings))
        fresh = (context.generated >= width) & ~_is_repeated_context(context, last)  # [N, 1]
        if scores.device.type == "cpu" and scores.shape[1] > _SMALL_VOCAB:
            winner = _gumbel_argmax_on_host(race, states, scores.float(), fresh)
        else:
            winner = torch.where(fresh, _gumbel_argmax(race, states, scores), -1)
        alone = torch.full_like(scores, NEG_INF).scatter_(1, winner.clamp(min=0), 0.0)
        if scores.device.type == "cpu" and bool((winner >= 0).all()):
            return alone
        return torch.where(winner >= 0, alone, scores)

    def _get_nonce(self, context: Context, settings: GumbelWatermarkingConfig) -> Tensor | int:
        """The nonce, or where each sequence draws its own, theirs [N, 1]."""
        if settings.nonce is not None:
            return settings.nonce
        drawn = (context.uniform_per_sequence(self.SALT) * settings.nonces).long()
        return drawn.clamp(max=settings.nonces - 1)  # in float32 the largest numbers below 1 are 1


def _last_tokens(context: Context, width: int) -> Tensor:
    """The last tokens of each line, rubbish before its first [N, W]."""
    at = context.length - width + torch.arange(width, device=context.length.device)
    return context.tokens.gather(1, at.clamp(min=0))


def _is_repeated_context(context: Context, last: Tensor) -> Tensor:
    """Whether a line's new tokens before its last have the same context somewhere [N, 1]."""
    tokens, length, width = context.tokens, context.length, last.shape[1]
    first = length - context.generated
    if width > _SHORT_CONTEXT:
        match = suffix_match_lengths(tokens, torch.zeros_like(tokens, dtype=torch.bool), first, length)
        return (match >= width).any(1, keepdim=True)
    start = torch.arange(max(tokens.shape[1] - width, 0), device=tokens.device)
    same = (start >= first) & (start < length - width)
    for place in range(width):
        same &= tokens[:, place : place + len(start)] == last[:, place : place + 1]
    return same.any(1, keepdim=True)


def _gumbel_argmax(race: KeyedUniforms, states: Tensor, scores: Tensor) -> Tensor:
    """The winner of each line, -1 where nobody can win [N, 1]; nothing is asked of the device."""
    even = race.vocab_uniforms(states, scores.shape[1]).clamp_(max=_BELOW_ONE)
    best, winner = (scores.float().softmax(-1) / even.neg_().log1p_().neg_()).max(-1, keepdim=True)
    return torch.where(best > 0, winner, -1)


def _gumbel_argmax_on_host(race: KeyedUniforms, states: Tensor, scores: Tensor, fresh: Tensor) -> Tensor:
    """The same of the fresh lines, where the host may look: few can win, and only they are asked exactly."""
    lines = np.flatnonzero(fresh.numpy())
    words, rows = states.numpy()[lines].astype(np.uint32), scores.numpy()
    tokens = _possible_winners(race, words, [rows[line] for line in lines])
    which = np.repeat(np.arange(len(lines)), [len(one) for one in tokens])
    token = np.concatenate([*tokens, np.empty(0, np.int64)])
    pace = -np.log1p(-race.token_uniforms(words[which], token))
    reached = rows[lines[which], token].astype(np.float64) - np.log(pace)
    order = np.lexsort((reached, which))
    best = order[np.diff(which, append=-1) != 0]  # the last of each line
    best = best[np.isfinite(reached[best])]
    winner = np.full((len(scores), 1), -1)
    winner[lines[which[best]], 0] = token[best]
    return torch.from_numpy(winner)


def _possible_winners(race: KeyedUniforms, words: Array, scores: Sequence[Array]) -> list[Array]:
    """The tokens of each line [V] that may win."""
    size = max(map(len, scores), default=0)
    few = [np.count_nonzero(line != NEG_INF) * _SPARSE_RATIO <= size for line in scores]
    evens = race.iter_vocab_uniforms(words[[at for at, sparse in enumerate(few) if not sparse]], size)
    hope = np.empty(size, np.float32)
    found = []
    for line, sparse in zip(scores, few, strict=True):
        if sparse:
            found.append(np.flatnonzero(line != NEG_INF))
            continue
        even = next(evens)
        with np.errstate(invalid="ignore"):  # a line of NaN or without a token has no winner
            np.subtract(line, line.max(), out=hope)
        np.exp(hope, out=hope)
        hope /= even
        # -log(1 - u), which is slow, is at least u, which is there: who would not win with u cannot win.
        first = int(hope.argmax())
        chance = min(float(even[first]), _BELOW_ONE)
        sure = float(hope[first]) * chance / -math.log1p(-chance)
        found.append(np.flatnonzero(hope >= np.float32(sure * _ROUNDING_SLACK)))
    return found

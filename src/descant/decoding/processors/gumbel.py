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
from descant.decoding.processors.base import number
from descant.decoding.processors.filters import NEVER
from descant.decoding.processors.repetition import matches
from descant.decoding.processors.watermark import Marking
from descant.decoding.watermark.schemes import GumbelWatermarkingConfig
from descant.decoding.watermark.schemes.gumbel import Race, race_of

__all__ = ["GumbelWatermarkLogitsProcessor"]

Array = np.ndarray[Any, np.dtype[Any]]

_SMALL = 1024  # vocabularies up to here are not worth a look at each line
_SPARSE = 64  # where fewer than one token in so many is possible, only those are asked
_SHORT = 16  # contexts up to here are compared token by token
_BELOW = 1.0 - 2.0**-24  # the largest number below 1
_SLACK = 1.0 - 2.0**-10  # more than float32 can be wrong


class GumbelWatermarkLogitsProcessor(Marking):
    """Leaves a line only the winner of its keyed race (Aaronson 2022; Kuditipudi et al. 2023).

    Each probability is divided by an exponential variable that hangs on the key, the sequence's nonce, its
    last `context_width` new tokens and the token; the largest wins, so that over all keys every token wins
    as often as it would be drawn. A line whose context is too short, or has been there before, is left as
    it is: the same chance twice would be a repetition. By hand, the first `prompt_length` ids are the
    prompt, and a `nonce` not given is drawn once, for all lines.
    """

    random = True
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
        self.prompt = number("prompt_length", prompt_length, 0, whole=True)

    def _marked(self, context: Context, scores: Tensor, settings: GumbelWatermarkingConfig) -> Tensor:
        """0 for the winner and -inf for all others, or the scores as they were."""
        width = settings.context_width
        if max(context.new) < width:
            return scores.clone()
        race, last = race_of(settings), _last(context, width)
        states = race.states(last, self._nonce(context, settings))
        fresh = (context.generated >= width) & ~_seen(context, last)  # [N, 1]
        if scores.device.type == "cpu" and scores.shape[1] > _SMALL:
            winner = _raced_on_host(race, states, scores.float(), fresh)
        else:
            winner = torch.where(fresh, _raced(race, states, scores), -1)
        alone = torch.full_like(scores, NEVER).scatter_(1, winner.clamp(min=0), 0.0)
        if scores.device.type == "cpu" and bool((winner >= 0).all()):
            return alone
        return torch.where(winner >= 0, alone, scores)

    def _nonce(self, context: Context, settings: GumbelWatermarkingConfig) -> Tensor | int:
        """The nonce, or where each sequence draws its own, theirs [N, 1]."""
        if settings.nonce is not None:
            return settings.nonce
        drawn = (context.luck(self.SALT) * settings.nonces).long()
        return drawn.clamp(max=settings.nonces - 1)  # in float32 the largest numbers below 1 are 1


def _last(context: Context, width: int) -> Tensor:
    """The last tokens of each line, rubbish before its first [N, W]."""
    at = context.length - width + torch.arange(width, device=context.length.device)
    return context.tokens.gather(1, at.clamp(min=0))


def _seen(context: Context, last: Tensor) -> Tensor:
    """Whether a line's new tokens before its last have the same context somewhere [N, 1]."""
    tokens, length, width = context.tokens, context.length, last.shape[1]
    first = length - context.generated
    if width > _SHORT:
        match = matches(tokens, torch.zeros_like(tokens, dtype=torch.bool), first, length)
        return (match >= width).any(1, keepdim=True)
    start = torch.arange(max(tokens.shape[1] - width, 0), device=tokens.device)
    same = (start >= first) & (start < length - width)
    for place in range(width):
        same &= tokens[:, place : place + len(start)] == last[:, place : place + 1]
    return same.any(1, keepdim=True)


def _raced(race: Race, states: Tensor, scores: Tensor) -> Tensor:
    """The winner of each line, -1 where nobody can win [N, 1]; nothing is asked of the device."""
    even = race.whole(states, scores.shape[1]).clamp_(max=_BELOW)
    best, winner = (scores.float().softmax(-1) / even.neg_().log1p_().neg_()).max(-1, keepdim=True)
    return torch.where(best > 0, winner, -1)


def _raced_on_host(race: Race, states: Tensor, scores: Tensor, fresh: Tensor) -> Tensor:
    """The same of the fresh lines, where the host may look: few can win, and only they are asked exactly."""
    lines = np.flatnonzero(fresh.numpy())
    words, rows = states.numpy()[lines].astype(np.uint32), scores.numpy()
    tokens = _hopeful(race, words, [rows[line] for line in lines])
    which = np.repeat(np.arange(len(lines)), [len(one) for one in tokens])
    token = np.concatenate([*tokens, np.empty(0, np.int64)])
    pace = -np.log1p(-race.chosen(words[which], token))
    reached = rows[lines[which], token].astype(np.float64) - np.log(pace)
    order = np.lexsort((reached, which))
    best = order[np.diff(which, append=-1) != 0]  # the last of each line
    best = best[np.isfinite(reached[best])]
    winner = np.full((len(scores), 1), -1)
    winner[lines[which[best]], 0] = token[best]
    return torch.from_numpy(winner)


def _hopeful(race: Race, words: Array, scores: Sequence[Array]) -> list[Array]:
    """The tokens of each line [V] that may win."""
    size = max(map(len, scores), default=0)
    few = [np.count_nonzero(line != NEVER) * _SPARSE <= size for line in scores]
    evens = race.each(words[[at for at, sparse in enumerate(few) if not sparse]], size)
    hope = np.empty(size, np.float32)
    found = []
    for line, sparse in zip(scores, few, strict=True):
        if sparse:
            found.append(np.flatnonzero(line != NEVER))
            continue
        even = next(evens)
        with np.errstate(invalid="ignore"):  # a line of NaN or without a token has no winner
            np.subtract(line, line.max(), out=hope)
        np.exp(hope, out=hope)
        hope /= even
        # -log(1 - u), which is slow, is at least u, which is there: who would not win with u cannot win.
        first = int(hope.argmax())
        chance = min(float(even[first]), _BELOW)
        sure = float(hope[first]) * chance / -math.log1p(-chance)
        found.append(np.flatnonzero(hope >= np.float32(sure * _SLACK)))
    return found

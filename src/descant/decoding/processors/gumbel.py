"""Logits processor of the Gumbel watermark: keyed Gumbel-max sampling."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from descant.core.context import Context
from descant.core.interfaces import Array
from descant.decoding.processors.base import check_number
from descant.decoding.processors.filters import NEG_INF
from descant.decoding.processors.repetition import suffix_match_lengths
from descant.decoding.processors.watermark import BaseWatermarkProcessor
from descant.decoding.watermark.schemes import GumbelWatermarkingConfig
from descant.decoding.watermark.schemes.gumbel import KeyedUniforms, get_keyed_uniforms

__all__ = ["GumbelWatermarkLogitsProcessor"]


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

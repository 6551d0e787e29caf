"""Logits processor of the green list watermark."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from descant.core.context import Context
from descant.decoding.processors.base import check_number
from descant.decoding.processors.watermark import BaseWatermarkProcessor
from descant.decoding.watermark.schemes import WatermarkingConfig
from descant.decoding.watermark.schemes.green_list import GreenList, get_green_list
from descant.decoding.watermark.schemes.keys import warn_if_public
from descant.errors import InputError

__all__ = ["WatermarkLogitsProcessor"]

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

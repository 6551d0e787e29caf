"""The green list's processor: a keyed share of the tokens is favoured, which a detector can count."""

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

SELFHASH_CANDIDATES: Final = 40  # best tokens of a line that selfhash asks about, as documented


class WatermarkLogitsProcessor(BaseWatermarkProcessor):
    """Adds `bias` to the tokens that are green after a line (Kirchenbauer et al. 2023, arXiv 2306.04634).

    A line shorter than `context_width` is left as it is. By hand the vocabulary's size is given, and what
    scores have beyond it is never green; `device` is where the scores are, and changes nothing: the list is
    the same on every device.
    """

    vocab_size: int | None = None  # in the loop: as many as there are scores

    def __init__(  # noqa: PLR0913 - as documented
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
        get_green_list(self.watermark, self.vocab_size)  # refuses what leaves nothing green

    def _apply_watermark(self, context: Context, scores: Tensor, settings: WatermarkingConfig) -> Tensor:
        """The scores, higher where a token is green."""
        size = self.vocab_size or scores.shape[1]
        if size > scores.shape[1]:
            raise InputError("vocab_size", f"must be at most the {scores.shape[1]} of the scores", size)
        if context.tokens.shape[1] < settings.context_width:
            return scores
        greens = get_green_list(settings, size)
        if settings.seeding_scheme == "selfhash":
            return _apply_selfhash(context, scores, settings, greens)
        return _apply_lefthash(context, scores, settings, greens)


def _apply_lefthash(
    context: Context, scores: Tensor, settings: WatermarkingConfig, greens: GreenList
) -> Tensor:
    """The scores with every green token's raised."""
    last, length = _context_on_host(context, 1)
    green = greens.green_mask(last[:, -1].tolist(), scores.device)
    if (length < settings.context_width).any():
        green &= torch.from_numpy(length >= settings.context_width).to(scores.device)[:, None]
    # A sum and not a choice, which on the host takes ten times as long where the mask looks like chance.
    raised = green.view(torch.uint8).to(scores.dtype)
    if raised.shape == scores.shape:
        return torch.add(scores, raised, alpha=settings.bias, out=None if scores.requires_grad else raised)
    answer = scores.clone()
    answer[:, : raised.shape[1]].add_(raised, alpha=settings.bias)
    return answer


def _apply_selfhash(
    context: Context, scores: Tensor, settings: WatermarkingConfig, greens: GreenList
) -> Tensor:
    """The scores with those of the best tokens raised that are green by themselves."""
    best, tokens = scores.topk(min(SELFHASH_CANDIDATES, scores.shape[1]))
    before, length = _context_on_host(context, greens.context_size)
    candidates = tokens.cpu().numpy()
    # What is ruled out stays so, and a list takes time to ask.
    asked = (best > -torch.inf).cpu().numpy() & (length >= settings.context_width)[:, None]
    green = np.zeros_like(asked)
    green[asked] = greens.is_green(greens.seeds(before, candidates)[asked], candidates[asked])
    raised = torch.from_numpy(green).to(scores.device)
    return scores.scatter(1, tokens, torch.where(raised, best + settings.bias, best))


def _context_on_host(context: Context, width: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The last tokens of each line [N, width] and its length [N], on the host.

    The device is waited for: the list is a shuffle by a generator that goes turn by turn, which no device
    does as the host does it.
    """
    length = context.length
    at = (length - width + torch.arange(width, device=length.device)).clamp(min=0)
    told = torch.cat((context.tokens.gather(1, at), length), 1).cpu().numpy()
    return told[:, :width], told[:, width]

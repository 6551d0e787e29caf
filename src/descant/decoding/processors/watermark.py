"""What the processors of all watermarks have in common: settings by row, lines of one key at a time."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from descant.config.generation_config import GenerationConfig
from descant.core.context import Context, PromptInfo
from descant.decoding.processors.base import LogitsProcessor
from descant.decoding.watermark.schemes import BaseWatermarkingConfig, as_watermarking_config

__all__ = ["BaseWatermarkProcessor"]


class BaseWatermarkProcessor(LogitsProcessor):
    """A watermark's processor: a subclass defines `_marked`, for lines that have the same settings.

    One made by hand holds those of all lines as `watermark`.
    """

    @classmethod
    def params_from_config(cls, config: GenerationConfig, prompt: PromptInfo) -> dict[str, Any]:  # noqa: ARG003
        """The settings of the row."""
        assert config.watermarking_config is not None
        return {"watermark": _intern_config(config.watermarking_config)}

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """The scores [N, V], marked."""
        given = context.object_param("watermark")
        if all(one is given[0] or one == given[0] for one in given):  # mostly: one config for all
            return self._apply_watermark(context, scores, given[0])
        places: dict[BaseWatermarkingConfig, list[int]] = {}
        for line, one in enumerate(given):
            places.setdefault(one, []).append(line)
        answer = scores.clone()
        for one, lines in places.items():
            part = torch.tensor(lines)
            at = part.to(scores.device, non_blocking=True)
            answer[at] = self._apply_watermark(context.take(part), scores[at], one)
        return answer

    def _apply_watermark(self, context: Context, scores: Tensor, settings: Any) -> Tensor:
        """The scores [N, V] of lines with these settings."""
        raise NotImplementedError(f"{type(self).__name__} must define `_marked`")


@lru_cache(maxsize=256)
def _intern_config(given: Mapping[str, Any]) -> BaseWatermarkingConfig:
    """One object for equal settings, so that a step can tell by identity that rows share them."""
    return as_watermarking_config(given)

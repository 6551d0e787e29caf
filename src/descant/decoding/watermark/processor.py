"""Base class of watermark processors: settings per row, rows grouped by settings."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from descant.config.generation_config import GenerationConfig
from descant.config.watermarking_config import BaseWatermarkingConfig, as_watermarking_config
from descant.core.context import Context, PromptInfo
from descant.decoding.processors.base import LogitsProcessor


class BaseWatermarkProcessor(LogitsProcessor):
    """A watermark processor. A subclass defines `_apply_watermark` for rows with the same settings.

    An instance for direct calls holds the settings of all rows as `watermark`.
    """

    @classmethod
    def params_from_config(cls, config: GenerationConfig, prompt: PromptInfo) -> dict[str, Any]:  # noqa: ARG003
        """Return the settings of the row."""
        assert config.watermarking_config is not None
        return {"watermark": _intern_config(config.watermarking_config)}

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Apply the watermark to the scores [N, V]."""
        row_settings = context.object_param("watermark")
        if all(settings is row_settings[0] or settings == row_settings[0] for settings in row_settings):
            return self._apply_watermark(context, scores, row_settings[0])
        groups: dict[BaseWatermarkingConfig, list[int]] = {}
        for row, settings in enumerate(row_settings):
            groups.setdefault(settings, []).append(row)
        marked = scores.clone()
        for settings, rows in groups.items():
            group = torch.tensor(rows)
            index = group.to(scores.device, non_blocking=True)
            marked[index] = self._apply_watermark(context.take(group), scores[index], settings)
        return marked

    def _apply_watermark(self, context: Context, scores: Tensor, settings: Any) -> Tensor:
        """Apply the watermark to the scores [N, V] of rows with these settings."""
        raise NotImplementedError(f"{type(self).__name__} must define `_apply_watermark`")


@lru_cache(maxsize=256)
def _intern_config(settings: Mapping[str, Any]) -> BaseWatermarkingConfig:
    """Return one object for equal settings, so that rows can be compared by identity."""
    return as_watermarking_config(settings)

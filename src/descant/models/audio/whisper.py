"""Whisper-like models, whose encoder takes audio windows of fixed length."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from descant.models.distributed import input_device


def language_codes() -> Mapping[str, str]:
    """Language codes by name: "english" -> "en"."""
    # Imported here: slow to load and rarely needed.
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    return TO_LANGUAGE_CODE


@dataclass(frozen=True)
class WhisperAdapter:
    """A model whose encoder takes windows of one length, so that longer audio is split."""

    model: Any
    num_mel_bins: int  # per frame
    window_frames: int  # per window
    encoder_stride: int  # frames per encoder position
    max_target_positions: int  # decoder positions, prompt included
    vocab_size: int
    median_filter_width: int  # width of the filter on attention weights, for token timestamps

    @property
    def device(self) -> torch.device:
        """The device of its inputs."""
        return input_device(self.model)

    @property
    def forced_decoder_ids(self) -> list[list[int | None]] | None:
        """Pairs of position and token that older checkpoints force at the start."""
        for config in (self.model.generation_config, self.model.config):
            pairs: list[list[int | None]] | None = getattr(config, "forced_decoder_ids", None)
            if pairs is not None:
                return pairs
        return None

    @torch.no_grad()
    def encode(self, windows: Tensor) -> Tensor:
        """Encoder states [N, positions, size] of windows [N, bins, frames]. The encoder takes no mask."""
        encoder = self.model.get_encoder()
        states: Tensor = encoder(windows.to(self.device, self.model.dtype), return_dict=True)[0]
        return states


def is_whisper(model: Any) -> bool:
    """Whether a model takes audio in windows: its own generate() has `num_segment_frames`."""
    model_class: Any = type(model)
    return _has_segment_frames(model_class)


def whisper_adapter_of(model: Any) -> WhisperAdapter | None:
    """The adapter of a Whisper-like model, None for other models."""
    if not is_whisper(model):
        return None
    config, encoder = model.config, model.get_encoder()
    stride = math.prod(
        module.stride[0] for module in encoder.modules() if isinstance(module, torch.nn.Conv1d)
    )
    return WhisperAdapter(
        model,
        num_mel_bins=int(config.num_mel_bins),
        window_frames=stride * int(config.max_source_positions),
        encoder_stride=stride,
        max_target_positions=int(config.max_target_positions),
        vocab_size=int(config.vocab_size),
        median_filter_width=int(getattr(config, "median_filter_width", 7)),
    )


@cache
def _has_segment_frames(model_class: Any) -> bool:
    # Of all bases: Descant's mixin may come before the model's own method.
    methods = (vars(base).get("generate") for base in model_class.__mro__)
    return any(
        method is not None and "num_segment_frames" in inspect.signature(method).parameters
        for method in methods
    )

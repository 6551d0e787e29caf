"""What a model that hears through a window of fixed length declares, and how it is made to listen."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from descant.models.devices import input_device

__all__ = ["WhisperAdapter", "is_whisper", "language_codes", "whisper_adapter_of"]


def language_codes() -> Mapping[str, str]:
    """The codes of languages by their names: "english" -> "en"."""
    # Here, not above: slow to load, and seldom asked for.
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    return TO_LANGUAGE_CODE


@dataclass(frozen=True)
class WhisperAdapter:
    """A model whose encoder takes windows of one length only, so that longer audio is heard in several."""

    model: Any
    num_mel_bins: int  # of a frame
    window_frames: int  # of a window
    encoder_stride: int  # frames for each position of the encoder
    max_target_positions: int  # of the decoder, prompt included
    vocab_size: int
    median_filter_width: int  # width of the filter over attention weights, for the times of tokens

    @property
    def device(self) -> torch.device:
        """Where it takes its inputs."""
        return input_device(self.model)

    @property
    def attn_implementation(self) -> str:
        """How it computes attention: "sdpa", "eager", ..."""
        return str(getattr(self.model.config, "_attn_implementation", None) or "eager")

    @property
    def forced_decoder_ids(self) -> list[list[int | None]] | None:
        """The pairs of position and token that older checkpoints begin with."""
        for config in (self.model.generation_config, self.model.config):
            pairs: list[list[int | None]] | None = getattr(config, "forced_decoder_ids", None)
            if pairs is not None:
                return pairs
        return None

    @torch.no_grad()
    def encode(self, windows: Tensor) -> Tensor:
        """The encoder's view of windows [N, bins, frames]: [N, positions, size]. It takes no mask."""
        encoder = self.model.get_encoder()
        states: Tensor = encoder(windows.to(self.device, self.model.dtype), return_dict=True)[0]
        return states


def is_whisper(model: Any) -> bool:
    """Whether a model declares that it hears by windows: its own generate() counts frames."""
    kind: Any = type(model)
    return _has_segment_frames(kind)


def whisper_adapter_of(model: Any) -> WhisperAdapter | None:
    """The model as a listener, if it is one."""
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
def _has_segment_frames(kind: Any) -> bool:
    own = getattr(kind, "generate", None)
    return own is not None and "num_segment_frames" in inspect.signature(own).parameters

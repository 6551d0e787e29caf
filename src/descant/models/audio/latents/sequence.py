"""The latents of one request: how they are drawn, and when speech ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from descant.core.sampling_noise import keyed_normal
from descant.kv_cache.cached_row import CachedRow

__all__ = ["LATENT_INPUT", "EndOfSpeech", "LatentSequence", "SharedNoise", "draw_noise"]

LATENT_INPUT = "latents"  # the name of a request's `LatentSequence` among its inputs


@dataclass(frozen=True)
class EndOfSpeech:
    """When a sequence ends: a number of frames after the first frame whose logit exceeds a threshold."""

    threshold: float
    frames_after: int  # frames that follow the one that exceeds it
    min_frames: int = 0  # first frames whose logit is ignored

    def is_last(self, logits: Sequence[float]) -> bool:
        """Whether the last of these frames, each with its logit, ends the sequence."""
        for frame in range(self.min_frames, len(logits)):
            if logits[frame] > self.threshold:
                return frame + self.frames_after == len(logits) - 1
        return False


class SharedNoise:
    """The noise of one call: a block for each frame by torch's generator, as transformers draws it.

    A block is kept, so that a repeated forward gets the same one and advances the generator once.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._blocks: list[Tensor] = []

    def block(self, frame: int, size: int, like: Tensor) -> Tensor:
        """The noise of that frame [B, D], on the device and in the dtype of `like`."""
        while len(self._blocks) <= frame:
            self._blocks.append(torch.randn(self._num_rows, size, device=like.device, dtype=like.dtype))
        return self._blocks[frame]


@dataclass(eq=False)
class LatentSequence:
    """One request's prompt and settings, and the latents that it has so far.

    Latents are stored by their frame: a forward that is repeated replaces what it wrote.
    """

    prompt: Tensor  # [L] token ids, without padding (host)
    max_frames: int
    end: EndOfSpeech
    num_flow_steps: int
    voice: Tensor | None = None  # [F, D'] latents of the prompt's voice positions; None: there are none
    past: CachedRow | None = None  # the keys and values of the prompt's first positions
    noise_scale: float = 0.0  # standard deviation of the noise; 0: there is none
    seed: int | None = None  # of its own noise; None: the noise is that of the call
    noise_row: int = 0  # its row in the noise of the call, or its index among the sequences of a prompt
    shared_noise: SharedNoise | None = None
    latents: list[Tensor] = field(default_factory=list)  # [D] each, normalised
    eos_logits: list[float] = field(default_factory=list)  # of each frame

    def write(self, frame: int, latent: Tensor, eos_logit: float) -> bool:
        """Store a frame; whether it is the last by the end-of-speech logits."""
        del self.latents[frame:], self.eos_logits[frame:]
        self.latents.append(latent)
        self.eos_logits.append(eos_logit)
        return self.end.is_last(self.eos_logits)

    def fed_latents(self, start: int, stop: int) -> list[Tensor]:
        """The latents that are fed at the positions from `start` to `stop`."""
        length = len(self.prompt)
        return self.latents[max(start - length, 0) : max(stop - length, 0)]


def draw_noise(sequences: Sequence[LatentSequence], frames: Sequence[int], size: int, like: Tensor) -> Tensor:
    """The scaled noise of one frame of each sequence [N, D], on the device and in the dtype of `like`."""
    lines = list(torch.zeros(len(sequences), size, device=like.device, dtype=like.dtype))
    keyed = [index for index, one in enumerate(sequences) if one.noise_scale and one.seed is not None]
    if keyed:
        keys = [(sequences[index].seed, sequences[index].noise_row, frames[index]) for index in keyed]
        seed, slot, frame = torch.tensor(keys).unbind(1)
        values = keyed_normal(seed, slot, frame, size).to(like.device, like.dtype)
        for index, value in zip(keyed, values, strict=True):
            lines[index] = value * sequences[index].noise_scale
    for index, one in enumerate(sequences):
        if one.noise_scale and one.shared_noise is not None and one.seed is None:
            lines[index] = one.shared_noise.block(frames[index], size, like)[one.noise_row] * one.noise_scale
    return torch.stack(lines)

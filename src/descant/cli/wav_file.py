"""WAV files: samples as 16-bit PCM."""

from __future__ import annotations

import io
import wave
from typing import Final

from torch import Tensor

__all__ = ["wav_bytes"]

_SAMPLE_BYTES: Final = 2
_LARGEST: Final = 2 ** (8 * _SAMPLE_BYTES - 1) - 1


def wav_bytes(samples: Tensor, sampling_rate: int) -> bytes:
    """A WAV file of samples [channels, T], clipped to [-1, 1]."""
    levels = (samples.float().clamp(-1, 1) * _LARGEST).round().short()
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(len(samples))
        written.setsampwidth(_SAMPLE_BYTES)
        written.setframerate(sampling_rate)
        written.writeframes(levels.T.contiguous().numpy().tobytes())  # the channels of a sample side by side
    return file.getvalue()

"""Recordings of requests as samples."""

from __future__ import annotations

import io
import wave
from typing import Any, Final

import numpy as np

from descant.errors import MissingExtra
from descant.serve.api_errors import ApiError

__all__ = ["read_audio"]

MAX_SECONDS: Final = 3 * 3600
_MAX_CHANNELS: Final = 8


def read_audio(data: bytes, rate: int) -> Any:
    """The samples [N] of a recording, between -1 and 1 and `rate` a second, its channels mixed.

    WAV with 16-bit samples is read as it is; other formats need the extra `audio`.
    """
    samples, own_rate = _read_wave(data) or _read_any(data)
    if len(samples) > MAX_SECONDS * own_rate:
        raise _audio_error(f"must be at most {MAX_SECONDS} seconds long")
    if not len(samples):
        raise _audio_error("must have at least one sample")
    mono = samples if samples.ndim == 1 else samples.mean(axis=1)
    return _resample(mono.astype(np.float32), own_rate, rate)


def _read_wave(data: bytes) -> tuple[Any, int] | None:
    """A WAV file of 16-bit samples; None: it is none."""
    try:
        with wave.open(io.BytesIO(data)) as sound:
            channels, width, rate = sound.getnchannels(), sound.getsampwidth(), sound.getframerate()
            if width != 2 or not 0 < channels <= _MAX_CHANNELS or rate <= 0:
                return None
            raw = sound.readframes(min(sound.getnframes(), MAX_SECONDS * rate + 1))
    except (wave.Error, EOFError, ValueError):
        return None
    whole = len(raw) // (2 * channels) * 2 * channels
    samples = np.frombuffer(raw[:whole], "<i2").astype(np.float32) / 32768
    return samples.reshape(-1, channels), rate


def _read_any(data: bytes) -> tuple[Any, int]:
    """A recording in any format that libsndfile reads: FLAC, Ogg, MP3 and others."""
    try:
        import soundfile
    except ImportError:
        raise MissingExtra("audio", "a recording that is not WAV with 16-bit samples") from None
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as sound:
            if not 0 < sound.channels <= _MAX_CHANNELS or sound.samplerate <= 0:
                raise _audio_error(f"must have 1 to {_MAX_CHANNELS} channels")
            samples = sound.read(MAX_SECONDS * sound.samplerate + 1, dtype="float32", always_2d=True)
            return samples, int(sound.samplerate)
    except (RuntimeError, ValueError, TypeError):  # what libsndfile raises for broken files
        raise _audio_error("must be a recording in a known format") from None


def _resample(samples: Any, own: int, rate: int) -> Any:
    if own == rate:
        return samples
    try:
        import soxr
    except ImportError:
        raise MissingExtra("audio", f"a recording with another rate than {rate} a second") from None
    if not 1000 <= own <= 400_000:
        raise _audio_error("must have a rate from 1,000 to 400,000 samples a second")
    return soxr.resample(samples, own, rate)


def _audio_error(must: str) -> ApiError:
    return ApiError(400, f"`file` {must}", param="file", code="invalid_value")

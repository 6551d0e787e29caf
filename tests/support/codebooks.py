"""Tiny random models with several codebooks a step, and their prompts."""

from __future__ import annotations

import functools
from typing import Any

import torch

import descant
from tools.sweep.subject import Entry, Subject
from tools.sweep.trial import subject_of

__all__ = ["CLASSES", "GUIDED", "admit", "codebook_subject", "copied", "drain", "same_sound"]

CLASSES = {
    "musicgen": ("text-to-audio", "musicgen", "MusicgenForConditionalGeneration"),
    "musicgen decoder": ("causal-lm", "musicgen", "MusicgenForCausalLM"),
    "melody": ("text-to-audio", "musicgen_melody", "MusicgenMelodyForConditionalGeneration"),
    "melody decoder": ("causal-lm", "musicgen_melody", "MusicgenMelodyForCausalLM"),
    "dia": ("speech-seq2seq", "dia", "DiaForConditionalGeneration"),
    "csm": ("text-to-audio", "csm", "CsmForConditionalGeneration"),
    "higgs": ("text-to-audio", "higgs_audio_v2", "HiggsAudioV2ForConditionalGeneration"),
}
GUIDED = ("musicgen", "melody", "dia")


@functools.cache
def codebook_subject(name: str) -> Subject:
    """The model of a class and its prompts."""
    return subject_of(Entry(*CLASSES[name]))


def copied(inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a call, which a model may write to."""
    return {name: value.clone() if hasattr(value, "clone") else value for name, value in inputs.items()}


def admit(session: descant.Session, request: descant.SoundRequest) -> list[int]:
    """Admit the requests of a sequence; their numbers."""
    return session.admit(*request.requests)


def drain(session: descant.Session, done: dict[int, Any], steps: int | None = None) -> None:
    """Run so many steps, or all, and note the hypothesis of each request that has finished."""
    while len(session) and (steps is None or steps > 0):
        for event in session.step():
            if isinstance(event, descant.Failed):
                raise event.error
            if isinstance(event, descant.Finished):
                done[event.request] = event.hypotheses[0]
        steps = None if steps is None else steps - 1


def same_sound(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether codes are equal, or sound is up to rounding: a codec rounds by the size of its batch."""
    if first.is_floating_point():
        return first.shape == second.shape and bool(torch.allclose(first, second, atol=1e-5))
    return torch.equal(first, second)

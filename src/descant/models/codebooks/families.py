"""The families of codebook models by the class of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from descant.models.codebooks.csm import CsmFamily
from descant.models.codebooks.dia import DiaFamily
from descant.models.codebooks.frames import CodebookFamily
from descant.models.codebooks.higgs_audio import HiggsAudioFamily
from descant.models.codebooks.musicgen import MelodyFamily, MusicgenFamily

__all__ = ["codebook_family_of"]

_FAMILIES: Final[Mapping[str, Callable[[Any], CodebookFamily]]] = {
    "CsmForConditionalGeneration": CsmFamily,
    "DiaForConditionalGeneration": DiaFamily,
    "HiggsAudioV2ForConditionalGeneration": HiggsAudioFamily,
    "MusicgenForCausalLM": MusicgenFamily,
    "MusicgenForConditionalGeneration": MusicgenFamily,
    "MusicgenMelodyForCausalLM": MelodyFamily,
    "MusicgenMelodyForConditionalGeneration": MelodyFamily,
}

_DECODING_METHODS: Final = ("forward", "_sample", "prepare_inputs_for_generation")


def codebook_family_of(model: Any) -> CodebookFamily | None:
    """The family of a model that predicts several codebooks a step; None: it predicts one token."""
    for base in type(model).__mro__:
        if base.__name__ in _FAMILIES:
            # A class with a loop or a forward of its own is another model.
            is_same = all(getattr(type(model), name) is getattr(base, name) for name in _DECODING_METHODS)
            return _FAMILIES[base.__name__](model) if is_same else None
    return None

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


def codebook_family_of(model: Any) -> CodebookFamily | None:
    """The family of a model that predicts several codebooks a step; None: it predicts one token."""
    for base in type(model).__mro__:
        if base.__name__ in _FAMILIES:
            # A class with a loop of its own is not one of these.
            has_own_loop = getattr(type(model), "_sample", None) is not getattr(base, "_sample", None)
            return None if has_own_loop else _FAMILIES[base.__name__](model)
    return None

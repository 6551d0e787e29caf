"""The adapter of a transformers model: how it is fed decides which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from descant.models.aligned_sound import AlignedSoundModel, is_aligned_sound
from descant.models.fast.prepacked_weights import drop_stale_products
from descant.models.transformers_model import TransformersModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["adapter_of"]


def adapter_of(model: PreTrainedModel, states: Sequence[str] = ()) -> TransformersModel:
    """A model behind the Model interface, with these further outputs."""
    drop_stale_products(model)
    return (AlignedSoundModel if is_aligned_sound(model) else TransformersModel)(model, states)

"""From what a user passes as a model to the `Model` interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from descant.core.interfaces import ModelTraits, RowCache
from descant.decoding.guidance.arithmetic import JointModel, LogitArithmetic
from descant.errors import UnsupportedModel
from descant.kv_cache.row_views import MultiModelCache
from descant.kv_cache.stores.dense import DenseStore
from descant.kv_cache.stores.recurrent_state import RecurrentStateCache
from descant.models.audio.latents.latent_model import LatentModel, is_latent_model
from descant.models.audio.whisper import is_whisper
from descant.models.model_adapter import adapter_of
from descant.models.wrapping.wrapped_model import unwrap_model

__all__ = ["as_model", "new_cache"]


def as_model(model: Any, states: Sequence[str] = ()) -> Any:
    """The model behind the `Model` interface; an object that implements it is returned as it is."""
    if hasattr(model, "traits"):
        return model
    model = unwrap_model(model)
    if isinstance(model, LogitArithmetic):
        # One per session, since it holds requests; only the first model returns states.
        parts = [as_model(part, states if index == 0 else ()) for index, part in enumerate(model.models)]
        return JointModel(model, parts, lambda parts: MultiModelCache([part.new_cache() for part in parts]))
    if is_latent_model(model):
        return LatentModel(model)
    # Late imports: they load transformers' models, which a caller who has a model has loaded already.
    from descant.models.audio.codebooks.codebook_model import CodebookModel, codebook_family_of
    from descant.models.compat.custom_generate import as_custom_generate

    family = codebook_family_of(model)
    if family is not None:
        return CodebookModel(family, states)
    if not is_whisper(model) and as_custom_generate(model) is not None:
        kind = type(model).__name__
        raise UnsupportedModel(f"{kind} prepares prompts in its own generate(): use descant.generate")
    return adapter_of(model, states)


def new_cache(traits: ModelTraits) -> RowCache:
    """An empty cache of the type that models with these traits work on by default."""
    return RecurrentStateCache(traits.cache_argument) if traits.cache_type == "recurrent" else DenseStore()

"""From what a user passes as a model to the `Model` interface, by how its class decodes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal
from weakref import WeakKeyDictionary

from descant.decoding.guidance import JointModel, LogitArithmetic
from descant.errors import UnsupportedModel
from descant.kv_cache.row_views import MultiModelCache
from descant.models.aligned_sound import AlignedSoundModel, is_aligned_sound
from descant.models.audio.latents import LatentModel, is_latent_model
from descant.models.audio.whisper import is_whisper
from descant.models.fast.products import PRODUCTS, drop_stale_products
from descant.models.transformers_model import TransformersModel
from descant.models.wrapping.wrapped_model import unwrap_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# "plain": its tokens are decoded as they are fed; "own generate": its generate() prepares the inputs.
ModelKind = Literal["plain", "aligned sound", "codebooks", "latents", "own generate", "whisper"]

_kinds: Final[WeakKeyDictionary[type, ModelKind]] = WeakKeyDictionary()


def model_kind(model: Any) -> ModelKind:
    """The kind of a model, by its class; an object that is no model of transformers is plain."""
    model_class = type(model)
    kind = _kinds.get(model_class)
    if kind is None:
        kind = _kinds[model_class] = _find_kind(model)
    return kind


def _find_kind(model: Any) -> ModelKind:
    if is_whisper(model):
        return "whisper"
    if is_latent_model(model):
        return "latents"
    if "transformers.modeling_utils" not in sys.modules:
        return "plain"  # whoever has a model of transformers has imported it
    # Imported here: they import transformers' models, which takes seconds.
    from descant.models.audio.codebooks.codebook_model import codebook_family_of
    from descant.models.compat.custom_generate import prepares_in_generate

    if codebook_family_of(model) is not None:
        return "codebooks"
    if is_aligned_sound(model):
        return "aligned sound"
    return "own generate" if prepares_in_generate(model) else "plain"


def as_model(model: Any, states: Sequence[str] = ()) -> Any:
    """The model behind the `Model` interface; an object that implements it is returned as it is."""
    if hasattr(model, "traits"):
        return model
    model = unwrap_model(model)
    if isinstance(model, LogitArithmetic):
        # One per session, since it holds requests; only the first model returns states.
        parts = [as_model(part, states if index == 0 else ()) for index, part in enumerate(model.models)]
        return JointModel(model, parts, lambda parts: MultiModelCache([part.new_cache() for part in parts]))
    kind = model_kind(model)
    if kind == "latents":
        return LatentModel(model)
    if kind == "codebooks":
        from descant.models.audio.codebooks.codebook_model import CodebookModel, codebook_family_of

        family = codebook_family_of(model)
        assert family is not None
        return CodebookModel(family, states)
    if kind == "own generate":
        from descant.models.compat.custom_generate import as_custom_generate

        as_custom_generate(model)  # raises what is more specific
        name = type(model).__name__
        raise UnsupportedModel(f"{name} prepares prompts in its own generate(): use descant.generate")
    return adapter_of(model, states)


def adapter_of(model: PreTrainedModel, states: Sequence[str] = ()) -> TransformersModel:
    """A model behind the Model interface, with these further outputs."""
    if PRODUCTS:
        drop_stale_products(model)
    return (AlignedSoundModel if model_kind(model) == "aligned sound" else TransformersModel)(model, states)

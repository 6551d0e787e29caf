"""The built-in model wrappers: when a config enables them, and the parameters of their rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from descant.config.generation_config import GenerationConfig
from descant.core.interfaces import ModelTraits
from descant.decoding.guidance.cfg import ClassifierFreeGuidance
from descant.decoding.guidance.dola import DoLa, early_layers
from descant.decoding.processors.pipeline import is_set
from descant.errors import ConfigError

__all__ = ["WRAPPERS", "WrapperSpec"]


@dataclass(frozen=True)
class WrapperSpec:
    """A wrapper, when a config enables it, and the parameters of the rows that use it."""

    name: str
    make: Callable[[Any], Any]  # returns a Wrapper
    is_enabled: Callable[[GenerationConfig], bool]
    row_params: Callable[[GenerationConfig, ModelTraits], dict[str, Any]]


def _dola_params(config: GenerationConfig, traits: ModelTraits) -> dict[str, Any]:
    assert config.dola_layers is not None
    if traits.is_encoder_decoder or not traits.has_lm_head:
        reason = "an encoder" if traits.is_encoder_decoder else "no output embeddings of its own"
        must = f"is not supported for a model with {reason}"
        raise ConfigError("dola_layers", must, config.dola_layers, "leave it out")
    return {"early_layers": early_layers(config.dola_layers, traits)}


def _guidance_params(config: GenerationConfig, traits: ModelTraits) -> dict[str, Any]:
    if traits.is_encoder_decoder:
        must = "is not supported for a model with an encoder, whose prompt is not in the decoder"
        raise ConfigError("guidance_scale", must, config.guidance_scale, "leave it out")
    return {"uses_guidance": 1, "guidance_scale": float(config.guidance_scale or 0.0)}


# The innermost wrapper first.
WRAPPERS: Final[Mapping[str, WrapperSpec]] = {
    "dola": WrapperSpec("DoLa", DoLa, is_set("dola_layers"), _dola_params),
    "guidance": WrapperSpec(
        "guidance", ClassifierFreeGuidance, is_set("guidance_scale", 1.0), _guidance_params
    ),
}

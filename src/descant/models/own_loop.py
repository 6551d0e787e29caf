"""A model's own generate() with another loop: it prepares the inputs and finishes the outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.utils import GenerationMixin

from descant.models.custom_generate import generating_modules, own_generate, replace_module
from descant.models.module_copy import shallow_copy

__all__ = ["LoopInputs", "known_fields", "run_with_loop"]


@dataclass(frozen=True)
class LoopInputs:
    """What a model's generate() has prepared for its decoding loop."""

    input_ids: Tensor
    generation_config: Any  # of transformers, with `max_length` and the special tokens resolved
    logits_processor: Any = ()  # of transformers, those of the config included
    stopping_criteria: Any = ()
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)


@torch.no_grad()
def run_with_loop(
    model: PreTrainedModel, loop: Callable[[Any, LoopInputs], Any], kwargs: Mapping[str, Any]
) -> Any:
    """The result of the model's own generate(), in which `loop` decodes in place of transformers' loop.

    The loop gets a copy of the model with shared weights, on which generate() was called, and returns what
    transformers' `_sample` would return.
    """
    model_class: Any = type(model)
    config = copy.deepcopy(model.generation_config)
    stand_in = shallow_copy(model, _loop_class(model_class), generation_config=config, _decoding_loop=loop)
    for path, part in generating_modules(model):
        # A model may write to the configs of its parts.
        replace_module(
            stand_in, path, shallow_copy(part, generation_config=copy.deepcopy(part.generation_config))
        )
    return own_generate(model_class)(stand_in, **kwargs)


def known_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config that transformers knows too: its generate() takes no others."""
    known = vars(transformers.GenerationConfig())  # type: ignore[no-untyped-call]
    return {name: value for name, value in fields.items() if name in known and value is not None}


class _LoopMixin(GenerationMixin):
    """Precedes a model class, so that its generate() reaches the given loop."""

    def _prefill(self, *_: Any, **__: Any) -> None:
        """Nothing: the loop feeds the prompts itself."""

    def _prepare_cache_for_generation(self, *_: Any, **__: Any) -> bool:
        """Nothing: the loop has its own cache."""
        return False

    def _sample(  # noqa: PLR0913 - the signature of transformers
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,  # noqa: ARG002
        streamer: Any = None,  # noqa: ARG002
        prefill_outputs: Any = None,  # noqa: ARG002
        **model_kwargs: Any,
    ) -> Any:
        """The result of the given loop."""
        loop: Callable[[Any, LoopInputs], Any] = vars(self)["_decoding_loop"]
        return loop(
            self, LoopInputs(input_ids, generation_config, logits_processor, stopping_criteria, model_kwargs)
        )


@cache
def _loop_class(model_class: type) -> type:
    """A subclass of `_LoopMixin` and a model class under the name of the latter."""
    attributes = {"__module__": model_class.__module__, "__doc__": model_class.__doc__}
    return type(model_class.__name__, (_LoopMixin, model_class), attributes)

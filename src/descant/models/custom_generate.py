"""Models with a generate() of their own: theirs prepares what is decoded, our loop decodes it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.generation.utils import GenerationMixin

from descant.config.generation_config import FIELDS, GenerationConfig
from descant.errors import InputError, UnsupportedModel

__all__ = ["CustomGenerateModel", "as_custom_generate"]

# The arguments of transformers' own generate(), in the order in which a model's may hand them on.
_GENERATE_ARGUMENTS = tuple(inspect.signature(GenerationMixin.generate).parameters)[1:]

# What a user gives to the loop; a model that keeps it from its parents' generate() must not make it vanish.
_FORWARDED_ARGUMENTS = ("logits_processor", "stopping_criteria", "streamer", "tokenizer")

# What a class declares, or refers to in its generate(), that our loop has no place for; and what that means.
_DELAY_PATTERN_REASON = "weaves several codebooks into each other, each a step behind the one before"
_UNSUPPORTED_HOOKS = {
    "apply_delay_pattern_mask": _DELAY_PATTERN_REASON,
    "apply_delay_mask": _DELAY_PATTERN_REASON,
    "_sample": "has a loop of its own (`_sample`), in which a step is more than one token a row",
    "_get_stopping_criteria": "ends where its own notes say so (`_get_stopping_criteria`), not at a token",
    "_prepare_model_inputs": "prepares by itself what goes in beside its tokens (`_prepare_model_inputs`)",
}


def as_custom_generate(model: Any) -> CustomGenerateModel | None:
    """The model as one that prepares by itself, if it has a generate() of its own that ours can serve."""
    kind: Any = type(model)
    if not isinstance(model, PreTrainedModel) or isinstance(model, _StandInModel):
        return None
    if not hasattr(kind, "generate"):
        return None
    reason = _unsupported_reason(kind)
    if not reason and kind.generate is GenerationMixin.generate:
        return None
    for path, part in _generating_modules(model):
        name, strange = path.rsplit(".", 1)[-1], _unsupported_reason(type(part))
        if strange and name in _names_in_generate(kind):
            reason = reason or f"asks its `{name}`, which {strange}"
    if reason:
        raise UnsupportedModel(f"{kind.__name__} {reason}: call its own generate()")
    return CustomGenerateModel(model)


def _unsupported_reason(kind: Any) -> str:
    """Why a kind of model cannot be decoded by our loop; nothing if it can."""
    own = kind.generate is not GenerationMixin.generate
    names = _names_in_generate(kind) if own else frozenset()
    for name, reason in _UNSUPPORTED_HOOKS.items():
        usual = getattr(GenerationMixin, name, None)
        if getattr(kind, name, usual) is not usual or (usual is None and name in names):
            return reason
    if own and "generate" not in names:
        return "decodes in its own generate() from beginning to end, which calls no other"
    return ""


def _names_in_generate(kind: Any) -> frozenset[str]:
    """What the code of a class' own generate() refers to by name."""
    code = getattr(inspect.unwrap(kind.generate), "__code__", None)
    return frozenset(code.co_names if code is not None else ())


class CustomGenerateModel:
    """A model whose own generate() is run with ours in the place of those that it calls."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    @torch.no_grad()
    def run(self, generate: Callable[..., Any], inputs: Any, config: Any, asked: Mapping[str, Any]) -> Any:
        """What the model's own generate() returns, while `generate` is what decodes."""
        kind: Any = type(self.model)
        empty = [
            name for name, value in asked.items() if value is None or (isinstance(value, tuple) and not value)
        ]
        given = {name: _clone_ids(value) for name, value in asked.items() if name not in empty}
        if isinstance(config, GenerationConfig):
            given = {name: getattr(config, name) for name in config.given} | given
        elif isinstance(config, list | tuple) and self._needs_single_config:
            must = f"must be one for all prompts of {kind.__name__}, which reads it before it decodes"
            raise InputError("generation_config", must, config)
        elif config is not None:
            given["generation_config"] = copy.deepcopy(config)
        self._check_output_modes(given)
        for name, value in given.items():
            if name in FIELDS and not isinstance(value, list | tuple):
                FIELDS[name].parse(value)  # before the model's own code sees it, and says so in its own words
        first = () if inputs is None else (_clone_ids(inputs),)
        turn = _CustomGenerateRun(generate, dict(zip(("inputs",), first, strict=False)) | given)
        standing = self._make_stand_in(turn)
        answer = kind.generate(standing, *first, **given)
        if not turn.num_calls:
            raise UnsupportedModel(f"{kind.__name__} did this in its own generate(): call that")
        return answer

    def _check_output_modes(self, given: Mapping[str, Any]) -> None:
        """Raise for what a model does beside writing, in loops of another kind."""
        name, mode = type(self.model).__name__, given.get("generation_mode")
        if mode == "image":
            raise UnsupportedModel(f"{name} makes pictures in a loop of its own: call its own generate()")
        silent = mode in ("text", False) or given.get("return_audio") is False
        if getattr(self.model, "has_talker", False) and not silent:
            reason = "speaks through its `talker`, which takes in a piece of text beside every token"
            raise UnsupportedModel(f'{name} {reason}: pass generation_mode="text" or call its own generate()')

    @property
    def _needs_single_config(self) -> bool:
        kind: Any = type(self.model)
        takes = inspect.signature(inspect.unwrap(kind.generate)).parameters
        return "generation_config" in takes or "_prepare_generation_config" in _names_in_generate(kind)

    def _make_stand_in(self, turn: _CustomGenerateRun) -> Any:
        """What stands in for the model: the same weights, other ways to generate. The model is left alone."""
        settings = copy.deepcopy(getattr(self.model, "generation_config", None))
        kind: Any = type(self.model)
        standing = _shallow_copy(self.model, _stand_in_class(kind), generation_config=settings, _turn=turn)
        for path, part in _generating_modules(self.model):
            _replace_module(standing, path, _shallow_copy(part, generate=turn.bind_generate(part)))
        return standing


@dataclass
class _CustomGenerateRun:
    """One run of a model's own generate(): what decodes, and what the user gave it."""

    generate: Callable[..., Any]
    user_arguments: Mapping[str, Any]
    num_calls: int = 0

    def bind_generate(self, part: Any) -> Callable[..., Any]:
        """The generate() of a part of the model."""
        return lambda *args, **kwargs: self.decode(part, args, kwargs)

    def decode(self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Decode what was prepared for a model, or for a part of it."""
        self.num_calls += 1
        asked = {**dict(zip(_GENERATE_ARGUMENTS, args, strict=False)), **kwargs}
        if isinstance(model, _StandInModel):
            asked = {
                **{
                    name: self.user_arguments[name]
                    for name in _FORWARDED_ARGUMENTS
                    if name in self.user_arguments
                },
                **asked,
            }
        asked = {name: value for name, value in asked.items() if value is not None}
        if isinstance(model, _StandInModel) or type(model).generate is GenerationMixin.generate:
            model, asked = self._resolve_config(model, asked)
            ids = asked.get("inputs", asked.get("input_ids"))
            if not asked.keys() & {"attention_mask", "inputs_embeds"} and not self._is_user_value(ids):
                asked |= _padding_mask(ids, model)
        return self.generate(model, **asked)

    def _resolve_config(self, model: Any, asked: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The model with what it decided by itself as its own config, and what is left of what is asked.

        What of it has no use (a temperature, where nothing is drawn) is then no mistake of the user's.
        """
        config = asked.get("generation_config")
        if config is not None and self._is_user_value(config, "generation_config"):
            return model, asked
        own = {
            name: value
            for name, value in asked.items()
            if name in FIELDS and not self._is_user_value(value, name)
        }
        settled = _merge_config(config, model.generation_config)
        for name, value in own.items():
            setattr(settled, name, value)
        rest = {name: value for name, value in asked.items() if name not in {*own, "generation_config"}}
        # A config of the model's may hold settings for the model alone, which has read them.
        read = {name for name in rest if name not in FIELDS and hasattr(config, name)}
        rest = {name: value for name, value in rest.items() if name not in read}
        return _shallow_copy(model, generation_config=settled), rest

    def _is_user_value(self, value: Any, name: str | None = None) -> bool:
        """Whether a value is the user's, as it was given; under that name, if it matters."""
        return (
            value is self.user_arguments.get(name)
            if name
            else any(value is one for one in self.user_arguments.values())
        )


class _StandInModel(GenerationMixin):
    """Comes before transformers' own generate() wherever a model calls that of its parents."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Ours."""
        turn: _CustomGenerateRun = vars(self)["_turn"]
        return turn.decode(self, args, kwargs)

    def _refuse_bypass(self, *_: Any, **__: Any) -> NoReturn:
        name = type(self).__name__
        raise UnsupportedModel(f"{name} goes around the generate() of its parents: call its own generate()")

    _sample = _beam_search = _assisted_decoding = _refuse_bypass


@cache
def _stand_in_class(kind: type) -> type:
    """The class of what stands in for a model: as its own, but for the loop at the bottom."""
    return type(
        kind.__name__, (kind, _StandInModel), {"__module__": kind.__module__, "__doc__": kind.__doc__}
    )


def _shallow_copy(module: nn.Module, kind: type | None = None, **attributes: Any) -> Any:
    """A module with the same weights and parts, whose attributes are its own."""
    view: Any = object.__new__(kind or type(module))
    vars(view).update(vars(module))
    vars(view).pop("generate", None)  # that of an attached model
    vars(view).update(attributes, _modules=dict(module._modules))
    return view


def _merge_config(config: Any, default: Any) -> Any:
    """A copy of a config, if there is any, with a model's own where it says nothing."""
    whole = copy.deepcopy(default if config is None else config)
    for name, value in vars(default).items():
        if getattr(whole, name, None) is None:
            setattr(whole, name, value)
    return whole


def _padding_mask(ids: Any, model: Any) -> dict[str, Tensor]:
    """Which of the tokens that a model put together itself are no padding, as it means them to be read."""
    pad, eos = model.generation_config.pad_token_id, model.generation_config.eos_token_id
    tokens = isinstance(ids, Tensor) and ids.ndim == 2 and not ids.is_floating_point()
    if not tokens or model.config.is_encoder_decoder or pad is None:
        return {}
    ends = eos if isinstance(eos, list | tuple) else [eos]
    return {} if pad in ends or not bool((ids == pad).any()) else {"attention_mask": (ids != pad).long()}


def _generating_modules(model: nn.Module) -> list[tuple[str, Any]]:
    """The parts of a model that generate, by their paths; not the parts of these."""
    found: list[tuple[str, Any]] = []
    for path, part in model.named_modules(remove_duplicate=False):
        inside = any(path.startswith(f"{other}.") for other, _ in found)
        if path and not inside and isinstance(part, GenerationMixin):
            found.append((path, part))
    return found


def _replace_module(view: Any, path: str, part: Any) -> None:
    """Put a part where `path` leads in a view; what lies on the way becomes a view as well."""
    *way, last = path.split(".")
    for name in way:
        view._modules[name] = view = _shallow_copy(view._modules[name])
    view._modules[last] = part


def _clone_ids(value: Any) -> Any:
    """Token ids and masks as a model may write into them, which the user must not see."""
    return value.clone() if isinstance(value, Tensor) and not value.is_floating_point() else value

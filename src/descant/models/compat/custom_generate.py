"""Models with their own generate(): it prepares the inputs, and Descant decodes them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.generation.utils import GenerationMixin

from descant.config.generation_config import FIELDS, GenerationConfig
from descant.errors import InputError, UnsupportedModel
from descant.models.aligned_sound import is_aligned_sound
from descant.models.wrapping.wrapped_model import derived_class, own_method, shallow_copy

# The positional order of the arguments of GenerationMixin.generate().
_GENERATE_ARGUMENTS = tuple(inspect.signature(GenerationMixin.generate).parameters)[1:]

# Arguments for the decoding loop, passed on even if the model's generate() does not forward them.
_FORWARDED_ARGUMENTS = ("logits_processor", "stopping_criteria", "streamer", "tokenizer")

# Methods that a class overrides or calls in its generate() and that Descant does not support -> the reason.
_DELAY_PATTERN_REASON = "interleaves several codebooks with a delay pattern"
_UNSUPPORTED_HOOKS = {
    "apply_delay_pattern_mask": _DELAY_PATTERN_REASON,
    "apply_delay_mask": _DELAY_PATTERN_REASON,
    "_sample": "overrides the decoding loop (`_sample`), whose steps are more than one token per row",
    "_get_stopping_criteria": "has its own stopping criteria (`_get_stopping_criteria`)",
    "_prepare_model_inputs": "prepares its other inputs itself (`_prepare_model_inputs`)",
}


def prepares_in_generate(model: Any) -> bool:
    """Whether the class of a model has its own generate(), or overrides the loop of transformers."""
    model_class: Any = type(model)
    if not isinstance(model, PreTrainedModel) or isinstance(model, _StandInModel):
        return False
    if not hasattr(model_class, "generate") or is_aligned_sound(model):
        return False
    has_own = own_generate(model_class) is not GenerationMixin.generate
    return has_own or bool(_unsupported_reason(model_class))


def as_custom_generate(model: Any) -> CustomGenerateModel | None:
    """The wrapper of a model that has its own generate(), None for other models; raises if unsupported."""
    if not prepares_in_generate(model):
        return None
    model_class: Any = type(model)
    reason = _unsupported_reason(model_class)
    for path, part in generating_modules(model):
        name, part_reason = path.rsplit(".", 1)[-1], _unsupported_reason(type(part))
        if part_reason and name in _names_in_generate(model_class):
            reason = reason or f"calls its `{name}`, which {part_reason}"
    if reason:
        raise UnsupportedModel(f"{model_class.__name__} {reason}: call its own generate()")
    return CustomGenerateModel(model)


def _unsupported_reason(model_class: Any) -> str:
    """Why Descant cannot decode a model class; empty if it can."""
    has_own = own_generate(model_class) is not GenerationMixin.generate
    names = _names_in_generate(model_class) if has_own else frozenset()
    for name, reason in _UNSUPPORTED_HOOKS.items():
        default = getattr(GenerationMixin, name, None)
        if getattr(model_class, name, default) is not default or (default is None and name in names):
            return reason
    if has_own and "generate" not in names:
        return "decodes in its own generate(), which calls no other"
    return ""


def own_generate(model_class: Any) -> Any:
    """The generate() of a class, without that of Descant's mixin."""
    return own_method(model_class, "generate") or model_class.generate


def _names_in_generate(model_class: Any) -> frozenset[str]:
    """The names that the code of a class' generate() refers to."""
    code = getattr(inspect.unwrap(own_generate(model_class)), "__code__", None)
    return frozenset(code.co_names if code is not None else ())


class CustomGenerateModel:
    """Runs a model's own generate() with Descant in place of the generate() methods that it calls."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    @torch.no_grad()
    def run(self, generate: Callable[..., Any], inputs: Any, config: Any, kwargs: Mapping[str, Any]) -> Any:
        """The result of the model's own generate(), with `generate` as the decoding loop."""
        model_class: Any = type(self.model)
        empty = [
            name
            for name, value in kwargs.items()
            if value is None or (isinstance(value, tuple) and not value)
        ]
        given = {name: _clone_ids(value) for name, value in kwargs.items() if name not in empty}
        if isinstance(config, GenerationConfig):
            given = {name: getattr(config, name) for name in config.given} | given
        elif isinstance(config, list | tuple) and self._needs_single_config:
            must = f"must be one config for all prompts of {model_class.__name__}, whose generate() reads it"
            raise InputError("generation_config", must, config)
        elif config is not None:
            given["generation_config"] = copy.deepcopy(config)
        self._check_output_modes(given)
        for name, value in given.items():
            if name in FIELDS and not isinstance(value, list | tuple):
                FIELDS[name].parse(value)  # validated here, so that the error is ours and not the model's
        args = () if inputs is None else (_clone_ids(inputs),)
        run = _CustomGenerateRun(generate, dict(zip(("inputs",), args, strict=False)) | given)
        output = own_generate(model_class)(self._make_stand_in(run), *args, **given)
        if not run.num_calls:
            raise UnsupportedModel(f"{model_class.__name__} decoded in its own generate(): call that")
        return output

    def _check_output_modes(self, given: Mapping[str, Any]) -> None:
        """Raise for images and speech, which models generate in other loops than text."""
        name, mode = type(self.model).__name__, given.get("generation_mode")
        if mode == "image":
            raise UnsupportedModel(f"{name} generates images in its own loop: call its own generate()")
        is_text_only = mode in ("text", False) or given.get("return_audio") is False
        if getattr(self.model, "has_talker", False) and not is_text_only:
            reason = "generates speech with its `talker`, which takes text states with every token"
            raise UnsupportedModel(f'{name} {reason}: pass generation_mode="text" or call its own generate()')

    @property
    def _needs_single_config(self) -> bool:
        model_class: Any = type(self.model)
        params = inspect.signature(inspect.unwrap(own_generate(model_class))).parameters
        return "generation_config" in params or "_prepare_generation_config" in _names_in_generate(
            model_class
        )

    def _make_stand_in(self, run: _CustomGenerateRun) -> Any:
        """A copy of the model with shared weights whose parent and submodule generate() is Descant."""
        config = copy.deepcopy(getattr(self.model, "generation_config", None))
        model_class: Any = type(self.model)
        stand_in = shallow_copy(
            self.model,
            derived_class(model_class, model_class, _StandInModel),
            generation_config=config,
            _custom_generate_run=run,
        )
        for path, part in generating_modules(self.model):
            replace_module(stand_in, path, shallow_copy(part, generate=run.bind_generate(part)))
        return stand_in


@dataclass
class _CustomGenerateRun:
    """One run of a model's own generate(): the decoding function and the user's arguments."""

    generate: Callable[..., Any]
    user_arguments: Mapping[str, Any]
    num_calls: int = 0

    def bind_generate(self, part: Any) -> Callable[..., Any]:
        """The generate() of a submodule."""
        return lambda *args, **kwargs: self.decode(part, args, kwargs)

    def decode(self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Decode the inputs that were prepared for the model or a submodule."""
        self.num_calls += 1
        given = {**dict(zip(_GENERATE_ARGUMENTS, args, strict=False)), **kwargs}
        if isinstance(model, _StandInModel):
            user = self.user_arguments
            given = {name: user[name] for name in _FORWARDED_ARGUMENTS if name in user} | given
        given = {name: value for name, value in given.items() if value is not None}
        if isinstance(model, _StandInModel) or type(model).generate is GenerationMixin.generate:
            model, given = self._resolve_config(model, given)
            ids = given.get("inputs", given.get("input_ids"))
            if not given.keys() & {"attention_mask", "inputs_embeds"} and not self._is_user_value(ids):
                given |= _padding_mask(ids, model)
        return self.generate(model, **given)

    def _resolve_config(self, model: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The model with the values that its code chose as its generation config, and the other arguments.

        Values without effect (a temperature without sampling) then do not count as mistakes of the user.
        """
        config = given.get("generation_config")
        if config is not None and self._is_user_value(config, "generation_config"):
            return model, given
        chosen = {
            name: value
            for name, value in given.items()
            if name in FIELDS and not self._is_user_value(value, name)
        }
        merged = _merge_config(config, model.generation_config)
        for name, value in chosen.items():
            setattr(merged, name, value)
        rest = {name: value for name, value in given.items() if name not in {*chosen, "generation_config"}}
        # The model's config may hold settings that only the model's own generate() uses.
        model_only = {name for name in rest if name not in FIELDS and hasattr(config, name)}
        rest = {name: value for name, value in rest.items() if name not in model_only}
        return shallow_copy(model, generation_config=merged), rest

    def _is_user_value(self, value: Any, name: str | None = None) -> bool:
        """Whether a value is the very object that the user passed, as `name` if given."""
        if name:
            return value is self.user_arguments.get(name)
        return any(value is argument for argument in self.user_arguments.values())


class _StandInModel(GenerationMixin):
    """Precedes GenerationMixin in the MRO of a stand-in, so that `super().generate()` reaches Descant."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Decode with Descant."""
        run: _CustomGenerateRun = vars(self)["_custom_generate_run"]
        return run.decode(self, args, kwargs)

    def _refuse_bypass(self, *_: Any, **__: Any) -> NoReturn:
        name = type(self).__name__
        raise UnsupportedModel(f"{name} bypasses the generate() of its parents: call its own generate()")

    _sample = _beam_search = _assisted_decoding = _refuse_bypass


def _merge_config(config: Any, default: Any) -> Any:
    """A copy of a config with unset fields filled from `default`."""
    merged = copy.deepcopy(default if config is None else config)
    for name, value in vars(default).items():
        if getattr(merged, name, None) is None:
            setattr(merged, name, value)
    return merged


def _padding_mask(ids: Any, model: Any) -> dict[str, Tensor]:
    """The attention mask of token ids that the model prepared itself; empty if they have no padding."""
    pad, eos = model.generation_config.pad_token_id, model.generation_config.eos_token_id
    is_batch = isinstance(ids, Tensor) and ids.ndim == 2 and not ids.is_floating_point()
    if not is_batch or model.config.is_encoder_decoder or pad is None:
        return {}
    eos_ids = eos if isinstance(eos, list | tuple) else [eos]
    return {} if pad in eos_ids or not bool((ids == pad).any()) else {"attention_mask": (ids != pad).long()}


def generating_modules(model: nn.Module) -> list[tuple[str, Any]]:
    """The outermost submodules that can generate, with their paths."""
    modules: list[tuple[str, Any]] = []
    for path, part in model.named_modules(remove_duplicate=False):
        nested = any(path.startswith(f"{other}.") for other, _ in modules)
        if path and not nested and isinstance(part, GenerationMixin):
            modules.append((path, part))
    return modules


def replace_module(view: Any, path: str, part: Any) -> None:
    """Replace the submodule at `path`; modules on the path are replaced by shallow copies."""
    *parents, last = path.split(".")
    for name in parents:
        view._modules[name] = view = shallow_copy(view._modules[name])
    view._modules[last] = part


def _clone_ids(value: Any) -> Any:
    """Copies of integer tensors: models may write into token ids and masks in place."""
    return value.clone() if isinstance(value, Tensor) and not value.is_floating_point() else value


@dataclass(frozen=True)
class PreparedLoop:
    """The decoding loop of a model's own generate(), as that has prepared it."""

    model: Any  # the copy of the model that generate() runs on
    input_ids: Tensor
    generation_config: Any  # of transformers, with `max_length` and the special tokens resolved
    logits_processor: Any = ()  # of transformers, those of the config included
    stopping_criteria: Any = ()
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)


@torch.no_grad()
def run_with_loop(
    model: PreTrainedModel, loop: Callable[[PreparedLoop], Any], kwargs: Mapping[str, Any]
) -> Any:
    """The result of the model's own generate(), in which `loop` decodes in place of transformers' loop.

    The loop gets a copy of the model with shared weights, on which generate() was called, and its inputs. It
    returns what transformers' `_sample` would return.
    """
    model_class: Any = type(model)
    config = copy.deepcopy(model.generation_config)
    loop_class = derived_class(model_class, _LoopMixin, model_class)
    stand_in = shallow_copy(model, loop_class, generation_config=config, _decoding_loop=loop)
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
        loop: Callable[[PreparedLoop], Any] = vars(self)["_decoding_loop"]
        return loop(
            PreparedLoop(
                self, input_ids, generation_config, logits_processor, stopping_criteria, model_kwargs
            )
        )

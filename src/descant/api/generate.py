"""generate(), and the front ends that a call of it may go through."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from descant.api.call import CallOptions, as_tuple, bind_inputs, pop_recipe
from descant.api.generate_call import GenerateCall
from descant.api.outputs import GenerateOutput, transition_scores
from descant.api.whisper.call import TranscribeCall, transcribe
from descant.config.generation_config import FIELDS
from descant.errors import ConfigError, InputError, NotInThisVersion
from descant.models.hf_callback import config_from_hf, inputs_from_hf, is_hf_prepared, user_criteria
from descant.models.hf_generation_config import fill_defaults
from descant.models.synced_gpus import synchronize_processes
from descant.models.whisper import WhisperAdapter, whisper_adapter_of
from descant.recipes.recipe import Recipe
from descant.trace.tracer import Tracer

__all__ = ["attach", "compute_transition_scores", "detach", "generate"]


@synchronize_processes
def generate(
    model: Any,
    inputs: Any = None,
    generation_config: Any = None,
    logits_processor: Sequence[Any] | None = None,
    stopping_criteria: Sequence[Any] | None = None,
    streamer: Any = None,
    **kwargs: Any,
) -> Tensor | GenerateOutput:
    """Continue prompts: `generate(model, **tokenizer(...), max_new_tokens=20, num_beams=4)`.

    Keyword arguments are fields of GenerationConfig, inputs of the model, and:

    - `tokenizer`, required by parameters that are text;
    - `negative_prompt_ids` [B, L] and `negative_prompt_attention_mask`, for guidance;
    - `assistant_model` and, if its vocabulary differs, `assistant_tokenizer`, for speculation;
    - `past_key_values`: a cache that holds a prefix of the prompts, in one row for all of them or one row
      each. Afterwards it holds the returned sequences without their last tokens; a read-only cache of
      `descant.prefill` is not changed. `input_ids` are the whole prompts in any case. An encoder-decoder
      model accepts an empty cache only, which selects the cache type;
    - `recipe` (or `custom_generate`): a third-party decoding method, given as a folder or
      `owner/name[@revision]` on the Hub, both only with `trust_remote_code=True`, as the name of an installed
      recipe, as a function, or as a class that implements an interface;
    - `trace=True` or a `descant.Tracer`: record every step. The result is then an output object whose
      `trace` can be saved, replayed and drawn. With `tokenizer` it has the text of tokens.

    `generation_config` and `seed` may be lists with one entry per prompt. Returns the sequences
    [B * num_return_sequences, L], or with `return_dict_in_generate=True` an output object.
    """
    recipe, others = pop_recipe(kwargs)
    tracer = Tracer.from_argument(others.pop("trace", None), others.get("tokenizer"))
    args = _GenerateArgs(
        model,
        inputs,
        generation_config,
        logits_processor,
        stopping_criteria,
        streamer,
        recipe,
        tracer,
        others,
    )
    for front_end in _FRONT_ENDS:
        adapter = front_end.match(args)
        if adapter is not None:
            _validate_arguments(front_end, args)
            output: Tensor | GenerateOutput = front_end.run(args, adapter)
            return output
    return _run_call(args)


@dataclass(frozen=True)
class _GenerateArgs:
    """The arguments of one call of generate()."""

    model: Any
    inputs: Any
    generation_config: Any
    logits_processor: Any
    stopping_criteria: Any
    streamer: Any
    recipe: Recipe | None
    tracer: Tracer | None
    others: dict[str, Any]  # config fields, model inputs, `tokenizer`, the assistant and the cache

    @property
    def processors(self) -> tuple[Any, ...]:
        """The user's logits processors."""
        return as_tuple("logits_processor", self.logits_processor)

    @property
    def criteria(self) -> tuple[Any, ...]:
        """The user's stopping criteria."""
        return as_tuple("stopping_criteria", self.stopping_criteria)

    @property
    def is_hf_prepared(self) -> bool:
        """Whether transformers' generate() made this call."""
        return is_hf_prepared(self.generation_config)

    def without(self, *names: str) -> dict[str, Any]:
        """The other arguments without these."""
        return {name: value for name, value in self.others.items() if name not in names}

    def call_options(self) -> dict[str, Any]:
        """The arguments as keyword arguments of `CallOptions`."""
        names = ("tokenizer", "assistant_model", "assistant_tokenizer")
        options: dict[str, Any] = {name: self.others.get(name) for name in names}
        options |= {"processors": self.processors, "criteria": self.criteria}
        return options | {"past": self.past, "recipe": self.recipe, "tracer": self.tracer}

    @property
    def past(self) -> Any:
        """The user's cache."""
        return self.others.get("past_key_values")


_CALL_OPTION_NAMES: Final = ("tokenizer", "assistant_model", "assistant_tokenizer", "past_key_values")


class _Unsupported(NamedTuple):
    """An argument that a front end does not support; `must` is formatted with the model's class name."""

    argument: str
    must: str = "is not supported for {model}"
    error: type[ConfigError | InputError] = NotInThisVersion


class _FrontEnd(NamedTuple):
    """One way to run a call in place of the plain one."""

    match: Callable[[_GenerateArgs], Any]  # what `run` needs, or None if the front end does not apply
    run: Callable[[_GenerateArgs, Any], Any]
    unsupported: tuple[_Unsupported, ...] = ()


def _validate_arguments(front_end: _FrontEnd, args: _GenerateArgs) -> None:
    """Raise for an argument that the front end does not support."""
    given = {"trace": args.tracer, "recipe": args.recipe, **args.others}
    for name, must, error in front_end.unsupported:
        value = given.get(name)
        if value is not None:
            got = True if name == "trace" else value if name == "recipe" else type(value).__name__
            raise error(name, must.format(model=type(args.model).__name__), got, "leave it out")


# ------------------------------------------------------------------------ a function recipe
# Arguments that a function recipe receives even if the call does not give them, as documented.
_RECIPE_ARGUMENTS: Final = (
    "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "synced_gpus", "assistant_model",
    "streamer", "negative_prompt_ids", "negative_prompt_attention_mask",
)  # fmt: skip


@torch.no_grad()
def _run_function_recipe(args: _GenerateArgs, recipe: Recipe) -> Any:
    """Call a function that replaces generate(), with all arguments of the call."""
    given: dict[str, Any] = {
        "logits_processor": args.logits_processor,
        "stopping_criteria": args.stopping_criteria,
        "streamer": args.streamer,
        **args.others,
    }
    fields = {name: value for name, value in given.items() if name in FIELDS}
    passed = {**dict.fromkeys(_RECIPE_ARGUMENTS), **given, "inputs": args.inputs}
    if args.inputs is not None and "inputs" not in recipe.argument_names:
        passed |= {"inputs": None, **bind_inputs(args.model, args.inputs, given)}
    passed["generation_config"] = fill_defaults(args.model, args.generation_config, fields)
    # The function may ignore config fields: the config it receives holds them.
    in_config = (*fields, "generation_config")
    required = (name for name, value in passed.items() if value is not None and name not in in_config)
    recipe.check_arguments(required)
    if not recipe.accepts_kwargs:
        passed = {name: value for name, value in passed.items() if name in recipe.argument_names}
    return recipe.call(args.model, **passed)


# ------------------------------------------------------------------------ Whisper
def _run_whisper(args: _GenerateArgs, adapter: WhisperAdapter) -> Tensor | GenerateOutput:
    """Transcribe audio window by window."""

    def decode(options: CallOptions, inputs: Mapping[str, Any], streamed: bool) -> Any:
        return GenerateCall(args.model, options, args.streamer if streamed else None).run(inputs)

    call = TranscribeCall(
        args.inputs,
        args.generation_config,
        args.processors,
        args.criteria,
        args.others.get("tokenizer"),
        args.streamer is not None,
        args.without(*_CALL_OPTION_NAMES),
    )
    return transcribe(adapter, decode, call)


# ------------------------------------------------------------------------ a model with its own generate()
def _match_custom_generate(args: _GenerateArgs) -> Any:
    # Imported here: it imports transformers' models, which takes seconds.
    from descant.models.custom_generate import as_custom_generate

    return None if args.is_hf_prepared else as_custom_generate(args.model)


def _run_custom_generate(args: _GenerateArgs, custom: Any) -> Tensor | GenerateOutput:
    """Run the model's own generate(), whose inner calls come back to ours."""
    given = {"tokenizer": None, "assistant_model": None, "assistant_tokenizer": None, **args.others}
    given |= {"logits_processor": args.processors, "stopping_criteria": args.criteria}
    given["streamer"] = args.streamer
    if given.get("past_key_values") is None:
        given.pop("past_key_values", None)
    if args.recipe is not None:
        given["recipe"] = args.recipe
    output: Tensor | GenerateOutput = custom.run(generate, args.inputs, args.generation_config, given)
    return output


# ------------------------------------------------------------------------ called by transformers' generate()
def _run_hf_prepared(args: _GenerateArgs, _: bool) -> Tensor | GenerateOutput:
    """Run a call whose config and inputs transformers' generate() has prepared."""
    inputs = bind_inputs(args.model, args.inputs, args.without(*_CALL_OPTION_NAMES, *FIELDS))
    config = config_from_hf(args.generation_config, inputs["input_ids"].shape[1])
    inputs = inputs_from_hf(args.generation_config, inputs, bool(args.model.config.is_encoder_decoder))
    if args.tracer is not None:
        config = config.replace(return_dict_in_generate=True)
    options = CallOptions([config], **args.call_options())
    options = replace(options, criteria=user_criteria(args.criteria))
    if args.past is None or not args.past.get_seq_length():  # an empty cache is transformers' own
        options = replace(options, past=None)
    return GenerateCall(args.model, options, args.streamer).run(inputs)


# The first front end that matches runs the call; without a match the call runs as it is.
_FRONT_ENDS: Final = (
    _FrontEnd(
        lambda args: args.recipe if args.recipe is not None and args.recipe.kind == "generate" else None,
        _run_function_recipe,
        (_Unsupported("trace", "must be None with a recipe that is a function", InputError),),
    ),
    _FrontEnd(
        lambda args: None if args.is_hf_prepared else whisper_adapter_of(args.model),
        _run_whisper,
        (
            _Unsupported("trace"),
            _Unsupported("past_key_values"),
            _Unsupported("assistant_model"),
            _Unsupported("recipe", "must be a function for {model}", InputError),
        ),
    ),
    _FrontEnd(_match_custom_generate, _run_custom_generate, (_Unsupported("trace"),)),
    _FrontEnd(lambda args: args.is_hf_prepared or None, _run_hf_prepared),
)


def _run_call(args: _GenerateArgs) -> Tensor | GenerateOutput:
    """Run a plain call."""
    others = args.without(*_CALL_OPTION_NAMES)
    fields = {name: others.pop(name) for name in list(others) if name in FIELDS}
    inputs = bind_inputs(args.model, args.inputs, others)
    if args.tracer is not None:
        fields["return_dict_in_generate"] = True
    options = CallOptions.from_call(args.model, args.generation_config, fields, **args.call_options())
    return GenerateCall(args.model, options, args.streamer).run(inputs)


def attach(model: Any) -> Any:
    """Replace `model.generate` by Descant's, for this object only; returns the model."""
    model.generate = MethodType(generate, model)
    return model


def detach(model: Any) -> Any:
    """Restore the model's own `generate`; returns the model."""
    if "generate" not in vars(model):
        raise InputError(
            "model", "must have been attached", type(model).__name__, "call descant.attach(model) first"
        )
    del model.generate
    return model


def compute_transition_scores(
    model: Any,  # noqa: ARG001 - documented as a method
    sequences: Tensor,
    scores: tuple[Tensor, ...],
    beam_indices: Tensor | None = None,
    normalize_logits: bool = False,
) -> Tensor:
    """The score of each new token of each sequence [N, T], 0 beyond the end of a beam."""
    return transition_scores(sequences, scores, beam_indices, normalize_logits)

"""generate(), and the front ends that a call of it may go through."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from descant.api.call import CallOptions, as_tuple, engine_or_model, pop_recipe
from descant.api.generate_call import GenerateCall
from descant.api.inputs import bind_inputs
from descant.api.latent_call import generate_latents, match_latents
from descant.api.method_call import IGNORED_INPUTS, explain_pipeline, warn_unused
from descant.api.text_inputs import is_text, with_texts
from descant.api.text_output import TextOutput, text_output
from descant.api.whisper.call import TranscribeCall, transcribe
from descant.config.generation_config import FIELDS
from descant.engine.protocol import is_engine
from descant.engine.scheduling.config import SchedulerConfig
from descant.errors import ConfigError, InputError, NotInThisVersion
from descant.models.hf_callback import config_from_hf, inputs_from_hf, is_hf_prepared, user_criteria
from descant.models.hf_generation_config import fill_defaults
from descant.models.model_output import GenerateOutput
from descant.models.synced_gpus import synchronized_processes
from descant.models.whisper import WhisperAdapter, whisper_adapter_of
from descant.models.wrapped_model import gathered_model
from descant.recipes.recipe import Recipe
from descant.trace.tracer import Tracer

__all__ = ["generate", "generate_as_method"]


def generate(  # noqa: PLR0913 - the documented order of arguments
    model: Any,
    inputs: Any = None,
    generation_config: Any = None,
    logits_processor: Sequence[Any] | None = None,
    stopping_criteria: Sequence[Any] | None = None,
    prefix_allowed_tokens_fn: Callable[[int, Tensor], Any] | None = None,
    synced_gpus: bool | None = None,
    assistant_model: Any = None,
    streamer: Any = None,
    negative_prompt_ids: Tensor | None = None,
    negative_prompt_attention_mask: Tensor | None = None,
    use_model_defaults: bool | None = None,
    custom_generate: Any = None,
    **kwargs: Any,
) -> Tensor | GenerateOutput | TextOutput:
    """Continue prompts: `generate(model, **tokenizer(...), max_new_tokens=20, num_beams=4)`.

    With a `tokenizer`, `inputs` may also be a text, messages, or a list of texts or of lists of messages.
    Then the result is a `TextOutput`: `print(generate(model, "Once", tokenizer=tokenizer))`.

    Keyword arguments are fields of GenerationConfig, inputs of the model, and:

    - `tokenizer`, required by parameters that are text;
    - `assistant_tokenizer`, if the vocabulary of `assistant_model` differs;
    - `past_key_values`: a cache that holds a prefix of the prompts, in one row for all or one row each. It
      then holds the returned sequences without their last tokens; that of `descant.prefill` is not changed.
      `input_ids` are the whole prompts. An encoder-decoder model accepts an empty cache only;
    - `recipe`, or `custom_generate`: a third-party decoding method, given as a folder or
      `owner/name[@revision]` on the Hub, both only with `trust_remote_code=True`, as the name of an installed
      recipe, as a function, or as a class that implements an interface;
    - `trace=True` or a `descant.Tracer`: record every step in the `trace` of an output object;
    - `scheduler`: a `descant.SchedulerConfig` with limits on rows, tokens a step and KV blocks. Prompts wait
      until there is room; the order of results stays the same, and so do tokens, but for sampling without a
      `seed`. A prompt that can never fit raises `InputError`, more prompts than `max_waiting` raise
      `EngineFull`;
    - `progress=True`: show a bar with the finished prompts and the tokens a second;
    - `adapter_names`: the PEFT adapter of all prompts, or a list with one for each; "__base__" is none.
      Without it the model's active adapter runs;
    - `engine`: a `descant.VLLM` that runs the requests; then `model` is None.

    `negative_prompt_ids` [B, L] are for guidance. With `use_model_defaults=False` a `generation_config` takes
    only special tokens from the model's own. It and `seed` may be lists with one entry per prompt. Returns
    sequences [B * num_return_sequences, L], or with `return_dict_in_generate=True` an output object.
    """
    named = {
        "inputs": inputs,
        "generation_config": generation_config,
        "logits_processor": logits_processor,
        "stopping_criteria": stopping_criteria,
        "prefix_allowed_tokens_fn": prefix_allowed_tokens_fn,
        "synced_gpus": synced_gpus,
        "assistant_model": assistant_model,
        "streamer": streamer,
        "negative_prompt_ids": negative_prompt_ids,
        "negative_prompt_attention_mask": negative_prompt_attention_mask,
        "use_model_defaults": use_model_defaults,
        "custom_generate": custom_generate,
    }
    return _generate(model, named, kwargs)


def generate_as_method(model: Any, *args: Any, **kwargs: Any) -> Tensor | GenerateOutput | TextOutput:
    """`generate` as documented for a model's method.

    `max_length` includes the padding, inputs that transformers ignores are ignored, and values without effect
    that transformers 4.52.4 ignores are ignored with a warning.
    """
    bound = _SIGNATURE.bind(model, *args, **kwargs)
    bound.apply_defaults()
    named = {name: value for name, value in bound.arguments.items() if name not in ("model", "kwargs")}
    return _generate(model, named, bound.arguments["kwargs"], is_method=True)


_SIGNATURE: Final = signature(generate)

# Arguments of the signature that are otherwise treated like keyword arguments; None: not given.
_KEYWORD_LIKE: Final = (
    "prefix_allowed_tokens_fn", "assistant_model", "negative_prompt_ids", "negative_prompt_attention_mask",
    "custom_generate",
)  # fmt: skip


def _generate(
    model: Any, named: Mapping[str, Any], kwargs: Mapping[str, Any], is_method: bool = False
) -> Tensor | GenerateOutput | TextOutput:
    """Run a call with the arguments of the signature by name, and its keyword arguments."""
    given = {name: named[name] for name in _KEYWORD_LIKE if named[name] is not None}
    kwargs = {name: value for name, value in kwargs.items() if not (is_method and name in IGNORED_INPUTS)}
    model = engine_or_model(model, kwargs.pop("engine", None))
    with gathered_model(model) as model, synchronized_processes(model, named["synced_gpus"]):
        recipe, others = pop_recipe({**kwargs, **given})
        scheduler, progress = others.pop("scheduler", None), others.pop("progress", None)
        if progress not in (None, True, False):
            raise InputError("progress", "must be True or False", progress)
        tracer = Tracer.from_argument(others.pop("trace", None), others.get("tokenizer"))
        args = _GenerateArgs(
            model,
            named["inputs"],
            named["generation_config"],
            named["logits_processor"],
            named["stopping_criteria"],
            named["streamer"],
            recipe,
            tracer,
            scheduler,
            others,
            named["use_model_defaults"],
            is_method,
            bool(progress),
        )
        return _run_front_end(args)


def _run_front_end(args: _GenerateArgs) -> Tensor | GenerateOutput | TextOutput:
    """Run a call by the first front end that matches, or as it is."""
    # The others are for models of certain kinds, and an engine is none.
    for front_end in _FRONT_ENDS[:1] if is_engine(args.model) else _FRONT_ENDS:
        adapter = front_end.match(args)
        if adapter is not None:
            _validate_arguments(front_end, args)
            output: Tensor | GenerateOutput | TextOutput = front_end.run(args, adapter)
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
    scheduler: SchedulerConfig | None
    others: dict[str, Any]  # config fields, model inputs, `tokenizer`, the assistant and the cache
    use_model_defaults: bool | None  # whether the model's config completes a given one; None: it does
    is_method: bool  # whether it is a model's method: lengths count padding, some errors are warnings
    progress: bool  # whether a bar counts the finished prompts

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
        names = ("tokenizer", "assistant_model", "assistant_tokenizer", "adapter_names")
        options: dict[str, Any] = {name: self.others.get(name) for name in names}
        options |= {"processors": self.processors, "criteria": self.criteria}
        options |= {"past": self.past, "recipe": self.recipe, "tracer": self.tracer}
        return options | {"is_method": self.is_method, "scheduler": self.scheduler}

    @property
    def past(self) -> Any:
        """The user's cache."""
        return self.others.get("past_key_values")


_CALL_OPTION_NAMES: Final = (
    "tokenizer", "assistant_model", "assistant_tokenizer", "past_key_values", "adapter_names",
)  # fmt: skip


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
    given = {"trace": args.tracer, "recipe": args.recipe, "scheduler": args.scheduler, **args.others}
    given["progress"] = args.progress or None
    if args.use_model_defaults is False:  # True is what every front end does
        given["use_model_defaults"] = False
    for name, must, error in front_end.unsupported:
        value = given.get(name)
        if value is not None:
            shown = {"trace": True, "recipe": args.recipe, "use_model_defaults": False}
            got = shown.get(name, type(value).__name__)
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
def _run_whisper(args: _GenerateArgs, adapter: WhisperAdapter) -> Tensor | GenerateOutput | TextOutput:
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


def _run_custom_generate(args: _GenerateArgs, custom: Any) -> Tensor | GenerateOutput | TextOutput:
    """Run the model's own generate(), whose inner calls come back to ours."""
    given = {"tokenizer": None, "assistant_model": None, "assistant_tokenizer": None, **args.others}
    given |= {"logits_processor": args.processors, "stopping_criteria": args.criteria}
    given["streamer"] = args.streamer
    if given.get("past_key_values") is None:
        given.pop("past_key_values", None)
    if args.recipe is not None:
        given["recipe"] = args.recipe
    loop = generate_as_method if args.is_method else generate
    output: Tensor | GenerateOutput = custom.run(loop, args.inputs, args.generation_config, given)
    return output


# ------------------------------------------------------------------------ several codebooks a step
def _match_codebooks(args: _GenerateArgs) -> Any:
    # Imported here: it imports transformers' models, which takes seconds.
    from descant.models.codebooks.families import codebook_family_of

    return None if args.is_hf_prepared else codebook_family_of(args.model)


def _run_codebooks(args: _GenerateArgs, family: Any) -> Any:
    """Decode the codebooks of a model whose own generate() prepares them and makes the output."""
    from descant.api.codebook_call import CodebookCall, own_arguments

    others = args.without(*_CALL_OPTION_NAMES)
    fields = {name: value for name, value in others.items() if name in FIELDS}
    config = args.generation_config
    options = CallOptions.from_call(args.model, config, fields, lenient=args.is_method, **args.call_options())
    arguments = own_arguments(args.model, config, bind_inputs(args.model, args.inputs, others))
    return CodebookCall(args.model, family, options, args.streamer).run(arguments)


# ------------------------------------------------------------------------ called by transformers' generate()
def _run_hf_prepared(args: _GenerateArgs, _: bool) -> Tensor | GenerateOutput | TextOutput:
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
        (
            _Unsupported("trace", "must be None with a recipe that is a function", InputError),
            _Unsupported("use_model_defaults", "must be None with a recipe that is a function", InputError),
            _Unsupported("scheduler", "must be None with a recipe that is a function", InputError),
            _Unsupported("progress", "must be None with a recipe that is a function", InputError),
        ),
    ),
    _FrontEnd(
        lambda args: None if args.is_hf_prepared else whisper_adapter_of(args.model),
        _run_whisper,
        (
            _Unsupported("trace"),
            _Unsupported("scheduler"),
            _Unsupported("progress"),
            _Unsupported("past_key_values"),
            _Unsupported("adapter_names"),
            _Unsupported("assistant_model"),
            _Unsupported("use_model_defaults"),
            _Unsupported("recipe", "must be a function for {model}", InputError),
        ),
    ),
    _FrontEnd(match_latents, generate_latents),
    _FrontEnd(
        _match_codebooks,
        _run_codebooks,
        tuple(
            map(
                _Unsupported,
                ("scheduler", "progress", "use_model_defaults", "adapter_names", "recipe", "past_key_values"),
            )
        ),
    ),
    _FrontEnd(
        _match_custom_generate,
        _run_custom_generate,
        tuple(map(_Unsupported, ("trace", "scheduler", "progress", "use_model_defaults", "adapter_names"))),
    ),
    _FrontEnd(lambda args: args.is_hf_prepared or None, _run_hf_prepared),
)


def _run_call(args: _GenerateArgs) -> Tensor | GenerateOutput | TextOutput:
    """Run a plain call."""
    others = args.without(*_CALL_OPTION_NAMES)
    fields = {name: others.pop(name) for name in list(others) if name in FIELDS}
    has_texts = is_text(args.inputs)
    if has_texts:
        inputs = with_texts(args.inputs, args.others.get("tokenizer"), others)
    else:
        inputs = bind_inputs(args.model, args.inputs, others)
    if args.tracer is not None or has_texts:
        fields["return_dict_in_generate"] = True
    with explain_pipeline() if args.is_method else nullcontext():
        options = CallOptions.from_call(
            args.model,
            args.generation_config,
            fields,
            use_model_defaults=args.use_model_defaults is not False,
            lenient=args.is_method,
            **args.call_options(),
        )
    if args.is_method:
        warn_unused(options.configs, args.generation_config, fields)
    call = GenerateCall(args.model, options, args.streamer, args.progress)
    output = call.run(inputs)
    if not has_texts:
        return output
    assert call.prompts is not None
    return text_output(call.call, call.prompts, call.results, output)

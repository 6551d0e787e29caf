"""generate(), and the front ends that a call of it may go through."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from inspect import signature
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor

from descant.api.call import CallOptions, engine_or_model
from descant.api.generate_call import GenerateCall
from descant.api.inputs import bind_inputs, bind_prompts, is_text
from descant.api.text_output import TextOutput, text_output
from descant.api.whisper.call import transcribe
from descant.config.generation_config import GenerationConfig
from descant.config.validation import TOLERATED, unused_warning
from descant.engine.protocol import is_engine
from descant.errors import ConfigError, InputError
from descant.models.audio.whisper import whisper_adapter_of
from descant.models.compat.hf_generation_config import (
    config_from_hf,
    fill_defaults,
    inputs_from_hf,
    is_hf_prepared,
    user_criteria,
)
from descant.models.distributed import synchronized_processes
from descant.models.model_adapter import ModelKind, model_kind
from descant.models.model_output import GenerateOutput
from descant.models.wrapping.wrapped_model import gathered_model

# Inputs of a training step, which trainers pass on and transformers drops before it decodes.
IGNORED_INPUTS: Final = frozenset({"labels", "num_items_in_batch"})

_PIPELINE_FIELDS: Final = frozenset({"do_sample", "temperature"})
_INTERNAL_MODULES: Final = frozenset({"descant", "torch", "contextlib"})


def warn_unused(configs: Sequence[GenerationConfig], argument: Any, fields: Mapping[str, Any]) -> None:
    """Warn of values that lenient configs have ignored; those of the model's own config are expected."""
    arguments = argument if isinstance(argument, list | tuple) else (argument,)
    ignored: dict[str, Any] = {}
    for config in configs:
        ignored |= {name: value for name, value in config.unused.items() if name in TOLERATED}
    for name, value in ignored.items():
        if name in fields or any(getattr(argument, name, None) is not None for argument in arguments):
            warnings.warn(unused_warning(name, value), UserWarning, stacklevel=_caller_level())


def _caller_level() -> int:
    """The stack level of the first caller outside of Descant and torch, for the function that calls this."""
    names = [name.partition(".")[0] for name in _calling_modules()][2:]
    return 1 + next((level for level, name in enumerate(names) if name not in _INTERNAL_MODULES), 0)


def _calling_modules() -> list[str]:
    """The name of the module of each function on the stack, this one first."""
    names: list[str] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        names.append(frame.f_globals.get("__name__", ""))
        frame = frame.f_back
    return names


@contextmanager
def explain_pipeline() -> Iterator[None]:
    """A block whose errors say that the pipeline of transformers that makes the call sets a parameter."""
    try:
        yield
    except ConfigError as error:
        names = {error.field} if isinstance(error.field, str) else {*error.field}
        is_in_pipeline = any(name.startswith("transformers.pipelines.") for name in _calling_modules())
        if not names & _PIPELINE_FIELDS or not is_in_pipeline:
            raise
        hint = "the pipeline sets do_sample=True unless it is given: pass do_sample=False to the pipeline"
        raise error.with_hint(hint) from None


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
    return _generate(locals())


def generate_as_method(model: Any, *args: Any, **kwargs: Any) -> Tensor | GenerateOutput | TextOutput:
    """`generate` as documented for a model's method.

    `max_length` includes the padding, inputs that transformers ignores are ignored, and values without effect
    that transformers 4.52.4 ignores are ignored with a warning.
    """
    bound = _SIGNATURE.bind(model, *args, **kwargs)
    bound.apply_defaults()
    return _generate(dict(bound.arguments), is_method=True)


_SIGNATURE: Final = signature(generate)


def _generate(named: dict[str, Any], is_method: bool = False) -> Tensor | GenerateOutput | TextOutput:
    """Run a call by the front end of its recipe or its model, or as a plain one.

    `named` are the arguments of the signature; one that is None is not given.
    """
    kwargs: dict[str, Any] = named.pop("kwargs")
    for name in IGNORED_INPUTS if is_method else ():
        kwargs.pop(name, None)
    model, synced = engine_or_model(named.pop("model"), kwargs.pop("engine", None)), named.pop("synced_gpus")
    kwargs |= {name: value for name, value in named.items() if value is not None}
    with gathered_model(model) as model, synchronized_processes(model, synced):
        call = CallOptions.parse(kwargs, is_method=is_method)
        front_end: Callable[[Any, CallOptions], Any] | None = None
        if call.recipe is not None and call.recipe.kind == "generate":
            front_end = _run_function_recipe
        elif not is_engine(model):  # the other front ends are for models
            is_prepared = call.generation_config is not None and is_hf_prepared(call.generation_config)
            front_end = _run_hf_prepared if is_prepared else _FRONT_ENDS.get(model_kind(model))
        if front_end is not None:
            output: Tensor | GenerateOutput | TextOutput = front_end(model, call)
            return output
        has_texts = is_text(call.inputs)
        bound = model, call.inputs, call.others
        inputs = bind_prompts(*bound, call.tokenizer) if has_texts else bind_inputs(*bound)
        returned = {"return_dict_in_generate": True} if has_texts or call.trace is not None else {}
        with explain_pipeline() if is_method else nullcontext():
            call = call.merged(model, **returned)
        if is_method:
            warn_unused(call.configs, call.generation_config, call.fields)
        running = GenerateCall(model, call)
        output = running.run(inputs)
        return text_output(running, output) if has_texts else output


# Arguments that a function recipe receives even if the call does not give them, as documented.
_RECIPE_ARGUMENTS: Final = (
    "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "synced_gpus", "assistant_model",
    "streamer", "negative_prompt_ids", "negative_prompt_attention_mask",
)  # fmt: skip

_LOOP_ARGUMENTS: Final = (
    "logits_processor", "stopping_criteria", "streamer", "tokenizer", "assistant_model",
    "assistant_tokenizer", "past_key_values", "adapter_names",
)  # fmt: skip


def _loop_arguments(call: CallOptions) -> dict[str, Any]:
    """The arguments of a call for another loop, by name."""
    given = {name: getattr(call, name) for name in _LOOP_ARGUMENTS}
    return {name: value for name, value in given.items() if value is not None} | {
        **call.fields,
        **call.others,
    }


@torch.no_grad()
def _run_function_recipe(model: Any, call: CallOptions) -> Any:
    """Call a function that replaces generate(), with all arguments of the call."""
    recipe = call.recipe
    assert recipe is not None
    must = "must be None with a recipe that is a function"
    call.check_unused("trace", "use_model_defaults", "scheduler", "progress", must=must, error=InputError)
    given = _loop_arguments(call)
    passed = {**dict.fromkeys(_RECIPE_ARGUMENTS), **given, "inputs": call.inputs}
    if call.inputs is not None and "inputs" not in recipe.argument_names:
        passed |= {"inputs": None, **bind_inputs(model, call.inputs, given)}
    passed["generation_config"] = fill_defaults(model, call.generation_config, call.fields)
    # The function may ignore config fields: the config it receives holds them.
    in_config = (*call.fields, "generation_config")
    required = (name for name, value in passed.items() if value is not None and name not in in_config)
    recipe.check_arguments(required)
    if not recipe.accepts_kwargs:
        passed = {name: value for name, value in passed.items() if name in recipe.argument_names}
    return recipe.call(model, **passed)


def _run_whisper(model: Any, call: CallOptions) -> Any:
    """Transcribe audio window by window."""
    must = f"is not supported for {type(model).__name__}"
    unused = ("trace", "scheduler", "progress", "past_key_values", "adapter_names", "assistant_model")
    call.check_unused(*unused, "use_model_defaults", must=must)
    call.check_unused("recipe", must=f"must be a function for {type(model).__name__}", error=InputError)
    whisper = whisper_adapter_of(model)
    assert whisper is not None
    return transcribe(whisper, call)


def _run_latents(model: Any, call: CallOptions) -> Any:
    """The output of the model's own generate(), for a model that predicts latents."""
    # Imported here: it imports transformers' models, which takes seconds.
    from descant.engine.latent_requests import decode_latents

    must = f"is not supported for {type(model).__name__}, which generates latents and not tokens"
    unused = ("logits_processor", "stopping_criteria", "streamer", "recipe", "trace", "scheduler", "progress")
    call.check_unused(*unused, "use_model_defaults", must=must)
    if isinstance(call.generation_config, list | tuple):
        must = f"must be one config for all prompts of {type(model).__name__}"
        raise InputError("generation_config", must, call.generation_config)
    inputs = _loop_arguments(replace(call, fields={}))
    return decode_latents(model, call.merged(model).configs, bind_inputs(model, call.inputs, inputs))


def _run_codebooks(model: Any, call: CallOptions) -> Any:
    """Decode the codebooks of a model whose own generate() prepares them and makes the output."""
    # Imported here: it imports transformers' models, which takes seconds.
    from descant.api.sound import generate_codebooks

    unused = ("scheduler", "progress", "use_model_defaults", "adapter_names", "recipe", "past_key_values")
    call.check_unused(*unused, must=f"is not supported for {type(model).__name__}")
    return generate_codebooks(model, call)


def _run_own_generate(model: Any, call: CallOptions) -> Any:
    """Run the model's own generate(), whose inner calls come back to ours."""
    # Imported here: it imports transformers' models, which takes seconds.
    from descant.models.compat.custom_generate import as_custom_generate

    must = f"is not supported for {type(model).__name__}"
    call.check_unused("trace", "scheduler", "progress", "use_model_defaults", "adapter_names", must=must)
    custom = as_custom_generate(model)
    assert custom is not None
    given = dict.fromkeys(("tokenizer", "assistant_model", "assistant_tokenizer", "streamer"))
    given |= _loop_arguments(call)
    given |= {"logits_processor": call.processors, "stopping_criteria": call.criteria}
    if call.recipe is not None:
        given["recipe"] = call.recipe
    loop = generate_as_method if call.is_method else generate
    return custom.run(loop, call.inputs, call.generation_config, given)


def _run_hf_prepared(model: Any, call: CallOptions) -> Tensor | GenerateOutput | TextOutput:
    """Run a call whose config and inputs transformers' generate() has prepared."""
    hf_config, past = call.generation_config, call.past_key_values
    inputs = bind_inputs(model, call.inputs, call.others)
    config = config_from_hf(hf_config, inputs["input_ids"].shape[1])
    if call.trace is not None:
        config = config.replace(return_dict_in_generate=True)
    call = replace(
        call,
        configs=[config],
        stopping_criteria=user_criteria(call.criteria),
        # An empty cache is transformers' own.
        past_key_values=past if past is not None and past.get_seq_length() else None,
    )
    inputs = inputs_from_hf(hf_config, inputs, bool(model.config.is_encoder_decoder))
    return GenerateCall(model, call).run(inputs)


_FRONT_ENDS: Final[Mapping[ModelKind, Callable[[Any, CallOptions], Any]]] = {
    "codebooks": _run_codebooks,
    "latents": _run_latents,
    "own generate": _run_own_generate,
    "whisper": _run_whisper,
}

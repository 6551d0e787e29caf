"""generate(): the documented face. A Session that admits everything and drains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from descant.api.call import Call, CallOptions, as_tuple, bind_inputs, num_rows, pop_recipe
from descant.api.inputs import RaggedPrompts
from descant.api.outputs import (
    GenerateBeamDecoderOnlyOutput,
    GenerateBeamEncoderDecoderOutput,
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
    GenerateOutput,
    transition_scores,
)
from descant.api.step_recorder import OutputLayout, StepRecorder
from descant.api.whisper.call import TranscribeCall, transcribe
from descant.config.generation_config import FIELDS, GenerationConfig
from descant.core.records import Hypothesis
from descant.engine.planner import pad_token_id
from descant.engine.session import Failed, Finished, Tokens
from descant.errors import ConfigError, ConstraintError, InputError, NotInThisVersion
from descant.models.hf_callback import config_from_hf, inputs_from_hf, is_hf_prepared, user_criteria
from descant.models.hf_generation_config import fill_defaults
from descant.models.synced_gpus import synchronize_processes
from descant.models.whisper import whisper_adapter_of
from descant.recipes.recipe import Recipe
from descant.trace.tracer import Tracer

__all__ = ["attach", "compute_transition_scores", "detach", "generate"]

_DECODER_STATES = ("decoder_attentions", "cross_attentions", "decoder_hidden_states")


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

    Keyword arguments are fields of GenerationConfig or inputs of the model, `tokenizer`, which what is given
    as text needs, for guidance `negative_prompt_ids` [B, L] with `negative_prompt_attention_mask`, and for
    speculation an `assistant_model`, with its `assistant_tokenizer` where that is another. A cache given as
    `past_key_values` holds what the prompts begin with, one row for all of them or one each, and in the end
    what the returned sequences hold, but for their last tokens; a frozen one, of `descant.prefill`, stays
    as it is. `input_ids` are the whole texts all the same. A model with an encoder takes an empty one only,
    to work on one of its kind.
    `recipe` (or `custom_generate`) is somebody else's method: a folder, `owner/name[@revision]` on the Hub,
    both with `trust_remote_code=True` alone, the name of an installed one, a function or a class of a port.
    `generation_config` may be a list, one for each prompt, and so may `seed`. Returns the sequences
    [B * num_return_sequences, L], or with `return_dict_in_generate=True` a record with what was asked for.
    `trace=True`, or a `descant.Tracer`, records every step: the result is a record then in any case, and its
    `trace` can be saved, replayed and drawn; with `tokenizer` it knows the texts of tokens.
    """
    recipe, kwargs = pop_recipe(kwargs)
    tracer = Tracer.from_argument(kwargs.pop("trace", None), kwargs.get("tokenizer"))
    if recipe is not None and recipe.kind == "generate":
        if tracer is not None:
            must = "must be None with a recipe that is a function, whose loop is its own"
            raise InputError("trace", must, True, "leave it out")
        own: dict[str, Any] = {"logits_processor": logits_processor, "stopping_criteria": stopping_criteria}
        own |= {"streamer": streamer, **kwargs}
        said: Tensor | GenerateOutput = _call_function_recipe(recipe, model, inputs, generation_config, own)
        return said
    tokenizer = kwargs.pop("tokenizer", None)
    assistant = {name: kwargs.pop(name, None) for name in ("assistant_model", "assistant_tokenizer")}
    past = kwargs.pop("past_key_values", None)
    processors = as_tuple("logits_processor", logits_processor)
    criteria = as_tuple("stopping_criteria", stopping_criteria)
    listener = None if is_hf_prepared(generation_config) else whisper_adapter_of(model)
    if listener is not None:
        if tracer is not None:
            must = f"is not kept of {type(model).__name__}, which hears window by window"
            raise NotInThisVersion("trace", must, True, "leave it out")
        if past is not None:
            must = f"is not taken by {type(model).__name__}, which hears window by window"
            raise NotInThisVersion("past_key_values", must, type(past).__name__, "leave it out")
        if assistant["assistant_model"] is not None:
            kind, do = type(model).__name__, "leave it out"
            must = f"is not taken by {kind}, which hears window by window"
            raise NotInThisVersion("assistant_model", must, type(assistant["assistant_model"]).__name__, do)
        if recipe is not None:
            must = f"must be a function for {type(model).__name__}, which hears window by window"
            raise InputError("recipe", must, recipe, "leave it out")
        spoken = TranscribeCall(
            inputs, generation_config, processors, criteria, tokenizer, streamer is not None, kwargs
        )

        def decode(asked: CallOptions, given: Mapping[str, Any], shown: bool) -> Any:
            return _GenerateCall(model, asked, streamer if shown else None).run(given)

        return transcribe(listener, decode, spoken)
    from descant.models.custom_generate import (
        as_custom_generate,  # here, not above: it brings transformers' models along
    )

    outer = None if is_hf_prepared(generation_config) else as_custom_generate(model)
    if outer is not None:
        if tracer is not None:
            must = f"is not kept of {type(model).__name__}, which has a loop around the call"
            raise NotInThisVersion("trace", must, True, "leave it out")
        held = {"logits_processor": processors, "stopping_criteria": criteria, "streamer": streamer}
        held = {**held, "tokenizer": tokenizer, **assistant, **kwargs}
        held |= {} if past is None else {"past_key_values": past}
        held |= {} if recipe is None else {"recipe": recipe}
        answer: Tensor | GenerateOutput = outer.run(generate, inputs, generation_config, held)
        return answer
    call = {name: kwargs.pop(name) for name in list(kwargs) if name in FIELDS}
    kwargs = bind_inputs(model, inputs, kwargs)
    if is_hf_prepared(generation_config):
        config = config_from_hf(generation_config, kwargs["input_ids"].shape[1])
        given = inputs_from_hf(generation_config, kwargs, bool(model.config.is_encoder_decoder))
        if tracer is not None:
            config = config.replace(return_dict_in_generate=True)
        asked = CallOptions(
            [config],
            processors,
            user_criteria(criteria),
            tokenizer,
            **assistant,
            recipe=recipe,
            tracer=tracer,
        )
        if past is not None and past.get_seq_length():  # an empty one it has made for itself
            asked = replace(asked, past=past)
        return _GenerateCall(model, asked, streamer).run(given)
    if tracer is not None:
        call["return_dict_in_generate"] = True
    parts: dict[str, Any] = {"processors": processors, "criteria": criteria, "tokenizer": tokenizer}
    parts |= {**assistant, "past": past, "recipe": recipe, "tracer": tracer}
    asked = CallOptions.from_call(model, generation_config, call, **parts)
    return _GenerateCall(model, asked, streamer).run(kwargs)


# What a function in the place of generate() is given even where the call does not say it, as documented.
_RECIPE_ARGUMENTS = (
    "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "synced_gpus", "assistant_model",
    "streamer", "negative_prompt_ids", "negative_prompt_attention_mask",
)  # fmt: skip


@torch.no_grad()
def _call_function_recipe(
    recipe: Recipe, model: Any, inputs: Any, config: Any, given: Mapping[str, Any]
) -> Any:
    """What a function in the place of generate() makes of the call: all of its arguments are handed on."""
    call = {name: value for name, value in given.items() if name in FIELDS}
    said = {**dict.fromkeys(_RECIPE_ARGUMENTS), **given, "inputs": inputs}
    if inputs is not None and "inputs" not in recipe.argument_names:
        said |= {"inputs": None, **bind_inputs(model, inputs, given)}
    said["generation_config"] = fill_defaults(model, config, call)
    # What a config has been told already need not be taken once more.
    told = (*call, "generation_config")
    recipe.check_arguments(name for name, value in said.items() if value is not None and name not in told)
    if not recipe.accepts_kwargs:
        said = {name: value for name, value in said.items() if name in recipe.argument_names}
    return recipe.call(model, **said)


def attach(model: Any) -> Any:
    """Make `model.generate` ours, for this object alone; the model."""
    model.generate = MethodType(generate, model)
    return model


def detach(model: Any) -> Any:
    """Give a model its own `generate` back; the model."""
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
    """The score of each new token of each sequence [N, T], 0 beyond a beam's end."""
    return transition_scores(sequences, scores, beam_indices, normalize_logits)


class _GenerateCall:
    """One call of generate(): admits all prompts, drains, and lays the results out as documented."""

    def __init__(self, model: Any, asked: CallOptions, streamer: Any) -> None:
        if streamer is not None and any(config.num_beams > 1 for config in asked.configs):
            do = "use descant.stream, which shows what all beams agree on"
            raise InputError("streamer", "must be None with beams, whose tokens are not final", streamer, do)
        if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
            raise InputError("streamer", "must have `put` and `end`", streamer)
        for config in asked.configs:
            _validate_logprobs_returned(config)
        self.config = asked.config
        self.streamer = streamer
        wants = {"scores", "logits", "attentions", "hidden_states"}
        wants = (
            {name for name in wants if getattr(self.config, f"output_{name}")}
            if self.config.return_dict_in_generate
            else set()
        )
        self.states = tuple(sorted(wants & {"attentions", "hidden_states"}))
        self.recorder = StepRecorder(frozenset(wants)) if wants else None
        self.call = Call(model, asked, states=self.states, observe=self.recorder)
        self.session = self.call.session
        self._validate_attention_backend()

    @torch.no_grad()
    def run(self, given: Mapping[str, Any]) -> Tensor | GenerateOutput:
        """The whole call."""
        prompts = self.call.admit(given)
        done = self._drain(prompts)
        ends = [done[number] for number in self.call.request_ids]
        found = [end.hypotheses for end in ends]
        sequences = [one for some in found for one in some]
        cache = self.call.result_cache(
            [past for end in ends for past in end.past_key_values], sequences, prompts
        )
        return self._build_output(prompts, found, cache)

    def _drain(self, prompts: RaggedPrompts) -> dict[int, Finished]:
        first = self.call.first_lines(num_rows)
        copies = torch.tensor([num_rows(config) for config in self.call.configs])
        shown = None
        if self.streamer is not None:
            self.streamer.put(prompts.padded_ids.cpu().repeat_interleave(copies, 0))
            shown = _StreamerFeed(self.streamer.put, first, int(copies.sum()), self._pad_token_id)
        done: dict[int, Finished] = {}
        while len(self.session):
            for event in self.session.step():
                if isinstance(event, Finished):
                    done[event.request] = event
                    if shown is not None:
                        shown.finish(event)
                elif isinstance(event, Failed):
                    raise event.error
                elif shown is not None:
                    shown.put(event)
        if self.streamer is not None:
            self.streamer.end()
        return done

    @property
    def _pad_token_id(self) -> int:
        return pad_token_id(self.config)

    def _build_output(
        self, prompts: RaggedPrompts, found: Sequence[list[Hypothesis]], cache: Any
    ) -> Tensor | GenerateOutput:
        """The prompts as given, each followed by what was found, padded at the right."""
        sequences = [one for some in found for one in some]
        wide = max(len(one.tokens) for one in sequences)
        new = torch.full((len(sequences), wide), self._pad_token_id)
        for line, one in enumerate(sequences):
            new[line, : len(one.tokens)] = one.tokens
        device = self.session.model.device
        each = torch.tensor([len(some) for some in found], device=device)
        whole = torch.cat((prompts.padded_ids.repeat_interleave(each, 0), new.to(device)), 1)
        if not self.config.return_dict_in_generate:
            _validate_constraints_met(sequences, [len(some) for some in found])
            return whole
        record = self._build_record(whole, prompts, found, wide)
        if cache is None:
            return record
        legacy = bool(self.config.return_legacy_cache)
        # Made again, for what it holds has an order.
        return type(record)(**record, past_key_values=cache.to_legacy_cache() if legacy else cache)

    def _build_record(
        self, whole: Tensor, prompts: RaggedPrompts, found: Sequence[list[Hypothesis]], wide: int
    ) -> GenerateOutput:
        config, both = self.config, self.session.model.traits.is_encoder_decoder
        numbers, configs = self.call.request_ids, self.call.configs
        first = self.call.first_lines(_num_score_lines)
        lines = {number: _num_score_lines(one) for number, one in zip(numbers, configs, strict=True)}
        layout = OutputLayout(first, lines, self._pad_token_id, prompts.width)
        values: dict[str, Any] = {"sequences": whole}
        if self.recorder is not None:
            values |= {name: self.recorder.step_tensors(name, layout) for name in ("scores", "logits")}
            names = _DECODER_STATES if both else self.states
            wanted = [name for name in names if name.endswith(self.states)]
            values |= {
                name: self._drop_cached_positions(name, self.recorder.states(name, layout)) for name in wanted
            }
            if both:
                values |= {
                    f"encoder_{name}": self.session.model.encoder_output.get(name) for name in self.states
                }
        sequences = [one for some in found for one in some]
        if any(one.logprobs is not None for one in sequences):
            values["logprobs"] = tuple(one.logprobs for one in sequences)
        if any(one.speculation is not None for one in sequences):
            values["speculation"] = tuple(one.speculation for one in sequences)
        values["trace"] = self.session.trace
        beams = any(one.num_beams > 1 for one in configs)
        if beams:
            if config.output_scores:
                scores = [torch.nan if one.score is None else one.score for one in sequences]
                values["sequences_scores"] = torch.tensor(scores, device=whole.device)
            if any(one.unmet_constraints is not None for one in sequences):
                values["unmet_constraints"] = tuple(one.unmet_constraints or () for one in sequences)
            values["beam_indices"] = _beam_indices(found, [first[number] for number in numbers], wide).to(
                whole.device
            )
        kinds = {
            (False, False): GenerateDecoderOnlyOutput,
            (False, True): GenerateEncoderDecoderOutput,
            (True, False): GenerateBeamDecoderOnlyOutput,
            (True, True): GenerateBeamEncoderDecoderOutput,
        }
        return kinds[beams, both](**values)

    def _drop_cached_positions(self, name: str, states: Any) -> Any:
        """The states of a call, those of the first step without what was in a cache already."""
        if self.call.user_cache is None or states is None or self.recorder is None:
            return states
        parts = [part for seen in self.recorder.observations for part in seen.output.states if name in part]
        size = max(int((part["fed_length"] - part["num_drafts"]).max()) for part in parts)
        dim = 2 if "attentions" in name else 1
        first = tuple(layer.narrow(dim, layer.shape[dim] - size, size) for layer in states[0])
        return (first, *states[1:])

    def _validate_attention_backend(self) -> None:
        if "attentions" in self.states and self.session.model.traits.attn_implementation != "eager":
            used = self.session.model.traits.attn_implementation
            do = 'load the model with attn_implementation="eager"'
            raise InputError(
                "output_attentions", f"needs attention weights, which {used!r} does not give", True, do
            )


class _StreamerFeed:
    """Shows a streamer the tokens of all lines abreast, one of each at a time, as the documented loop does.

    Where some lines are ahead of others, what they have said waits for these.
    """

    def __init__(self, put: Callable[[Tensor], None], first: Mapping[int, int], lines: int, pad: int) -> None:
        self._put, self._first_lines, self._pad_token_id = put, first, pad
        self._tokens: list[list[int]] = [[] for _ in range(lines)]
        self._is_finished = [False] * lines
        self._num_streamed = 0

    def put(self, event: Tokens) -> None:
        """Take the tokens of a step, and show what is there of every line that goes on."""
        columns = (event.request.tolist(), event.slot.tolist(), event.token.tolist())
        for place, (request, slot, token) in enumerate(zip(*columns, strict=True)):
            line = self._first_lines[request] + slot
            self._tokens[line].append(token)
            self._is_finished[line] = place in event.finished
        self._flush()

    def finish(self, event: Finished) -> None:
        """Take what a method has not said of its sequences until they ended, and show what is there."""
        for slot, one in enumerate(event.hypotheses):
            line = self._first_lines[event.request] + slot
            self._tokens[line] += one.tokens[len(self._tokens[line]) :].tolist()
            self._is_finished[line] = True
        self._flush()

    def _flush(self) -> None:
        while self._has_full_column():
            at = self._num_streamed
            self._put(
                torch.tensor([one[at] if at < len(one) else self._pad_token_id for one in self._tokens])
            )
            self._num_streamed += 1

    def _has_full_column(self) -> bool:
        """Whether every line that goes on, and any at all, has said one more."""
        lengths = [len(one) for one in self._tokens]
        going = [size for size, over in zip(lengths, self._is_finished, strict=True) if not over]
        return max(lengths) > self._num_streamed and min(going, default=max(lengths)) > self._num_streamed


def _validate_constraints_met(sequences: Sequence[Hypothesis], counts: Sequence[int]) -> None:
    """Raise for sequences that do not meet their constraints, where nothing else would say so."""
    whose = [line for line, count in enumerate(counts) for _ in range(count)]
    for line, one in zip(whose, sequences, strict=True):
        if one.unmet_constraints:
            places = ", ".join(map(str, one.unmet_constraints))
            do = "raise max_new_tokens or num_beams, or set return_dict_in_generate=True to be told which"
            raise ConstraintError(
                f"the result of prompt {line} must meet all constraints, got {len(one.tokens)} tokens "
                f"without number {places}: {do}",
                line,
                one.unmet_constraints,
            )


def _validate_logprobs_returned(config: GenerationConfig) -> None:
    """Raise for log-probabilities that nobody would be given."""
    told = config.return_dict_in_generate or config.logprobs is None or config.source("logprobs") == "model"
    if not told:
        do = "set return_dict_in_generate=True or leave it out"
        must = "has no use while `return_dict_in_generate` is False"
        raise ConfigError("logprobs", must, config.logprobs, do)


def _num_score_lines(config: GenerationConfig) -> int:
    """How many lines a request has in the scores of a step."""
    return config.num_beams if config.num_beams > 1 else config.num_return_sequences


def _beam_indices(found: Sequence[list[Hypothesis]], first: Sequence[int], wide: int) -> Tensor:
    """The line of the scores that each token of each sequence was chosen from, -1 beyond its end [N, T]."""
    trails = []
    for start, some in zip(first, found, strict=True):
        for slot, one in enumerate(some):
            # A prompt without beams, beside others that have them, is on its own line all along.
            own = [slot] * len(one.tokens) if one.beam_indices is None else one.beam_indices
            trails.append([start + place for place in own] + [-1] * (wide - len(own)))
    return torch.tensor(trails, dtype=torch.int32)

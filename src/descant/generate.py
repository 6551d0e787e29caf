"""generate(): the documented face. A Session that admits everything and drains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from descant.adapters.callback import is_prepared, own_criteria, recovered_config, recovered_inputs
from descant.config import FIELDS, GenerationConfig
from descant.errors import InputError, NotInThisVersion
from descant.inputs import Prepared, prepared
from descant.outputs import (
    GenerateBeamDecoderOnlyOutput,
    GenerateBeamEncoderDecoderOutput,
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
    GenerateOutput,
    transition_scores,
)
from descant.session import Failed, Finished, Request, Session, Tokens
from descant.step import Hypothesis
from descant.trace import Layout, Trace

__all__ = ["attach", "compute_transition_scores", "detach", "generate"]

# Documented arguments whose method is not built yet: anything but None (or False) is refused.
_LATER = (
    "prefix_allowed_tokens_fn", "synced_gpus", "assistant_model", "negative_prompt_ids",
    "negative_prompt_attention_mask", "tokenizer", "assistant_tokenizer", "custom_generate",
    "trust_remote_code",
)  # fmt: skip


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

    Keyword arguments are fields of GenerationConfig or inputs of the model. Returns the sequences
    [B * num_return_sequences, L], or with `return_dict_in_generate=True` a record with what was asked for.
    """
    for name in _LATER:
        value = kwargs.pop(name, None)
        if value is not None and value is not False:
            raise NotInThisVersion(name, "is not in this version of Descant", value, "leave it unset")
    call = {name: kwargs.pop(name) for name in list(kwargs) if name in FIELDS}
    if inputs is not None:
        if not isinstance(inputs, Tensor) or inputs.ndim not in (2, 3):
            raise InputError("inputs", "must be [batch, length] of ids or [batch, length, size]", inputs)
        name = "inputs_embeds" if inputs.ndim == 3 else "input_ids"
        if kwargs.get(name) is not None:
            raise InputError(name, "must not be given beside `inputs`, which is the same", kwargs[name])
        kwargs[name] = inputs
    processors = _listed("logits_processor", logits_processor)
    criteria = _listed("stopping_criteria", stopping_criteria)
    if is_prepared(generation_config):
        config = recovered_config(generation_config, kwargs["input_ids"].shape[1])
        given = recovered_inputs(generation_config, kwargs, bool(model.config.is_encoder_decoder))
        return _Call(model, config, processors, own_criteria(criteria), streamer).run(given)
    own = getattr(model, "generation_config", None)
    # A model's own config handed back as the argument is still the model's: its leftovers stay harmless.
    argument = None if generation_config is own else _config(generation_config)
    config = GenerationConfig.merge(call, argument, _config(own))
    return _Call(model, config, processors, criteria, streamer).run(kwargs)


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


class _Call:
    """One call of generate(): admits all prompts, drains, and lays the results out as documented."""

    def __init__(
        self,
        model: Any,
        config: GenerationConfig,
        processors: Sequence[Any],
        criteria: Sequence[Any],
        streamer: Any,
    ) -> None:
        if streamer is not None and config.num_beams > 1:
            raise InputError("streamer", "must be None with beams, whose tokens are not final", streamer)
        if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
            raise InputError("streamer", "must have `put` and `end`", streamer)
        self.config = config
        self.streamer = streamer
        self.processors, self.criteria = tuple(processors), tuple(criteria)
        wants = {"scores", "logits", "attentions", "hidden_states"}
        wants = (
            {name for name in wants if getattr(config, f"output_{name}")}
            if config.return_dict_in_generate
            else set()
        )
        self.states = tuple(sorted(wants & {"attentions", "hidden_states"}))
        self.trace = Trace(frozenset(wants)) if wants else None
        self.session = Session(model, states=self.states, observe=self.trace)
        self._refuse_fused_attention()

    @torch.no_grad()
    def run(self, given: Mapping[str, Any]) -> Tensor | GenerateOutput:
        """The whole call."""
        model = self.session.model
        prompts = prepared(given, self.config, model.facts, model.device)
        copies = self.config.num_return_sequences if self.config.num_beams == 1 else 1
        requests = [
            Request(
                prompts.prompt(line),
                self.config,
                prompts.inputs[line],
                self.processors,
                self.criteria,
                width=prompts.shown.shape[1],
                line=line * copies,
                merged=True,
            )
            for line in range(len(prompts))
        ]
        numbers = self.session.admit(*requests, lines=len(prompts) * copies)
        done = self._drained(numbers, prompts, copies)
        return self._laid_out(prompts, numbers, [one for number in numbers for one in done[number]])

    def _drained(self, numbers: Sequence[int], prompts: Prepared, copies: int) -> dict[int, list[Hypothesis]]:
        first = {number: line * copies for line, number in enumerate(numbers)}
        if self.streamer is not None:
            self.streamer.put(prompts.shown.repeat_interleave(copies, 0).cpu())
        done: dict[int, list[Hypothesis]] = {}
        while len(self.session):
            if self.trace is not None:
                self.trace.begin()
            for event in self.session.step():
                if isinstance(event, Finished):
                    done[event.request] = event.hypotheses
                elif isinstance(event, Failed):
                    raise event.error
                elif self.streamer is not None:
                    self.streamer.put(self._spread(event, first, len(numbers) * copies))
        if self.streamer is not None:
            self.streamer.end()
        return done

    def _spread(self, event: Tokens, first: Mapping[int, int], lines: int) -> Tensor:
        """A step's tokens for every line of the call, the pad token where a row has ended [lines]."""
        tokens = torch.full((lines,), self._pad)
        start = torch.tensor([first[one] for one in event.request.tolist()])
        tokens[start + event.slot] = event.token
        return tokens

    @property
    def _pad(self) -> int:
        pad, eos = self.config.pad_token_id, self.config.eos_token_id
        if pad is None:
            pad = 0 if eos is None else eos if isinstance(eos, int) else eos[0]
        return int(pad)

    def _laid_out(
        self, prompts: Prepared, numbers: Sequence[int], sequences: Sequence[Hypothesis]
    ) -> Tensor | GenerateOutput:
        """The prompts as given, each followed by what was found, padded at the right."""
        device, each = self.session.model.device, self.config.num_return_sequences
        wide = max(len(one.tokens) for one in sequences)
        new = torch.full((len(sequences), wide), self._pad)
        for line, one in enumerate(sequences):
            new[line, : len(one.tokens)] = one.tokens
        whole = torch.cat((prompts.shown.repeat_interleave(each, 0), new.to(device)), 1)
        if not self.config.return_dict_in_generate:
            return whole
        return self._record(whole, prompts, numbers, sequences, wide)

    def _record(
        self,
        whole: Tensor,
        prompts: Prepared,
        numbers: Sequence[int],
        sequences: Sequence[Hypothesis],
        wide: int,
    ) -> GenerateOutput:
        config, both = self.config, self.session.model.facts.encoder_decoder
        beams = config.num_beams > 1
        lines = config.num_beams if beams else config.num_return_sequences
        first = {number: line * lines for line, number in enumerate(numbers)}
        layout = Layout(first, lines, self._pad, prompts.width)
        values: dict[str, Any] = {"sequences": whole}
        if self.trace is not None:
            values |= {name: self.trace.tensors(name, layout) for name in ("scores", "logits")}
            names = (
                ("decoder_attentions", "cross_attentions", "decoder_hidden_states") if both else self.states
            )
            values |= {name: self.trace.states(name, layout) for name in names}
            if both:
                values |= {f"encoder_{name}": self.session.model.encoded.get(name) for name in self.states}
        if beams:
            each = config.num_return_sequences
            if config.output_scores:
                values["sequences_scores"] = torch.tensor(
                    [one.score for one in sequences], device=whole.device
                )
            trail = torch.full((len(sequences), wide), -1, dtype=torch.int32)
            for line, one in enumerate(sequences):
                start = first[numbers[line // each]]
                trail[line, : len(one.tokens)] = torch.tensor(one.beams, dtype=torch.int32) + start
            values["beam_indices"] = trail.to(whole.device)
        kinds = {
            (False, False): GenerateDecoderOnlyOutput,
            (False, True): GenerateEncoderDecoderOutput,
            (True, False): GenerateBeamDecoderOnlyOutput,
            (True, True): GenerateBeamEncoderDecoderOutput,
        }
        return kinds[beams, both](**values)

    def _refuse_fused_attention(self) -> None:
        if "attentions" in self.states and self.session.model.facts.attention != "eager":
            used = self.session.model.facts.attention
            do = 'load the model with attn_implementation="eager"'
            raise InputError(
                "output_attentions", f"needs attention weights, which {used!r} does not give", True, do
            )


def _listed(name: str, given: Any) -> tuple[Any, ...]:
    """A list of processors or criteria, checked to be one."""
    if given is None:
        return ()
    if not isinstance(given, list | tuple):
        raise InputError(name, "must be a list of callables", given)
    return tuple(given)


def _config(given: Any) -> GenerationConfig | None:
    """A generation config of ours, from ours or transformers' own."""
    if given is None or isinstance(given, GenerationConfig):
        return given
    if not hasattr(given, "to_dict"):
        raise InputError("generation_config", "must be a GenerationConfig", given)
    # Its attributes and not its `to_dict`, which copies everything deeply at every call.
    return GenerationConfig.from_transformers(vars(given))

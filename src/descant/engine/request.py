"""A request: one prompt and how to continue it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from torch import Tensor

from descant.config.generation_config import GenerationConfig
from descant.config.grammar_spec import GrammarSpec
from descant.core.context import PromptInfo
from descant.core.interfaces import ModelTraits
from descant.decoding.grammars.backend import CompiledGrammar, MatcherPool
from descant.decoding.grammars.compiler import compile_grammar, compiler_of
from descant.decoding.processors.base import as_id_list
from descant.decoding.stopping import Criterion, RegexStop
from descant.errors import ConfigError, InputError
from descant.models.forward.inputs import is_per_token
from descant.tokenization.stop_strings import PhraseMatcher, StopStringMatcher
from descant.tokenization.token_bytes import TokenBytes
from descant.tokenization.token_healing import HealedSuffix


@dataclass(frozen=True, eq=False, kw_only=True)
class CallPlace:
    """The place of a request in the call that makes it, and what that call has resolved already."""

    prompt_index: int = 0  # the index of its prompt, for `prefix_allowed_tokens_fn`
    padded_width: int = 0  # of the padded prompts; user processors get ids of that width
    counted_width: int = 0  # width that counts as its prompt in `max_length` and `min_length`; 0: its own
    batch_row: int = 0  # the index of its first sequence among the rows of the call
    batch_size: int = 0  # the number of these rows; 0: it is a call of its own
    noise_row: int = -1  # its row of torch's noise; -1: it draws from its own stream
    config_merged: bool = False  # whether the config is merged with the model's own
    healed_suffix: HealedSuffix | None = None  # that token healing removes; None: unknown
    compiled_grammar: CompiledGrammar | None = None  # of the config's `grammar`; None: not compiled


_NO_CALL: Final = CallPlace()
MERGED: Final = CallPlace(config_merged=True)  # of requests that are made one by one


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt and how to continue it.

    `prompt` holds the token ids (of the decoder, for encoder-decoder models; empty where the prompt is
    given as `inputs["inputs_embeds"]` alone). `inputs` holds the model's other inputs: `inputs_embeds`, an
    encoder's `input_ids` and `attention_mask`, `token_type_ids` and the like without a batch dimension;
    media (`pixel_values`, `input_features`) as their processor returns them for this request alone.
    `past_key_values` holds the keys and values of the prompt's first tokens, which are not fed again; it is
    not modified.
    """

    prompt: Tensor | Sequence[int]
    generation_config: GenerationConfig = field(default_factory=GenerationConfig)
    inputs: Mapping[str, Any] = field(default_factory=dict)
    logits_processor: Sequence[Any] = ()
    stopping_criteria: Sequence[Criterion] = ()
    tokenizer: Any = None  # for texts of the config: `stop_strings`, `grammar`, token healing and the like
    assistant_model: Any = None  # a draft model
    assistant_tokenizer: Any = None  # the draft model's tokenizer, if it is not `tokenizer`
    past_key_values: Any = None  # a `CachedRow`, or a cache of one row
    return_past_key_values: bool = False  # whether `Finished.past_key_values` holds its sequences' KV
    recipe: Any = None  # a `Recipe` other than a function, or a class of one of its interfaces
    prompt_logprobs: int | None = None  # alternatives of each prompt token; of an `AsyncEngine`
    priority: int = 0  # of a session with a scheduler: lower is sooner
    deadline: float | None = None  # seconds from its admission, after which it fails; with a scheduler
    cache_salt: bytes = b""  # only requests with the same salt share cached prefixes and suffixes
    adapter_name: str | None = None  # of PEFT; None: the active one, "__base__": none
    _call: CallPlace = field(default_factory=lambda: _NO_CALL, repr=False)


class TextMatchers(NamedTuple):
    """A request's texts in terms of tokens."""

    stop_strings: StopStringMatcher | None
    stop_regex: RegexStop | None
    sequence_breakers: list[int] | None
    banned_phrases: PhraseMatcher | None = None

    def row_params(self) -> dict[str, Any]:
        """Those that are parameters of the row."""
        params = {"phrase_matcher": self.banned_phrases, "dry_sequence_breakers": self.sequence_breakers}
        return {name: value for name, value in params.items() if value is not None}


TEXT_FIELDS: Final = ("stop_strings", "stop_regex", "dry_multiplier", "banned_phrases")


def build_text_matchers(request: Request, config: GenerationConfig) -> TextMatchers:
    """The matchers of a request's texts by its tokenizer, or an InputError if it has none."""
    breakers = config.dry_sequence_breakers if config.dry_multiplier else None
    breaker_texts = [part for part in breakers or () if isinstance(part, str)]
    texts = {
        "stop_strings": config.stop_strings,
        "stop_regex": config.stop_regex,
        "dry_sequence_breakers": breaker_texts,
        "banned_phrases": config.banned_phrases,
    }
    first = next((name for name, value in texts.items() if value), None)
    if first is None:
        return TextMatchers(None, None, None)
    if request.tokenizer is None:
        raise InputError("tokenizer", f"must be given with `{first}`", None, "pass the model's tokenizer")
    strings = _as_strings(config.stop_strings)
    vocabulary = TokenBytes.from_tokenizer(request.tokenizer)
    breaker_ids = None
    if breaker_texts:
        parts = [text.encode() for text in breaker_texts]
        breaker_ids = [int(part) for part in breakers or () if not isinstance(part, str)]
        breaker_ids += [
            token for token, text in enumerate(vocabulary.bytes) if any(part in text for part in parts)
        ]
    return TextMatchers(
        StopStringMatcher.from_tokenizer(request.tokenizer, strings) if strings else None,
        RegexStop(re.compile(config.stop_regex), vocabulary) if config.stop_regex else None,
        breaker_ids,
        PhraseMatcher.from_tokenizer(request.tokenizer, _as_strings(config.banned_phrases))
        if config.banned_phrases
        else None,
    )


def _as_strings(value: str | Sequence[str] | None) -> tuple[str, ...]:
    """One string or several as a tuple."""
    return (value,) if isinstance(value, str) else tuple(value or ())


def healed_suffix(request: Request, ids: Tensor) -> HealedSuffix:
    """The tokens that token healing removes from the end of a prompt."""
    if request._call.healed_suffix is not None:
        return request._call.healed_suffix
    if request.tokenizer is None:
        do = "pass the model's tokenizer"
        raise InputError("tokenizer", "must be given with `token_healing`", None, do)
    return HealedSuffix.from_prompt(request.tokenizer, ids.tolist())


def matcher_pool(request: Request, config: GenerationConfig, suffix: HealedSuffix | None) -> MatcherPool:
    """The matchers of a request's grammar, which its text follows from the end of its prompt on."""
    assert isinstance(config.grammar, GrammarSpec)
    grammar = request._call.compiled_grammar
    prefix = b"" if suffix is None else suffix.text
    if grammar is None or not compiler_of(request.tokenizer).owns(grammar, config.grammar, prefix):
        grammar = compile_request_grammar(request, config.grammar, suffix)
    ends = as_id_list(config.eos_token_id)
    if not ends:
        do = "set it, a grammar ends a row with it"
        raise ConfigError(("eos_token_id", "grammar"), "must be given with `grammar`", None, do)
    num_bits = 32 * grammar.backend.mask_width
    if min(ends) >= num_bits:
        must = f"must be a token of the tokenizer, which has {num_bits} at most, with `grammar`"
        raise ConfigError(("eos_token_id", "grammar"), must, ends)
    special = TokenBytes.from_tokenizer(request.tokenizer).special_ids
    return MatcherPool(
        grammar, ends + [token for token in as_id_list(config.stop_token_ids) if token in special]
    )


def compile_request_grammar(
    request: Request, spec: GrammarSpec, suffix: HealedSuffix | None = None
) -> CompiledGrammar:
    """The compiled grammar of a request, behind what token healing generates again."""
    if request.tokenizer is None:
        raise InputError("tokenizer", "must be given with `grammar`", None, "pass the model's tokenizer")
    return compile_grammar(spec, request.tokenizer, b"" if suffix is None else suffix.text)


def drop_last_tokens(inputs: Mapping[str, Any], count: int) -> dict[str, Any]:
    """The inputs of a decoder-only model without the entries of the last `count` tokens."""
    return {
        name: value[: len(value) - count]
        if name == "inputs_embeds" or is_per_token(name, getattr(value, "ndim", 0))
        else value
        for name, value in inputs.items()
    }


def prompt_info(request: Request, ids: Tensor, offset: int, suffix: HealedSuffix | None = None) -> PromptInfo:
    """The facts of a prompt on which the parameters of its row may depend."""

    def source_ids() -> list[int]:
        source = request.inputs.get("input_ids")
        if source is None:
            return [int(token) for token in ids.tolist()]
        mask = request.inputs.get("attention_mask")
        valid = source if mask is None else source[mask.bool()]
        return [int(token) for token in valid.tolist()]

    length = ids.shape[0]
    return PromptInfo(
        length,
        offset,
        request._call.padded_width,
        request._call.prompt_index,
        source_ids,
        suffix,
        padding=max(0, request._call.counted_width - length - offset),
    )


def validate_negative_prompt(
    request: Request, wrappers: Sequence[str], traits: ModelTraits, max_new: int
) -> None:
    """Raise for a negative prompt without guidance, or one that leaves no room for `max_new` tokens."""
    given = request.inputs.get("negative_prompt_ids")
    if given is None:
        if "guidance" in wrappers and not len(request.prompt):
            must = "must be given with `guidance_scale` where the prompt has no tokens"
            raise InputError("negative_prompt_ids", must, None)
        return
    if "guidance" not in wrappers:
        do = "set guidance_scale, or leave it out"
        raise InputError("negative_prompt_ids", "has no use without `guidance_scale`", given, do)
    ids = [int(token) for token in given]
    if not ids or min(ids) < 0 or max(ids) >= traits.vocab_size:
        raise InputError("negative_prompt_ids", f"must hold ids from 0 to {traits.vocab_size - 1}", given)
    # The last token is never fed.
    if traits.max_positions is not None and len(ids) + max_new - 1 > traits.max_positions:
        must = f"must leave room for {max_new} new tokens, the model has {traits.max_positions} positions"
        do = "shorten it or lower max_new_tokens"
        raise InputError("negative_prompt_ids", must, f"{len(ids)} tokens", do)


def validate_callables(request: Request) -> None:
    """Raise for processors and criteria that cannot be called."""
    for processor in request.logits_processor:
        if not callable(processor) and not hasattr(processor, "process"):
            raise InputError("logits_processor", "must hold callables", processor)
    for criterion in request.stopping_criteria:
        if not callable(criterion):
            raise InputError("stopping_criteria", "must hold callables", criterion)

"""A request: one prompt, how to continue it, and what its texts come to."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from descant.config.generation_config import GenerationConfig
from descant.core.context import PromptInfo
from descant.core.interfaces import ModelTraits
from descant.decoding.stopping.checker import Criterion, RegexStop
from descant.errors import InputError
from descant.models.multimodal import is_per_token
from descant.tokenization.banned_phrases import PhraseMatcher
from descant.tokenization.stop_strings import StopStringMatcher
from descant.tokenization.token_bytes import TokenBytes
from descant.tokenization.token_healing import HealedSuffix

__all__ = [
    "Request",
    "TextMatchers",
    "build_text_matchers",
    "drop_last_tokens",
    "healed_suffix",
    "negative_prompt_excess",
    "prompt_info",
    "validate_callables",
    "validate_negative_prompt",
]


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt and how to continue it.

    `prompt` holds the token ids (of the decoder, for encoder-decoder models; empty where the prompt is
    given as `inputs["inputs_embeds"]` alone). `inputs` holds what else the model wants: `inputs_embeds`, an
    encoder's `input_ids` and `attention_mask`, `token_type_ids` and the like without a batch dimension;
    media (`pixel_values`, `input_features`) as their processor makes them for it alone. `past` holds the
    keys and values of the prompt's first tokens, which are not read again; it stays as it is.
    """

    prompt: Tensor | Sequence[int]
    generation_config: GenerationConfig = field(default_factory=GenerationConfig)
    inputs: Mapping[str, Any] = field(default_factory=dict)
    logits_processor: Sequence[Any] = ()
    stopping_criteria: Sequence[Criterion] = ()
    tokenizer: Any = None  # for what is text: `stop_strings`, `stop_regex`, `dry_sequence_breakers`, healing
    assistant_model: Any = None  # a draft model, which guesses ahead
    assistant_tokenizer: Any = None  # and its tokenizer, where that is another than `tokenizer`
    past_key_values: Any = None  # a `Past`, or a cache of one row
    return_past_key_values: bool = False  # whether `Finished.pasts` is to hold what its sequences have read
    recipe: Any = None  # a `Recipe` that is a part of the loop, or a class of one of its ports
    cache_salt: bytes = b""  # for a prefix cache: only requests with the same one share what they have read
    prompt_index: int = 0  # which prompt of its call it is, for `prefix_allowed_tokens_fn`
    padded_width: int = 0  # of the padded prompts it came with; a user's processor is shown ids of that width
    noise_row: int = -1  # which line of torch's noise is its own; -1: it draws from a stream of its own
    config_merged: bool = False  # the config has taken in the model's own already


class TextMatchers(NamedTuple):
    """What a request gives as text, in terms of tokens."""

    stop_strings: StopStringMatcher | None
    stop_regex: RegexStop | None
    sequence_breakers: list[int] | None
    banned_phrases: PhraseMatcher | None = None


def build_text_matchers(request: Request, config: GenerationConfig) -> TextMatchers:
    """A request's texts by its tokenizer, or an InputError that asks for one."""
    breakers = config.dry_sequence_breakers if config.dry_multiplier else None
    spoken = [part for part in breakers or () if isinstance(part, str)]
    needs = {
        "stop_strings": config.stop_strings,
        "stop_regex": config.stop_regex,
        "dry_sequence_breakers": spoken,
        "banned_phrases": config.banned_phrases,
    }
    asking = next((name for name, value in needs.items() if value), None)
    if asking is None:
        return TextMatchers(None, None, None)
    if request.tokenizer is None:
        raise InputError("tokenizer", f"must be given with `{asking}`", None, "pass the model's tokenizer")
    strings = _as_strings(config.stop_strings)
    vocabulary = TokenBytes.from_tokenizer(request.tokenizer)
    found = None
    if spoken:
        parts = [part.encode() for part in spoken]
        found = [int(part) for part in breakers or () if not isinstance(part, str)]
        found += [at for at, text in enumerate(vocabulary.bytes) if any(part in text for part in parts)]
    return TextMatchers(
        StopStringMatcher.from_tokenizer(request.tokenizer, strings) if strings else None,
        RegexStop(re.compile(config.stop_regex), vocabulary) if config.stop_regex else None,
        found,
        PhraseMatcher.from_tokenizer(request.tokenizer, _as_strings(config.banned_phrases))
        if config.banned_phrases
        else None,
    )


def _as_strings(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """Texts of a config, one or several."""
    return (given,) if isinstance(given, str) else tuple(given or ())


def healed_suffix(request: Request, config: GenerationConfig, ids: Tensor) -> HealedSuffix | None:
    """What token healing takes off the end of a request's prompt; None where it is not asked for."""
    if not config.token_healing:
        return None
    if request.tokenizer is None:
        do = "pass the model's tokenizer"
        raise InputError("tokenizer", "must be given with `token_healing`", None, do)
    return HealedSuffix.from_prompt(request.tokenizer, ids.tolist())


def drop_last_tokens(inputs: Mapping[str, Any], count: int) -> dict[str, Any]:
    """What a model that has no encoder is given beside its prompt, without its last `count` tokens."""
    return {
        name: one[: len(one) - count]
        if name == "inputs_embeds" or is_per_token(name, getattr(one, "ndim", 0))
        else one
        for name, one in inputs.items()
    }


def prompt_info(request: Request, ids: Tensor, offset: int, tail: HealedSuffix | None = None) -> PromptInfo:
    """What the parameters of a request's row may depend on."""

    def source() -> list[int]:
        given = request.inputs.get("input_ids")
        if given is None:
            return [int(token) for token in ids.tolist()]
        mask = request.inputs.get("attention_mask")
        kept = given if mask is None else given[mask.bool()]
        return [int(token) for token in kept.tolist()]

    return PromptInfo(len(ids), offset, request.padded_width, request.prompt_index, source, tail)


def negative_prompt_excess(request: Request) -> int:
    """How many positions longer than its prompt the longest text is that is read beside it."""
    negative = request.inputs.get("negative_prompt_ids")
    return 0 if negative is None else max(0, len(negative) - len(request.prompt))


def validate_negative_prompt(request: Request, wraps: Sequence[str], facts: ModelTraits, new: int) -> None:
    """Raise for a negative prompt that nobody reads, or that leaves no room for `new` tokens after it."""
    given = request.inputs.get("negative_prompt_ids")
    if given is None:
        if "guidance" in wraps and not len(request.prompt):
            must = "must be given with `guidance_scale` where the prompt has no tokens"
            raise InputError("negative_prompt_ids", must, None)
        return
    if "guidance" not in wraps:
        do = "set guidance_scale, or leave it out"
        raise InputError("negative_prompt_ids", "has no use without `guidance_scale`", given, do)
    ids = [int(token) for token in given]
    if not ids or min(ids) < 0 or max(ids) >= facts.vocab_size:
        raise InputError("negative_prompt_ids", f"must hold ids from 0 to {facts.vocab_size - 1}", given)
    # The last token is never fed.
    if facts.max_positions is not None and len(ids) + new - 1 > facts.max_positions:
        must = f"must leave room for {new} new tokens, the model has {facts.max_positions} positions"
        raise InputError(
            "negative_prompt_ids", must, f"{len(ids)} tokens", "shorten it or lower max_new_tokens"
        )


def validate_callables(request: Request) -> None:
    """Raise for processors and criteria that cannot be called."""
    for name in ("logits_processor", "stopping_criteria"):
        for one in getattr(request, name):
            if not callable(one) and not (name == "logits_processor" and hasattr(one, "process")):
                raise InputError(name, "must hold callables", one)

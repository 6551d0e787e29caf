"""A request: one prompt, how to continue it, and what its texts come to."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from descant.config.generation_config import GenerationConfig
from descant.core.context import Prompt
from descant.core.interfaces import Facts
from descant.decoding.stopping.checker import Criterion, Pattern
from descant.errors import InputError
from descant.models.multimodal import is_mark
from descant.tokenization.banned_phrases import Phrases
from descant.tokenization.stop_strings import StopTable
from descant.tokenization.token_bytes import Vocabulary
from descant.tokenization.token_healing import Tail

__all__ = [
    "Request",
    "Texts",
    "beside",
    "healed",
    "prompt_of",
    "refuse_uncallable",
    "refuse_unguided",
    "shortened",
    "texts_of",
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
    past: Any = None  # a `Past`, or a cache of one row
    keep: bool = False  # whether `Finished.pasts` is to hold what its sequences have read
    recipe: Any = None  # a `Recipe` that is a part of the loop, or a class of one of its ports
    salt: bytes = b""  # for a prefix cache: only requests with the same one share what they have read
    batch: int = 0  # which prompt of its call it is, for `prefix_allowed_tokens_fn`
    width: int = 0  # of the padded prompts it came with; a user's processor is shown ids of that width
    line: int = -1  # which line of torch's noise is its own; -1: it draws from a stream of its own
    merged: bool = False  # the config has taken in the model's own already


class Texts(NamedTuple):
    """What a request gives as text, in terms of tokens."""

    table: StopTable | None
    pattern: Pattern | None
    breakers: list[int] | None
    phrases: Phrases | None = None


def texts_of(request: Request, config: GenerationConfig) -> Texts:
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
        return Texts(None, None, None)
    if request.tokenizer is None:
        raise InputError("tokenizer", f"must be given with `{asking}`", None, "pass the model's tokenizer")
    strings = _strings(config.stop_strings)
    vocabulary = Vocabulary.of(request.tokenizer)
    found = None
    if spoken:
        parts = [part.encode() for part in spoken]
        found = [int(part) for part in breakers or () if not isinstance(part, str)]
        found += [at for at, text in enumerate(vocabulary.bytes) if any(part in text for part in parts)]
    return Texts(
        StopTable.of(request.tokenizer, strings) if strings else None,
        Pattern(re.compile(config.stop_regex), vocabulary) if config.stop_regex else None,
        found,
        Phrases.of(request.tokenizer, _strings(config.banned_phrases)) if config.banned_phrases else None,
    )


def _strings(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """Texts of a config, one or several."""
    return (given,) if isinstance(given, str) else tuple(given or ())


def healed(request: Request, config: GenerationConfig, ids: Tensor) -> Tail | None:
    """What token healing takes off the end of a request's prompt; None where it is not asked for."""
    if not config.token_healing:
        return None
    if request.tokenizer is None:
        do = "pass the model's tokenizer"
        raise InputError("tokenizer", "must be given with `token_healing`", None, do)
    return Tail.of(request.tokenizer, ids.tolist())


def shortened(inputs: Mapping[str, Any], count: int) -> dict[str, Any]:
    """What a model that has no encoder is given beside its prompt, without its last `count` tokens."""
    return {
        name: one[: len(one) - count]
        if name == "inputs_embeds" or is_mark(name, getattr(one, "ndim", 0))
        else one
        for name, one in inputs.items()
    }


def prompt_of(request: Request, ids: Tensor, offset: int, tail: Tail | None = None) -> Prompt:
    """What the parameters of a request's row may depend on."""

    def source() -> list[int]:
        given = request.inputs.get("input_ids")
        if given is None:
            return [int(token) for token in ids.tolist()]
        mask = request.inputs.get("attention_mask")
        kept = given if mask is None else given[mask.bool()]
        return [int(token) for token in kept.tolist()]

    return Prompt(len(ids), offset, request.width, request.batch, source, tail)


def beside(request: Request) -> int:
    """How many positions longer than its prompt the longest text is that is read beside it."""
    negative = request.inputs.get("negative_prompt_ids")
    return 0 if negative is None else max(0, len(negative) - len(request.prompt))


def refuse_unguided(request: Request, wraps: Sequence[str], facts: Facts, new: int) -> None:
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
    if not ids or min(ids) < 0 or max(ids) >= facts.vocabulary:
        raise InputError("negative_prompt_ids", f"must hold ids from 0 to {facts.vocabulary - 1}", given)
    # The last token is never fed.
    if facts.table is not None and len(ids) + new - 1 > facts.table:
        must = f"must leave room for {new} new tokens, the model has {facts.table} positions"
        raise InputError(
            "negative_prompt_ids", must, f"{len(ids)} tokens", "shorten it or lower max_new_tokens"
        )


def refuse_uncallable(request: Request) -> None:
    """Raise for processors and criteria that cannot be called."""
    for name in ("logits_processor", "stopping_criteria"):
        for one in getattr(request, name):
            if not callable(one) and not (name == "logits_processor" and hasattr(one, "process")):
                raise InputError(name, "must hold callables", one)

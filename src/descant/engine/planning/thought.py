"""The thought of a request: what tells where its rows think, and what closes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from descant.config.generation_config import GenerationConfig
from descant.errors import ConfigError, InputError
from descant.tokenization.regions import ThoughtTracker
from descant.tokenization.response_syntax import ResponseSyntax, ThoughtMarkers
from descant.tokenization.token_bytes import TokenBytes


def thought_tracker(
    tokenizer: Any, config: GenerationConfig, prompt: Sequence[int], num_healed: int = 0
) -> ThoughtTracker | None:
    """What tells the thought of a request's rows; None: it has none, or its budget goes by token ids.

    A grammar waits for a thought that its prompt opens. Where the prompt ends with the beginning of a turn,
    the model may open one by itself, unless its budget is 0.
    """
    if tokenizer is None:
        return None
    if config.thinking_end is not None:
        return None if config.grammar is None else _tracker_of_ids(tokenizer, config, prompt)
    syntax = ResponseSyntax.of_tokenizer(tokenizer)
    if syntax is None or syntax.thought is None:
        return None
    region = syntax.opening_region(tokenizer, prompt)
    if config.grammar is not None and num_healed:  # the grammar begins in the prompt
        region = "content"
    if config.grammar is not None and region == "start":
        special = TokenBytes.from_tokenizer(tokenizer).special_ids
        if config.thinking_budget == 0 or special.isdisjoint(prompt[1:]):
            region = "content"
    if region == "content" and config.thinking_budget is None:
        return None
    return ThoughtTracker(syntax.thought, tokenizer, region, config.thinking_budget)


def _tracker_of_ids(tokenizer: Any, config: GenerationConfig, prompt: Sequence[int]) -> ThoughtTracker:
    """The tracker of the markers that a config has as token ids."""
    start = _token_text(tokenizer, config.thinking_start or ())
    end = _token_text(tokenizer, config.thinking_end or ())
    markers = ThoughtMarkers((start,) if start else (), (end,))
    region = ResponseSyntax(markers).opening_region(tokenizer, prompt) if start else "reasoning"
    return ThoughtTracker(markers, tokenizer, region, config.thinking_budget)


def _token_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of tokens, special ones included."""
    vocabulary = TokenBytes.from_tokenizer(tokenizer)
    data = [vocabulary.bytes[token] if token < vocabulary.size else b"" for token in ids]
    return b"".join(data).decode(errors="replace")


def budget_tokens(tokenizer: Any, config: GenerationConfig, thought: ThoughtTracker | None) -> list[int]:
    """The tokens that close a thought when it has used up its budget."""
    end, text = config.thinking_end, config.thinking_message or ""
    if tokenizer is None and (end is None or text):
        name = "thinking_budget" if end is None else "thinking_message"
        do = "pass the model's tokenizer" if text else "pass the model's tokenizer, or set `thinking_end`"
        raise InputError("tokenizer", f"must be given with `{name}`", None, do)
    if end is None:
        if thought is None:
            must = "needs a tokenizer with markers of thoughts in its chat template or its added tokens"
            do = "set `thinking_end`, the tokens that end a thought, or leave it out"
            raise ConfigError("thinking_budget", must, config.thinking_budget, do)
        text += thought.markers.close[0]
    ids = tokenizer.encode(text, add_special_tokens=False) if text else []
    return [*map(int, getattr(ids, "ids", ids)), *(end or ())]

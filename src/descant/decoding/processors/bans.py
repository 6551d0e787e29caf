"""Bans: tokens that are never chosen, or not at the beginning, or not after what came before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from descant.config.generation_config import GenerationConfig
from descant.core.context import Context, PromptInfo
from descant.decoding.processors.base import LogitsProcessor, check_number, vocab_mask
from descant.decoding.processors.biases import check_max_token_id, check_sequences, completing_tokens
from descant.decoding.processors.lengths import TokenIds, as_id_list
from descant.decoding.processors.penalties import EncoderInputProcessor, as_source_ids
from descant.errors import InputError

__all__ = [
    "EncoderNoRepeatNGramLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "PrefixConstrainedLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
    "SuppressTokensLogitsProcessor",
]


class SuppressTokensLogitsProcessor(LogitsProcessor):
    """Rules tokens out everywhere."""

    config_fields = ("suppress_tokens",)

    def __init__(self, suppress_tokens: TokenIds, device: str = "cpu") -> None:  # noqa: ARG002
        self.suppress_tokens = as_id_list(suppress_tokens)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """The scores without those tokens."""
        return scores.masked_fill(vocab_mask(scores.shape, context.param("suppress_tokens")), -torch.inf)


class SuppressTokensAtBeginLogitsProcessor(LogitsProcessor):
    """Rules tokens out at one place, `begin_index`: the first that the model may choose freely."""

    config_fields = ("begin_suppress_tokens",)

    def __init__(self, begin_suppress_tokens: TokenIds, begin_index: int, device: str = "cpu") -> None:  # noqa: ARG002
        self.begin_suppress_tokens = as_id_list(begin_suppress_tokens)
        self.begin_index = check_number("begin_index", begin_index, 0, integer=True)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """The scores without those tokens at that place."""
        here = context.length == context.param("begin_index")
        return scores.masked_fill(
            vocab_mask(scores.shape, context.param("begin_suppress_tokens")) & here, -torch.inf
        )


def _ngram_completions(context: Context, store: Tensor, size: Tensor, most: int) -> Tensor:
    """Which tokens of `store` [N, S] end an n-gram, of that `size` [N, 1], that the line's last tokens begin.

    `store` holds -1 where it has no token, and `most` is the largest size.
    """
    same = (store >= 0) & (context.length >= size - 1)
    before = store
    for back in range(1, min(most, store.shape[1] + 1, context.tokens.shape[1] + 1)):
        before = torch.nn.functional.pad(before[:, :-1], (1, 0), value=-1)  # what stands `back` before
        last = context.tokens.gather(1, (context.length - back).clamp(min=0))  # [N, 1]
        same = same & ((before == last) | (size <= back))
    # The loop looks no further back than there are tokens: a longer n-gram is nowhere.
    return same & (size <= store.shape[1]) & (size > 0)


class NoRepeatNGramLogitsProcessor(LogitsProcessor):
    """Rules out every token that would repeat an n-gram of the row, prompt included.

    With a `window`, n-grams count only as long as all of them lies in the row's last so many tokens;
    0 means the whole row.
    """

    config_fields = ("no_repeat_ngram_size", "no_repeat_ngram_window")

    def __init__(self, ngram_size: int, window: int = 0) -> None:
        self.no_repeat_ngram_size = check_number("ngram_size", ngram_size, 1, integer=True)
        self.no_repeat_ngram_window = check_number("window", window, 0, integer=True)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """The scores without what would repeat."""
        size, window = context.param("no_repeat_ngram_size"), context.param("no_repeat_ngram_window")
        tokens = torch.where(context.valid, context.tokens, -1)
        again = _ngram_completions(context, tokens, size, context.max_on_host("no_repeat_ngram_size"))
        first = torch.arange(tokens.shape[1], device=tokens.device) - size + 1  # where each n-gram begins
        again &= (window <= 0) | (first >= context.length - window)
        return scores.masked_fill(vocab_mask(scores.shape, torch.where(again, tokens, -1)), -torch.inf)


class EncoderNoRepeatNGramLogitsProcessor(EncoderInputProcessor):
    """Rules out every token that would repeat an n-gram of the encoder's input."""

    def __init__(self, encoder_ngram_size: int, encoder_input_ids: Tensor) -> None:
        self.encoder_no_repeat_ngram_size = check_number(
            "encoder_ngram_size", encoder_ngram_size, 1, integer=True
        )
        self.source_ids = as_source_ids(encoder_input_ids)

    @classmethod
    def params_from_config(cls, config: GenerationConfig, prompt: PromptInfo) -> dict[str, Any]:
        """The size, and whose n-grams."""
        name = "encoder_no_repeat_ngram_size"
        return {name: getattr(config, name), "source_ids": prompt.source_ids()}

    def process_with_source(self, context: Context, scores: Tensor, sources: Tensor) -> Tensor:
        """The scores without what would repeat the source."""
        name = "encoder_no_repeat_ngram_size"
        again = _ngram_completions(context, sources, context.param(name), context.max_on_host(name))
        return scores.masked_fill(vocab_mask(scores.shape, torch.where(again, sources, -1)), -torch.inf)


class NoBadWordsLogitsProcessor(LogitsProcessor):
    """Rules out every token that would complete one of some sequences.

    A sequence that is only one of `eos_token_id` is passed over: rows must be able to end.
    """

    bad_words_ids: list[list[int]]
    bad_words_sizes: list[int]
    max_token_id = -1

    def __init__(self, bad_words_ids: Sequence[Sequence[int]], eos_token_id: TokenIds | None = None) -> None:
        vars(self).update(_bad_words_params(bad_words_ids, as_id_list(eos_token_id)))
        self.max_token_id = max(map(max, self.bad_words_ids))

    @classmethod
    def params_from_config(cls, config: GenerationConfig, prompt: PromptInfo) -> dict[str, Any]:  # noqa: ARG003
        """The sequences and how long each is."""
        return _bad_words_params(config.bad_words_ids or (), as_id_list(config.eos_token_id))

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """The scores without what would complete a sequence."""
        check_max_token_id("bad_words_ids", self.max_token_id, scores)
        complete, token = completing_tokens(
            context, context.param("bad_words_ids"), context.param("bad_words_sizes")
        )
        return scores.masked_fill(vocab_mask(scores.shape, torch.where(complete, token, -1)), -torch.inf)


def _bad_words_params(value: Any, eos: list[int]) -> dict[str, Any]:
    if not isinstance(value, list | tuple) or not value:
        raise InputError("bad_words_ids", "must hold sequences of token ids", value, "write [[5, 6], [7]]")
    ends = [[one] for one in eos]
    words = [word for word in check_sequences("bad_words_ids", value) if word not in ends]
    return {"bad_words_ids": words or [[-1]], "bad_words_sizes": [len(word) for word in words] or [0]}


class PrefixConstrainedLogitsProcessor(LogitsProcessor):
    """Leaves only the tokens that a function allows after each row (De Cao et al. 2021).

    `prefix_allowed_tokens_fn(batch_id, ids)` is told which prompt of the call a row continues and the
    row's ids [L], without padding, and returns the ids of the tokens that may follow. By hand, every
    `num_beams` lines belong to one prompt.
    """

    def __init__(
        self, prefix_allowed_tokens_fn: Callable[[int, Tensor], Sequence[int]] | Any, num_beams: int = 1
    ) -> None:
        if not callable(prefix_allowed_tokens_fn):
            must = "must be a function (batch_id, ids) -> token ids"
            raise InputError("prefix_allowed_tokens_fn", must, prefix_allowed_tokens_fn)
        self.prefix_allowed_tokens_fn = prefix_allowed_tokens_fn
        self.num_beams = check_number("num_beams", num_beams, 1, integer=True)

    @classmethod
    def params_from_config(cls, config: GenerationConfig, prompt: PromptInfo) -> dict[str, Any]:
        """The function, and which prompt a row continues."""
        return {
            "prefix_allowed_tokens_fn": config.prefix_allowed_tokens_fn,
            "prompt_index": prompt.prompt_index,
        }

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """New scores [N, V] after the ids [N, L], all of which count as real."""
        batch = [line // self.num_beams for line in range(len(input_ids))]
        context = Context.standalone(input_ids, vars(self))
        return _mask_disallowed(self._allowed_tokens(context, scores, batch, min_tokens=1), scores)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """The scores of the allowed tokens, of lines whose prompts the context knows.

        Where nothing is allowed nothing is left, and that row alone fails.
        """
        batch = context.param("prompt_index").squeeze(1).tolist()
        return _mask_disallowed(self._allowed_tokens(context, scores, batch), scores)

    def _allowed_tokens(
        self, context: Context, scores: Tensor, batch: list[int], min_tokens: int = 0
    ) -> list[list[int]]:
        """What the function allows after each line."""
        functions = context.object_param("prefix_allowed_tokens_fn")
        lengths = context.length.squeeze(1).tolist()
        lines = zip(functions, batch, context.tokens, lengths, strict=True)
        return [
            _check_allowed(function(prompt, tokens[:length].clone()), prompt, scores.shape[1], min_tokens)
            for function, prompt, tokens, length in lines
        ]


def _mask_disallowed(answers: list[list[int]], scores: Tensor) -> Tensor:
    """The scores of the tokens allowed, nothing else [N, V]."""
    wide = max(1, *map(len, answers))
    ids = torch.tensor([answer + [-1] * (wide - len(answer)) for answer in answers], device=scores.device)
    return scores.masked_fill(~vocab_mask(scores.shape, ids), -torch.inf)


def _check_allowed(answer: Any, prompt: int, vocabulary: int, least: int) -> list[int]:
    """What the function returned, as a list of at least so many ids."""
    name = "prefix_allowed_tokens_fn"
    ids = answer.tolist() if isinstance(answer, Tensor) else answer
    if not isinstance(ids, Iterable) or isinstance(ids, str | bytes):
        raise InputError(name, "must return a list of token ids", answer)
    ids = list(ids)
    if len(ids) < least:
        must = f"must allow at least one token, for prompt {prompt} too"
        raise InputError(name, must, answer, "return the end token where nothing may follow")
    odd = [one for one in ids if not isinstance(one, Integral) or not 0 <= int(one) < vocabulary]
    if odd:
        raise InputError(name, f"must return token ids below {vocabulary}, the vocabulary", odd[0])
    return [int(one) for one in ids]

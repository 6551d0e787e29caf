"""Bans: tokens that are never chosen, or not at the beginning, or not after what came before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from descant.config.generation_config import GenerationConfig
from descant.core.context import Context, Prompt
from descant.decoding.processors.base import LogitsProcessor, marked, number
from descant.decoding.processors.biases import about_to_end, refuse_strangers, sequences
from descant.decoding.processors.lengths import Ids, ids_of
from descant.decoding.processors.penalties import Sourced, source_of
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

    reads = ("suppress_tokens",)

    def __init__(self, suppress_tokens: Ids, device: str = "cpu") -> None:  # noqa: ARG002
        self.suppress_tokens = ids_of(suppress_tokens)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """The scores without those tokens."""
        return scores.masked_fill(marked(scores.shape, context.param("suppress_tokens")), -torch.inf)


class SuppressTokensAtBeginLogitsProcessor(LogitsProcessor):
    """Rules tokens out at one place, `begin_index`: the first that the model may choose freely."""

    reads = ("begin_suppress_tokens",)

    def __init__(self, begin_suppress_tokens: Ids, begin_index: int, device: str = "cpu") -> None:  # noqa: ARG002
        self.begin_suppress_tokens = ids_of(begin_suppress_tokens)
        self.begin_index = number("begin_index", begin_index, 0, whole=True)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """The scores without those tokens at that place."""
        here = context.length == context.param("begin_index")
        return scores.masked_fill(
            marked(scores.shape, context.param("begin_suppress_tokens")) & here, -torch.inf
        )


def _repeats(context: Context, store: Tensor, size: Tensor, most: int) -> Tensor:
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

    reads = ("no_repeat_ngram_size", "no_repeat_ngram_window")

    def __init__(self, ngram_size: int, window: int = 0) -> None:
        self.no_repeat_ngram_size = number("ngram_size", ngram_size, 1, whole=True)
        self.no_repeat_ngram_window = number("window", window, 0, whole=True)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """The scores without what would repeat."""
        size, window = context.param("no_repeat_ngram_size"), context.param("no_repeat_ngram_window")
        tokens = torch.where(context.valid, context.tokens, -1)
        again = _repeats(context, tokens, size, context.largest("no_repeat_ngram_size"))
        first = torch.arange(tokens.shape[1], device=tokens.device) - size + 1  # where each n-gram begins
        again &= (window <= 0) | (first >= context.length - window)
        return scores.masked_fill(marked(scores.shape, torch.where(again, tokens, -1)), -torch.inf)


class EncoderNoRepeatNGramLogitsProcessor(Sourced):
    """Rules out every token that would repeat an n-gram of the encoder's input."""

    def __init__(self, encoder_ngram_size: int, encoder_input_ids: Tensor) -> None:
        self.encoder_no_repeat_ngram_size = number("encoder_ngram_size", encoder_ngram_size, 1, whole=True)
        self.source = source_of(encoder_input_ids)

    @classmethod
    def columns(cls, config: GenerationConfig, prompt: Prompt) -> dict[str, Any]:
        """The size, and whose n-grams."""
        name = "encoder_no_repeat_ngram_size"
        return {name: getattr(config, name), "source": prompt.source()}

    def sourced(self, context: Context, scores: Tensor, sources: Tensor) -> Tensor:
        """The scores without what would repeat the source."""
        name = "encoder_no_repeat_ngram_size"
        again = _repeats(context, sources, context.param(name), context.largest(name))
        return scores.masked_fill(marked(scores.shape, torch.where(again, sources, -1)), -torch.inf)


class NoBadWordsLogitsProcessor(LogitsProcessor):
    """Rules out every token that would complete one of some sequences.

    A sequence that is only one of `eos_token_id` is passed over: rows must be able to end.
    """

    bad_words_ids: list[list[int]]
    bad_words_sizes: list[int]
    highest = -1

    def __init__(self, bad_words_ids: Sequence[Sequence[int]], eos_token_id: Ids | None = None) -> None:
        vars(self).update(_words(bad_words_ids, ids_of(eos_token_id)))
        self.highest = max(map(max, self.bad_words_ids))

    @classmethod
    def columns(cls, config: GenerationConfig, prompt: Prompt) -> dict[str, Any]:  # noqa: ARG003
        """The sequences and how long each is."""
        return _words(config.bad_words_ids or (), ids_of(config.eos_token_id))

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """The scores without what would complete a sequence."""
        refuse_strangers("bad_words_ids", self.highest, scores)
        complete, token = about_to_end(
            context, context.param("bad_words_ids"), context.param("bad_words_sizes")
        )
        return scores.masked_fill(marked(scores.shape, torch.where(complete, token, -1)), -torch.inf)


def _words(value: Any, eos: list[int]) -> dict[str, Any]:
    if not isinstance(value, list | tuple) or not value:
        raise InputError("bad_words_ids", "must hold sequences of token ids", value, "write [[5, 6], [7]]")
    ends = [[one] for one in eos]
    words = [word for word in sequences("bad_words_ids", value) if word not in ends]
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
        self.num_beams = number("num_beams", num_beams, 1, whole=True)

    @classmethod
    def columns(cls, config: GenerationConfig, prompt: Prompt) -> dict[str, Any]:
        """The function, and which prompt a row continues."""
        return {"prefix_allowed_tokens_fn": config.prefix_allowed_tokens_fn, "batch": prompt.batch}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """New scores [N, V] after the ids [N, L], all of which count as real."""
        batch = [line // self.num_beams for line in range(len(input_ids))]
        context = Context.standalone(input_ids, vars(self))
        return _kept(self._answers(context, scores, batch, least=1), scores)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """The scores of the allowed tokens, of lines whose prompts the context knows.

        Where nothing is allowed nothing is left, and that row alone fails.
        """
        batch = context.param("batch").squeeze(1).tolist()
        return _kept(self._answers(context, scores, batch), scores)

    def _answers(self, context: Context, scores: Tensor, batch: list[int], least: int = 0) -> list[list[int]]:
        """What the function allows after each line."""
        functions = context.objects("prefix_allowed_tokens_fn")
        lengths = context.length.squeeze(1).tolist()
        lines = zip(functions, batch, context.tokens, lengths, strict=True)
        return [
            _allowed(function(prompt, tokens[:length].clone()), prompt, scores.shape[1], least)
            for function, prompt, tokens, length in lines
        ]


def _kept(answers: list[list[int]], scores: Tensor) -> Tensor:
    """The scores of the tokens allowed, nothing else [N, V]."""
    wide = max(1, *map(len, answers))
    ids = torch.tensor([answer + [-1] * (wide - len(answer)) for answer in answers], device=scores.device)
    return scores.masked_fill(~marked(scores.shape, ids), -torch.inf)


def _allowed(answer: Any, prompt: int, vocabulary: int, least: int) -> list[int]:
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

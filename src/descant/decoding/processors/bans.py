"""Token bans: suppressed tokens, repeated n-grams, bad words, and user-defined prefix constraints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from descant.config.generation_config import GenerationConfig
from descant.core.context import Context, PromptInfo
from descant.decoding.processors.base import LogitsProcessor, TokenIds, as_id_list, check_number, vocab_mask
from descant.decoding.processors.penalties import EncoderInputProcessor, as_source_ids
from descant.errors import InputError


def check_sequences(name: str, value: Sequence[Any]) -> list[list[int]]:
    """Return the sequences of token ids as lists; raise if one is empty or invalid."""
    checked = []
    for sequence in value:
        ids = list(sequence) if isinstance(sequence, Sequence) and not isinstance(sequence, str) else []
        if not ids or any(isinstance(token, bool) or not isinstance(token, Integral) for token in ids):
            raise InputError(name, "must contain non-empty sequences of token ids", sequence)
        if min(ids) < 0:
            raise InputError(name, "must contain token ids >= 0", sequence)
        checked.append([int(token) for token in ids])
    return checked


def completing_tokens(context: Context, ids: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Return which sequences one more token would complete [N, K], and that token [N, K].

    `ids` [N, K, W] are the sequences, padded on the right; `sizes` [N, K] are their lengths, 0 if unused.
    """
    last = sizes.clamp(min=1) - 1  # [N, K]
    complete = (sizes > 0) & (sizes <= context.length + 1)
    for back in range(1, min(ids.shape[2], context.tokens.shape[1] + 1)):
        expected = ids.gather(2, (last - back).clamp(min=0)[:, :, None]).squeeze(2)
        actual = context.tokens.gather(1, (context.length - back).clamp(min=0))  # [N, 1]
        complete &= (actual == expected) | (last < back)
    return complete, ids.gather(2, last[:, :, None]).squeeze(2)


class SequenceBiasLogitsProcessor(LogitsProcessor):
    """Adds a bias to the token that would complete a sequence; a single token is always biased.

    `sequence_bias` maps sequences to biases: `{(10, 45): -2.0, (64,): -7.5}`, or the JSON form
    `[[[10, 45], -2.0], [[64], -7.5]]`.
    """

    sequence_bias: list[float]
    sequence_bias_ids: list[list[int]]
    sequence_bias_sizes: list[int]
    max_token_id = -1

    def __init__(self, sequence_bias: Mapping[tuple[int, ...], float] | Sequence[Any]) -> None:
        vars(self).update(_sequence_bias_params(sequence_bias))
        self.max_token_id = max(map(max, self.sequence_bias_ids))

    @classmethod
    def params_from_config(cls, config: GenerationConfig, prompt: PromptInfo) -> dict[str, Any]:  # noqa: ARG003
        """Return the sequences, their lengths and their biases."""
        return _sequence_bias_params(config.sequence_bias or {})

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Add the biases of the sequences that would be completed."""
        check_max_token_id("sequence_bias", self.max_token_id, scores)
        complete, token = completing_tokens(
            context, context.param("sequence_bias_ids"), context.param("sequence_bias_sizes")
        )
        bias = torch.where(complete, context.param("sequence_bias").to(scores.dtype), 0.0)
        # transformers sums the biases of a token before it adds them to the score.
        return scores + torch.zeros_like(scores).scatter_add_(1, *_drop_unknown_ids(scores, token, bias))


def _sequence_bias_params(value: Any) -> dict[str, Any]:
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, list | tuple) or not pairs:
        must = "must map sequences of token ids to biases"
        raise InputError("sequence_bias", must, value, "write {(10, 45): -2.0} or [[[10, 45], -2.0]]")
    if any(not isinstance(pair, list | tuple) or len(pair) != 2 for pair in pairs):
        raise InputError("sequence_bias", "must contain pairs of a sequence and its bias", value)
    ids = check_sequences("sequence_bias", [pair[0] for pair in pairs])
    biases = {
        tuple(sequence): _check_bias("sequence_bias", pair[1])
        for sequence, pair in zip(ids, pairs, strict=True)
    }
    # Float sums depend on the order: single tokens first, as in transformers.
    ordered = sorted(biases, key=lambda sequence: len(sequence) > 1)
    return {
        "sequence_bias_ids": [list(sequence) for sequence in ordered],
        "sequence_bias_sizes": [len(sequence) for sequence in ordered],
        "sequence_bias": [biases[sequence] for sequence in ordered],
    }


class LogitBiasLogitsProcessor(LogitsProcessor):
    """Adds a bias to the scores of single tokens, like the OpenAI API's `logit_bias`.

    -100 or -inf effectively bans a token.
    """

    logit_bias: list[float]
    logit_bias_ids: list[int]
    max_token_id = -1

    def __init__(self, logit_bias: Mapping[int, float]) -> None:
        vars(self).update(_logit_bias_params(logit_bias))
        self.max_token_id = max(self.logit_bias_ids)

    @classmethod
    def params_from_config(cls, config: GenerationConfig, prompt: PromptInfo) -> dict[str, Any]:  # noqa: ARG003
        """Return the tokens and their biases."""
        return _logit_bias_params(config.logit_bias or {})

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Add the biases."""
        check_max_token_id("logit_bias", self.max_token_id, scores)
        ids = context.param("logit_bias_ids")
        return scores.scatter_add(
            1, *_drop_unknown_ids(scores, ids, context.param("logit_bias").to(scores.dtype))
        )


def _logit_bias_params(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not value:
        raise InputError("logit_bias", "must map token ids to biases", value, "write {50256: -100.0}")
    ids = [token_id for (token_id,) in check_sequences("logit_bias", [[token] for token in value])]
    return {"logit_bias_ids": ids, "logit_bias": [_check_bias("logit_bias", bias) for bias in value.values()]}


def _check_bias(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or value != value:
        raise InputError(name, "must have numbers as biases", value)
    return float(value)


def _drop_unknown_ids(scores: Tensor, ids: Tensor, amounts: Tensor) -> tuple[Tensor, Tensor]:
    """Return ids and amounts [N, W] for a scatter-add; an id out of range adds 0."""
    known = (ids >= 0) & (ids < scores.shape[1])
    return torch.where(known, ids, 0), torch.where(known, amounts, 0.0)


def check_max_token_id(name: str, max_token_id: int, scores: Tensor) -> None:
    """Raise if a token id is outside the vocabulary of the scores."""
    if max_token_id >= scores.shape[1]:
        raise InputError(
            name, f"must have token ids below {scores.shape[1]}, the vocabulary size", max_token_id
        )


class SuppressTokensLogitsProcessor(LogitsProcessor):
    """Masks tokens at every position."""

    config_fields = ("suppress_tokens",)

    def __init__(self, suppress_tokens: TokenIds, device: str = "cpu") -> None:  # noqa: ARG002
        self.suppress_tokens = as_id_list(suppress_tokens)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Mask the tokens."""
        return scores.masked_fill(vocab_mask(scores.shape, context.param("suppress_tokens")), -torch.inf)


class SuppressTokensAtBeginLogitsProcessor(LogitsProcessor):
    """Masks tokens at one position, `begin_index`: the first that is not forced."""

    config_fields = ("begin_suppress_tokens",)

    def __init__(self, begin_suppress_tokens: TokenIds, begin_index: int, device: str = "cpu") -> None:  # noqa: ARG002
        self.begin_suppress_tokens = as_id_list(begin_suppress_tokens)
        self.begin_index = check_number("begin_index", begin_index, 0, integer=True)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Mask the tokens in rows of length `begin_index`."""
        at_begin = context.length == context.param("begin_index")
        return scores.masked_fill(
            vocab_mask(scores.shape, context.param("begin_suppress_tokens")) & at_begin, -torch.inf
        )


def _ngram_completions(context: Context, source: Tensor, size: Tensor, max_size: int) -> Tensor:
    """Mask [N, S] of the tokens of `source` that complete an n-gram begun by the row's last tokens.

    `source` [N, S] is padded with -1, `size` [N, 1] is each row's n, and `max_size` the largest of them.
    """
    matches = (source >= 0) & (context.length >= size - 1)
    before = source
    for back in range(1, min(max_size, source.shape[1] + 1, context.tokens.shape[1] + 1)):
        before = torch.nn.functional.pad(before[:, :-1], (1, 0), value=-1)  # `back` tokens earlier
        last = context.tokens.gather(1, (context.length - back).clamp(min=0))  # [N, 1]
        matches = matches & ((before == last) | (size <= back))
    # The loop compares at most as many tokens as there are: a longer n-gram cannot match.
    return matches & (size <= source.shape[1]) & (size > 0)


class NoRepeatNGramLogitsProcessor(LogitsProcessor):
    """Masks every token that would repeat an n-gram of the row, prompt included.

    With a `window`, only n-grams that lie entirely within the row's last `window` tokens count; 0 means the
    whole row.
    """

    config_fields = ("no_repeat_ngram_size", "no_repeat_ngram_window")

    def __init__(self, ngram_size: int, window: int = 0) -> None:
        self.no_repeat_ngram_size = check_number("ngram_size", ngram_size, 1, integer=True)
        self.no_repeat_ngram_window = check_number("window", window, 0, integer=True)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Mask the tokens that would complete a repeated n-gram."""
        size, window = context.param("no_repeat_ngram_size"), context.param("no_repeat_ngram_window")
        tokens = torch.where(context.valid, context.tokens, -1)
        repeats = _ngram_completions(context, tokens, size, context.max_on_host("no_repeat_ngram_size"))
        ngram_start = torch.arange(tokens.shape[1], device=tokens.device) - size + 1  # [L]
        repeats &= (window <= 0) | (ngram_start >= context.length - window)
        return scores.masked_fill(vocab_mask(scores.shape, torch.where(repeats, tokens, -1)), -torch.inf)


class EncoderNoRepeatNGramLogitsProcessor(EncoderInputProcessor):
    """Masks every token that would repeat an n-gram of the encoder's input."""

    def __init__(self, encoder_ngram_size: int, encoder_input_ids: Tensor) -> None:
        self.encoder_no_repeat_ngram_size = check_number(
            "encoder_ngram_size", encoder_ngram_size, 1, integer=True
        )
        self.source_ids = as_source_ids(encoder_input_ids)

    @classmethod
    def params_from_config(cls, config: GenerationConfig, prompt: PromptInfo) -> dict[str, Any]:
        """Return the n-gram size and the encoder's input ids."""
        name = "encoder_no_repeat_ngram_size"
        return {name: getattr(config, name), "source_ids": prompt.source_ids()}

    def process_with_source(self, context: Context, scores: Tensor, sources: Tensor) -> Tensor:
        """Mask the tokens that would complete an n-gram of the source."""
        name = "encoder_no_repeat_ngram_size"
        repeats = _ngram_completions(context, sources, context.param(name), context.max_on_host(name))
        return scores.masked_fill(vocab_mask(scores.shape, torch.where(repeats, sources, -1)), -torch.inf)


class NoBadWordsLogitsProcessor(LogitsProcessor):
    """Masks every token that would complete one of the bad words.

    A bad word that is a single end token is ignored, because rows must be able to end.
    """

    bad_words_ids: list[list[int]]
    bad_words_sizes: list[int]
    max_token_id = -1

    def __init__(self, bad_words_ids: Sequence[Sequence[int]], eos_token_id: TokenIds | None = None) -> None:
        vars(self).update(_bad_words_params(bad_words_ids, as_id_list(eos_token_id)))
        self.max_token_id = max(map(max, self.bad_words_ids))

    @classmethod
    def params_from_config(cls, config: GenerationConfig, prompt: PromptInfo) -> dict[str, Any]:  # noqa: ARG003
        """Return the bad words and their lengths."""
        return _bad_words_params(config.bad_words_ids or (), as_id_list(config.eos_token_id))

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Mask the tokens that would complete a bad word."""
        check_max_token_id("bad_words_ids", self.max_token_id, scores)
        complete, token = completing_tokens(
            context, context.param("bad_words_ids"), context.param("bad_words_sizes")
        )
        return scores.masked_fill(vocab_mask(scores.shape, torch.where(complete, token, -1)), -torch.inf)


def _bad_words_params(value: Any, eos: list[int]) -> dict[str, Any]:
    if not isinstance(value, list | tuple) or not value:
        raise InputError("bad_words_ids", "must be a list of token id lists", value, "write [[5, 6], [7]]")
    end_words = [[token] for token in eos]
    words = [word for word in check_sequences("bad_words_ids", value) if word not in end_words]
    return {"bad_words_ids": words or [[-1]], "bad_words_sizes": [len(word) for word in words] or [0]}


class PrefixConstrainedLogitsProcessor(LogitsProcessor):
    """Allows only the tokens that a function returns for each row (De Cao et al. 2021).

    `prefix_allowed_tokens_fn(batch_id, ids)` receives the index of the row's prompt and the row's ids [L]
    without padding, and returns the ids of the allowed next tokens. In a direct call, every `num_beams`
    consecutive rows belong to one prompt.
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
        """Return the function and the row's prompt index."""
        return {
            "prefix_allowed_tokens_fn": config.prefix_allowed_tokens_fn,
            "prompt_index": prompt.prompt_index,
        }

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return new scores [N, V] for the ids [N, L], none of which is treated as padding."""
        prompts = [row // self.num_beams for row in range(len(input_ids))]
        context = Context.standalone(input_ids, vars(self))
        return _mask_disallowed(self._allowed_tokens(context, scores, prompts, min_tokens=1), scores)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Mask the tokens that are not allowed.

        If no token is allowed, all are masked, and only that row fails.
        """
        prompts = context.param("prompt_index").squeeze(1).tolist()
        return _mask_disallowed(self._allowed_tokens(context, scores, prompts), scores)

    def _allowed_tokens(
        self, context: Context, scores: Tensor, prompts: list[int], min_tokens: int = 0
    ) -> list[list[int]]:
        """Call the function for each row and return the allowed tokens."""
        functions = context.object_param("prefix_allowed_tokens_fn")
        lengths = context.length.squeeze(1).tolist()
        rows = zip(functions, prompts, context.tokens, lengths, strict=True)
        return [
            _check_allowed(function(prompt, tokens[:length].clone()), prompt, scores.shape[1], min_tokens)
            for function, prompt, tokens, length in rows
        ]


def _mask_disallowed(allowed: list[list[int]], scores: Tensor) -> Tensor:
    """Mask all tokens that are not allowed [N, V]."""
    width = max(1, *map(len, allowed))
    ids = torch.tensor([tokens + [-1] * (width - len(tokens)) for tokens in allowed], device=scores.device)
    return scores.masked_fill(~vocab_mask(scores.shape, ids), -torch.inf)


def _check_allowed(result: Any, prompt: int, vocab_size: int, min_tokens: int) -> list[int]:
    """Return the function's result as a list of at least `min_tokens` valid ids."""
    name = "prefix_allowed_tokens_fn"
    ids = result.tolist() if isinstance(result, Tensor) else result
    if not isinstance(ids, Iterable) or isinstance(ids, str | bytes):
        raise InputError(name, "must return a list of token ids", result)
    ids = list(ids)
    if len(ids) < min_tokens:
        must = f"must allow at least one token, also for prompt {prompt}"
        raise InputError(name, must, result, "return the end token where no other token may follow")
    invalid = [token for token in ids if not isinstance(token, Integral) or not 0 <= int(token) < vocab_size]
    if invalid:
        raise InputError(name, f"must return token ids below {vocab_size}, the vocabulary size", invalid[0])
    return [int(token) for token in ids]


class BacktrackMaskProcessor(LogitsProcessor):
    """Masks the tokens a row has retracted at its position, read from the column `masked_tokens`.

    This is a processor and not part of selection, because warpers must see the remaining distribution.
    """

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Mask the retracted tokens."""
        masked = context.state("masked_tokens")[:, 0]  # [N, W] (host), padded with -1
        if not bool((masked >= 0).any()):
            return scores
        return scores.masked_fill(vocab_mask(scores.shape, masked.to(scores.device)), -torch.inf)

"""SynthID-Text: keyed g-values, the processor, detection by mean g-values, and the documented detector."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from descant.config.watermarking_config import SynthIDTextWatermarkingConfig
from descant.core.context import Context
from descant.core.interfaces import Array
from descant.decoding.processors.base import check_number
from descant.decoding.processors.filters import above_threshold, scatter_candidates
from descant.decoding.watermark.keys import warn_if_public
from descant.decoding.watermark.processor import BaseWatermarkProcessor
from descant.decoding.watermark.statistics import (
    PaddingTokens,
    TokenScores,
    WatermarkScheme,
    mean_interval,
    weighted_tail,
)
from descant.errors import InputError

LCG_MULTIPLIER: Final = 6364136223846793005  # Knuth's generator, as in newlib and musl
_MAX_TABLE_BYTES: Final = 2**25


def lcg_hash(hashes: Tensor, data: Tensor, multiplier: int = LCG_MULTIPLIER, increment: int = 1) -> Tensor:
    """Update the hashes [...] with the numbers [..., W], by a linear congruential generator modulo 2^64."""
    for index in range(data.shape[-1]):
        hashes = (hashes + data[..., index]) * multiplier + increment
    return hashes


def repetition_mask(hashes: Tensor, history: int) -> Tensor:
    """Mask of the hashes [N, C] that equal one of the previous `history` in their row."""
    ordered, order = hashes.sort(dim=1, stable=True)
    repeats = (ordered[:, 1:] == ordered[:, :-1]) & (order[:, 1:] - order[:, :-1] <= history)
    return torch.zeros_like(hashes, dtype=torch.bool).scatter_(1, order[:, 1:], repeats)


def before_eos_mask(input_ids: Tensor, eos_token_id: int) -> Tensor:
    """Mask of the ids [N, L] before the first end token of their row."""
    return (input_ids == eos_token_id).cumsum(1) == 0


@lru_cache(maxsize=8)
def sampling_table(size: int, seed: int) -> Tensor:
    """The table of random bits that g-values are looked up in [S] uint8, from the CPU generator."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (size,), generator=generator).to(torch.uint8)


class Tournament:
    """G-values of SynthID-Text (Dathathri et al. 2024, Nature 634): one bit per token and round.

    A token is hashed with the `context_size` tokens before it and with the round's key; the hash modulo the
    table size is its index in the sampling table. If that size is a power of two, only the low bits matter:
    the g-values of token `v` after a context with hash `c` depend on `c + v` only, so that those of a whole
    vocabulary are a slice of one precomputed table.
    """

    def __init__(self, settings: SynthIDTextWatermarkingConfig) -> None:
        self.settings = settings
        self.context_size = settings.ngram_len - 1
        self.depth = len(settings.keys)
        self.table_size = settings.sampling_table_size
        self.sampling_table = sampling_table(self.table_size, settings.sampling_table_seed)
        self.ones_fraction = float(self.sampling_table.double().mean())
        self.is_power_of_two = self.table_size & (self.table_size - 1) == 0
        self._has_g_value_table = self.is_power_of_two and self.table_size * self.depth <= _MAX_TABLE_BYTES
        self._device_tensors: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._g_value_tables: dict[torch.device, Tensor] = {}

    @property
    def distinct_rounds(self) -> list[int]:
        """The rounds without repetitions of an earlier round's key."""
        modulus = self.table_size if self.is_power_of_two else 2**64
        first = {key % modulus: depth for depth, key in reversed(list(enumerate(self.settings.keys)))}
        return sorted(first.values())

    def context_hashes(self, tokens: Tensor) -> Tensor:
        """Hashes of all runs of `context_size` tokens [..., L] -> [..., L - context_size + 1]."""
        count = tokens.shape[-1] - self.context_size + 1
        hashes = tokens.new_ones((*tokens.shape[:-1], count))
        # Position by position for all runs, which avoids copying the runs.
        for offset in range(self.context_size):
            hashes = (hashes + tokens[..., offset : offset + count]) * LCG_MULTIPLIER + 1
        return hashes

    def current_contexts(
        self, tokens: Tensor, length: Tensor, generated: Tensor, max_generated: int
    ) -> tuple[Tensor, Tensor]:
        """Return the hash of each row's context [N, 1], and whether it may be marked [N, 1].

        A row is `tokens[i, :length[i]]` [N, L], [N, 1], of which the last `generated` [N, 1] are generated,
        at most `max_generated`. Only these are part of a context, padded with zeros. A row is marked unless
        the context is one of the last `context_history_size`.
        """
        history = min(max_generated, self.settings.context_history_size)
        positions = length + torch.arange(-history - self.context_size, 0, device=tokens.device)
        gathered = tokens.gather(1, positions.clamp(0, tokens.shape[1] - 1)) if tokens.shape[1] else positions
        hashes = self.context_hashes(
            torch.where(positions >= length - generated, gathered, 0)
        )  # [N, back + 1]
        first = self.context_size if self.settings.skip_first_ngram_calls else 0
        exists = generated - torch.arange(history, 0, -1, device=tokens.device) >= first
        repeated = ((hashes[:, :-1] == hashes[:, -1:]) & exists).any(1, keepdim=True)
        return hashes[:, -1:], ~repeated & (generated >= first)

    def g_value_inputs(self, contexts: Tensor, tokens: Tensor) -> Tensor:
        """The input of the g-values of tokens [...]: equal inputs have equal g-values under any key."""
        return (contexts + tokens) & (self.table_size - 1) if self.is_power_of_two else contexts + tokens

    def ngram_keys(self, ngrams: Tensor) -> Tensor:
        """Combine n-gram hashes [...] with the key of every round [..., D]."""
        return (ngrams[..., None] + self._on_device(ngrams.device)[0]) * LCG_MULTIPLIER + 1

    def lookup_g_values(self, ngram_keys: Tensor) -> Tensor:
        """Look up the g-values, 0 or 1, of keyed hashes [...]."""
        return self._on_device(ngram_keys.device)[1][ngram_keys % self.table_size]

    def g_values(self, contexts: Tensor, tokens: Tensor) -> Tensor:
        """G-values of tokens [...] after contexts [...], per round [..., D]."""
        return self.lookup_g_values(self.ngram_keys((contexts + tokens) * LCG_MULTIPLIER + 1))

    def iter_g_values(self, contexts: Tensor, tokens: Tensor) -> Iterator[Tensor]:
        """Yield each round's g-values [N, K], for tokens [N, K] or [K] after contexts [N, 1]."""
        if self._has_g_value_table:
            g_value_table = self._g_value_table(contexts.device, 0)
            index = (contexts + tokens) & (self.table_size - 1)
            yield from (g_value_table[depth][index] for depth in range(self.depth))
            return
        ngrams = (contexts + tokens) * LCG_MULTIPLIER + 1
        keys, table = self._on_device(contexts.device)
        for key in keys.unbind():
            yield table[((ngrams + key) * LCG_MULTIPLIER + 1) % self.table_size]

    def vocab_g_values(self, context: int, vocab_size: int) -> Tensor | None:
        """G-values of the whole vocabulary after one context [D, V], a view; None if there is no table."""
        if not self._has_g_value_table:
            return None
        start = context & (self.table_size - 1)
        return self._g_value_table(torch.device("cpu"), vocab_size)[:, start : start + vocab_size]

    def _on_device(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The keys [D] and the sampling table [S] on a device."""
        if device not in self._device_tensors:
            keys = torch.tensor(self.settings.keys, dtype=torch.long)
            self._device_tensors[device] = keys.to(device), self.sampling_table.to(device)
        return self._device_tensors[device]

    def _g_value_table(self, device: torch.device, vocab_size: int) -> Tensor:
        """G-values of each residue, extended periodically by the vocabulary size [D, S + V]."""
        table = self._g_value_tables.get(device)
        if table is None or table.shape[1] < self.table_size + vocab_size:
            residues = torch.arange(self.table_size, device=device)
            ngrams = residues * LCG_MULTIPLIER + 1
            g_values = [
                self.lookup_g_values((ngrams + key) * LCG_MULTIPLIER + 1)
                for key in self._on_device(device)[0].unbind()
            ]
            periodic = torch.arange(self.table_size + vocab_size, device=device) & (self.table_size - 1)
            table = torch.stack([values[periodic] for values in g_values])
            self._g_value_tables[device] = table
        return table


@lru_cache(maxsize=32)
def get_tournament(settings: SynthIDTextWatermarkingConfig) -> Tournament:
    """Return the cached tournament of the settings."""
    return Tournament(settings)


_LARGE_VOCAB = 4096  # vocabulary size above which rows are processed one by one, to stay in the CPU cache


class SynthIDTextWatermarkLogitsProcessor(BaseWatermarkProcessor):
    """Tournament sampling by keyed g-values (SynthID-Text, Dathathri et al. 2024, Nature 634).

    In each of `len(keys)` rounds, a token with g-value 1 gains the mass share of the tokens with 0, and a
    token with 0 loses the share of those with 1, so that the distribution is unchanged over random keys. The
    g-values depend on the last `ngram_len - 1` generated tokens, padded with zeros, and are the same on every
    device. Rows are unchanged if the context is one of the last `context_history_size`, or, with
    `skip_first_ngram_calls`, while it is shorter than that. `debug_mode` marks a uniform distribution.

    In direct calls, the ids of the first call are the prompt. A text continues while the ids are one token
    wider than in the previous call; other ids start a new text.
    """

    def __init__(  # noqa: PLR0913 - transformers' signature
        self,
        ngram_len: int,
        keys: Sequence[int],
        sampling_table_size: int,
        sampling_table_seed: int,
        context_history_size: int,
        device: torch.device | str,
        skip_first_ngram_calls: bool = False,
        debug_mode: bool = False,
    ) -> None:
        self.watermark = SynthIDTextWatermarkingConfig(
            ngram_len=ngram_len,
            keys=keys,  # type: ignore[arg-type]  # converted to a tuple
            context_history_size=context_history_size,
            sampling_table_seed=sampling_table_seed,
            sampling_table_size=sampling_table_size,
            skip_first_ngram_calls=skip_first_ngram_calls,
            debug_mode=debug_mode,
        )
        warn_if_public(self.watermark)
        self.device = torch.device(device)
        self._last_shape = (0, 0)  # shape of the ids of the last direct call
        self._prompt_length = 0  # prompt tokens among them

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return new scores [N, V] for the ids [N, L]; those of the first call are the prompt."""
        count, width = _check_ids(input_ids).shape
        if self._last_shape != (count, width - 1):
            self._prompt_length = width
        self._last_shape = (count, width)
        params = {"watermark": self.watermark, "prompt_length": self._prompt_length}
        return self.process(Context.standalone(input_ids, params), scores)

    def _apply_watermark(
        self, context: Context, scores: Tensor, settings: SynthIDTextWatermarkingConfig
    ) -> Tensor:
        """Return log-probabilities after all rounds where the context is new, the scores elsewhere."""
        return _run_tournament(get_tournament(settings), context, scores)

    @property
    def ngram_len(self) -> int:
        """Number of tokens a g-value depends on, including its own."""
        return self.watermark.ngram_len

    @property
    def keys(self) -> Tensor:
        """The keys of the rounds [D]."""
        return torch.tensor(self.watermark.keys, dtype=torch.long, device=self.device)

    @property
    def sampling_table(self) -> Tensor:
        """The table that g-values are looked up in [S]."""
        return self._tournament.sampling_table.to(self.device, torch.long)

    @property
    def context_history_size(self) -> int:
        """Number of previous contexts that are compared."""
        return self.watermark.context_history_size

    @property
    def skip_first_ngram_calls(self) -> bool:
        """Whether the first tokens are left unmarked."""
        return self.watermark.skip_first_ngram_calls

    @property
    def debug_mode(self) -> bool:
        """Whether a uniform distribution is marked instead of the model's."""
        return self.watermark.debug_mode

    @property
    def _tournament(self) -> Tournament:
        return get_tournament(self.watermark)

    def update_scores(self, scores: Tensor, g_values: Tensor) -> Tensor:
        """Return log-probabilities [N, V] after rounds with the g-values [N, V, D]."""
        return _clamped_log(_apply_rounds(scores.softmax(1), g_values.unbind(2)))

    def accumulate_hash(
        self, current_hash: Tensor, data: Tensor, multiplier: int = LCG_MULTIPLIER, increment: int = 1
    ) -> Tensor:
        """Update the hashes [...] with the numbers [..., W]."""
        return lcg_hash(current_hash, data, multiplier, increment)

    def compute_ngram_keys(self, ngrams: Tensor) -> Tensor:
        """Hash n-grams [N, C, ngram_len] with the key of every round [N, C, D]."""
        if ngrams.ndim != 3 or ngrams.shape[2] != self.ngram_len:
            raise InputError("ngrams", f"must be of shape [batch, ngrams, {self.ngram_len}]", ngrams)
        return self._tournament.ngram_keys(lcg_hash(torch.ones_like(ngrams[..., 0]), ngrams))

    def sample_g_values(self, ngram_keys: Tensor) -> Tensor:
        """Look up the g-values, 0 or 1, of hashed n-grams [N, C, D]."""
        return self._tournament.lookup_g_values(ngram_keys).long()

    def compute_g_values(self, input_ids: Tensor) -> Tensor:
        """The g-values of all tokens with a full context in the ids [N, L]: [N, L - ngram_len + 1, D]."""
        contexts = self._context_hashes(input_ids)
        return self._tournament.g_values(contexts, input_ids[:, self.ngram_len - 1 :]).long()

    def compute_context_repetition_mask(self, input_ids: Tensor) -> Tensor:
        """Mask of the tokens whose context is not repeated [N, L - ngram_len + 1]."""
        return ~repetition_mask(self._context_hashes(input_ids), self.context_history_size)

    def compute_eos_token_mask(self, input_ids: Tensor, eos_token_id: int) -> Tensor:
        """Mask of the ids [N, L] before the first end token of their row."""
        return before_eos_mask(_check_ids(input_ids), eos_token_id)

    def expected_mean_g_value(self, vocab_size: int, coinflip_prob: float = 0.5) -> float:
        """Expected mean g-value of text marked in one round under a uniform distribution."""
        check_number("vocab_size", vocab_size, 1, integer=True)
        check_number("coinflip_prob", coinflip_prob, 0.0, 1.0)
        return float(coinflip_prob + coinflip_prob * (1 - coinflip_prob) * (1 - 1 / vocab_size))

    def _context_hashes(self, input_ids: Tensor) -> Tensor:
        """Hashes of all contexts that are followed by a token of the ids [N, L - ngram_len + 1]."""
        if _check_ids(input_ids).shape[1] < self.ngram_len:
            raise InputError("input_ids", f"must have at least {self.ngram_len} tokens per row", input_ids)
        return self._tournament.context_hashes(input_ids[:, :-1])


def _check_ids(input_ids: Tensor) -> Tensor:
    if input_ids.ndim != 2:
        raise InputError("input_ids", "must be of shape [batch, length]", input_ids)
    return input_ids


def _run_tournament(tournament: Tournament, context: Context, scores: Tensor) -> Tensor:
    """Run the rounds on the scores [N, V] of rows with the same key."""
    if tournament.settings.debug_mode:
        scores = torch.ones_like(scores)
    max_generated = max(context.generated_on_host)
    contexts, is_new = tournament.current_contexts(
        context.tokens, context.length, context.generated, max_generated
    )
    candidates = above_threshold(scores, 0.0)
    if candidates is not None:
        values, ids = candidates
        probs = _apply_rounds(values.softmax(1), tournament.iter_g_values(contexts, ids))
        min_score = torch.finfo(scores.dtype).min
        return _restore_unmarked(
            scatter_candidates(scores, _clamped_log(probs), ids).clamp_(min=min_score), scores, is_new
        )
    vocab_size = scores.shape[1]
    if (
        scores.device.type == "cpu"
        and vocab_size > _LARGE_VOCAB
        and tournament.vocab_g_values(0, vocab_size) is not None
    ):
        return _run_by_row(tournament, contexts, is_new, scores)
    tokens = torch.arange(vocab_size, device=scores.device)
    probs = _apply_rounds(scores.softmax(1), tournament.iter_g_values(contexts, tokens))
    return torch.where(is_new, _clamped_log(probs), scores)


def _run_by_row(tournament: Tournament, contexts: Tensor, is_new: Tensor, scores: Tensor) -> Tensor:
    """The same row by row on the CPU, so that one row stays in its cache."""
    probs = scores.softmax(1)
    row_contexts = zip(contexts.squeeze(1).tolist(), is_new.squeeze(1).tolist(), strict=True)
    for row, (context, is_marked) in enumerate(row_contexts):
        g_values = tournament.vocab_g_values(context, scores.shape[1]) if is_marked else None
        if g_values is not None:
            _apply_rounds(probs[row : row + 1], g_values[:, None])
    return _restore_unmarked(_clamped_log(probs), scores, is_new)


def _restore_unmarked(marked: Tensor, scores: Tensor, is_new: Tensor) -> Tensor:
    """Write the scores back into the rows that are not marked, in place."""
    unmarked = ~is_new.squeeze(1)
    if bool(unmarked.any()):
        marked[unmarked] = scores[unmarked]
    return marked


def _apply_rounds(probs: Tensor, g_values: Iterable[Tensor]) -> Tensor:
    """Apply rounds with the given g-values, [N, K] each, to the probabilities [N, K] in place.

    A round draws two tokens; the one with the larger g-value wins, ties are broken at random.
    """
    values, factor = torch.empty_like(probs), torch.empty_like(probs)
    for round_values in g_values:
        values.copy_(round_values)
        mass = torch.mul(values, probs, out=factor).sum(1, keepdim=True)
        probs *= torch.sub(values.add_(1), mass, out=factor)
    return probs


def _clamped_log(probs: Tensor) -> Tensor:
    """Logarithm of probabilities, in place: the dtype's minimum for 0; NaN stays."""
    # Rounding can make the subtracted share exceed the whole and leave negative values.
    return probs.clamp_(min=0).log_().clamp_(min=torch.finfo(probs.dtype).min)


# Lowest effect size of marked text, in standard deviations of a token's value. Real models (15M and 135M
# parameters, 9 and 30 rounds) reach 0.5 at temperature 0.7 and still 0.22 to 0.36 at 0.4.
MIN_EFFECT_SIZE: Final = 0.2
_NO_TOKEN: Final = -1  # in place of padding


def round_weights(depth: int) -> Array:
    """Weights of the rounds [D]: linear from 10 to 1, since later rounds mark less, normalised to sum 1."""
    weights: Array = np.linspace(10.0, 1.0, depth)
    scaled: Array = weights / weights.sum()
    return scaled


class SynthIDScheme(WatermarkScheme):
    """SynthID-Text: a token's value is the weighted mean of its g-values, one per round.

    A token is scored if its whole context is present, the context is not skipped as a repetition, and no
    earlier token had the same g-values under every key. Over random keys a g-value is a random entry of the
    sampling table, so it is 1 with the table's fraction of ones. Rounds with equal keys have equal g-values,
    of which only the first counts.
    """

    name = "synthid"
    settings: SynthIDTextWatermarkingConfig

    def __init__(self, settings: SynthIDTextWatermarkingConfig) -> None:
        self.settings = settings
        self._tournament = get_tournament(settings)
        self._rounds = self._tournament.distinct_rounds
        weights = round_weights(len(settings.keys))[self._rounds]
        self._weights = weights / weights.sum()
        self.context_size = self._tournament.context_size
        ones_fraction = self._tournament.ones_fraction
        self.null_mean = ones_fraction
        self.null_std = math.sqrt(ones_fraction * (1.0 - ones_fraction) * float((self._weights**2).sum()))
        self.min_marked_mean = self.null_mean + MIN_EFFECT_SIZE * self.null_std

    def score_tokens(self, ids: Array) -> TokenScores:
        """Score the tokens [L] by their mean g-value."""
        if len(ids) <= self.context_size:
            return TokenScores(np.zeros(len(ids), bool), np.zeros(len(ids)))
        tokens = torch.from_numpy(np.ascontiguousarray(ids, dtype=np.int64))
        contexts, targets = self._tournament.context_hashes(tokens[:-1]), tokens[self.context_size :]
        is_new = ~repetition_mask(contexts[None], self.settings.context_history_size)[0].numpy()
        positions = np.flatnonzero(is_new)
        inputs = self._tournament.g_value_inputs(contexts, targets).numpy()[positions]
        positions = positions[np.sort(np.unique(inputs, return_index=True)[1])]
        g_values = self._tournament.g_values(contexts[positions], targets[positions]).numpy()
        values = g_values[:, self._rounds] @ self._weights
        return TokenScores.at(self.context_size + positions, values, len(ids))

    def p_value(self, count: int, total: float) -> float:
        """Probability that the values of `count` unmarked tokens sum to `total` or more."""
        return weighted_tail(count, self._weights, self.null_mean, total)

    def confidence_interval(self, values: Array) -> tuple[float, float]:
        """95 % Student interval of the mean, with at least the spread of unmarked text."""
        low, high = mean_interval(values, self.null_std)
        return max(0.0, low), min(1.0, high)


def mean_score(g_values: Tensor, mask: Tensor) -> Tensor:
    """Mean g-value of each text [N], from g-values [N, C, D] and their mask [N, C]; NaN if all are masked."""
    return _masked_mean(g_values, mask, np.full(_check_depth(g_values, mask), 1.0 / g_values.shape[2]))


def weighted_mean_score(g_values: Tensor, mask: Tensor, weights: Array | None = None) -> Tensor:
    """Like `mean_score`, with round weights [D] that by default fall linearly from 10 to 1."""
    depth = _check_depth(g_values, mask)
    round_weight = round_weights(depth) if weights is None else np.asarray(weights, dtype=np.float64)
    if round_weight.shape != (depth,) or not (round_weight >= 0).all() or not round_weight.sum() > 0:
        raise InputError("weights", f"must be {depth} numbers >= 0, not all 0", weights)
    return _masked_mean(g_values, mask, round_weight / round_weight.sum())


def _masked_mean(g_values: Tensor, mask: Tensor, weights: Array) -> Tensor:
    value = (g_values.double() * torch.from_numpy(weights).to(g_values.device)).sum(2)
    weight = mask.to(g_values.device, torch.float64)
    return ((value * weight).sum(1) / weight.sum(1)).float()


def _check_depth(g_values: Tensor, mask: Tensor) -> int:
    """Check the shapes and return the number of rounds."""
    if g_values.ndim != 3:
        raise InputError("g_values", "must be of shape [batch, tokens, depth]", g_values)
    if mask.shape != g_values.shape[:2]:
        raise InputError("mask", f"must be of shape {list(g_values.shape[:2])}", mask)
    return int(g_values.shape[2])


class SynthIDTextWatermarkDetector:
    """Applies a detector module to the g-values of texts, without padding, end tokens and repeated contexts.

    The module is called with `(g_values [N, C, D], mask [N, C])`: a `BayesianDetectorModel`, or, without
    training, `mean_score` or `weighted_mean_score`.
    """

    def __init__(
        self, detector_module: Callable[[Tensor, Tensor], Any], logits_processor: Any, tokenizer: Any
    ) -> None:
        self.detector_module = detector_module
        self.logits_processor = logits_processor
        self.tokenizer = tokenizer

    def __call__(self, tokenized_outputs: Tensor) -> Any:
        """Return the module's result for texts [N, L] of token ids."""
        processor, eos_token_id = self.logits_processor, self.tokenizer.eos_token_id
        g_values = processor.compute_g_values(tokenized_outputs)
        mask = processor.compute_context_repetition_mask(tokenized_outputs)
        is_text = self._text_mask(tokenized_outputs)
        context = processor.ngram_len - 1
        if eos_token_id is not None:  # a tokenizer may have no end token
            # Padding on the left may be the end token: it ends nothing.
            text = torch.where(is_text, tokenized_outputs, _NO_TOKEN)
            mask = mask & processor.compute_eos_token_mask(text, eos_token_id)[:, context:]
        # A token counts if its whole n-gram is text.
        mask = mask & is_text.unfold(1, context + 1, 1).all(2)
        return self.detector_module(g_values, mask)

    def _text_mask(self, ids: Tensor) -> Tensor:
        """Which of the ids [N, L] are text and not padding."""
        padding = PaddingTokens.of(self.tokenizer)
        mask = torch.zeros_like(ids, dtype=torch.bool)
        for row, line in zip(mask, ids.cpu().numpy(), strict=True):
            row[slice(*padding.text_span(line))] = True
        return mask

"""Logits processor of SynthID-Text: tournament sampling."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from descant.config.watermarking_config import SynthIDTextWatermarkingConfig
from descant.core.context import Context
from descant.decoding.processors.base import check_number
from descant.decoding.processors.filters import above_threshold, scatter_candidates
from descant.decoding.processors.watermark import BaseWatermarkProcessor
from descant.decoding.watermark.schemes.keys import warn_if_public
from descant.decoding.watermark.schemes.synthid import (
    LCG_MULTIPLIER,
    Tournament,
    before_eos_mask,
    get_tournament,
    lcg_hash,
    repetition_mask,
)
from descant.errors import InputError

__all__ = ["SynthIDTextWatermarkLogitsProcessor"]

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

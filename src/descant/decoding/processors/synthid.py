"""The tournament as a processor: SynthID-Text's mark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from descant.core.context import Context
from descant.decoding.processors.base import check_number
from descant.decoding.processors.filters import above_threshold, scatter_candidates
from descant.decoding.processors.watermark import BaseWatermarkProcessor
from descant.decoding.watermark.schemes.config import SynthIDTextWatermarkingConfig
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

_LARGE_VOCAB = 4096  # tokens from which on a line is so long that many at once would not stay in a cache


class SynthIDTextWatermarkLogitsProcessor(BaseWatermarkProcessor):
    """Prefers, round after round, tokens to which the key gives a coin (SynthID-Text, Dathathri et al. 2024).

    In each of `len(keys)` rounds a token with a coin becomes likelier by the share of those without one, and
    a token without one less likely by the share of those with one, so that over all keys the law is what it
    was (Nature 634). The coins hang on the last `ngram_len - 1` new tokens, zeros before them, and are the
    same on every device. After a context that is one of the last `context_history_size` nothing is changed,
    nor, with `skip_first_ngram_calls`, before there are so many new tokens. `debug_mode` marks a uniform law.

    By hand, what stands in the ids at the first call is the prompt. A text goes on as long as the ids are one
    token wider than those of the call before; other ids begin another.
    """

    def __init__(  # noqa: PLR0913 - the documented face
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
            keys=keys,  # type: ignore[arg-type]  # made a tuple there
            context_history_size=context_history_size,
            sampling_table_seed=sampling_table_seed,
            sampling_table_size=sampling_table_size,
            skip_first_ngram_calls=skip_first_ngram_calls,
            debug_mode=debug_mode,
        )
        warn_if_public(self.watermark)
        self.device = torch.device(device)
        self._last_shape = (0, 0)  # the shape of the last ids by hand
        self._prompt_length = 0  # how many of them are the prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """New scores [N, V] after the ids [N, L], of which those of the first call are the prompt."""
        count, wide = _check_ids(input_ids).shape
        if self._last_shape != (count, wide - 1):
            self._prompt_length = wide
        self._last_shape = (count, wide)
        given = {"watermark": self.watermark, "prompt_length": self._prompt_length}
        return self.process(Context.standalone(input_ids, given), scores)

    def _apply_watermark(
        self, context: Context, scores: Tensor, settings: SynthIDTextWatermarkingConfig
    ) -> Tensor:
        """The logarithms of the law after all rounds, where the context is new; the scores elsewhere."""
        return _run_tournament(get_tournament(settings), context, scores)

    @property
    def ngram_len(self) -> int:
        """How many tokens a coin hangs on, that which gets it among them."""
        return self.watermark.ngram_len

    @property
    def keys(self) -> Tensor:
        """The rounds' keys [D]."""
        return torch.tensor(self.watermark.keys, dtype=torch.long, device=self.device)

    @property
    def sampling_table(self) -> Tensor:
        """The coins that all questions are answered from [S]."""
        return self._tournament.sampling_table.to(self.device, torch.long)

    @property
    def context_history_size(self) -> int:
        """How many contexts are remembered."""
        return self.watermark.context_history_size

    @property
    def skip_first_ngram_calls(self) -> bool:
        """Whether the first tokens are left unmarked."""
        return self.watermark.skip_first_ngram_calls

    @property
    def debug_mode(self) -> bool:
        """Whether a uniform law is marked in the place of the model's."""
        return self.watermark.debug_mode

    @property
    def _tournament(self) -> Tournament:
        return get_tournament(self.watermark)

    def update_scores(self, scores: Tensor, g_values: Tensor) -> Tensor:
        """The logarithms [N, V] of the law after rounds with these coins [N, V, D]."""
        return _clamped_log(_apply_rounds(scores.softmax(1), g_values.unbind(2)))

    def accumulate_hash(
        self, current_hash: Tensor, data: Tensor, multiplier: int = LCG_MULTIPLIER, increment: int = 1
    ) -> Tensor:
        """The hashes [...] after the numbers [..., W]."""
        return lcg_hash(current_hash, data, multiplier, increment)

    def compute_ngram_keys(self, ngrams: Tensor) -> Tensor:
        """The hashes of n-grams [N, C, ngram_len] with every round's key [N, C, D]."""
        if ngrams.ndim != 3 or ngrams.shape[2] != self.ngram_len:
            raise InputError("ngrams", f"must be of shape [batch, ngrams, {self.ngram_len}]", ngrams)
        return self._tournament.ngram_keys(lcg_hash(torch.ones_like(ngrams[..., 0]), ngrams))

    def sample_g_values(self, ngram_keys: Tensor) -> Tensor:
        """The coins to such hashes [N, C, D], 0 or 1."""
        return self._tournament.lookup_g_values(ngram_keys).long()

    def compute_g_values(self, input_ids: Tensor) -> Tensor:
        """The coins of all tokens that have a context in the ids [N, L]: [N, L - ngram_len + 1, D]."""
        contexts = self._context_hashes(input_ids)
        return self._tournament.g_values(contexts, input_ids[:, self.ngram_len - 1 :]).long()

    def compute_context_repetition_mask(self, input_ids: Tensor) -> Tensor:
        """Whether the contexts of those tokens are new, as marking sees them [N, L - ngram_len + 1]."""
        return ~repetition_mask(self._context_hashes(input_ids), self.context_history_size)

    def compute_eos_token_mask(self, input_ids: Tensor, eos_token_id: int) -> Tensor:
        """Which ids [N, L] stand before the first end token of their line [N, L]."""
        return before_eos_mask(_check_ids(input_ids), eos_token_id)

    def expected_mean_g_value(self, vocab_size: int, coinflip_prob: float = 0.5) -> float:
        """The share of coins that a text marked in one round has where all tokens are equally likely."""
        check_number("vocab_size", vocab_size, 1, integer=True)
        check_number("coinflip_prob", coinflip_prob, 0.0, 1.0)
        return float(coinflip_prob + coinflip_prob * (1 - coinflip_prob) * (1 - 1 / vocab_size))

    def _context_hashes(self, input_ids: Tensor) -> Tensor:
        """The hashes of the contexts that a token of the ids follows [N, L - ngram_len + 1]."""
        if _check_ids(input_ids).shape[1] < self.ngram_len:
            raise InputError("input_ids", f"must have at least {self.ngram_len} tokens a line", input_ids)
        return self._tournament.context_hashes(input_ids[:, :-1])


def _check_ids(input_ids: Tensor) -> Tensor:
    if input_ids.ndim != 2:
        raise InputError("input_ids", "must be of shape [batch, length]", input_ids)
    return input_ids


def _run_tournament(rounds: Tournament, context: Context, scores: Tensor) -> Tensor:
    """The scores [N, V] after the rounds, for lines that have the same key."""
    if rounds.settings.debug_mode:
        scores = torch.ones_like(scores)
    most = max(context.generated_on_host)
    contexts, fresh = rounds.current_contexts(context.tokens, context.length, context.generated, most)
    few = above_threshold(scores, 0.0)
    if few is not None:
        values, ids = few
        law = _apply_rounds(values.softmax(1), rounds.iter_g_values(contexts, ids))
        lowest = torch.finfo(scores.dtype).min
        return _restore_unmarked(
            scatter_candidates(scores, _clamped_log(law), ids).clamp_(min=lowest), scores, fresh
        )
    size = scores.shape[1]
    if scores.device.type == "cpu" and size > _LARGE_VOCAB and rounds.vocab_g_values(0, size) is not None:
        return _run_by_line(rounds, contexts, fresh, scores)
    tokens = torch.arange(size, device=scores.device)
    law = _apply_rounds(scores.softmax(1), rounds.iter_g_values(contexts, tokens))
    return torch.where(fresh, _clamped_log(law), scores)


def _run_by_line(rounds: Tournament, contexts: Tensor, fresh: Tensor, scores: Tensor) -> Tensor:
    """The same on the host, where a line of a whole vocabulary stays in the processor's cache."""
    law = scores.softmax(1)
    where = zip(contexts.squeeze(1).tolist(), fresh.squeeze(1).tolist(), strict=True)
    for line, (context, marks) in enumerate(where):
        window = rounds.vocab_g_values(context, scores.shape[1]) if marks else None
        if window is not None:
            _apply_rounds(law[line : line + 1], window[:, None])
    return _restore_unmarked(_clamped_log(law), scores, fresh)


def _restore_unmarked(answer: Tensor, scores: Tensor, fresh: Tensor) -> Tensor:
    """The answer [N, V] with the scores in the lines that are not marked, mostly none; on the host."""
    old = ~fresh.squeeze(1)
    if bool(old.any()):
        answer[old] = scores[old]
    return answer


def _apply_rounds(law: Tensor, coins: Iterable[Tensor]) -> Tensor:
    """The law [N, K] made that of who is left after rounds with these coins, [N, K] each.

    Of two who are drawn from the law one with a coin goes on, of equal ones either.
    """
    held, factor = torch.empty_like(law), torch.empty_like(law)
    for coin in coins:
        held.copy_(coin)
        mass = torch.mul(held, law, out=factor).sum(1, keepdim=True)
        law *= torch.sub(held.add_(1), mass, out=factor)
    return law


def _clamped_log(law: Tensor) -> Tensor:
    """The logarithm of a law, the lowest number where something is impossible; NaN stays."""
    # Rounding can make a share of the whole more than the whole, and what is left of the others negative.
    return law.clamp_(min=0).log_().clamp_(min=torch.finfo(law.dtype).min)

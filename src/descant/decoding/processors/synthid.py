"""The tournament as a processor: SynthID-Text's mark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from descant.core.context import Context
from descant.decoding.processors.base import number
from descant.decoding.processors.filters import only, reaching
from descant.decoding.processors.watermark import Marking
from descant.decoding.watermark.schemes.config import SynthIDTextWatermarkingConfig
from descant.decoding.watermark.schemes.keys import warn_if_public
from descant.decoding.watermark.schemes.synthid import (
    MULTIPLIER,
    Tournament,
    accumulated,
    before_end,
    repeated,
    tournament,
)
from descant.errors import InputError

__all__ = ["SynthIDTextWatermarkLogitsProcessor"]

_WIDE = 4096  # tokens from which on a line is so long that many at once would not stay in a cache


class SynthIDTextWatermarkLogitsProcessor(Marking):
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
        self._asked = (0, 0)  # the shape of the last ids by hand
        self._prompt = 0  # how many of them are the prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """New scores [N, V] after the ids [N, L], of which those of the first call are the prompt."""
        count, wide = _checked(input_ids).shape
        if self._asked != (count, wide - 1):
            self._prompt = wide
        self._asked = (count, wide)
        given = {"watermark": self.watermark, "prompt": self._prompt}
        return self.process(Context.standalone(input_ids, given), scores)

    def _marked(self, context: Context, scores: Tensor, settings: SynthIDTextWatermarkingConfig) -> Tensor:
        """The logarithms of the law after all rounds, where the context is new; the scores elsewhere."""
        return _played(tournament(settings), context, scores)

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
        return self._tournament.table.to(self.device, torch.long)

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
        return tournament(self.watermark)

    def update_scores(self, scores: Tensor, g_values: Tensor) -> Tensor:
        """The logarithms [N, V] of the law after rounds with these coins [N, V, D]."""
        return _logarithm(_won(scores.softmax(1), g_values.unbind(2)))

    def accumulate_hash(
        self, current_hash: Tensor, data: Tensor, multiplier: int = MULTIPLIER, increment: int = 1
    ) -> Tensor:
        """The hashes [...] after the numbers [..., W]."""
        return accumulated(current_hash, data, multiplier, increment)

    def compute_ngram_keys(self, ngrams: Tensor) -> Tensor:
        """The hashes of n-grams [N, C, ngram_len] with every round's key [N, C, D]."""
        if ngrams.ndim != 3 or ngrams.shape[2] != self.ngram_len:
            raise InputError("ngrams", f"must be of shape [batch, ngrams, {self.ngram_len}]", ngrams)
        return self._tournament.ngram_keys(accumulated(torch.ones_like(ngrams[..., 0]), ngrams))

    def sample_g_values(self, ngram_keys: Tensor) -> Tensor:
        """The coins to such hashes [N, C, D], 0 or 1."""
        return self._tournament.coins(ngram_keys).long()

    def compute_g_values(self, input_ids: Tensor) -> Tensor:
        """The coins of all tokens that have a context in the ids [N, L]: [N, L - ngram_len + 1, D]."""
        contexts = self._contexts(input_ids)
        return self._tournament.values(contexts, input_ids[:, self.ngram_len - 1 :]).long()

    def compute_context_repetition_mask(self, input_ids: Tensor) -> Tensor:
        """Whether the contexts of those tokens are new, as marking sees them [N, L - ngram_len + 1]."""
        return ~repeated(self._contexts(input_ids), self.context_history_size)

    def compute_eos_token_mask(self, input_ids: Tensor, eos_token_id: int) -> Tensor:
        """Which ids [N, L] stand before the first end token of their line [N, L]."""
        return before_end(_checked(input_ids), eos_token_id)

    def expected_mean_g_value(self, vocab_size: int, coinflip_prob: float = 0.5) -> float:
        """The share of coins that a text marked in one round has where all tokens are equally likely."""
        number("vocab_size", vocab_size, 1, whole=True)
        number("coinflip_prob", coinflip_prob, 0.0, 1.0)
        return float(coinflip_prob + coinflip_prob * (1 - coinflip_prob) * (1 - 1 / vocab_size))

    def _contexts(self, input_ids: Tensor) -> Tensor:
        """The hashes of the contexts that a token of the ids follows [N, L - ngram_len + 1]."""
        if _checked(input_ids).shape[1] < self.ngram_len:
            raise InputError("input_ids", f"must have at least {self.ngram_len} tokens a line", input_ids)
        return self._tournament.contexts(input_ids[:, :-1])


def _checked(input_ids: Tensor) -> Tensor:
    if input_ids.ndim != 2:
        raise InputError("input_ids", "must be of shape [batch, length]", input_ids)
    return input_ids


def _played(rounds: Tournament, context: Context, scores: Tensor) -> Tensor:
    """The scores [N, V] after the rounds, for lines that have the same key."""
    if rounds.settings.debug_mode:
        scores = torch.ones_like(scores)
    most = max(context.new)
    contexts, fresh = rounds.present(context.tokens, context.length, context.generated, most)
    few = reaching(scores, 0.0)
    if few is not None:
        values, ids = few
        law = _won(values.softmax(1), rounds.play(contexts, ids))
        lowest = torch.finfo(scores.dtype).min
        return _kept(only(scores, _logarithm(law), ids).clamp_(min=lowest), scores, fresh)
    size = scores.shape[1]
    if scores.device.type == "cpu" and size > _WIDE and rounds.window(0, size) is not None:
        return _line_by_line(rounds, contexts, fresh, scores)
    tokens = torch.arange(size, device=scores.device)
    law = _won(scores.softmax(1), rounds.play(contexts, tokens))
    return torch.where(fresh, _logarithm(law), scores)


def _line_by_line(rounds: Tournament, contexts: Tensor, fresh: Tensor, scores: Tensor) -> Tensor:
    """The same on the host, where a line of a whole vocabulary stays in the processor's cache."""
    law = scores.softmax(1)
    where = zip(contexts.squeeze(1).tolist(), fresh.squeeze(1).tolist(), strict=True)
    for line, (context, marks) in enumerate(where):
        window = rounds.window(context, scores.shape[1]) if marks else None
        if window is not None:
            _won(law[line : line + 1], window[:, None])
    return _kept(_logarithm(law), scores, fresh)


def _kept(answer: Tensor, scores: Tensor, fresh: Tensor) -> Tensor:
    """The answer [N, V] with the scores in the lines that are not marked, mostly none; on the host."""
    old = ~fresh.squeeze(1)
    if bool(old.any()):
        answer[old] = scores[old]
    return answer


def _won(law: Tensor, coins: Iterable[Tensor]) -> Tensor:
    """The law [N, K] made that of who is left after rounds with these coins, [N, K] each.

    Of two who are drawn from the law one with a coin goes on, of equal ones either.
    """
    held, factor = torch.empty_like(law), torch.empty_like(law)
    for coin in coins:
        held.copy_(coin)
        mass = torch.mul(held, law, out=factor).sum(1, keepdim=True)
        law *= torch.sub(held.add_(1), mass, out=factor)
    return law


def _logarithm(law: Tensor) -> Tensor:
    """The logarithm of a law, the lowest number where something is impossible; NaN stays."""
    # Rounding can make a share of the whole more than the whole, and what is left of the others negative.
    return law.clamp_(min=0).log_().clamp_(min=torch.finfo(law.dtype).min)

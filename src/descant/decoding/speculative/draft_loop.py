"""Guessing with a network: token after token, each row for as long as it is worth it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from descant.core.context import row_params
from descant.core.interfaces import NoiseSource
from descant.core.records import DraftContext, Proposal
from descant.core.rows import Rows, index_rows

__all__ = ["DraftLoop", "limit_to_positions"]

# The logits [N, V'] that follow some rows, `lines` (host), of a table to which what was tried is appended.
LogitsFn = Callable[[Rows, Tensor], Tensor]


def limit_to_positions(most: Tensor, position: Tensor, table: int | None) -> Tensor:
    """How many tokens rows may try [R] (host) when a network has so many positions; None: any number.

    To say what follows a row it is fed the row, and all but the last of what it says.
    """
    return most if table is None else torch.minimum(most, table - position + 1).clamp(min=0)


@dataclass(frozen=True)
class DraftLoop:
    """The loop over one network's guesses: the law of each, how it is drawn, and when a row stops.

    A row's law is the softmax of the network's logits after the target's own processors, so that it can
    agree with the target. A greedy row takes the likeliest token; a sampled one draws, with the noise
    that the target has at that position. A token that was drawn is tried, whatever it is; that it was
    unlikely, or an end, only keeps the row from going on.
    """

    noise: NoiseSource
    vocab_size: int  # the target's

    @torch.no_grad()
    def run(self, rows: Rows, most: Tensor, aid: DraftContext, ask: LogitsFn) -> Proposal:
        """Up to `most[i]` tokens (host) after row `i`, with the law of each where somebody has to know it."""
        terms = _DraftParams.from_rows(rows)
        active, n, grown = most > 0, torch.zeros_like(most), rows
        drafts: list[Tensor] = []
        laws: list[Tensor] = []
        while bool(active.any()):
            logits = self._next_logits(ask, grown, active)
            scores = aid.process(grown, logits)
            law = scores.softmax(-1)
            tokens = self._choose_tokens(terms, law, scores, len(drafts))
            likely = law.gather(1, tokens[:, None])
            token, likelihood = torch.cat((tokens[:, None], likely.double()), 1).cpu().unbind(1)
            # Where nothing can be chosen there is no law, and what is not a number is not above 0.
            tried = active & (likelihood > 0)
            n += tried
            drafts.append(tokens)
            if terms.needs_probs is not None:
                certain = torch.nn.functional.one_hot(tokens, self.vocab_size).to(law.dtype)
                laws.append(torch.where((terms.needs_probs & tried).to(law.device)[:, None], law, certain))
            grown = grown.append(tokens[:, None], grown.length + tried)
            active = tried & (n < most) & ~terms.should_stop(token.long(), likelihood)
        width = int(n.max()) if len(n) else 0
        if not width:
            return Proposal()
        probs = torch.stack(laws[:width], 1) if laws else None
        return Proposal(None, torch.stack(drafts[:width], 1), n, probs)

    def _next_logits(self, ask: LogitsFn, rows: Rows, active: Tensor) -> Tensor:
        """What the network says of the rows that go on, of as many tokens as the target knows [R, V]."""
        lines = active.nonzero().squeeze(1)
        logits = ask(rows, lines).to(rows.tokens.device)
        short = self.vocab_size - logits.shape[1]
        if short:  # below 0 it cuts
            logits = torch.nn.functional.pad(logits, (0, short), value=-torch.inf)
        if len(lines) == len(rows):
            return logits
        # Processors see every row of a lane; nobody looks at what they make of those that have stopped.
        return logits.new_zeros(len(rows), self.vocab_size).index_copy(0, lines.to(logits.device), logits)

    def _choose_tokens(self, terms: _DraftParams, law: Tensor, scores: Tensor, ahead: int) -> Tensor:
        """The token of each row [R], `ahead` tokens after its last decided one."""
        drawing, index = terms.sampled_rows, terms.sampled_index
        if drawing is None:
            return scores.argmax(-1)
        noise = self.noise.draw(drawing.replace(length=drawing.length + ahead), self.vocab_size)
        if index is None:
            return (law / noise).argmax(-1)
        drawn = (index_rows(law, index) / noise).argmax(-1)
        return scores.argmax(-1).index_copy(0, index.to(drawn.device), drawn)


@dataclass(frozen=True)
class _DraftParams:
    """What rows want of guesses."""

    sampled_rows: Rows | None  # those that sample
    sampled_index: Tensor | None  # [N] (host) which those are; None: all
    needs_probs: (
        Tensor | None
    )  # [R] (host) those whose law must be known: they sample without a seed; None: nobody
    stop_token_ids: Tensor  # [R, E] (host) tokens after which a row has ended
    min_confidence: Tensor  # [R] (host) a row goes on only after tokens at least so likely

    @classmethod
    def from_rows(cls, rows: Rows) -> _DraftParams:
        """The terms of these rows."""
        params = row_params(rows)
        sampled = params["do_sample"] == 1
        index = sampled.nonzero().squeeze(1)
        drawing: Rows | None = None
        if len(index):
            drawing = rows if len(index) == len(rows) else rows.take(index)
        unseeded = sampled & (params["seed"] < 0)
        name = "assistant_confidence_threshold"
        return cls(
            drawing,
            None if drawing is rows else index,
            unseeded if bool(unseeded.any()) else None,
            params["end_token_ids" if "end_token_ids" in params.values else "eos_token_ids"],
            params[name] if name in params.values else torch.full((len(rows),), -1.0),
        )

    def should_stop(self, tokens: Tensor, likelihood: Tensor) -> Tensor:
        """Whether a row stops after its token [R], which was so likely (host)."""
        return (self.stop_token_ids == tokens[:, None]).any(1) | (likelihood < self.min_confidence)

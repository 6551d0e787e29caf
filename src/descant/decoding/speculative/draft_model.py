"""A draft model: a smaller network that reads the same tokens and is asked first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from descant.core.interfaces import Model, NoiseSource, RowCache
from descant.core.records import DraftContext, Proposal
from descant.core.rows import Rows, stable_row_order
from descant.decoding.speculative.draft_loop import DraftLoop, limit_to_positions
from descant.kv_cache.row_subset import row_subset

__all__ = ["AssistantDrafter"]

# What another model's encoder or embeddings have made of an input.
_PRECOMPUTED_INPUTS = ("encoder_outputs", "inputs_embeds")


class AssistantDrafter:
    """A draft model with the target's tokenizer, whose rows and cache follow the target's.

    Of each row it holds what it was fed, as far as that was decided; what it lacks it is fed before it is
    asked again. A cache that cannot be cut (`rewind`) keeps a copy of a row for every token tried: a
    fork that is not fed. Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318.
    """

    is_model_free = False

    def __init__(self, model: Model, cache: RowCache, noise: NoiseSource, vocabulary: int) -> None:
        self.forwards = 0
        self._model, self._cache = model, cache
        self._draft_loop = DraftLoop(noise, vocabulary)
        self._can_rewind = cache.max_rewind is None
        self._unreadable_requests: set[int] = set()  # requests whose input it cannot read
        # Where each row lies in the cache and how many positions it holds there, the row itself first and
        # then its copies. [R, J] (host), -1 for none.
        self._cache_rows = torch.zeros(0, 1, dtype=torch.long)
        self._cached_lengths = torch.zeros(0, 1, dtype=torch.long)

    @torch.no_grad()
    def add_requests(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        """Take what new requests give an encoder; those with more beside their tokens get no guesses."""
        facts = self._model.traits
        given = {
            name: lines
            for name, lines in inputs.items()
            if name in (*facts.input_names, *_PRECOMPUTED_INPUTS)
        }
        read = {name: [self._usable_input(name, line) for line in lines] for name, lines in given.items()}
        heard = [any(line[at] is not None for line in read.values()) for at in range(len(requests))]
        if not facts.is_encoder_decoder:
            # What goes in with a prompt (images, sound) goes in once, and rows may have split up by then.
            self._unreadable_requests |= {
                request for request, more in zip(requests, heard, strict=True) if more
            }
            return
        main = {facts.main_input_name, *_PRECOMPUTED_INPUTS} & read.keys()
        seeing = [at for at in range(len(requests)) if any(read[name][at] is not None for name in main)]
        self._unreadable_requests |= set(requests) - {requests[at] for at in seeing}
        if seeing:
            lines = {name: [line[at] for at in seeing] for name, line in read.items()}
            self._model.add_requests([requests[at] for at in seeing], lines)

    def remove_requests(self, requests: Sequence[int]) -> None:
        """Forget requests that have ended."""
        self._unreadable_requests -= set(requests)
        self._model.remove_requests(requests)

    def commit(self, parents: Tensor, lengths: Tensor) -> None:
        """Follow the rows: row `i` is what `parents[i]` was at the last draft, -1 if it was not there."""
        count = len(parents)
        old = (parents >= 0).nonzero().squeeze(1)
        place, holds = self._cache_rows[parents[old]], self._cached_lengths[parents[old]]
        agreed = torch.minimum(holds[:, 0], (lengths[old] - 1).clamp(min=0))
        fits = (holds >= agreed[:, None]) if self._can_rewind else (holds == agreed[:, None])
        # A row that cannot be cut to what was agreed, and of which there is no such copy, begins again.
        known = fits.any(1)
        old, agreed = old[known], agreed[known]
        whence = place[known].gather(1, fits[known].int().argmax(1)[:, None])[:, 0]
        order = stable_row_order(whence, len(self._cache))
        if order is None:
            self._cache.commit(None, agreed)
            order = torch.arange(len(old))
        else:
            self._cache.commit(whence[order], agreed[order])
        lies = torch.full((count,), -1)
        lies[old[order]] = torch.arange(len(old))
        new = (lies < 0).nonzero().squeeze(1)
        if len(new):
            self._cache.extend(len(new))
            lies[new] = len(old) + torch.arange(len(new))
        held = torch.zeros(count, dtype=torch.long)
        held[old] = agreed
        self._cache_rows, self._cached_lengths = lies[:, None], held[:, None]

    def draft(self, rows: Rows, most: Tensor, aid: DraftContext) -> Proposal:
        """Tokens that may follow each row, at most so many [R] (host)."""
        able = rows.length > 0
        if self._unreadable_requests:
            able &= torch.tensor([one not in self._unreadable_requests for one in rows.request.tolist()])
        facts = self._model.traits
        # Not every table of positions is learned: what lies beyond the length that a model was made for may
        # be an error, and where it is none the guesses are poor.
        limit = facts.context_length if facts.max_positions is None else facts.max_positions
        most = limit_to_positions(torch.where(able, most, 0), rows.length, limit)
        return self._draft_loop.run(
            rows, most, aid, lambda grown, lines: self._next_logits(rows, grown, lines)
        )

    # -------------------------------------------------------------------- asking the model
    def _next_logits(self, rows: Rows, grown: Rows, lines: Tensor) -> Tensor:
        """The logits [N, V'] that follow some rows, with what was tried after them."""
        own = grown.replace(
            tokens=self._clamp_tokens(grown.tokens),
            cached_length=self._cached_lengths[:, 0],
            offset=torch.zeros_like(grown.offset),
        )
        if self._can_rewind:
            return self._forward_pending(own, lines)
        if grown is not rows:
            self._snapshot_rows(lines)
        return self._forward_stepwise(own, lines)

    def _forward_pending(self, own: Rows, lines: Tensor) -> Tensor:
        """Feed some rows what is pending: the logits [N, V'] of their last positions."""
        part = own if len(lines) == len(own) else own.take(lines)
        self.forwards += 1
        heard = self._model.forward(part, Proposal(), row_subset(self._cache, self._cache_rows[lines, 0]))
        self._cached_lengths[lines, 0] = own.length[lines]
        return heard.logits[:, 0]

    def _forward_stepwise(self, own: Rows, lines: Tensor) -> Tensor:
        """The same token by token where a row has a past: few that have a state read several after it."""
        logits: Tensor | None = None
        while len(left := lines[self._cached_lengths[lines, 0] < own.length[lines]]):
            held = self._cached_lengths[:, 0]
            length = torch.where(held > 0, held + 1, own.length)
            said = self._forward_pending(own.replace(length=length, cached_length=held), left)
            if logits is None:
                logits = said.new_zeros(len(own), said.shape[1])
            logits[left.to(logits.device)] = said
        assert logits is not None  # a row always has a pending token: the last is never held
        return logits[lines.to(logits.device)]

    def _snapshot_rows(self, lines: Tensor) -> None:
        """Keep some rows as they are, below all others of the cache."""
        size = len(self._cache)
        inside = torch.zeros(size, dtype=torch.long)
        seats = self._cache_rows >= 0
        inside[self._cache_rows[seats]] = self._cached_lengths[seats]
        whence = torch.cat((torch.arange(size), self._cache_rows[lines, 0]))
        self._cache.commit(whence, inside[whence])
        more = torch.full((len(self._cache_rows), 1), -1)
        more[lines, 0] = size + torch.arange(len(lines))
        held = torch.full_like(more, -1)
        held[lines] = self._cached_lengths[lines, :1]
        self._cache_rows = torch.cat((self._cache_rows, more), 1)
        self._cached_lengths = torch.cat((self._cached_lengths, held), 1)

    # -------------------------------------------------------------------- reading what others can
    def _clamp_tokens(self, tokens: Tensor) -> Tensor:
        """Tokens as the model can read them: ids that it does not know become one that it does.

        What it then guesses is worth less, and costs nothing else.
        """
        size = self._model.traits.vocab_size
        known = tokens.clamp(max=size - 1) if size < self._draft_loop.vocab_size else tokens
        return known.to(self._model.device, non_blocking=True)

    def _usable_input(self, name: str, line: Any) -> Any:
        """One request's input as the model can read it; None where it cannot."""
        facts = self._model.traits
        if line is None:
            return None
        if name in _PRECOMPUTED_INPUTS:  # by the target, in vectors of its own
            return line if facts.is_encoder_decoder and line.shape[-1] == facts.embedding_size else None
        return self._clamp_tokens(line) if name == "input_ids" else line

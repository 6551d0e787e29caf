"""Drafting with a smaller model that has the target's tokenizer."""

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

# Inputs computed by the target's encoder or embeddings.
_PRECOMPUTED_INPUTS = ("encoder_outputs", "inputs_embeds")


class AssistantDrafter:
    """A draft model with the target's tokenizer; its rows and cache follow the target's.

    Its cache holds the committed tokens of each row; missing tokens are fed before the next draft. A cache
    that cannot rewind keeps a copy of the row for every drafted token: a fork that is not fed. Leviathan et
    al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318.
    """

    is_model_free = False

    def __init__(self, model: Model, cache: RowCache, noise: NoiseSource, vocabulary: int) -> None:
        self.forwards = 0
        self._model, self._cache = model, cache
        self._draft_loop = DraftLoop(noise, vocabulary)
        self._can_rewind = cache.max_rewind is None
        self._unreadable_requests: set[int] = set()  # requests whose inputs the draft model cannot use
        # The cache row of each row and its cached positions: the row itself first, then its copies.
        # [R, J] (host), -1 for none.
        self._cache_rows = torch.zeros(0, 1, dtype=torch.long)
        self._cached_lengths = torch.zeros(0, 1, dtype=torch.long)

    @torch.no_grad()
    def add_requests(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        """Pass encoder inputs to the draft model; requests with inputs it cannot use get no drafts."""
        traits = self._model.traits
        known_inputs = {
            name: values
            for name, values in inputs.items()
            if name in (*traits.input_names, *_PRECOMPUTED_INPUTS)
        }
        usable = {
            name: [self._usable_input(name, value) for value in values]
            for name, values in known_inputs.items()
        }
        has_input = [
            any(value[index] is not None for value in usable.values()) for index in range(len(requests))
        ]
        if not (traits.is_encoder_decoder or traits.has_aligned_inputs):
            # Prompt inputs (images, audio) are fed once, and rows may already be expanded by then.
            self._unreadable_requests |= {
                request for request, has_more in zip(requests, has_input, strict=True) if has_more
            }
            return
        main_inputs = {traits.main_input_name, *_PRECOMPUTED_INPUTS} & usable.keys()
        readable = [
            index
            for index in range(len(requests))
            if any(usable[name][index] is not None for name in main_inputs)
        ]
        self._unreadable_requests |= set(requests) - {requests[index] for index in readable}
        if readable:
            values = {name: [value[index] for index in readable] for name, value in usable.items()}
            self._model.add_requests([requests[index] for index in readable], values)

    def remove_requests(self, requests: Sequence[int]) -> None:
        """Remove requests."""
        self._unreadable_requests -= set(requests)
        self._model.remove_requests(requests)

    def commit(self, parents: Tensor, lengths: Tensor) -> None:
        """Follow the rows: row `i` continues row `parents[i]` of the last draft, -1 if it is new."""
        count = len(parents)
        known_rows = (parents >= 0).nonzero().squeeze(1)
        cache_rows, cached_lengths = (
            self._cache_rows[parents[known_rows]],
            self._cached_lengths[parents[known_rows]],
        )
        common = torch.minimum(cached_lengths[:, 0], (lengths[known_rows] - 1).clamp(min=0))
        is_usable = (
            (cached_lengths >= common[:, None]) if self._can_rewind else (cached_lengths == common[:, None])
        )
        # A row that cannot rewind to the common prefix and has no copy of that length starts again.
        has_usable = is_usable.any(1)
        known_rows, common = known_rows[has_usable], common[has_usable]
        source_rows = cache_rows[has_usable].gather(1, is_usable[has_usable].int().argmax(1)[:, None])[:, 0]
        order = stable_row_order(source_rows, len(self._cache))
        if order is None:
            self._cache.commit(None, common)
            order = torch.arange(len(known_rows))
        else:
            self._cache.commit(source_rows[order], common[order])
        row_in_cache = torch.full((count,), -1)
        row_in_cache[known_rows[order]] = torch.arange(len(known_rows))
        new = (row_in_cache < 0).nonzero().squeeze(1)
        if len(new):
            self._cache.extend(len(new))
            row_in_cache[new] = len(known_rows) + torch.arange(len(new))
        row_lengths = torch.zeros(count, dtype=torch.long)
        row_lengths[known_rows] = common
        self._cache_rows, self._cached_lengths = row_in_cache[:, None], row_lengths[:, None]

    def draft(self, rows: Rows, max_drafts: Tensor, context: DraftContext) -> Proposal:
        """Draft up to `max_drafts` [R] (host) tokens after each row."""
        can_draft = rows.length > 0
        if self._unreadable_requests:
            can_draft &= torch.tensor(
                [request not in self._unreadable_requests for request in rows.request.tolist()]
            )
        traits = self._model.traits
        # Beyond its context length a model may fail, or else draft poorly, even without a position table.
        limit = traits.context_length if traits.max_positions is None else traits.max_positions
        max_drafts = limit_to_positions(torch.where(can_draft, max_drafts, 0), rows.length, limit)
        return self._draft_loop.run(
            rows, max_drafts, context, lambda grown, index: self._next_logits(rows, grown, index)
        )

    # -------------------------------------------------------------------- forwards
    def _next_logits(self, rows: Rows, grown: Rows, index: Tensor) -> Tensor:
        """The logits [N, V'] that follow the rows `index` with their drafts."""
        draft_rows = grown.replace(
            tokens=self._clamp_tokens(grown.tokens),
            cached_length=self._cached_lengths[:, 0],
            offset=torch.zeros_like(grown.offset),
        )
        if self._can_rewind:
            return self._forward_pending(draft_rows, index)
        if grown is not rows:
            self._snapshot_rows(index)
        return self._forward_stepwise(draft_rows, index)

    def _forward_pending(self, draft_rows: Rows, index: Tensor) -> Tensor:
        """Feed the pending tokens of the rows `index`: the logits [N, V'] at their last positions."""
        fed_rows = draft_rows if len(index) == len(draft_rows) else draft_rows.take(index)
        self.forwards += 1
        output = self._model.forward(
            fed_rows, Proposal(), row_subset(self._cache, self._cache_rows[index, 0])
        )
        self._cached_lengths[index, 0] = draft_rows.length[index]
        return output.logits[:, 0]

    def _forward_stepwise(self, draft_rows: Rows, index: Tensor) -> Tensor:
        """The same one token at a time: most recurrent models take only one token after their state."""
        logits: Tensor | None = None
        while len(unfinished := index[self._cached_lengths[index, 0] < draft_rows.length[index]]):
            cached = self._cached_lengths[:, 0]
            length = torch.where(cached > 0, cached + 1, draft_rows.length)
            step_logits = self._forward_pending(
                draft_rows.replace(length=length, cached_length=cached), unfinished
            )
            if logits is None:
                logits = step_logits.new_zeros(len(draft_rows), step_logits.shape[1])
            logits[unfinished.to(logits.device)] = step_logits
        assert logits is not None  # a row always has a pending token: the last is never cached
        return logits[index.to(logits.device)]

    def _snapshot_rows(self, index: Tensor) -> None:
        """Append copies of the rows `index` to the cache."""
        size = len(self._cache)
        lengths = torch.zeros(size, dtype=torch.long)
        is_used = self._cache_rows >= 0
        lengths[self._cache_rows[is_used]] = self._cached_lengths[is_used]
        sources = torch.cat((torch.arange(size), self._cache_rows[index, 0]))
        self._cache.commit(sources, lengths[sources])
        new_rows = torch.full((len(self._cache_rows), 1), -1)
        new_rows[index, 0] = size + torch.arange(len(index))
        new_lengths = torch.full_like(new_rows, -1)
        new_lengths[index] = self._cached_lengths[index, :1]
        self._cache_rows = torch.cat((self._cache_rows, new_rows), 1)
        self._cached_lengths = torch.cat((self._cached_lengths, new_lengths), 1)

    # -------------------------------------------------------------------- inputs
    def _clamp_tokens(self, tokens: Tensor) -> Tensor:
        """Token ids limited to the draft model's vocabulary; unknown ids become its last id.

        This can only lower the acceptance rate.
        """
        vocab_size = self._model.traits.vocab_size
        clamped = tokens.clamp(max=vocab_size - 1) if vocab_size < self._draft_loop.vocab_size else tokens
        return clamped.to(self._model.device, non_blocking=True)

    def _usable_input(self, name: str, value: Any) -> Any:
        """One request's input as the draft model can use it, else None."""
        traits = self._model.traits
        if value is None:
            return None
        if name in _PRECOMPUTED_INPUTS:  # computed by the target, in its embedding size
            return value if traits.is_encoder_decoder and value.shape[-1] == traits.embedding_size else None
        return self._clamp_tokens(value) if name == "input_ids" else value

"""Drafters whose model has a different tokenizer than the target: by text, or by shared tokens.

By text: the target's tokens are decoded and encoded for the assistant, which continues greedily, and its
text is encoded for the target (universal assisted decoding). By shared tokens: the assistant's distribution
is restricted to the tokens of both vocabularies and sampled from, so sampling stays lossless (Timor et al.
2025, Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous
Vocabularies; token-level intersection).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from descant.core.context import row_params
from descant.core.interfaces import DraftContext, Model, ModelTraits, NoiseSource, RowCache
from descant.core.records import Proposal
from descant.core.rows import Rows, index_rows, stable_row_order
from descant.decoding.speculative.draft_model import DraftLoop, limit_to_positions, padded_drafts
from descant.decoding.speculative.token_alignment import (
    AlignedRow,
    ByteTokenizer,
    LookbehindWindows,
    TokenTranslator,
    shared_tokens,
)
from descant.errors import InputError, UnsupportedModel
from descant.kv_cache.row_views import row_subset


def check_draft_model(traits: ModelTraits) -> None:
    """Raise for a draft model that cannot read a re-encoded text."""
    if traits.is_encoder_decoder and traits.main_input_name == "input_ids":
        raise UnsupportedModel(
            "a draft model whose encoder reads tokens must have the target's tokenizer: remove "
            "`assistant_tokenizer`, or use a draft model without an encoder"
        )
    if traits.has_aligned_inputs:
        raise UnsupportedModel(
            "a draft model with another input beside every token must have the target's tokenizer: remove "
            "`assistant_tokenizer`"
        )


@dataclass
class _DraftRow:
    """A row in the assistant's tokens, and its part of the assistant's cache."""

    aligned_row: AlignedRow
    lookbehind: LookbehindWindows = field(default_factory=LookbehindWindows)
    cached_tokens: list[int] = field(default_factory=list)  # the cached tokens that are still valid
    pending_tokens: list[int] = field(default_factory=list)  # tokens to feed next
    cache_row: int = -1  # row in the cache; -1: none
    buffer_row: int = -1  # row in the token buffer; -1: none

    def fork(self) -> _DraftRow:
        """A copy; it gets its own cache row when the cache is rearranged."""
        return replace(self, aligned_row=self.aligned_row.fork(), cached_tokens=list(self.cached_tokens))

    def truncate(self, num_unchanged: int, ids: Sequence[int]) -> None:
        """Truncate the cached tokens to their common prefix with `ids`, at least `num_unchanged` long."""
        stop = min(len(self.cached_tokens), len(ids) - 1)  # the last is fed again for its logits
        num_equal = min(num_unchanged, stop)
        while num_equal < stop and self.cached_tokens[num_equal] == ids[num_equal]:
            num_equal += 1
        del self.cached_tokens[num_equal:]


class _CrossTokenizerDrafter:
    """Base: the draft model with its rows and cache, which follow the target's rows by their text.

    The cache of a row is truncated to the common prefix of its cached tokens and the current encoding of its
    text, whatever happened to the row in between.
    """

    is_model_free = False

    def __init__(self, model: Model, cache: RowCache, tokenizer: Any, assistant_tokenizer: Any) -> None:
        check_draft_model(model.traits)
        self.forwards = 0
        self._model, self._cache = model, cache
        self._translator = TokenTranslator(ByteTokenizer(tokenizer), ByteTokenizer(assistant_tokenizer))
        assistant = self._translator.assistant
        # What an empty row is fed.
        self._empty_row_ids = [
            next(
                (token for token in (assistant.bos_token_id, assistant.eos_token_id) if token is not None), 0
            )
        ]
        self._draft_rows: list[_DraftRow] = []
        self._token_buffer = torch.zeros(0, 0, dtype=torch.long, device=model.device)  # [R, C]
        self._assistant_rows: Rows | None = None  # the assistant's rows during a draft

    def add_requests(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        """Pass encoder inputs to the draft model; tokens and embeddings are only for the target."""
        self._model.add_requests(requests, inputs if self._model.traits.is_encoder_decoder else {})

    def remove_requests(self, requests: Sequence[int]) -> None:
        """Remove requests."""
        self._model.remove_requests(requests)

    def commit(self, parents: Tensor, lengths: Tensor) -> None:  # noqa: ARG002 - tokens are compared instead
        """Follow the rows; committed tokens are read at the next draft."""
        previous, used, draft_rows = self._draft_rows, set[int](), list[_DraftRow]()
        for parent in parents.tolist():
            if parent < 0:
                draft_rows.append(_DraftRow(self._translator.new_row()))
            else:
                draft_rows.append(previous[parent].fork() if parent in used else previous[parent])
                used.add(parent)
        self._draft_rows = draft_rows

    # -------------------------------------------------------------------- committed tokens
    def _sync_rows(self, rows: Rows, max_drafts: Tensor) -> Tensor:
        """Read the committed tokens; returns the possible drafts per row, at most `max_drafts` [R] (host)."""
        if not bool(max_drafts.any()):
            return max_drafts
        params = row_params(rows).values
        windows = [
            _param_values(params.get(f"{side}_lookbehind"), 10, len(rows)) for side in ("target", "assistant")
        ]
        for draft_row, target, assistant in zip(self._draft_rows, *windows, strict=True):
            draft_row.lookbehind = LookbehindWindows(max(1, int(target)), max(1, int(assistant)))
        row_indices = max_drafts.nonzero().squeeze(1).tolist()
        for row, num_unchanged in zip(row_indices, self._read_new_tokens(rows, row_indices), strict=True):
            self._draft_rows[row].truncate(num_unchanged, self._row_ids(row))
        length = torch.tensor([len(self._row_ids(row)) for row in range(len(rows))])
        is_complete = torch.tensor([draft_row.aligned_row.is_complete for draft_row in self._draft_rows])
        max_drafts = torch.where(
            is_complete, limit_to_positions(max_drafts, length, self._model.traits.max_positions), 0
        )
        active = max_drafts.nonzero().squeeze(1).tolist()
        if active:
            self._arrange_cache()
            self._build_assistant_rows(rows, active)
        return max_drafts

    def _row_ids(self, row: int) -> list[int]:
        """The assistant's ids of a row."""
        return self._draft_rows[row].aligned_row.assistant_ids or self._empty_row_ids

    def _read_new_tokens(self, rows: Rows, row_indices: Sequence[int]) -> list[int]:
        """Read the new tokens of these rows; returns how many leading ids of each are unchanged."""
        aligned = [self._draft_rows[row].aligned_row for row in row_indices]
        lengths = rows.length[row_indices].tolist()
        num_known = [len(aligned_row.target_ids) for aligned_row in aligned]
        starts = [
            max(0, min(known_length, length) - self._draft_rows[row].lookbehind.target)
            for row, known_length, length in zip(row_indices, num_known, lengths, strict=True)
        ]
        width = max(1, *(length - start for length, start in zip(lengths, starts, strict=True)))
        positions = torch.tensor(starts)[:, None] + torch.arange(width)
        row_column = torch.tensor(row_indices)[:, None]
        buffer = rows.tokens if rows.tokens.shape[1] else rows.tokens.new_zeros(len(rows), 1)
        positions = positions.clamp(max=buffer.shape[1] - 1)
        windows = buffer[row_column.to(buffer.device), positions.to(buffer.device)].tolist()
        num_unchanged = []
        for row, known_length, length, start, tokens in zip(
            row_indices, num_known, lengths, starts, windows, strict=True
        ):
            draft_row = self._draft_rows[row]
            window = tokens[: length - start]
            if draft_row.aligned_row.target_ids[start:] == window[: known_length - start]:
                num_unchanged.append(
                    self._translator.append_tokens(
                        draft_row.aligned_row, window[known_length - start :], draft_row.lookbehind
                    )
                )
                continue
            # The row does not continue its known tokens: read it from the start.
            draft_row.aligned_row = self._translator.new_row()
            self._translator.append_tokens(
                draft_row.aligned_row, rows.tokens[row, :length].tolist(), draft_row.lookbehind
            )
            num_unchanged.append(0)
        return num_unchanged

    def _arrange_cache(self) -> None:
        """Give every row its cache row, truncated to its valid cached tokens."""
        cached = [draft_row for draft_row in self._draft_rows if draft_row.cache_row >= 0]
        sources = torch.tensor([draft_row.cache_row for draft_row in cached], dtype=torch.long)
        lengths = torch.tensor([len(draft_row.cached_tokens) for draft_row in cached], dtype=torch.long)
        order = stable_row_order(sources, len(self._cache))
        self._cache.commit(*((None, lengths) if order is None else (sources[order], lengths[order])))
        for cache_row, index in enumerate(range(len(cached)) if order is None else order.tolist()):
            cached[index].cache_row = cache_row
        uncached = [draft_row for draft_row in self._draft_rows if draft_row.cache_row < 0]
        if uncached:
            self._cache.extend(len(uncached))
        for cache_row, draft_row in enumerate(uncached, len(cached)):
            draft_row.cache_row = cache_row

    def _build_assistant_rows(self, rows: Rows, active: Sequence[int]) -> None:
        """Build the assistant's rows, with the uncached tokens of the active ones."""
        draft_rows, device = self._draft_rows, self._model.device
        buffer_rows = torch.tensor([draft_row.buffer_row for draft_row in draft_rows])
        if len(self._token_buffer) != len(draft_rows) or not torch.equal(
            buffer_rows, torch.arange(len(draft_rows))
        ):
            empty = self._token_buffer.new_zeros(1, self._token_buffer.shape[1])
            self._token_buffer = torch.cat((self._token_buffer, empty))[
                buffer_rows.to(device)
            ]  # index -1: the empty row
        for buffer_row, draft_row in enumerate(draft_rows):
            draft_row.buffer_row = buffer_row
        cached = torch.tensor([len(draft_row.cached_tokens) for draft_row in draft_rows])
        for row in active:
            draft_rows[row].pending_tokens = self._row_ids(row)[len(draft_rows[row].cached_tokens) :]
        pending = [draft_rows[row].pending_tokens for row in active]
        width = max(map(len, pending))
        required, capacity = int(cached.max()) + width, self._token_buffer.shape[1]
        if required > capacity:
            self._token_buffer = torch.nn.functional.pad(
                self._token_buffer, (0, required + required // 2 - capacity)
            )
        block = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in pending])
        block = block.clamp(max=self._model.traits.vocab_size - 1).to(
            device
        )  # the tokenizer may have more tokens than the model
        index = torch.tensor(active)
        positions = cached[index][:, None] + torch.arange(width)
        self._token_buffer[index[:, None].to(device), positions.to(device)] = block
        length = cached.clone()
        length[index] += torch.tensor([len(tokens) for tokens in pending])
        zeros = torch.zeros_like(length)
        self._assistant_rows = Rows(
            self._token_buffer, length, cached, zeros, length, rows.request, rows.slot
        )

    # -------------------------------------------------------------------- forwards
    def _forward_pending(self, index: Tensor) -> Tensor:
        """Feed the pending tokens of the rows `index`: the logits [N, V'] at their last positions."""
        all_rows = self._assistant_rows
        assert all_rows is not None
        fed_rows = all_rows if len(index) == len(all_rows) else all_rows.take(index)
        draft_rows = [self._draft_rows[row] for row in index.tolist()]
        cache_rows = torch.tensor([draft_row.cache_row for draft_row in draft_rows])
        self.forwards += 1
        logits = self._model.forward(fed_rows, Proposal(), row_subset(self._cache, cache_rows)).logits[:, 0]
        for draft_row in draft_rows:
            draft_row.cached_tokens += draft_row.pending_tokens
            draft_row.pending_tokens = []
        cached = all_rows.cached_length.clone()
        cached[index] = all_rows.length[index]
        self._assistant_rows = all_rows.replace(cached_length=cached)
        return logits

    def _append_tokens(self, index: Tensor, tokens: Tensor, host_tokens: Sequence[int]) -> None:
        """Append one assistant token [N] to the rows `index`."""
        all_rows = self._assistant_rows
        assert all_rows is not None
        for row, token in zip(index.tolist(), host_tokens, strict=True):
            self._draft_rows[row].pending_tokens = [token]
        row_tokens = tokens.new_zeros(len(all_rows)).index_copy(0, index.to(tokens.device), tokens)
        length = all_rows.length.clone()
        length[index] += 1
        self._assistant_rows = all_rows.append(row_tokens[:, None], length)
        self._token_buffer = self._assistant_rows.tokens


class RetokenizingDrafter(_CrossTokenizerDrafter):
    """A draft model with another tokenizer that reads the text and whose text is re-encoded as drafts.

    It continues greedily, also for sampling rows: its drafts depend only on the text. The drafts are the
    target's tokens that begin exactly where the row ends; if the following text would change the row's last
    token, there are none.
    """

    def __init__(
        self,
        model: Model,
        cache: RowCache,
        tokenizer: Any,
        assistant_tokenizer: Any,
        vocabulary: int | None = None,
    ) -> None:
        super().__init__(model, cache, tokenizer, assistant_tokenizer)
        # The target model's vocabulary size; its tokenizer may have more tokens.
        self._target_vocab_size = (
            len(self._translator.target.token_bytes) if vocabulary is None else vocabulary
        )

    @torch.no_grad()
    def draft(self, rows: Rows, max_drafts: Tensor, context: DraftContext) -> Proposal:  # noqa: ARG002 - the interface
        """Draft up to `max_drafts` [R] (host) tokens after each row."""
        max_drafts = self._sync_rows(rows, max_drafts)
        assistant_drafts: list[list[int]] = [[] for _ in self._draft_rows]
        min_confidence = _param_values(
            row_params(rows).values.get("assistant_confidence_threshold"), -1.0, len(rows)
        )
        active = max_drafts.nonzero().squeeze(1)
        while len(active):
            logits = self._forward_pending(active)
            best, tokens = logits.max(-1)
            probs = (best - logits.logsumexp(-1)).exp()
            host_tokens, host_probs = tokens.tolist(), probs.tolist()
            continuing = []
            for index, row in enumerate(active.tolist()):
                row_drafts = assistant_drafts[row]
                row_drafts.append(host_tokens[index])
                can_continue = len(row_drafts) < max_drafts[row] and host_probs[index] >= min_confidence[row]
                if can_continue and self._translator.assistant.is_text(host_tokens[index]):
                    continuing.append(index)
            continuing_index = torch.tensor(continuing, dtype=torch.long)
            active = active[continuing_index]
            if continuing:
                self._append_tokens(
                    active,
                    tokens[continuing_index.to(tokens.device)],
                    [host_tokens[index] for index in continuing],
                )
        target_drafts = [
            self._to_target_tokens(draft_row, row_drafts)[:limit] if row_drafts else []
            for draft_row, row_drafts, limit in zip(
                self._draft_rows, assistant_drafts, max_drafts.tolist(), strict=True
            )
        ]
        return padded_drafts(target_drafts, rows.tokens.device)

    def _to_target_tokens(self, draft_row: _DraftRow, drafts: Sequence[int]) -> list[int]:
        """The target tokens for the assistant's drafts, up to one outside the target model's vocabulary."""
        tokens = self._translator.to_target_tokens(draft_row.aligned_row, drafts, draft_row.lookbehind)
        return list(itertools.takewhile(lambda token: token < self._target_vocab_size, tokens))


class SharedVocabDrafter(_CrossTokenizerDrafter):
    """A draft model with another tokenizer, restricted to the tokens that the target also has.

    It reads the text in its own tokens; each drafted token is the target's token with the same bytes, so its
    probability is known and sampling stays exact.
    """

    def __init__(
        self,
        model: Model,
        cache: RowCache,
        noise: NoiseSource,
        tokenizer: Any,
        assistant_tokenizer: Any,
        vocabulary: int,
    ) -> None:
        super().__init__(model, cache, tokenizer, assistant_tokenizer)
        self._draft_loop = DraftLoop(noise, vocabulary)
        pairs = shared_tokens(self._translator.target, self._translator.assistant).items()
        shared = [
            (assistant_id, target_id)
            for assistant_id, target_id in pairs
            if assistant_id < model.traits.vocab_size and target_id < vocabulary
        ]
        if not shared:
            must = "must have tokens in common with `tokenizer`"
            raise InputError("assistant_tokenizer", must, assistant_tokenizer, "use another draft model")
        self._shared_assistant_ids, self._shared_target_ids = (
            torch.tensor(shared).to(model.device).T.contiguous()
        )
        # The assistant's token by the target's, -1: none.
        self._assistant_by_target = torch.full((vocabulary,), -1, device=model.device)
        self._assistant_by_target[self._shared_target_ids] = self._shared_assistant_ids

    def draft(self, rows: Rows, max_drafts: Tensor, context: DraftContext) -> Proposal:
        """Draft up to `max_drafts` [R] (host) tokens after each row."""
        max_drafts = self._sync_rows(rows, max_drafts)
        return self._draft_loop.run(
            rows, max_drafts, context, lambda grown, index: self._shared_logits(rows, grown, index)
        )

    def _shared_logits(self, rows: Rows, grown: Rows, index: Tensor) -> Tensor:
        """The assistant's logits [N, V] after the rows `index`, -inf for tokens that are not shared."""
        device, usable = self._model.device, torch.arange(len(index))
        if grown is not rows:
            last = grown.tokens.gather(1, (grown.length - 1).to(grown.tokens.device)[:, None])[:, 0]
            tokens = self._assistant_by_target[index_rows(last, index).to(device)]
            host_tokens = tokens.tolist()
            # A processor may force a token that is not shared; the assistant cannot continue from it.
            usable = torch.tensor(
                [position for position, token in enumerate(host_tokens) if token >= 0], dtype=torch.long
            )
            if len(usable):
                self._append_tokens(
                    index[usable],
                    tokens[usable.to(device)],
                    [host_tokens[position] for position in usable.tolist()],
                )
        shared_logits = torch.full((len(index), self._draft_loop.vocab_size), -torch.inf, device=device)
        if len(usable):
            logits = self._forward_pending(index[usable])
            shared_logits[usable.to(device)[:, None], self._shared_target_ids] = logits[
                :, self._shared_assistant_ids
            ]
        return shared_logits


def _param_values(values: Any, default: float, count: int) -> list[float]:
    """A parameter of each row; the default if it is absent or below 0."""
    if values is None:
        return [default] * count
    return [default if value < 0 else value for value in values.tolist()]

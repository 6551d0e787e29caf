"""Drafting with a smaller model that has the target's tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from descant.core.context import row_params
from descant.core.interfaces import (
    Array,
    DraftContext,
    DraftLimitingCache,
    Model,
    ModelTraits,
    NoiseSource,
    RowCache,
)
from descant.core.records import Proposal
from descant.core.rows import Rows, index_rows, stable_row_order
from descant.errors import ConfigError
from descant.kv_cache.row_views import RowView, row_subset
from descant.kv_cache.stores.recurrent_state import RecurrentStateCache

# (rows with the drafts appended, index [N] (host)) -> logits [N, V'] that follow those rows.
LogitsFn = Callable[[Rows, Tensor], Tensor]


def limit_to_positions(max_drafts: Tensor, position: Tensor, max_positions: int | None) -> Tensor:
    """Limit the drafts of each row [R] (host) to a network's maximum number of positions; None: no limit.

    The network is fed the row and all drafts but the last.
    """
    return (
        max_drafts
        if max_positions is None
        else torch.minimum(max_drafts, max_positions - position + 1).clamp(min=0)
    )


def limit_to_cache(max_drafts: Array, rows: Rows, context: DraftContext) -> Array:
    """Limit the drafts of each row [R] to those that read a lossy cache as they would one by one."""
    cache = context.cache
    store = cache.inner if isinstance(cache, RowView) else cache
    if cache.max_rewind is not None or isinstance(store, RecurrentStateCache):
        # An evicting cache lets a prefill see the whole prompt; drafts in the same forward must not. A state
        # that has read the prompt and drafts could not be cut to the prompt.
        max_drafts = np.where(rows.cached_length.numpy() == 0, 0, max_drafts)
    if isinstance(cache, DraftLimitingCache):
        index = torch.arange(len(rows)) if context.row_index is None else context.row_index
        max_drafts = np.minimum(max_drafts, cache.max_drafts(index, rows.pending).numpy())
    return max_drafts


def padded_drafts(drafts: Sequence[Sequence[int]], device: torch.device) -> Proposal:
    """The drafts of each row as a proposal."""
    width = max(map(len, drafts), default=0)
    if not width:
        return Proposal()
    tokens = torch.tensor([[*row_drafts, *[0] * (width - len(row_drafts))] for row_drafts in drafts])
    return Proposal(None, tokens.to(device, non_blocking=True), torch.tensor(list(map(len, drafts))))


@dataclass(frozen=True)
class DraftLoop:
    """The loop over one network's drafts: their distribution, how they are chosen, and when a row stops.

    The draft distribution is the softmax of the network's logits after the target's processors, to match the
    target closely. A greedy row takes the most likely token; a sampling row samples with the noise that the
    target has at that position. Every chosen token is proposed; a low probability or an end token only stops
    the row from drafting further.
    """

    noise: NoiseSource
    vocab_size: int  # the target's

    @torch.no_grad()
    def run(self, rows: Rows, max_drafts: Tensor, context: DraftContext, next_logits: LogitsFn) -> Proposal:
        """Up to `max_drafts[i]` tokens (host) after row `i`, with probabilities where needed."""
        params = _DraftParams.from_rows(rows)
        active, num_drafts, grown = max_drafts > 0, torch.zeros_like(max_drafts), rows
        drafts: list[Tensor] = []
        draft_probs: list[Tensor] = []
        while bool(active.any()):
            logits = self._next_logits(next_logits, grown, active)
            scores = context.process(grown, logits)
            probs = scores.softmax(-1)
            tokens = self._choose_tokens(params, probs, scores, len(drafts))
            token_probs = probs.gather(1, tokens[:, None])
            host_tokens, host_probs = torch.cat((tokens[:, None], token_probs.double()), 1).cpu().unbind(1)
            # A row without possible tokens has NaN probabilities, which are not above 0.
            proposed = active & (host_probs > 0)
            num_drafts += proposed
            drafts.append(tokens)
            if params.needs_probs is not None:
                certain = torch.nn.functional.one_hot(tokens, self.vocab_size).to(probs.dtype)
                draft_probs.append(
                    torch.where((params.needs_probs & proposed).to(probs.device)[:, None], probs, certain)
                )
            grown = grown.append(tokens[:, None], grown.length + proposed)
            active = (
                proposed & (num_drafts < max_drafts) & ~params.should_stop(host_tokens.long(), host_probs)
            )
        width = int(num_drafts.max()) if len(num_drafts) else 0
        if not width:
            return Proposal()
        stacked = torch.stack(draft_probs[:width], 1) if draft_probs else None
        return Proposal(None, torch.stack(drafts[:width], 1), num_drafts, stacked)

    def _next_logits(self, next_logits: LogitsFn, rows: Rows, active: Tensor) -> Tensor:
        """The network's logits for the active rows, resized to the target's vocabulary [R, V]."""
        index = active.nonzero().squeeze(1)
        logits = next_logits(rows, index).to(rows.tokens.device)
        missing = self.vocab_size - logits.shape[1]
        if missing:  # a negative value truncates
            logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        if len(index) == len(rows):
            return logits
        # Processors run on every row of the group; the results of inactive rows are ignored.
        return logits.new_zeros(len(rows), self.vocab_size).index_copy(0, index.to(logits.device), logits)

    def _choose_tokens(self, params: _DraftParams, probs: Tensor, scores: Tensor, ahead: int) -> Tensor:
        """The token of each row [R], `ahead` positions after its last committed token."""
        sampled_rows, index = params.sampled_rows, params.sampled_index
        if sampled_rows is None:
            return scores.argmax(-1)
        noise = self.noise.draw(sampled_rows.replace(length=sampled_rows.length + ahead), self.vocab_size)
        if index is None:
            return (probs / noise).argmax(-1)
        sampled_tokens = (index_rows(probs, index) / noise).argmax(-1)
        return scores.argmax(-1).index_copy(0, index.to(sampled_tokens.device), sampled_tokens)


@dataclass(frozen=True)
class _DraftParams:
    """The drafting parameters of the rows."""

    sampled_rows: Rows | None  # the rows that sample
    sampled_index: Tensor | None  # [N] (host) their indices; None: all rows
    needs_probs: (
        Tensor | None
    )  # [R] (host) rows that sample without a seed, for rejection sampling; None: none
    stop_token_ids: Tensor  # [R, E] (host) tokens that finish a row
    min_confidence: Tensor  # [R] (host) minimum token probability to continue drafting

    @classmethod
    def from_rows(cls, rows: Rows) -> _DraftParams:
        """The drafting parameters of these rows."""
        params = row_params(rows)
        sampled = params["do_sample"] == 1
        index = sampled.nonzero().squeeze(1)
        sampled_rows: Rows | None = None
        if len(index):
            sampled_rows = rows if len(index) == len(rows) else rows.take(index)
        unseeded = sampled & (params["seed"] < 0)
        name = "assistant_confidence_threshold"
        return cls(
            sampled_rows,
            None if sampled_rows is rows else index,
            unseeded if bool(unseeded.any()) else None,
            params["end_token_ids" if "end_token_ids" in params.values else "eos_token_ids"],
            params[name] if name in params.values else torch.full((len(rows),), -1.0),
        )

    def should_stop(self, tokens: Tensor, probs: Tensor) -> Tensor:
        """Whether a row stops after its token with this probability [R] (host)."""
        return (self.stop_token_ids == tokens[:, None]).any(1) | (probs < self.min_confidence)


# Inputs computed by the target's encoder or embeddings.
_PRECOMPUTED_INPUTS = ("encoder_outputs", "inputs_embeds")


class AssistantDrafter:
    """A draft model with the target's tokenizer; its rows and cache follow the target's.

    Its cache holds the committed tokens of each row; missing tokens are fed before the next draft. Leviathan
    et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318.
    """

    is_model_free = False

    def __init__(self, model: Model, cache: RowCache, noise: NoiseSource, vocabulary: int) -> None:
        self.forwards = 0
        self._model, self._cache = model, cache
        self._draft_loop = DraftLoop(noise, vocabulary)
        self._unreadable_requests: set[int] = set()  # requests whose inputs the draft model cannot use
        # The cache row of each row and its cached positions [R] (host).
        self._cache_rows = torch.zeros(0, dtype=torch.long)
        self._cached_lengths = torch.zeros(0, dtype=torch.long)

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
        source_rows = self._cache_rows[parents[known_rows]]
        cached_lengths = self._cached_lengths[parents[known_rows]]
        common = torch.minimum(cached_lengths, (lengths[known_rows] - 1).clamp(min=0))
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
        self._cache_rows, self._cached_lengths = row_in_cache, row_lengths

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
        return self._draft_loop.run(rows, max_drafts, context, self._next_logits)

    # -------------------------------------------------------------------- forwards
    def _next_logits(self, grown: Rows, index: Tensor) -> Tensor:
        """The logits [N, V'] that follow the rows `index` with their drafts."""
        draft_rows = grown.replace(
            tokens=self._clamp_tokens(grown.tokens),
            cached_length=self._cached_lengths,
            offset=torch.zeros_like(grown.offset),
        )
        fed_rows = draft_rows if len(index) == len(draft_rows) else draft_rows.take(index)
        self.forwards += 1
        output = self._model.forward(fed_rows, Proposal(), row_subset(self._cache, self._cache_rows[index]))
        self._cached_lengths[index] = draft_rows.length[index]
        return output.logits[:, 0]

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


def check_early_exit(layers: int, traits: ModelTraits) -> None:
    """Raise if the model does not support an exit after this many layers."""
    name = "assistant_early_exit"
    if layers < 1:
        raise ConfigError(name, "must be >= 1", layers)
    if layers >= traits.num_layers:
        raise ConfigError(name, f"must be below the model's {traits.num_layers} layers", layers, "lower it")
    reasons = {
        "has an encoder": traits.is_encoder_decoder,
        "has no LM head": not traits.has_lm_head,
        "has recurrent state, which its first layers cannot share": traits.cache_type == "recurrent",
        "has no KV cache to share with its first layers": traits.cache_type == "none",
        "prepares its own inputs": traits.prepares_own_inputs,
    }
    for reason, applies in reasons.items():
        if applies:
            raise ConfigError(name, f"is not supported for a model that {reason}", layers, "remove it")


class EarlyExit:
    """The target's first layers with its own LM head, reading and writing the target's cache.

    They reuse the target's cached positions. What they write is overwritten by the verifying forward at the
    same positions. Elhoushi et al. 2024, arXiv 2404.16710.
    """

    is_model_free = False

    def __init__(self, truncated_model: Model, noise: NoiseSource, vocabulary: int) -> None:
        self.forwards = 0
        self._model = truncated_model
        self._draft_loop = DraftLoop(noise, vocabulary)

    def add_requests(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        """Pass on `inputs_embeds`, so that positions count from the end, and what is beside every token."""
        traits = self._model.traits
        known = traits.input_names if traits.has_aligned_inputs else {"inputs_embeds"}
        self._model.add_requests(requests, {name: values for name, values in inputs.items() if name in known})

    def remove_requests(self, requests: Sequence[int]) -> None:
        """Remove requests."""
        self._model.remove_requests(requests)

    def commit(self, parents: Tensor, lengths: Tensor) -> None:
        """Nothing to do: the target's cache follows the rows."""

    def draft(self, rows: Rows, max_drafts: Tensor, context: DraftContext) -> Proposal:
        """Draft up to `max_drafts` [R] (host) tokens after each row; none before its prefill."""
        cache_rows = torch.arange(len(rows)) if context.row_index is None else context.row_index
        cached = rows.cached_length.clone()

        def next_logits(grown: Rows, index: Tensor) -> Tensor:
            fed_rows = grown.replace(cached_length=cached)
            fed_rows = fed_rows if len(index) == len(fed_rows) else fed_rows.take(index)
            self.forwards += 1
            output = self._model.forward(fed_rows, Proposal(), row_subset(context.cache, cache_rows[index]))
            cached[index] = grown.position[index]
            return output.logits[:, 0]

        max_drafts = limit_to_positions(
            torch.where(cached > 0, max_drafts, 0), rows.position, self._model.traits.max_positions
        )
        return self._draft_loop.run(rows, max_drafts, context, next_logits)

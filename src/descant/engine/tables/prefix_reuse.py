"""Prefix reuse: cached prefixes of prompts, prefill in chunks, and the keys and values that are returned."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from descant.core.interfaces import (
    KVCache,
    Model,
    ModelTraits,
    PromptChunk,
    ReadableCache,
    RowCache,
    SelectableCache,
    StateCache,
)
from descant.core.records import Hypothesis, Proposal
from descant.core.rows import Rows
from descant.decoding.guidance import NEGATIVE_PROMPT_KEY
from descant.engine.planning.planner import DecodingPlan
from descant.engine.request import Request
from descant.errors import ConfigError, InputError
from descant.kv_cache.prefix_cache import PrefixCache
from descant.kv_cache.row_views import CachedRow, is_lossless, layer_indices, row_subset, unwrap_cache
from descant.kv_cache.stores.paged import PagedStore
from descant.models.forward.no_cache import NoCache
from descant.models.wrapping.fingerprint import check_prompt_cache


class FinishedKV:
    """Copies of the cached rows on which sequences ended: all tokens but the last, which is never fed.

    An entry is freed with its sequence, so that sequences that beam search discards cost no memory. With a
    limited block pool, rows that are returned are copied out of it, and the others give way to requests.
    """

    def __init__(self, *, is_pool_limited: bool = False) -> None:
        self._is_pool_limited = is_pool_limited
        self._requests: dict[int, bool] = {}  # whether their rows are returned
        self._entries: dict[int, tuple[weakref.ref[Hypothesis], CachedRow]] = {}  # by the sequence's id()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: int, *, returned: bool) -> None:
        """Capture the sequences of this request, whose rows may be returned to the caller."""
        self._requests[request] = returned

    def remove(self, request: int) -> None:
        """Stop capturing the sequences of this request."""
        self._requests.pop(request, None)

    def get(self, sequences: Sequence[Hypothesis]) -> list[CachedRow | None]:
        """The row of each sequence; None: it was not captured, or has given way to requests."""
        return [
            self._entries[id(sequence)][1] if id(sequence) in self._entries else None
            for sequence in sequences
        ]

    def limit_idle(self, limit: int) -> None:
        """Drop the oldest rows that are not returned until at most `limit` blocks of their pool are idle."""
        for key in list(self._entries) if self._is_pool_limited else ():
            # Another thread may have dropped the sequence meanwhile, and its entry with it. Nothing here may
            # hold an earlier row: its blocks would still count as idle.
            entry = self._entries.get(key)
            store = None if entry is None else entry[1].store
            if isinstance(store, PagedStore) and store.is_reclaimable and store.pool.num_idle > limit:
                self._entries.pop(key, None)

    def capture(
        self, cache: RowCache, rows: Rows, ended: Sequence[tuple[int, Hypothesis]], kept_lengths: Tensor
    ) -> None:
        """Copy the fed rows on which sequences ended, before the cache drops them.

        `kept_lengths` [R] (host) is how much of every row remains in use.
        """
        selected = [
            (row, request_id) for row, request_id in ended if int(rows.request[row]) in self._requests
        ]
        if not selected:
            return
        index = torch.tensor([row for row, _ in selected])
        num_new = torch.tensor([len(one.tokens) for _, one in selected])
        # Only committed positions can be copied, and some caches cannot cut committed positions.
        lengths = (rows.offset + rows.prompt_length)[index] + num_new - 1
        cache.commit(None, kept_lengths.scatter(0, index, lengths))
        store, store_rows = unwrap_cache(cache, index)
        if self._is_pool_limited and isinstance(store, PagedStore):
            owners = rows.request[index].tolist()
            pairs = zip(owners, store_rows.tolist(), strict=True)
            copies = [CachedRow(self._copy_from_pool(store, owner, row)) for owner, row in pairs]
        else:
            selection = store.select(store_rows)
            copies = [CachedRow(selection, row) for row in range(len(selected))]
        for copied, (_, sequence) in zip(copies, selected, strict=True):
            key = id(sequence)
            ref = weakref.ref(sequence, lambda _, key=key: self._entries.pop(key, None))  # type: ignore[misc]
            self._entries[key] = (ref, copied)

    def _copy_from_pool(self, store: PagedStore, request: int, row: int) -> PagedStore:
        """A row of a request as a store: in a pool of its own, or with blocks that it gives up again."""
        selected = store.select(torch.tensor([row]))
        if self._requests[request]:
            copied = PagedStore(store.pool.block_size)
            copied.join(selected)
            return copied
        selected.mark_reclaimable()
        return selected


_PAST_ARGUMENT = "past_key_values"
_NO_ROWS = torch.zeros(0, dtype=torch.long)

Forward = Callable[[Rows, Proposal, RowCache], Any]


class CachedPrefix(NamedTuple):
    """The start of a new row: the first `length` positions of a cached row."""

    cached_row: CachedRow | None = None
    length: int = 0


NO_PREFIX: Final = CachedPrefix()


class _PrefixKey(NamedTuple):
    """The key of a request in the prefix cache."""

    prompt: Tensor  # [L] (host)
    cache_salt: bytes
    adapter: str | None
    generation: int  # of the model with which it was admitted


class PrefixReuse:
    """Cached prefixes at admission, chunked prefill, and the keys and values of finished requests."""

    def __init__(
        self, model: Model, prefix_cache: PrefixCache | None = None, *, is_pool_limited: bool = False
    ) -> None:
        self._model, self._traits = model, model.traits
        self._prefix_cache = prefix_cache
        self._finished_kv = FinishedKV(is_pool_limited=is_pool_limited)
        self._returning: set[int] = set()  # requests that return their keys and values
        self._prefix_keys: dict[int, _PrefixKey] = {}  # requests that use the prefix cache
        self._unpublished: set[int] = set()  # those of them that are not prefilled yet
        self._is_checked = False  # whether the model has been compared since the last step
        self._chunk_sizes: dict[int, int] = {}  # requests with chunked prefill

    @property
    def is_used(self) -> bool:
        """Whether any running request uses it."""
        return bool(self._returning or self._prefix_keys or self._chunk_sizes)

    @property
    def finished_kv(self) -> FinishedKV | None:
        """The copies of finished sequences; None: no running request needs it."""
        return self._finished_kv if self._returning or self._prefix_keys else None

    # -------------------------------------------------------------------- admission
    def check(self, request: Request, plan: DecodingPlan, ids: Tensor, cache: RowCache) -> None:
        """Raise for a past, a prefill or a result that a request with the prompt `ids` [L] cannot have."""
        past = None
        if request.past_key_values is not None:
            past = as_cached_row(request.past_key_values)
            check_prompt_cache(request.past_key_values, self._model, _PAST_ARGUMENT, [request.adapter_name])
        if request.inputs or plan.config.use_cache is False:
            self._check_use_cache(request, plan, cache)
        if request.return_past_key_values:
            self._check_returnable(plan, cache)
        if plan.prefill_chunk_size is not None:
            self._check_chunkable(plan)
        if past is not None and past.length:
            _check_past_fits(self._traits, request, past, len(ids))

    def lookup(
        self, request: Request, plan: DecodingPlan, ids: Tensor, cache: RowCache, *, is_counted: bool = True
    ) -> CachedPrefix:
        """The cached prefix of a request with the prompt `ids` [L], which has passed `check`."""
        if plan.needs_full_prefill or (self._prefix_cache is None and request.past_key_values is None):
            return CachedPrefix()
        past = None
        if request.past_key_values is not None:
            past = as_cached_row(request.past_key_values)
        elif self._prefix_cache is not None and self._is_prefix_cacheable(request, cache):
            salt, adapter = request.cache_salt, request.adapter_name
            past = self._prefix_cache.lookup(ids, salt, adapter=adapter, is_counted=is_counted)
        size = 0 if past is None else min(past.length, len(ids) - 1)
        return CachedPrefix() if size <= 0 else CachedPrefix(past, size)

    def add(
        self, request_id: int, request: Request, plan: DecodingPlan, ids: Tensor, cache: RowCache
    ) -> None:
        """Register an admitted request."""
        if request.return_past_key_values:
            self._returning.add(request_id)
        if self._prefix_cache is not None and self._is_prefix_cacheable(request, cache):
            self._prefix_keys[request_id] = _PrefixKey(
                ids.cpu(), request.cache_salt, request.adapter_name, self._prefix_cache.generation
            )
            self._unpublished.add(request_id)
        size = plan.prefill_chunk_size
        if size is not None and not request.inputs and not _is_no_cache(cache):
            self._chunk_sizes[request_id] = size
        if request.return_past_key_values or request_id in self._prefix_keys:
            self._finished_kv.add(request_id, returned=request.return_past_key_values)

    def remove(self, request_id: int) -> None:
        """Drop a request."""
        self._finished_kv.remove(request_id)
        self._returning.discard(request_id)
        self._unpublished.discard(request_id)
        self._prefix_keys.pop(request_id, None)
        self._chunk_sizes.pop(request_id, None)

    # -------------------------------------------------------------------- steps
    def prefill_chunks(self, forward: Forward, cache: RowCache, rows: Rows) -> Iterator[Rows]:
        """Prefill long prompts in chunks, until only the last of each is pending; the rows after each."""
        while self._chunk_sizes:
            size = torch.tensor(
                [self._chunk_sizes.get(request_id, 0) for request_id in rows.request.tolist()]
            )
            index = ((size > 0) & (rows.pending > size)).nonzero().squeeze(1)
            if not len(index):
                self._chunk_sizes.clear()
                break
            rows = prefill_chunk(forward, cache, rows, index, size[index])
            yield rows

    def publish_prompts(self, cache: RowCache, rows: Rows) -> None:
        """Insert the prompts that were prefilled in this step into the prefix cache."""
        self._is_checked = False
        if not self._unpublished:
            return
        assert self._prefix_cache is not None
        first_row = {request_id: row for row, request_id in reversed(list(enumerate(rows.request.tolist())))}
        for request_id in sorted(self._unpublished & first_row.keys()):
            store, index = unwrap_cache(cache, torch.tensor([first_row[request_id]]))
            self._insert(self._prefix_keys[request_id], torch.zeros(0), CachedRow(store, int(index[0])))
        self._unpublished.clear()

    def _insert(self, key: _PrefixKey, tokens: Tensor, cached: CachedRow) -> None:
        """Insert a prompt and further tokens, unless the model has changed since it was admitted."""
        assert self._prefix_cache is not None
        if not self._is_checked:  # once for all requests of a step
            self._prefix_cache.drop_stale()
            self._is_checked = True
        if key.generation == self._prefix_cache.generation:
            sequence = torch.cat((key.prompt, tokens.to(key.prompt.dtype)))
            self._prefix_cache.insert(sequence, cached, key.cache_salt, adapter=key.adapter)

    def collect_finished(self, request_id: int, sequences: Sequence[Hypothesis]) -> tuple[CachedRow, ...]:
        """Insert the sequences of a request into the prefix cache; return their rows if it asks for them."""
        if request_id not in self._returning and request_id not in self._prefix_keys:
            return ()
        cached_rows = self._finished_kv.get(sequences)
        key = self._prefix_keys.get(request_id)
        if key is not None and self._prefix_cache is not None:
            for sequence, row in zip(sequences, cached_rows, strict=True):
                if row is not None:
                    self._insert(key, sequence.tokens, row)
        return tuple(row for row in cached_rows if row is not None) if request_id in self._returning else ()

    def limit_idle(self, limit: int) -> None:
        """Drop captured sequences until at most `limit` blocks of their pool are idle."""
        self._finished_kv.limit_idle(limit)

    # -------------------------------------------------------------------- checks
    def _is_prefix_cacheable(self, request: Request, cache: RowCache) -> bool:
        """Whether a request uses the prefix cache: its keys depend on nothing but its tokens."""
        traits = self._traits
        if traits.is_encoder_decoder or traits.cache_type != "kv" or traits.has_own_position_ids:
            return False
        return not _side_inputs(request) and is_lossless(unwrap_cache(cache, _NO_ROWS)[0])

    def _check_use_cache(self, request: Request, plan: DecodingPlan, cache: RowCache) -> None:
        """Raise for `use_cache=False` in a session with a cache, and for inputs that cannot be fed again."""
        is_fed_again = self._traits.is_encoder_decoder or self._traits.has_aligned_inputs
        inputs: Sequence[str] = () if is_fed_again else _fed_once(request, self._traits)
        is_off = plan.config.use_cache is False and plan.config.source("use_cache") != "model"
        if not inputs and not is_off:  # most requests: the type of the cache does not matter
            return
        if not _is_no_cache(cache):
            if is_off:
                must = "must be True in a session, whose requests share a cache"
                raise ConfigError("use_cache", must, False, "use descant.generate")
        elif inputs:
            must = f"must not be False with `{inputs[0]}`, which is fed once, with the prompt"
            raise ConfigError("use_cache", must, False)

    def _check_returnable(self, plan: DecodingPlan, cache: RowCache) -> None:
        """Raise where the keys and values of sequences cannot be returned."""
        traits = self._traits
        reason = None
        if traits.cache_type == "none":
            reason = "cannot be returned for a model without a cache"
        elif not isinstance(unwrap_cache(cache, _NO_ROWS)[0], SelectableCache):
            reason = "cannot be returned for this type of cache"
        elif traits.cache_type == "recurrent" and plan.strategy.traits.feeds_rejected_tokens:
            reason = "cannot be returned for a recurrent model by a method that feeds tokens it rejects"
        if reason is not None:
            raise InputError(_PAST_ARGUMENT, reason, plan.strategy.name, "leave it out")

    def _check_chunkable(self, plan: DecodingPlan) -> None:
        """Raise where a prompt cannot be prefilled in chunks."""
        traits = self._traits
        reason = None
        if traits.cache_type != "kv":
            reason = "needs a model with a cache of keys and values"
        elif traits.is_encoder_decoder or traits.has_own_position_ids:
            reason = "has no use here: this model's prompt is fed as a whole"
        elif plan.needs_full_prefill:
            reason = "cannot be combined with contrastive search, which needs the states of the whole prompt"
        if reason is not None:
            raise ConfigError("prefill_chunk_size", reason, plan.prefill_chunk_size, "leave it out")


def _check_past_fits(traits: ModelTraits, request: Request, past: CachedRow, prompt_length: int) -> None:
    """Raise for a past that this model or this request cannot start with."""
    got = f"{past.length} positions"
    if traits.is_encoder_decoder:
        must = "must be empty for a model with an encoder, since it depends on the encoder's output"
        raise InputError(_PAST_ARGUMENT, must, got, "pass an empty cache, or none")
    if traits.cache_type == "none":
        raise InputError(_PAST_ARGUMENT, "must not be given to a model without a cache", got)
    if traits.needs_own_cache:
        raise InputError(_PAST_ARGUMENT, "must not be given to several models, each has its own", got)
    inputs = _fed_once(request, traits)
    if inputs:
        must = f"must not be given beside `{inputs[0]}`, which is fed with the beginning of the prompt"
        raise InputError(_PAST_ARGUMENT, must, got)
    if traits.cache_argument == "mems":
        must = "must be empty for a model with bidirectional attention in its prompt"
        raise InputError(_PAST_ARGUMENT, must, got)
    if traits.cache_type == "recurrent":
        if not isinstance(past.store, StateCache):
            raise InputError(_PAST_ARGUMENT, "must hold the state of a recurrent model", got)
        if past.length > prompt_length - 1:
            must = f"must hold less than the prompt's {prompt_length} tokens: a state cannot be cut"
            raise InputError(_PAST_ARGUMENT, must, got)
        return
    if traits.has_own_position_ids:
        must = "must be empty for a model that computes its own positions"
        raise InputError(_PAST_ARGUMENT, must, got)
    max_rewind = past.store.max_rewind
    if max_rewind is not None and past.length - (prompt_length - 1) > max_rewind:
        must = f"must be cut to {prompt_length - 1} positions, and this type can be cut by {max_rewind}"
        raise InputError(_PAST_ARGUMENT, must, got, "pass a cache that is not longer than the prompt")
    store: SelectableCache = past.store
    layers = layer_indices(store) if isinstance(store, ReadableCache) else ()
    if layers and max(layers) >= traits.num_layers:
        must = f"must have been made by this model, which has {traits.num_layers} layers"
        raise InputError(_PAST_ARGUMENT, must, f"{max(layers) + 1} layers")


def _side_inputs(request: Request) -> list[str]:
    """The names of a request's inputs besides its prompts."""
    return sorted(request.inputs.keys() - {NEGATIVE_PROMPT_KEY})


def _fed_once(request: Request, traits: ModelTraits) -> list[str]:
    """The names of those of them that are fed with the beginning of the prompt alone."""
    return [name for name in _side_inputs(request) if name not in traits.positioned_inputs]


def _is_no_cache(cache: RowCache) -> bool:
    return isinstance(unwrap_cache(cache, _NO_ROWS)[0], NoCache)


def empty_cache_like(request: Request) -> KVCache | None:
    """An empty cache of the type of a request's past, so that it can be shared and need not be copied."""
    if request.past_key_values is None:
        return None
    past = as_cached_row(request.past_key_values)
    return past.store.select(_NO_ROWS) if past.length else None


def as_cached_row(past: Any) -> CachedRow:
    """A request's past as a row: it may be one, or a cache of one row."""
    if isinstance(past, CachedRow):
        return past
    commit_store = getattr(past, "commit_store", None)  # a cache with the transformers API
    store = past if commit_store is None else commit_store()
    is_row = isinstance(store, SelectableCache) and len(store) == 1
    if not is_row:
        raise InputError("past_key_values", "must be a `CachedRow`, or a cache of one row", past)
    return CachedRow(store)


def prefill_chunk(forward: Forward, cache: RowCache, rows: Rows, index: Tensor, size: Tensor) -> Rows:
    """Feed the next `size` [N] positions of the rows `index` (host), without choosing a token."""
    chunk = prompt_chunk(cache, rows, index, size)
    forward(chunk.rows, Proposal(), chunk.cache)
    return commit_chunk(cache, rows, index, size)


def prompt_chunk(cache: RowCache, rows: Rows, index: Tensor, size: Tensor) -> PromptChunk:
    """The next `size` [N] positions of the rows `index` (host)."""
    part = rows.replace(columns={}).take(index)
    stop = part.cached_length + size
    return PromptChunk(part.replace(length=stop - part.offset), row_subset(cache, index))


def commit_chunk(cache: RowCache, rows: Rows, index: Tensor, size: Tensor) -> Rows:
    """Commit `size` [N] positions of the rows `index` (host), which have been fed; the rows after it."""
    cached = rows.cached_length.clone()
    cached[index] += size
    cache.commit(None, cached)
    return rows.replace(cached_length=cached)

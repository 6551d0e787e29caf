"""What a session need not read: pasts that requests bring or a prefix cache knows, and what it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from descant.core.interfaces import KVCache, ModelTraits, RowCache
from descant.core.records import Hypothesis, Proposal
from descant.core.rows import Rows
from descant.decoding.guidance.cfg import NEGATIVE_PROMPT_KEY
from descant.engine.finished_kv import FinishedKV
from descant.engine.planner import DecodingPlan
from descant.engine.request import Request
from descant.errors import ConfigError, InputError
from descant.kv_cache.cached_row import CachedRow, is_lossless, layer_indices, unwrap_cache
from descant.kv_cache.prefix_cache import PrefixCache, PrefixReport
from descant.kv_cache.row_subset import row_subset
from descant.models.no_cache import NoCache

__all__ = ["CachedPrefix", "PrefixReuse", "empty_cache_like", "prefill_chunk"]

_PAST_ARGUMENT = "past_key_values"
_NO_ROWS = torch.zeros(0, dtype=torch.long)


class CachedPrefix(NamedTuple):
    """What a request's row begins with: the first `length` positions of a past."""

    cached_row: CachedRow | None = None
    length: int = 0


class _PrefixKey(NamedTuple):
    """What a request's prefixes are known by."""

    prompt: Tensor  # [L] (host)
    cache_salt: bytes


class PrefixReuse:
    """What rows begin with, and what is kept of them when they end."""

    def __init__(self, model: Any, prefixes: PrefixCache | None = None) -> None:
        self._traits: ModelTraits = model.traits
        self._has_several_caches = hasattr(
            model, "new_cache"
        )  # whether each part of it has a cache of its own
        self._prefix_cache = prefixes
        self._finished_kv = FinishedKV()
        self._returning: set[int] = set()  # requests whose sequences' keys and values are asked for
        self._prefix_keys: dict[int, _PrefixKey] = {}  # requests that use the prefix cache
        self._unpublished: set[int] = set()  # those of them that have not been read yet
        self._chunk_sizes: dict[int, int] = {}  # requests whose prompts are read in parts
        if prefixes is not None:
            prefixes.bind_model(getattr(model, "model", model))

    @property
    def finished_kv(self) -> FinishedKV | None:
        """What has to see the sequences that end; None where nothing is kept of any."""
        return self._finished_kv if self._returning or self._prefix_keys else None

    def report(self) -> PrefixReport | None:
        """What the prefix cache has done."""
        return None if self._prefix_cache is None else self._prefix_cache.report()

    # -------------------------------------------------------------------- requests come
    def lookup(self, request: Request, known: DecodingPlan, ids: Tensor, cache: RowCache) -> CachedPrefix:
        """What a request's row with the prompt `ids` [L] begins with."""
        given = as_cached_row(request.past_key_values)
        self._check_use_cache(request, known, cache)
        if request.return_past_key_values:
            self._check_returnable(known, cache)
        if _prefill_chunk_size(known) is not None:
            self._check_chunkable(known)
        if given is not None and given.length:
            self._check_past(request, given, len(ids))
        elif given is None and self._is_prefix_cacheable(request, cache) and not needs_full_prefill(known):
            assert self._prefix_cache is not None
            given = self._prefix_cache.lookup(ids, request.cache_salt)
        size = 0 if given is None else min(given.length, len(ids) - 1)
        return CachedPrefix() if size <= 0 or needs_full_prefill(known) else CachedPrefix(given, size)

    def add(self, number: int, request: Request, known: DecodingPlan, ids: Tensor, cache: RowCache) -> None:
        """Follow a request that was admitted."""
        if (
            request.past_key_values is not None
            and self._traits.cache_type == "recurrent"
            and not needs_full_prefill(known)
        ):
            self._chunk_sizes[number] = 1  # few models that keep a state read several tokens after it
        if request.return_past_key_values:
            self._returning.add(number)
        if self._is_prefix_cacheable(request, cache):
            self._prefix_keys[number] = _PrefixKey(ids.cpu(), request.cache_salt)
            self._unpublished.add(number)
        size = _prefill_chunk_size(known)
        if (
            size is not None
            and not request.inputs
            and not isinstance(unwrap_cache(cache, _NO_ROWS)[0], NoCache)
        ):
            self._chunk_sizes[number] = size
        if request.return_past_key_values or number in self._prefix_keys:
            self._finished_kv.add(number)

    def remove(self, number: int) -> None:
        """Forget a request."""
        self._finished_kv.remove(number)
        self._returning.discard(number)
        self._unpublished.discard(number)
        self._prefix_keys.pop(number, None)
        self._chunk_sizes.pop(number, None)

    # -------------------------------------------------------------------- steps
    def run_prefill_chunks(self, model: Any, cache: RowCache, rows: Rows) -> Rows:
        """Read long prompts in parts, as far as only the last part of each is pending."""
        while self._chunk_sizes:
            size = torch.tensor([self._chunk_sizes.get(one, 0) for one in rows.request.tolist()])
            index = ((size > 0) & (rows.pending > size)).nonzero().squeeze(1)
            if not len(index):
                self._chunk_sizes.clear()
                break
            rows = prefill_chunk(model, cache, rows, index, size[index])
        return rows

    def publish_prompts(self, cache: RowCache, rows: Rows) -> None:
        """Give the prefix cache the prompts that were read in this step."""
        if not self._unpublished:
            return
        assert self._prefix_cache is not None
        first = {request: row for row, request in reversed(list(enumerate(rows.request.tolist())))}
        for number in sorted(self._unpublished & first.keys()):
            whole, place = unwrap_cache(cache, torch.tensor([first[number]]))
            text = self._prefix_keys[number]
            self._prefix_cache.insert(text.prompt, CachedRow(whole, int(place[0])), text.cache_salt)
        self._unpublished.clear()

    def collect_finished(self, number: int, sequences: Sequence[Hypothesis]) -> tuple[CachedRow, ...]:
        """What the sequences of a request hold, where that is asked for; the prefix cache is given it."""
        pasts = self._finished_kv.get(sequences)
        text = self._prefix_keys.get(number)
        if text is not None and self._prefix_cache is not None:
            for one, past in zip(sequences, pasts, strict=True):
                self._prefix_cache.insert(torch.cat((text.prompt, one.tokens)), past, text.cache_salt)
        return tuple(pasts) if number in self._returning else ()

    # -------------------------------------------------------------------- what cannot be
    def _is_prefix_cacheable(self, request: Request, cache: RowCache) -> bool:
        """Whether a request uses the prefix cache: its keys hang on nothing but its tokens."""
        facts = self._traits
        if (
            self._prefix_cache is None
            or facts.is_encoder_decoder
            or facts.cache_type != "kv"
            or facts.has_own_position_ids
        ):
            return False
        return not (request.inputs.keys() - {NEGATIVE_PROMPT_KEY}) and is_lossless(
            unwrap_cache(cache, _NO_ROWS)[0]
        )

    def _check_past(self, request: Request, given: CachedRow, length: int) -> None:
        """Raise for a past that this model or this request cannot begin with."""
        facts = self._traits
        held = f"{given.length} positions"
        if facts.is_encoder_decoder:
            must = "must hold nothing for a model with an encoder, which is looked at while reading"
            raise InputError(_PAST_ARGUMENT, must, held, "pass an empty cache, or none")
        if facts.cache_type == "none":
            raise InputError(_PAST_ARGUMENT, "must not be given to a model that remembers nothing", held)
        if self._has_several_caches:
            raise InputError(_PAST_ARGUMENT, "must not be given to several models, each has its own", held)
        beside = sorted(request.inputs.keys() - {NEGATIVE_PROMPT_KEY})
        if beside:
            must = f"must not be given beside `{beside[0]}`, which is read with the beginning of the prompt"
            raise InputError(_PAST_ARGUMENT, must, held)
        if facts.cache_argument == "mems":
            must = "must hold nothing for a model that looks both ways in its prompt, which it reads as one"
            raise InputError(_PAST_ARGUMENT, must, held)
        if facts.cache_type == "recurrent":
            if not hasattr(given.store, "read_state"):
                raise InputError(
                    _PAST_ARGUMENT, "must hold the state of a model that keeps more than keys", held
                )
            if given.length > length - 1:
                must = f"must hold less than the prompt's {length} tokens: this model cannot take any back"
                raise InputError(_PAST_ARGUMENT, must, held)
            return
        if facts.has_own_position_ids:
            must = "must hold nothing for a model that counts positions by itself"
            raise InputError(_PAST_ARGUMENT, must, held)
        back = given.store.max_rewind
        if back is not None and given.length - (length - 1) > back:
            must = f"must be cut to {length - 1} positions, and this kind can take back {back}"
            raise InputError(_PAST_ARGUMENT, must, held, "pass a cache that is not longer than the prompt")
        layers = getattr(given.store, "layers", ())
        if layers and max(layer_indices(given.store)) >= facts.num_layers:
            must = f"must have been made by this model, which has {facts.num_layers} layers"
            raise InputError(_PAST_ARGUMENT, must, f"{max(layer_indices(given.store)) + 1} layers")

    def _check_use_cache(self, request: Request, known: DecodingPlan, cache: RowCache) -> None:
        """Raise for a request without a cache that a session has, or that needs one."""
        if isinstance(unwrap_cache(cache, _NO_ROWS)[0], NoCache):
            beside = sorted(request.inputs.keys() - {NEGATIVE_PROMPT_KEY})
            if beside and not self._traits.is_encoder_decoder:
                must = f"must not be False with `{beside[0]}`, which goes in with the prompt, once"
                raise ConfigError("use_cache", must, False)
        elif known.config.use_cache is False and known.config.source("use_cache") != "model":
            must = "must be True in a session, whose requests share a cache"
            raise ConfigError("use_cache", must, False, "use descant.generate")

    def _check_returnable(self, known: DecodingPlan, cache: RowCache) -> None:
        """Raise where what sequences hold cannot be given back."""
        facts = self._traits
        why = None
        if facts.is_encoder_decoder:
            why = "of a model with an encoder is not given back"
        elif facts.cache_type == "none":
            why = "cannot be given back by a model that remembers nothing"
        elif not hasattr(unwrap_cache(cache, _NO_ROWS)[0], "select"):
            why = "cannot be given back of this kind of cache"
        elif facts.cache_type == "recurrent" and known.strategy_key[0] not in (
            "sampling",
            "beam",
            "constrained",
        ):
            why = "cannot be given back where tokens are tried, by a model that cannot take them back"
        if why is not None:
            raise InputError(_PAST_ARGUMENT, why, known.strategy_key[0], "leave it out")

    def _check_chunkable(self, known: DecodingPlan) -> None:
        """Raise where a prompt cannot be read in parts."""
        facts, size = self._traits, _prefill_chunk_size(known)
        why = None
        if facts.cache_type != "kv":
            why = "needs a model that remembers keys and values"
        elif facts.is_encoder_decoder or facts.has_own_position_ids:
            why = "has no use here: this model's prompt is read as a whole"
        elif needs_full_prefill(known):
            why = "cannot be combined with contrastive search, which looks at the states of the whole prompt"
        if why is not None:
            raise ConfigError("prefill_chunk_size", why, size, "leave it out")


def _prefill_chunk_size(known: DecodingPlan) -> int | None:
    """The size of the parts in which a prompt is read, where that was asked for."""
    config = known.config
    return None if config.source("prefill_chunk_size") == "model" else config.prefill_chunk_size


def needs_full_prefill(known: DecodingPlan) -> bool:
    """Whether a plan needs the whole prompt read, for its hidden states, whatever is known of it."""
    return known.strategy_key[0] in ("contrastive", "sequential")


def empty_cache_like(request: Request) -> KVCache | None:
    """An empty cache of the kind that a request's past is of, so that it can be shared and not copied."""
    past = as_cached_row(request.past_key_values)
    return None if past is None or not past.length else past.store.select(_NO_ROWS)


def as_cached_row(given: Any) -> CachedRow | None:
    """What a request was given as its past: a row of a cache, or a cache of one row."""
    if given is None or isinstance(given, CachedRow):
        return given
    store = getattr(given, "store", given)
    if not hasattr(store, "lengths") or not hasattr(store, "select") or len(store) != 1:
        must = "must be a `Past`, or a cache of one row"
        raise InputError("past", must, given)
    return CachedRow(store)


def prefill_chunk(model: Any, cache: RowCache, rows: Rows, index: Tensor, size: Tensor) -> Rows:
    """The rows after those of `index` (host) have read `size` [N] further positions, without a choice."""
    part = rows.replace(columns={}).take(index)
    stop = part.cached_length + size
    part = part.replace(length=stop - part.offset)
    model.forward(part, Proposal(), row_subset(cache, index))
    cached = rows.cached_length.clone()
    cached[index] = stop
    cache.commit(None, cached)
    return rows.replace(cached_length=cached)

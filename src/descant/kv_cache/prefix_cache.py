"""The prefix cache: keys and values of prompt prefixes, in hashed blocks, reused across requests."""

from __future__ import annotations

import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import Array, KVCache
from descant.errors import InputError
from descant.kv_cache.block_pool import BlockPool
from descant.kv_cache.model_state import ModelState
from descant.kv_cache.row_views import CachedRow, read_layers
from descant.kv_cache.stores.paged import PagedStore


@dataclass(frozen=True)
class PrefixReport:
    """Statistics of a prefix cache."""

    hits: int  # requests with a cached prefix
    misses: int  # requests without
    tokens_read: int  # prompt tokens looked up
    tokens_found: int  # prompt tokens found
    bytes: int
    blocks: int
    evicted: int  # evicted blocks


@dataclass(slots=True, eq=False)
class _PrefixBlock:
    """The keys and values [H, block, D] of one block of tokens, by layer."""

    layers: Mapping[int, tuple[Tensor, Tensor]]
    last_used: int = 0  # a larger number is later

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for pair in self.layers.values() for tensor in pair)


class _PooledPrefixBlock:
    """Blocks of a paged cache's pool that hold one block of tokens: a reference to them, no copy."""

    def __init__(self, pool: BlockPool, ids: Array) -> None:
        self.pool, self.ids, self.last_used = pool, ids, 0
        self.nbytes = len(ids) * pool.block_nbytes
        pool.incref(ids)
        pool.mark_reclaimable(ids)

    def __del__(self) -> None:
        if hasattr(self, "nbytes"):
            self.pool.release(self.ids, is_reclaimable=True)

    @property
    def layers(self) -> Mapping[int, tuple[Tensor, Tensor]]:
        """By layer the keys and values [H, block, D]."""
        pairs = read_layers(PagedStore.of_blocks(self.pool, self.ids), torch.zeros(1, dtype=torch.long))
        return {layer: (key[0], value[0]) for layer, (key, value) in pairs.items()}

    @property
    def num_unused(self) -> int:
        """The number of blocks that no request refers to."""
        return int(self.pool.is_idle[self.ids].sum())


class _BlockChain:
    """Consecutive blocks, readable as a cache with one row."""

    max_rewind: int | None = None
    exact_reads = True

    def __init__(self, blocks: Sequence[_PrefixBlock | _PooledPrefixBlock], block: int) -> None:
        self._blocks = [block.layers for block in blocks]
        self.lengths = torch.tensor([len(blocks) * block])

    @property
    def layers(self) -> Sequence[int]:
        """The layers of the blocks."""
        return list(self._blocks[0])

    def read(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of its only row, expanded to [N, H, S, D]."""
        pairs = [layers[layer] for layers in self._blocks]
        key, value = (torch.cat([pair[side] for pair in pairs], 1)[None] for side in (0, 1))
        return key.expand(len(rows), -1, -1, -1), value.expand(len(rows), -1, -1, -1)


class PrefixCache:
    """Prompt prefixes reused across requests: `Session(model, prefix_cache=PrefixCache())`.

    Prompts and outputs are cut into blocks of `block` tokens. The key of a block is the SHA-256 of its
    tokens, the key of the block before it, two salts, the cache's and the request's (`Request.cache_salt`),
    and the adapter that the request names. Requests with different salts share nothing, so timing reveals
    nothing between them. Above `max_bytes` the least recently used blocks are evicted, the end of a text
    before its start. Of a paged cache whose block size divides `block` it refers to the pool's own blocks;
    others are copied.

    A cache serves one model, the first it is used with. All blocks are dropped when the model changes: its
    weights, buffers, adapters, forward hooks or training mode. Of a large weight some numbers are compared. A
    change that torch does not count and that may miss those has to be reported with
    `descant.weights_changed(model)`.
    """

    def __init__(self, max_bytes: int = 2**30, *, salt: bytes = b"", block: int = 32) -> None:
        numbers: dict[str, Any] = {"max_bytes": max_bytes, "block": block}
        for name, number in numbers.items():
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise InputError(name, "must be an integer >= 1", number)
        self.max_bytes, self.block = max_bytes, block
        self._salt = _check_bytes("salt", salt)
        # The least recently used block comes first.
        self._blocks: OrderedDict[bytes, _PrefixBlock | _PooledPrefixBlock] = OrderedDict()
        self._chains: weakref.WeakValueDictionary[bytes, Any] = weakref.WeakValueDictionary()
        self._model: weakref.ref[Any] | None = None
        self._state: ModelState | None = None
        self.generation = 0  # counts the changes of the model
        self._hits = self._misses = self._tokens_read = self._tokens_found = 0
        self._total_bytes = self._num_evicted = 0
        self._uses = count()
        # By pool the block of this cache that a pool block is part of.
        self._digest_of: weakref.WeakKeyDictionary[BlockPool, dict[int, bytes]] = weakref.WeakKeyDictionary()
        # Blocks that no request refers to, the least recently used first; some may be in use again.
        self._unused: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        """The number of blocks."""
        return len(self._blocks)

    @property
    def nbytes(self) -> int:
        """The memory of all blocks in bytes."""
        return self._total_bytes

    def report(self) -> PrefixReport:
        """The statistics so far."""
        return PrefixReport(
            self._hits,
            self._misses,
            self._tokens_read,
            self._tokens_found,
            self._total_bytes,
            len(self),
            self._num_evicted,
        )

    def clear(self) -> None:
        """Remove all blocks and the bound model."""
        self._blocks.clear()
        self._chains.clear()
        self._unused.clear()
        self._digest_of.clear()
        self._total_bytes, self._model, self._state = 0, None, None

    def bind_model(self, model: object) -> None:
        """Bind the cache to a model; raise if it is bound to another one."""
        bound = None if self._model is None else self._model()
        if bound is None:
            if self._model is not None:
                self.clear()
            self._model, self._state = weakref.ref(model), ModelState(model)
        elif bound is not model:
            do = "use one prefix cache per model, or call clear()"
            raise InputError("prefix_cache", "must not be bound to another model", type(bound).__name__, do)
        self.drop_stale()

    def drop_stale(self) -> int:
        """Drop all blocks if the model has changed; returns the generation of the model.

        `lookup` and `insert` do not check: this reads some numbers of each weight.
        """
        state = ModelState(None if self._model is None else self._model())
        if state != self._state:
            bound = self._model
            self.clear()
            self._model, self._state = bound, state
            self.generation += 1
        return self.generation

    def lookup(
        self, tokens: Tensor, salt: bytes = b"", *, adapter: str | None = None, is_counted: bool = True
    ) -> CachedRow | None:
        """The longest cached prefix of a prompt [L] (host); the last token is always left to feed.

        `adapter` is the one that the request names. `is_counted` says whether it is a hit or a miss of the
        statistics.
        """
        matched: list[bytes] = []
        for digest in self._digests(tokens[: len(tokens) - 1], salt, adapter):
            if digest not in self._blocks:
                break
            matched.append(digest)
        if is_counted:
            self._tokens_read += len(tokens)
            self._tokens_found += len(matched) * self.block
            self._hits, self._misses = self._hits + bool(matched), self._misses + (not matched)
        if not matched:
            return None
        self._touch(matched)
        chain = self._chains.get(matched[-1])
        if chain is None:
            chain = _join_blocks([self._blocks[digest] for digest in matched], self.block)
            self._chains[matched[-1]] = chain
        return CachedRow(cast(KVCache, chain))

    def insert(
        self, tokens: Tensor, cached: CachedRow, salt: bytes = b"", *, adapter: str | None = None
    ) -> None:
        """Keep the full blocks of tokens [L] (host) of their cached row: by reference, or as copies."""
        digests = list(self._digests(tokens[: cached.length], salt, adapter))
        if not digests:
            return
        new = [index for index, digest in enumerate(digests) if digest not in self._blocks]
        for index, block in zip(new, self._read_blocks(cached, new), strict=True):
            self._blocks[digests[index]] = block
            self._total_bytes += block.nbytes
            if isinstance(block, _PooledPrefixBlock):
                owned = self._digest_of.setdefault(block.pool, {})
                owned.update(dict.fromkeys(block.ids.tolist(), digests[index]))
        self._touch(digests)
        while self._total_bytes > self.max_bytes:
            self._evict(next(iter(self._blocks)))

    def _read_blocks(
        self, cached: CachedRow, indices: Sequence[int]
    ) -> Iterator[_PrefixBlock | _PooledPrefixBlock]:
        """Some blocks of a cached row."""
        if not indices:
            return
        store = cached.store
        if isinstance(store, PagedStore) and self.block % store.pool.block_size == 0:
            ids = store.block_ids(np.array([cached.row]))[0]
            size = self.block // store.pool.block_size
            for index in indices:
                yield _PooledPrefixBlock(store.pool, ids[index * size : (index + 1) * size])
            return
        layers = read_layers(store, torch.tensor([cached.row]))
        for index in indices:
            slots = slice(index * self.block, (index + 1) * self.block)
            pairs = {
                layer: (key[0, :, slots].clone(), value[0, :, slots].clone())
                for layer, (key, value) in layers.items()
            }
            yield _PrefixBlock(pairs)

    def _evict(self, digest: bytes) -> None:
        """Drop a block."""
        block = self._blocks.pop(digest)
        self._total_bytes -= block.nbytes
        self._num_evicted += 1
        self._unused.pop(digest, None)
        if isinstance(block, _PooledPrefixBlock):
            owned = self._digest_of[block.pool]
            for pooled in block.ids.tolist():
                owned.pop(pooled, None)

    def num_unused(self) -> int:
        """The number of blocks of its pools that no request refers to."""
        return sum(pool.num_idle for pool in self._digest_of)

    def limit_unused(self, limit: int) -> None:
        """Evict the least recently used blocks until at most `limit` pool blocks are unused."""
        excess = self.num_unused() - limit
        if excess <= 0:
            return
        self._note_unused()
        while excess > 0 and self._unused:
            digest = self._unused.popitem(last=False)[0]
            block = self._blocks[digest]
            unused = block.num_unused if isinstance(block, _PooledPrefixBlock) else 0
            if unused:  # not in use again
                excess -= unused
                self._evict(digest)

    def _note_unused(self) -> None:
        """Put the blocks that requests have let go of at the end of the unused ones."""
        for pool, owned in self._digest_of.items():
            found = {owned[block] for block in pool.take_newly_idle() if block in owned}
            for digest in sorted(found, key=lambda one: self._blocks[one].last_used):
                self._unused[digest] = None
                self._unused.move_to_end(digest)

    def _touch(self, digests: Sequence[bytes]) -> None:
        """Mark blocks as used, the first block last: it must not be evicted before its successors."""
        for digest in reversed(digests):
            self._blocks.move_to_end(digest)
            self._blocks[digest].last_used = next(self._uses)
            if digest in self._unused:
                self._unused.move_to_end(digest)

    def _digests(self, tokens: Tensor, salt: bytes, adapter: str | None = None) -> Iterator[bytes]:
        """The key of each full block: a hash of its tokens, all blocks before it, salts and adapter."""
        parts = [self._salt, _check_bytes("salt", salt)]
        parts += [] if adapter is None else [adapter.encode()]
        framed = [len(part).to_bytes(8, "little") + part for part in parts]
        digest = hashlib.sha256(b"".join((b"descant prefix", *framed))).digest()
        ids = tokens.cpu().numpy().astype("<i8")
        for start in range(0, len(ids) - self.block + 1, self.block):
            digest = hashlib.sha256(digest + ids[start : start + self.block].tobytes()).digest()
            yield digest


def _join_blocks(blocks: Sequence[_PrefixBlock | _PooledPrefixBlock], size: int) -> Any:
    """Consecutive blocks as a cache with one row, which shares the memory of a pool."""
    pooled = [block for block in blocks if isinstance(block, _PooledPrefixBlock)]
    if len(pooled) == len(blocks) and all(block.pool is pooled[0].pool for block in pooled):
        return PagedStore.of_blocks(pooled[0].pool, np.concatenate([block.ids for block in pooled]))
    return _BlockChain(blocks, size)


def _check_bytes(name: str, value: object) -> bytes:
    if not isinstance(value, bytes):
        raise InputError(name, "must be bytes", value)
    return value

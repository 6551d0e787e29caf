"""The prefix cache: keys and values of what many prompts begin with, block by block, found by its hash."""

from __future__ import annotations

import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from descant.core.interfaces import KVCache
from descant.errors import InputError
from descant.kv_cache.cached_row import CachedRow, read_layers

__all__ = ["PrefixCache", "PrefixReport"]


@dataclass(frozen=True)
class PrefixReport:
    """What a prefix cache has done so far, and what it holds now."""

    hits: int  # requests that began with something known
    misses: int  # requests that did not
    tokens_read: int  # of prompts, all told
    tokens_found: int  # of those, known already
    bytes: int
    blocks: int
    evicted: int  # blocks


class _PrefixBlock(NamedTuple):
    """The keys and values [H, block, D] of one block of tokens, by layer."""

    layers: Mapping[int, tuple[Tensor, Tensor]]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for pair in self.layers.values() for part in pair)


class _BlockChain:
    """Blocks that follow each other, read like a cache of one row."""

    max_rewind: int | None = None

    def __init__(self, blocks: Sequence[_PrefixBlock], block: int) -> None:
        self._blocks = blocks
        self.lengths = torch.tensor([len(blocks) * block])

    @property
    def layers(self) -> Sequence[int]:
        """The layers that it holds."""
        return list(self._blocks[0].layers)

    def read(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of its row [N, H, S, D], as often as it is asked for."""
        pairs = [one.layers[layer] for one in self._blocks]
        key, value = (torch.cat([pair[side] for pair in pairs], 1)[None] for side in (0, 1))
        return key.expand(len(rows), -1, -1, -1), value.expand(len(rows), -1, -1, -1)


class PrefixCache:
    """What prompts begin with, kept from request to request: `Session(model, prefix_cache=PrefixCache())`.

    Prompts and answers are cut into blocks of `block` tokens. A block is known by the SHA-256 of its tokens,
    of all blocks before it, and of the salts: the cache's own, and the request's (`Request.salt`), so that
    no request can tell by its speed what others with another salt have said. When more than `max_bytes` are
    held the least recently used go first, the end of a text before its beginning.

    It belongs to the first model that it is used with, as that is: call `clear` when weights change.
    """

    def __init__(self, max_bytes: int = 2**30, *, salt: bytes = b"", block: int = 32) -> None:
        numbers: dict[str, Any] = {"max_bytes": max_bytes, "block": block}
        for name, number in numbers.items():
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise InputError(name, "must be an integer >= 1", number)
        self.max_bytes, self.block = max_bytes, block
        self._salt = _check_bytes("salt", salt)
        self._blocks: OrderedDict[bytes, _PrefixBlock] = OrderedDict()  # the least recently used first
        self._chains: weakref.WeakValueDictionary[bytes, _BlockChain] = weakref.WeakValueDictionary()
        self._model: weakref.ref[Any] | None = None
        self._total_bytes = self._hits = self._misses = self._tokens_read = self._tokens_found = (
            self._num_evicted
        ) = 0

    def __len__(self) -> int:
        """How many blocks it holds."""
        return len(self._blocks)

    @property
    def nbytes(self) -> int:
        """What its blocks take in memory."""
        return self._total_bytes

    def report(self) -> PrefixReport:
        """What it has done so far."""
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
        """Forget everything, and whose it is."""
        self._blocks.clear()
        self._chains.clear()
        self._total_bytes, self._model = 0, None

    def bind_model(self, model: object) -> None:
        """Belong to a model, or raise where it belongs to another."""
        mine = None if self._model is None else self._model()
        if mine is None:
            if self._model is not None:
                self.clear()
            self._model = weakref.ref(model)
        elif mine is not model:
            do = "give each model a cache of its own, or clear() it"
            raise InputError("prefix_cache", "must not hold what another model read", type(mine).__name__, do)

    def lookup(self, tokens: Tensor, salt: bytes = b"") -> CachedRow | None:
        """The longest known beginning of a prompt [L] (host), short of the last token, which is fed."""
        known: list[bytes] = []
        for digest in self._digests(tokens[: len(tokens) - 1], salt):
            if digest not in self._blocks:
                break
            known.append(digest)
        self._tokens_read += len(tokens)
        self._tokens_found += len(known) * self.block
        self._hits, self._misses = self._hits + bool(known), self._misses + (not known)
        if not known:
            return None
        self._touch(known)
        chain = self._chains.get(known[-1])
        if chain is None:
            chain = _BlockChain([self._blocks[one] for one in known], self.block)
            self._chains[known[-1]] = chain
        return CachedRow(cast(KVCache, chain))

    def insert(self, tokens: Tensor, past: CachedRow, salt: bytes = b"") -> None:
        """Take the full blocks of a text [L] (host), of which `past` holds the keys and values."""
        digests = list(self._digests(tokens[: past.length], salt))
        if not digests:
            return
        new = [place for place, digest in enumerate(digests) if digest not in self._blocks]
        if new:
            layers = read_layers(past.store, torch.tensor([past.row]))
            for place in new:
                here = slice(place * self.block, (place + 1) * self.block)
                pairs = {
                    layer: (key[0, :, here].clone(), value[0, :, here].clone())
                    for layer, (key, value) in layers.items()
                }
                self._blocks[digests[place]] = _PrefixBlock(pairs)
                self._total_bytes += self._blocks[digests[place]].nbytes
        self._touch(digests)
        while self._total_bytes > self.max_bytes:
            _, gone = self._blocks.popitem(last=False)
            self._total_bytes -= gone.nbytes
            self._num_evicted += 1

    def _touch(self, digests: Sequence[bytes]) -> None:
        """Count blocks as used, the first of a text last: it must not go before what follows it."""
        for digest in reversed(digests):
            self._blocks.move_to_end(digest)

    def _digests(self, tokens: Tensor, salt: bytes) -> Iterator[bytes]:
        """The name of each full block: a hash of it, of all before it, and of the salts."""
        salt = _check_bytes("salt", salt)
        sizes = b"".join(len(part).to_bytes(8, "little") for part in (self._salt, salt))
        link = hashlib.sha256(b"descant prefix" + sizes + self._salt + salt).digest()
        ids = tokens.cpu().numpy().astype("<i8")
        for start in range(0, len(ids) - self.block + 1, self.block):
            link = hashlib.sha256(link + ids[start : start + self.block].tobytes()).digest()
            yield link


def _check_bytes(name: str, value: object) -> bytes:
    if not isinstance(value, bytes):
        raise InputError(name, "must be bytes", value)
    return value

"""A cache that a caller lends to a call: what its prompts begin with, and what it holds afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from descant.api.inputs import RaggedPrompts
from descant.core.interfaces import KVCache, KVSpan
from descant.errors import InputError
from descant.kv_cache.cached_row import CachedRow, gather_rows, is_lossless, read_layers
from descant.kv_cache.recurrent_state import RecurrentStateCache
from descant.models.hf_caches.exports import (
    Cache,
    DynamicCache,
    PagedCache,
    RecurrentCache,
    to_descant_cache,
)

__all__ = ["UserCache", "return_cache"]


_ARGUMENT = "past_key_values"


class UserCache:
    """A user's cache for the time of a call.

    Its one row is what every prompt begins with, or its rows are what the prompts begin with, each its own.
    The call works on copies. A cache that is not frozen holds in the end what the returned sequences hold,
    all of their tokens but the last, as it does after transformers' generate(); one that transformers made
    holds it column by column as the sequences are padded.
    """

    def __init__(self, given: Any) -> None:
        self._given = given
        self.hf_cache: Any = to_descant_cache(given)
        self._is_transformers = self.hf_cache is not given
        self.frozen = bool(getattr(self.hf_cache, "read_only", False)) or isinstance(given, tuple | list)
        self._store = cast(KVCache, self.hf_cache.store)

    @property
    def is_empty(self) -> bool:
        """Whether it holds nothing yet."""
        return not len(self._store) or not bool(self._store.lengths.any())

    def empty_like(self) -> KVCache:
        """An empty cache of its kind."""
        return self._store.select(torch.zeros(0, dtype=torch.long))

    def cached_rows(self, prompts: RaggedPrompts) -> list[CachedRow | None]:
        """What each prompt begins with."""
        count, rows = len(prompts), len(self._store)
        if self._is_transformers and not self.frozen:
            self._validate_fillable(prompts)
        if self.is_empty:
            return [None] * count
        if rows not in (1, count):
            raise InputError(
                _ARGUMENT, f"must have one row, or one for each of {count} prompts", f"{rows} rows"
            )
        known = known_tokens(self.hf_cache)
        place = [0] * count if rows == 1 else list(range(count))
        if known is not None:
            for line, row in enumerate(place):
                _validate_prefix(prompts.prompt(line).cpu(), known[row], line)
        store = self._store
        level = bool((store.lengths == store.lengths[0]).all())
        packed = known is not None or getattr(self.hf_cache, "packed", False) or not level
        if not packed and rows == count and prompts.mask is not None:
            store = (
                _remove_padding(store, prompts.mask)
                if is_lossless(store)
                else self._store_without_padding(prompts.mask)
            )
        return [CachedRow(store, row) for row in place]

    def _store_without_padding(self, here: Tensor) -> KVCache:
        """Its rows without their padding at the left, where they cannot be read position by position."""
        return cast(KVCache, to_descant_cache(self._given, here).store)

    def _validate_fillable(self, prompts: RaggedPrompts) -> None:
        """Raise for a cache that transformers made and that could not be filled in the end."""
        kind, do = type(self._given).__name__, "use one of descant's"
        if prompts.embed_width:
            raise InputError(_ARGUMENT, "must be one of descant's where prompts have no tokens", kind, do)
        store = self._store
        if is_lossless(store) or isinstance(store, RecurrentStateCache):
            return
        if len(prompts) > 1 or not hasattr(store, "read"):
            must = "must be given for one prompt at a time, to be filled again: it forgets what it has read"
            raise InputError(_ARGUMENT, must, kind, do)

    def write_back(self, store: KVCache, tokens: Sequence[Tensor], columns: Tensor) -> Any:
        """Have it hold the rows of a store, of these tokens; `columns` [R, W] is where sequences have them.

        The cache as it was given.
        """
        face, given = self.hf_cache, self._given
        face.store = store
        if not self._is_transformers:
            face.tokens = list(tokens)
        elif isinstance(store, RecurrentStateCache):
            vars(given).update(vars(store.read_state(torch.arange(len(store)))))
        else:
            pairs = {
                layer: _scatter_columns(pair, columns)
                for layer, pair in read_layers(store, _all_rows(store)).items()
            }
            given.reset()
            for layer, (key, value) in pairs.items():
                given.update(key, value, layer)
        return given


def return_cache(
    loan: UserCache | None, pasts: Sequence[CachedRow], tokens: Sequence[Tensor], columns: Tensor
) -> Any:
    """A cache that holds what sequences hold, `tokens` each: the one that was lent, or a new one.

    `columns` [R, W] says where the sequences have these tokens, as they are returned.
    """
    store = gather_rows(pasts)
    if loan is not None and not loan.frozen:
        return loan.write_back(store, tokens, columns)
    face = _wrap_store(store)
    face.tokens = list(tokens)
    return face


def _wrap_store(store: Any) -> Any:
    """A new cache over a store, of the documented kind where there is one that needs no more."""
    if isinstance(store, RecurrentStateCache):
        state = store.read_state(torch.arange(len(store)))
        return (
            RecurrentCache(state, store.lengths) if hasattr(state, "layers") else Cache(cast(KVCache, store))
        )
    for kind in (DynamicCache, PagedCache):
        face = kind()
        if type(face.store) is type(store):
            face.store = store
            return face
    return Cache(store)


def _all_rows(store: KVCache) -> Tensor:
    return torch.arange(len(store))


def _scatter_columns(pair: tuple[Tensor, Tensor], columns: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [R, H, S, D] in the columns [R, W] where their tokens are, 0 in the others."""
    device = pair[0].device
    # What a row has forgotten is at its beginning, and whoever forgets has rows without holes.
    short = int(columns.sum(1).max()) - pair[0].shape[2]
    place = (columns.long().cumsum(1) - 1).clamp(min=0).to(device)[:, None, :, None]
    empty = ~columns.to(device)[:, None, :, None]
    key, value = (
        torch.nn.functional.pad(part, (0, 0, max(short, 0), 0))
        .gather(2, place.expand(-1, part.shape[1], -1, part.shape[3]))
        .masked_fill(empty, 0)
        for part in pair
    )
    return key, value


def known_tokens(face: Any) -> list[Tensor] | None:
    """The tokens that each row of a cache holds, if it knows: not those that a forward by hand added."""
    tokens: list[Tensor] | None = getattr(face, "tokens", None)
    if tokens is None or [len(one) for one in tokens] != face.store.lengths.tolist():
        return None
    return tokens


def _validate_prefix(prompt: Tensor, held: Tensor, line: int) -> None:
    """Raise for a prompt that does not begin with the tokens that its cache holds."""
    size = min(len(prompt), len(held))
    other = (prompt[:size] != held[:size]).nonzero()
    if len(other):
        at = int(other[0])
        must = (
            f"must hold the tokens that prompt {line} begins with: position {at} is {int(prompt[at])} there"
        )
        raise InputError(_ARGUMENT, must, f"token {int(held[at])}", "pass the whole text as `input_ids`")


def _remove_padding(store: KVCache, here: Tensor) -> KVCache:
    """Rows without the padding that a forward of padded prompts left in them: of the first columns."""
    size = int(store.lengths.max())
    if size > here.shape[1]:
        must = f"must not hold more than the {here.shape[1]} columns of a padded batch"
        raise InputError(_ARGUMENT, must, f"{size} positions")
    mask = here[:, :size].cpu() & (torch.arange(size) < store.lengths[:, None])
    lengths = mask.sum(1)
    if torch.equal(lengths, store.lengths):
        return store
    order = (~mask).long().sort(dim=1, stable=True).indices[:, : int(lengths.max())]  # [R, S]
    rows = torch.arange(len(store))
    fresh = store.select(rows[:0])
    fresh.extend(len(rows))
    wide = order.shape[1]
    span = KVSpan(None, 0, wide, wide)
    for layer, pair in read_layers(store, rows).items():
        at = order.to(pair[0].device)[:, None, :, None]
        key, value = (part.gather(2, at.expand(-1, part.shape[1], -1, part.shape[3])) for part in pair)
        fresh.update(layer, key, value, span)
    fresh.commit(None, lengths)
    return fresh

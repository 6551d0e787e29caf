"""A user's `past_key_values` during a call: the cached prefixes of prompts, and the write-back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from descant.api.inputs import RaggedPrompts
from descant.core.interfaces import KVCache, KVSpan
from descant.errors import InputError
from descant.kv_cache.row_views import CachedRow, gather_rows, is_lossless, read_layers
from descant.kv_cache.stores.recurrent_state import RecurrentStateCache
from descant.models.compat.hf_caches.base import Cache
from descant.models.compat.hf_caches.convert import EncoderDecoderCache, to_descant_cache
from descant.models.compat.hf_caches.dynamic import DynamicCache, PagedCache
from descant.models.compat.hf_caches.recurrent import RecurrentCache
from descant.models.forward.cache_layers import KVPair
from descant.models.wrapping.fingerprint import check_prompt_cache

_ARGUMENT = "past_key_values"


class UserCache:
    """A user's cache during a call.

    Its single row is a prefix of every prompt, or it has one row per prompt with a prefix of that prompt. The
    call uses copies. A cache that is not frozen afterwards holds all tokens of the returned sequences but the
    last, as after transformers' generate(). A cache of transformers holds them in the columns of the padded
    sequences.
    """

    def __init__(self, given: Any) -> None:
        self._given = given
        self.hf_cache: Any = to_descant_cache(given)
        self._is_transformers = self.hf_cache is not given
        self.frozen = bool(getattr(self.hf_cache, "read_only", False)) or isinstance(given, tuple | list)
        self._store = cast(KVCache, self.hf_cache.commit_store())

    def check_model(self, model: Any, adapters: Sequence[str | None]) -> None:
        """Raise for a prompt cache that this model with these adapters would not make."""
        if not self.is_empty:
            check_prompt_cache(self._given, model, _ARGUMENT, adapters)

    @property
    def is_empty(self) -> bool:
        """Whether the cache has no positions."""
        return not len(self._store) or not bool(self._store.lengths.any())

    def empty_like(self) -> KVCache:
        """An empty store of the same type."""
        return self._store.select(torch.zeros(0, dtype=torch.long))

    def cached_rows(self, prompts: RaggedPrompts) -> list[CachedRow | None]:
        """The cached prefix of each prompt."""
        count, rows = len(prompts), len(self._store)
        if self._is_transformers and not self.frozen:
            self._validate_fillable(prompts)
        if self.is_empty:
            return [None] * count
        if rows not in (1, count):
            raise InputError(
                _ARGUMENT, f"must have one row, or one for each of {count} prompts", f"{rows} rows"
            )
        tokens = known_tokens(self.hf_cache)
        row_of_prompt = [0] * count if rows == 1 else list(range(count))
        if tokens is not None:
            for index, row in enumerate(row_of_prompt):
                _validate_prefix(prompts.prompt(index).cpu(), tokens[row], index)
        store = self._store
        is_uniform = bool((store.lengths == store.lengths[0]).all())
        is_packed = tokens is not None or getattr(self.hf_cache, "packed", False) or not is_uniform
        if not is_packed and rows == count and prompts.mask is not None:
            store = (
                _remove_padding(store, prompts.mask)
                if is_lossless(store)
                else cast(KVCache, to_descant_cache(self._given, prompts.mask).commit_store())
            )
        return [CachedRow(store, row) for row in row_of_prompt]

    def _validate_fillable(self, prompts: RaggedPrompts) -> None:
        """Raise for a cache of transformers that cannot be written back."""
        name, do = type(self._given).__name__, "use a cache of descant"
        if prompts.embed_width:
            raise InputError(_ARGUMENT, "must be a cache of descant for prompts without tokens", name, do)
        store = self._store
        if is_lossless(store) or isinstance(store, RecurrentStateCache):
            return
        if len(prompts) > 1 or not hasattr(store, "read"):
            must = "must be given with one prompt, as this type evicts positions and is written back by row"
            raise InputError(_ARGUMENT, must, name, do)

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether it has keys and values of an encoder too."""
        return isinstance(self.hf_cache, EncoderDecoderCache)

    def write_back(
        self, store: KVCache, tokens: Sequence[Tensor], columns: Tensor, cross: Sequence[KVPair]
    ) -> Any:
        """Write the rows of a store, with these tokens, into the user's cache and return it.

        `columns` [R, W] says which columns of the returned sequences have tokens; `cross` is what
        cross-attention reads in each layer.
        """
        given = self._given
        self.hf_cache.set_store(store)
        if not self._is_transformers:
            self.hf_cache.tokens = list(tokens)
            if cross:
                self.hf_cache.set_cross_attention(cross)
        elif isinstance(store, RecurrentStateCache):
            vars(given).update(vars(store.read_state(torch.arange(len(store)))))
        else:
            pairs = {
                layer: _scatter_columns(pair, columns)
                for layer, pair in read_layers(store, torch.arange(len(store))).items()
            }
            _fill(getattr(given, "self_attention_cache", given), pairs)
            if cross:
                _fill(given.cross_attention_cache, dict(enumerate(cross)))
                given.is_updated = dict.fromkeys(range(len(cross)), True)
        return given


def _fill(given: Any, pairs: Mapping[int, KVPair]) -> None:
    """Replace the contents of a cache of transformers."""
    given.reset()
    for layer, (key, value) in pairs.items():
        given.update(key, value, layer)


def return_cache(
    user_cache: UserCache | None,
    cached_rows: Sequence[CachedRow],
    tokens: Sequence[Tensor],
    columns: Tensor,
    cross: Sequence[KVPair] = (),
) -> Any:
    """The cache of the returned sequences: the user's if it is writable, else a new one.

    `tokens` are those of each row; `columns` [R, W] says which columns of the returned sequences have them.
    `cross` is what the cross-attention of an encoder-decoder model reads in each layer.
    """
    store = gather_rows(cached_rows)
    if user_cache is not None and not user_cache.frozen:
        return user_cache.write_back(store, tokens, columns, cross)
    cache = _wrap_store(store)
    if cross:
        cache = EncoderDecoderCache(cache, DynamicCache(cross))
    cache.tokens = list(tokens)
    return cache


def _wrap_store(store: Any) -> Any:
    """A new cache with this store, of a documented class if one fits."""
    if isinstance(store, RecurrentStateCache):
        state = store.read_state(torch.arange(len(store)))
        return (
            RecurrentCache(state, store.lengths) if hasattr(state, "layers") else Cache(cast(KVCache, store))
        )
    for cache_type in (DynamicCache, PagedCache):
        cache = cache_type()
        if type(cache.commit_store()) is type(store):
            cache.set_store(store)
            return cache
    return Cache(store)


def _scatter_columns(pair: tuple[Tensor, Tensor], columns: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [R, H, S, D] moved to the columns [R, W] of their tokens; 0 in the others."""
    device = pair[0].device
    # Evicted positions are at the beginning of a row.
    num_evicted = int(columns.sum(1).max()) - pair[0].shape[2]
    source = (columns.long().cumsum(1) - 1).clamp(min=0).to(device)[:, None, :, None]
    empty = ~columns.to(device)[:, None, :, None]
    key, value = (
        torch.nn.functional.pad(part, (0, 0, max(num_evicted, 0), 0))
        .gather(2, source.expand(-1, part.shape[1], -1, part.shape[3]))
        .masked_fill(empty, 0)
        for part in pair
    )
    return key, value


def known_tokens(cache: Any) -> list[Tensor] | None:
    """The tokens of each row of a cache; None if unknown, as after a forward outside of generate()."""
    tokens: list[Tensor] | None = getattr(cache, "tokens", None)
    if tokens is None or [len(row) for row in tokens] != cache.lengths.tolist():
        return None
    return tokens


def _validate_prefix(prompt: Tensor, cached: Tensor, index: int) -> None:
    """Raise for a prompt that does not begin with the tokens of its cache."""
    size = min(len(prompt), len(cached))
    different = (prompt[:size] != cached[:size]).nonzero()
    if len(different):
        position = int(different[0])
        must = f"must hold a prefix of prompt {index}, which has token {int(prompt[position])} at {position}"
        got = f"token {int(cached[position])}"
        raise InputError(_ARGUMENT, must, got, "pass the whole prompt as `input_ids`")


def _remove_padding(store: KVCache, prompt_mask: Tensor) -> KVCache:
    """The store without the positions of padding in `prompt_mask` [B, W]."""
    size = int(store.lengths.max())
    if size > prompt_mask.shape[1]:
        must = f"must not hold more than the {prompt_mask.shape[1]} columns of the padded prompts"
        raise InputError(_ARGUMENT, must, f"{size} positions")
    mask = prompt_mask[:, :size].cpu() & (torch.arange(size) < store.lengths[:, None])
    lengths = mask.sum(1)
    if torch.equal(lengths, store.lengths):
        return store
    order = (~mask).long().sort(dim=1, stable=True).indices[:, : int(lengths.max())]  # [R, S]
    rows = torch.arange(len(store))
    unpadded = store.select(rows[:0])
    unpadded.extend(len(rows))
    width = order.shape[1]
    span = KVSpan(None, 0, width, width)
    for layer, pair in read_layers(store, rows).items():
        index = order.to(pair[0].device)[:, None, :, None]
        key, value = (part.gather(2, index.expand(-1, part.shape[1], -1, part.shape[3])) for part in pair)
        unpadded.update(layer, key, value, span)
    unpadded.commit(None, lengths)
    return unpadded

"""What a session need not read: pasts that requests bring or a prefix cache knows, and what it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from descant.core.interfaces import Cache, Facts, KeyCache
from descant.core.records import Hypothesis, Proposal
from descant.core.rows import Rows
from descant.decoding.guidance.cfg import NEGATIVE
from descant.engine.finished_kv import Archive
from descant.engine.planner import Plan
from descant.engine.request import Request
from descant.errors import ConfigError, InputError
from descant.kv_cache.cached_row import Past, inside, layers_of, readable
from descant.kv_cache.prefix_cache import PrefixCache, PrefixReport
from descant.kv_cache.row_subset import portion
from descant.models.no_cache import Unkept

__all__ = ["Begun", "Recall", "fed", "like_past"]

_NAME = "past_key_values"
_NONE = torch.zeros(0, dtype=torch.long)


class Begun(NamedTuple):
    """What a request's row begins with: the first `length` positions of a past."""

    past: Past | None = None
    length: int = 0


class _Text(NamedTuple):
    """What a request's prefixes are known by."""

    prompt: Tensor  # [L] (host)
    salt: bytes


class Recall:
    """What rows begin with, and what is kept of them when they end."""

    def __init__(self, model: Any, prefixes: PrefixCache | None = None) -> None:
        self._facts: Facts = model.facts
        self._several = hasattr(model, "new_cache")  # whether each part of it has a cache of its own
        self._prefixes = prefixes
        self._archive = Archive()
        self._kept: set[int] = set()  # requests whose sequences' keys and values are asked for
        self._texts: dict[int, _Text] = {}  # requests that use the prefix cache
        self._new: set[int] = set()  # those of them that have not been read yet
        self._chunks: dict[int, int] = {}  # requests whose prompts are read in parts
        if prefixes is not None:
            prefixes.bind(getattr(model, "model", model))

    @property
    def archive(self) -> Archive | None:
        """What has to see the sequences that end; None where nothing is kept of any."""
        return self._archive if self._kept or self._texts else None

    def report(self) -> PrefixReport | None:
        """What the prefix cache has done."""
        return None if self._prefixes is None else self._prefixes.report()

    # -------------------------------------------------------------------- requests come
    def begin(self, request: Request, known: Plan, ids: Tensor, cache: Cache) -> Begun:
        """What a request's row with the prompt `ids` [L] begins with."""
        given = past_of(request.past)
        self._refuse_uncached(request, known, cache)
        if request.keep:
            self._refuse_unkept(known, cache)
        if _chunk(known) is not None:
            self._refuse_unparted(known)
        if given is not None and given.length:
            self._refuse_unread(request, given, len(ids))
        elif given is None and self._shares(request, cache) and not rereads(known):
            assert self._prefixes is not None
            given = self._prefixes.find(ids, request.salt)
        size = 0 if given is None else min(given.length, len(ids) - 1)
        return Begun() if size <= 0 or rereads(known) else Begun(given, size)

    def open(self, number: int, request: Request, known: Plan, ids: Tensor, cache: Cache) -> None:
        """Follow a request that was admitted."""
        if request.past is not None and self._facts.memory == "own" and not rereads(known):
            self._chunks[number] = 1  # few models that keep a state read several tokens after it
        if request.keep:
            self._kept.add(number)
        if self._shares(request, cache):
            self._texts[number] = _Text(ids.cpu(), request.salt)
            self._new.add(number)
        size = _chunk(known)
        if size is not None and not request.inputs and not isinstance(inside(cache, _NONE)[0], Unkept):
            self._chunks[number] = size
        if request.keep or number in self._texts:
            self._archive.open(number)

    def close(self, number: int) -> None:
        """Forget a request."""
        self._archive.close(number)
        self._kept.discard(number)
        self._new.discard(number)
        self._texts.pop(number, None)
        self._chunks.pop(number, None)

    # -------------------------------------------------------------------- steps
    def read(self, model: Any, cache: Cache, rows: Rows) -> Rows:
        """Read long prompts in parts, as far as only the last part of each is pending."""
        while self._chunks:
            size = torch.tensor([self._chunks.get(one, 0) for one in rows.request.tolist()])
            index = ((size > 0) & (rows.pending > size)).nonzero().squeeze(1)
            if not len(index):
                self._chunks.clear()
                break
            rows = fed(model, cache, rows, index, size[index])
        return rows

    def read_through(self, cache: Cache, rows: Rows) -> None:
        """Give the prefix cache the prompts that were read in this step."""
        if not self._new:
            return
        assert self._prefixes is not None
        first = {request: row for row, request in reversed(list(enumerate(rows.request.tolist())))}
        for number in sorted(self._new & first.keys()):
            whole, place = inside(cache, torch.tensor([first[number]]))
            text = self._texts[number]
            self._prefixes.give(text.prompt, Past(whole, int(place[0])), text.salt)
        self._new.clear()

    def ended(self, number: int, sequences: Sequence[Hypothesis]) -> tuple[Past, ...]:
        """What the sequences of a request hold, where that is asked for; the prefix cache is given it."""
        pasts = self._archive.of(sequences)
        text = self._texts.get(number)
        if text is not None and self._prefixes is not None:
            for one, past in zip(sequences, pasts, strict=True):
                self._prefixes.give(torch.cat((text.prompt, one.tokens)), past, text.salt)
        return tuple(pasts) if number in self._kept else ()

    # -------------------------------------------------------------------- what cannot be
    def _shares(self, request: Request, cache: Cache) -> bool:
        """Whether a request uses the prefix cache: its keys hang on nothing but its tokens."""
        facts = self._facts
        if self._prefixes is None or facts.encoder_decoder or facts.memory != "keys" or facts.places:
            return False
        return not (request.inputs.keys() - {NEGATIVE}) and readable(inside(cache, _NONE)[0])

    def _refuse_unread(self, request: Request, given: Past, length: int) -> None:
        """Raise for a past that this model or this request cannot begin with."""
        facts = self._facts
        held = f"{given.length} positions"
        if facts.encoder_decoder:
            must = "must hold nothing for a model with an encoder, which is looked at while reading"
            raise InputError(_NAME, must, held, "pass an empty cache, or none")
        if facts.memory == "none":
            raise InputError(_NAME, "must not be given to a model that remembers nothing", held)
        if self._several:
            raise InputError(_NAME, "must not be given to several models, each has its own", held)
        beside = sorted(request.inputs.keys() - {NEGATIVE})
        if beside:
            must = f"must not be given beside `{beside[0]}`, which is read with the beginning of the prompt"
            raise InputError(_NAME, must, held)
        if facts.past == "mems":
            must = "must hold nothing for a model that looks both ways in its prompt, which it reads as one"
            raise InputError(_NAME, must, held)
        if facts.memory == "own":
            if not hasattr(given.store, "fetch"):
                raise InputError(_NAME, "must hold the state of a model that keeps more than keys", held)
            if given.length > length - 1:
                must = f"must hold less than the prompt's {length} tokens: this model cannot take any back"
                raise InputError(_NAME, must, held)
            return
        if facts.places:
            must = "must hold nothing for a model that counts positions by itself"
            raise InputError(_NAME, must, held)
        back = given.store.rewind
        if back is not None and given.length - (length - 1) > back:
            must = f"must be cut to {length - 1} positions, and this kind can take back {back}"
            raise InputError(_NAME, must, held, "pass a cache that is not longer than the prompt")
        layers = getattr(given.store, "layers", ())
        if layers and max(layers_of(given.store)) >= facts.layers:
            must = f"must have been made by this model, which has {facts.layers} layers"
            raise InputError(_NAME, must, f"{max(layers_of(given.store)) + 1} layers")

    def _refuse_uncached(self, request: Request, known: Plan, cache: Cache) -> None:
        """Raise for a request without a cache that a session has, or that needs one."""
        if isinstance(inside(cache, _NONE)[0], Unkept):
            beside = sorted(request.inputs.keys() - {NEGATIVE})
            if beside and not self._facts.encoder_decoder:
                must = f"must not be False with `{beside[0]}`, which goes in with the prompt, once"
                raise ConfigError("use_cache", must, False)
        elif known.config.use_cache is False and known.config.source("use_cache") != "model":
            must = "must be True in a session, whose requests share a cache"
            raise ConfigError("use_cache", must, False, "use descant.generate")

    def _refuse_unkept(self, known: Plan, cache: Cache) -> None:
        """Raise where what sequences hold cannot be given back."""
        facts = self._facts
        why = None
        if facts.encoder_decoder:
            why = "of a model with an encoder is not given back"
        elif facts.memory == "none":
            why = "cannot be given back by a model that remembers nothing"
        elif not hasattr(inside(cache, _NONE)[0], "select"):
            why = "cannot be given back of this kind of cache"
        elif facts.memory == "own" and known.key[0] not in ("sampling", "beam", "constrained"):
            why = "cannot be given back where tokens are tried, by a model that cannot take them back"
        if why is not None:
            raise InputError(_NAME, why, known.key[0], "leave it out")

    def _refuse_unparted(self, known: Plan) -> None:
        """Raise where a prompt cannot be read in parts."""
        facts, size = self._facts, _chunk(known)
        why = None
        if facts.memory != "keys":
            why = "needs a model that remembers keys and values"
        elif facts.encoder_decoder or facts.places:
            why = "has no use here: this model's prompt is read as a whole"
        elif rereads(known):
            why = "cannot be combined with contrastive search, which looks at the states of the whole prompt"
        if why is not None:
            raise ConfigError("prefill_chunk_size", why, size, "leave it out")


def _chunk(known: Plan) -> int | None:
    """The size of the parts in which a prompt is read, where that was asked for."""
    config = known.config
    return None if config.source("prefill_chunk_size") == "model" else config.prefill_chunk_size


def rereads(known: Plan) -> bool:
    """Whether a plan needs the whole prompt read, for its hidden states, whatever is known of it."""
    return known.key[0] in ("contrastive", "sequential")


def like_past(request: Request) -> KeyCache | None:
    """An empty cache of the kind that a request's past is of, so that it can be shared and not copied."""
    past = past_of(request.past)
    return None if past is None or not past.length else past.store.select(_NONE)


def past_of(given: Any) -> Past | None:
    """What a request was given as its past: a row of a cache, or a cache of one row."""
    if given is None or isinstance(given, Past):
        return given
    store = getattr(given, "store", given)
    if not hasattr(store, "lengths") or not hasattr(store, "select") or len(store) != 1:
        must = "must be a `Past`, or a cache of one row"
        raise InputError("past", must, given)
    return Past(store)


def fed(model: Any, cache: Cache, rows: Rows, index: Tensor, size: Tensor) -> Rows:
    """The rows after those of `index` (host) have read `size` [N] further positions, without a choice."""
    part = rows.changed(columns={}).take(index)
    stop = part.cached + size
    part = part.changed(length=stop - part.offset)
    model.forward(part, Proposal(), portion(cache, index))
    cached = rows.cached.clone()
    cached[index] = stop
    cache.commit(None, cached)
    return rows.changed(cached=cached)

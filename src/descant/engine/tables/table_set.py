"""The tables of a session: one for each cache that its running requests use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Final

from descant.core.interfaces import RowCache
from descant.engine.memory_check import check_kv_fits, num_growing_positions
from descant.engine.planning.cache_factory import (
    CACHE_FIELD,
    CACHE_NAMES,
    CacheKey,
    cache_key,
    cache_name,
    default_cache_key,
)
from descant.engine.planning.drafter_factory import USER_DRAFTER
from descant.engine.planning.planner import choose_cache, validate_cache
from descant.engine.request import ResolvedRequest
from descant.engine.tables.prefix_reuse import NO_PREFIX, CachedPrefix, as_cached_row, empty_cache_like
from descant.engine.tables.table import Table
from descant.errors import ConfigError, InputError
from descant.kv_cache.row_views import is_lossless
from descant.models.forward.no_cache import NoCache

# Caches that give every position back as it was written: a request that names one may choose the default.
_DEFAULT_KEYS: Final = frozenset(map(CacheKey, CACHE_NAMES.values()))

_max_slots = attrgetter("max_slots")

TableFactory = Callable[[RowCache, CacheKey | None], Table]


@dataclass(frozen=True)
class Placement:
    """The table and the cache that requests are to join; either may be new."""

    table: Table
    cache: RowCache
    cache_name: str | None
    indices: tuple[int, ...]  # of the requests, among those that are admitted together
    resolved: tuple[ResolvedRequest, ...]
    version: int = -1  # of the tables for which it was made

    def alone(self, one: ResolvedRequest) -> Placement:
        """The placement of one of the requests."""
        version = self.version if len(self.resolved) == 1 else -1  # others may have decided on the cache
        return replace(self, indices=(0,), resolved=(one,), version=version)

    def check(self) -> None:
        """Raise for a request that could not join the table later."""
        self.check_cache()
        self.table.running.check(self.resolved)

    def check_cache(self) -> None:
        """Raise for a request that cannot run on the cache."""
        max_slots = max(map(_max_slots, self.resolved))
        for one in self.resolved:
            if one.uses_prefix_reuse:
                self.table.prefix_reuse.check(one.request, one.plan, one.prompt, self.cache)
            validate_cache(one.plan, self.cache, self.cache_name, max_slots)

    def cached_prefixes(self, *, is_counted: bool = True) -> list[CachedPrefix]:
        """The cached prefix of each new row; call `check` first. Statistics count it if `is_counted`."""
        prefixes = []
        for one in self.resolved:
            prefix = NO_PREFIX
            if one.uses_prefix_reuse:
                given = one.request, one.plan, one.prompt, self.cache
                prefix = self.table.prefix_reuse.lookup(*given, is_counted=is_counted)
            prefixes.append(prefix)
        return prefixes


class TableSet:
    """The tables of a session: that of the default cache, and one for each cache that requests name.

    A request that names a cache joins the table of that name and these settings. All others share the
    default cache: the one given to the session, else one that the first of them determine. A table without
    rows is dropped with its cache, except the default one.
    """

    def __init__(self, model: Any, cache: RowCache | None, make_table: TableFactory) -> None:
        self._model, self._make_table = model, make_table
        self._is_given = cache is not None
        self._is_uncached = isinstance(cache, NoCache)
        self._is_chosen = self._is_given  # whether the default cache is chosen for good
        first: RowCache = model.new_cache() if cache is None else cache
        self.default = make_table(first, default_cache_key(first) if self._is_given else None)
        self.default.cache_name = None
        self._tables = [self.default]
        self._version = 0  # changes with the tables and their caches

    def __iter__(self) -> Iterator[Table]:
        return iter(self._tables)

    @property
    def num_rows(self) -> int:
        """The number of rows of all tables."""
        return sum(map(len, self._tables))

    @property
    def cache_bytes(self) -> int | None:
        """The memory of all caches in bytes; None: unknown for one of them."""
        total = 0
        for table in self._tables:
            size = table.cache_bytes
            if size is None:
                return None
            total += size
        return total

    # -------------------------------------------------------------------- admission
    def place(self, resolved: Sequence[ResolvedRequest]) -> list[Placement]:
        """The tables of requests that are admitted together; raises for a cache that cannot be.

        Nothing changes before `add`.
        """
        keys = list(map(self._key_of, resolved))
        named = self.default.key
        if not self._is_chosen:
            named = next(filter(_DEFAULT_KEYS.__contains__, keys), None)
        groups: dict[CacheKey | None, list[int]] = {}
        for index, key in enumerate(keys):
            groups.setdefault(None if key == named else key, []).append(index)
        placements = []
        for group_key, indices in groups.items():
            own = tuple(map(resolved.__getitem__, indices))
            num_slots = max(map(_max_slots, own))
            table, cache, name = (
                self._default_place(own, num_slots)
                if group_key is None
                else self._named_place(group_key, own[0], num_slots)
            )
            placements.append(Placement(table, cache, name, tuple(indices), own, self._version))
        return placements

    def renew(self, placement: Placement) -> Placement:
        """The placement of requests that were placed before, as the tables are now."""
        return placement if placement.version == self._version else self.place(placement.resolved)[0]

    def check(self, placements: Sequence[Placement]) -> None:
        """Raise for requests that cannot run on their cache, or whose keys and values do not fit."""
        owners: dict[object, Table] = {}  # of the users' drafters
        for placement in placements:
            for one in placement.resolved:
                if one.plan.strategy.settings == USER_DRAFTER:
                    self._check_drafter(one, placement.table, owners)
        num_others = 0  # positions that earlier placements may still add
        for placement in placements:
            placement.check_cache()
            new = [
                (one.plan, len(one.prompt), one.prompt_params.max_length, one.offset)
                for one in placement.resolved
            ]
            others = num_others
            for table in self._tables:
                if table is not placement.table and table.rows is not None:
                    others += num_growing_positions(self._model, table.cache, table.cache_name, table.rows)
            num_others += check_kv_fits(
                self._model,
                placement.cache,
                placement.cache_name,
                new,
                placement.table.rows,
                num_others=others,
            )

    def _check_drafter(self, one: ResolvedRequest, table: Table, owners: dict[object, Table]) -> None:
        """Raise for a user's drafter that would draft for two tables: it follows the rows of one."""
        for other in self._tables if not owners else ():
            for running in other.running.requests.values():
                owners[running.plan.strategy.key] = other
        if owners.setdefault(one.plan.strategy.key, table) is not table:
            must = "must not be a drafter that drafts for requests on another cache"
            drafter = one.request.assistant_model
            raise InputError("assistant_model", must, drafter, "use a drafter for each cache")

    def add(self, placement: Placement, undo: ExitStack) -> None:
        """Make a placement's table and cache part of the set; `undo` removes what is new."""
        table = placement.table
        if table is self.default and not self._is_chosen:
            undo.callback(self._set_default, table.cache, table.cache_name, False)
            self._set_default(placement.cache, placement.cache_name, True)
        elif all(table is not known for known in self._tables):
            undo.callback(self.drop_empty)
            self._tables.append(table)
            self._version += 1

    def drop_empty(self) -> None:
        """Drop the tables without requests and free their caches; the default one stays."""
        if len(self._tables) > 1:
            self._version += 1
            self._tables = [
                table
                for table in self._tables
                if table is self.default or len(table) or table.running.requests  # parked ones
            ]

    def _set_default(self, cache: RowCache, name: str | None, is_chosen: bool) -> None:
        self.default.cache, self.default.cache_name = cache, name
        self.default.key = default_cache_key(cache) if is_chosen else None
        self._version += 1
        self._is_chosen = is_chosen

    def _key_of(self, one: ResolvedRequest) -> CacheKey | None:
        """The key of a request's cache; None: the default one."""
        config, traits = one.plan.config, self._model.traits
        key = cache_key(config, traits)
        if key is not None and self._is_uncached:
            must = "must not be given with `use_cache=False`"
            raise ConfigError(CACHE_FIELD, must, config.cache_implementation, "leave it out")
        if key is not None or self._is_given or cache_name(config) is not None or traits.cache_type != "kv":
            return key
        if one.request.past_key_values is None:
            return None
        past = as_cached_row(one.request.past_key_values)
        if not past.length or is_lossless(past.store):
            return None
        # The settings of a store are not known here, so only requests with the same one share a table.
        return CacheKey(type(past.store).__name__, past.store)

    def _named_place(
        self, key: CacheKey, first: ResolvedRequest, num_slots: int
    ) -> tuple[Table, RowCache, str | None]:
        """The table of requests that name a cache, the cache and its name."""
        for table in self._tables:
            has_room = table.cache.capacity is None or num_slots <= table.cache.capacity
            if table.key == key and has_room:
                return table, table.cache, table.cache_name
        past = empty_cache_like(first.request) if cache_name(first.plan.config) is None else None
        cache = choose_cache(self._model, [first.plan.config], num_slots, 0) if past is None else past
        return self._make_table(cache, key), cache, key.name

    def _default_place(
        self, resolved: Sequence[ResolvedRequest], num_slots: int
    ) -> tuple[Table, RowCache, str | None]:
        """The table of the default cache, the cache and its name: the first requests determine it."""
        table, model = self.default, self._model
        first, named, shared = resolved[0].plan.config, [], 0
        for one in resolved:
            shared += one.plan.shared_positions(len(one.prompt))
            if one.plan.config.cache_implementation is not None:
                named.append(one.plan.config)
        if self._is_chosen:
            for config in named:
                if config.source(CACHE_FIELD) != "model":
                    choose_cache(model, [config], num_slots, 0)  # raises where the model cannot have it
            return table, table.cache, table.cache_name
        config = named[0] if named else first
        cache, name = choose_cache(model, [config], num_slots, shared), cache_name(config)
        if name is None:
            for one in resolved:
                past = empty_cache_like(one.request) if one.uses_prefix_reuse else None
                if past is not None:
                    return table, past, name
        return table, cache, name

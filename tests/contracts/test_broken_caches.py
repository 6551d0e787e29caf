"""The law of caches can be broken: one fault in one cache at a time, and the check finds each."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch

from descant.core.interfaces import VisibleSlots
from descant.kv_cache.attention import shared_prefix_attention
from descant.kv_cache.block_pool import BlockPool
from descant.kv_cache.stores import quantized
from descant.kv_cache.stores.dense import DenseStore, OffloadedStore, StaticStore
from descant.kv_cache.stores.evicting import H2OStore, SnapKVStore
from descant.kv_cache.stores.paged import PagedStore
from descant.kv_cache.stores.quantized import QuantizedStore
from descant.kv_cache.stores.quantizers import Quanto
from descant.kv_cache.stores.sink_window import SinkStore, SinkWindowBlocks, WindowStore
from descant.testing import CacheTraits, ReferenceCache, check_cache
from tests.contracts.stores import last, quietly, small, store

Patch = pytest.MonkeyPatch
Broken = Callable[[Patch], None]
FAULTS: dict[str, tuple[str, Broken]] = {}


def fault(name: str) -> Callable[[Broken], Broken]:
    """A fault of the store of that name."""

    def note(broken: Broken) -> Broken:
        FAULTS[f"{name}: {(broken.__doc__ or '').strip().rstrip('.')}"] = name, broken
        return broken

    return note


def after(patch: Patch, kind: type, name: str, change: Callable[..., Any]) -> None:
    """Change what a method gives: `change(given, self, *its arguments)`."""
    old = getattr(kind, name)
    patch.setattr(kind, name, lambda self, *given, **more: change(old(self, *given, **more), self, *given))


def before(patch: Patch, kind: type, name: str, change: Callable[..., tuple[Any, ...]]) -> None:
    """Change what a method is given: `change(self, *its arguments)`."""
    old = getattr(kind, name)
    patch.setattr(kind, name, lambda self, *given, **more: old(self, *change(self, *given), **more))


# ------------------------------------------------------------------------ rows
@fault("dense")
def wrong_parent(patch: Patch) -> None:
    """A row continues another row."""
    before(
        patch, DenseStore, "commit", lambda self, parents, lengths: (
            parents if parents is None or len(parents) < 2 else parents.flip(0), lengths
        ),
    )  # fmt: skip


@fault("dense")
def stale_prefix(patch: Patch) -> None:
    """Diverged rows are treated as sharing what one of them lost."""

    def commit(_: None, self: DenseStore, parents: Any, lengths: torch.Tensor) -> None:
        self._prefix_groups._shared_lengths = lengths.numpy() + 2

    after(patch, DenseStore, "commit", commit)


@fault("dense")
def missing_cut(patch: Patch) -> None:
    """What is cut stays."""

    def commit(self: DenseStore, parents: Any, lengths: torch.Tensor) -> tuple[Any, torch.Tensor]:
        old = self.lengths if parents is None else self.lengths[parents]
        return parents, torch.maximum(lengths, old)

    before(patch, DenseStore, "commit", commit)


@fault("dense")
def forgotten_values(patch: Patch) -> None:
    """The value of the first position is lost."""

    def update(given: Any, *_: Any) -> Any:
        given[1][:, :, 0] = 0
        return given

    after(patch, DenseStore, "update", update)


@fault("dense")
def swapped(patch: Patch) -> None:
    """Keys are given for values."""
    after(patch, DenseStore, "update", lambda given, *_: (given[1], given[0]))


@fault("dense")
def extended_in_front(patch: Patch) -> None:
    """A new row is treated as having the length of the last one."""

    def extend(_: None, self: DenseStore, rows: int) -> None:
        if len(self._lengths) > rows:
            self._lengths[-1] = self._lengths[-1 - rows]

    after(patch, DenseStore, "extend", extend)


# ------------------------------------------------------------------------ whole rows
@fault("dense")
def borrowed(patch: Patch) -> None:
    """Rows that were selected are written to by both."""

    def select(other: DenseStore, self: DenseStore, rows: torch.Tensor) -> DenseStore:
        if torch.equal(rows, torch.arange(len(self))):
            other._keys.update(self._keys), other._values.update(self._values)
        return other

    after(patch, DenseStore, "select", select)


@fault("dense")
def selected_once(patch: Patch) -> None:
    """A row that is selected twice is given once."""
    before(patch, DenseStore, "select", lambda self, rows: (rows.unique(),))


@fault("dense")
def uncommitted(patch: Patch) -> None:
    """Uncommitted positions are selected, too."""

    def select(other: DenseStore, self: DenseStore, rows: torch.Tensor) -> DenseStore:
        other._lengths = other._lengths + 1
        return other

    after(patch, DenseStore, "select", select)


@fault("paged")
def joined_in_front(patch: Patch) -> None:
    """Rows that join come first."""

    def join(_: None, self: PagedStore, other: PagedStore) -> None:
        self._block_table, self._lengths = np.roll(self._block_table, 1, 0), self._lengths.roll(1)

    after(patch, PagedStore, "join", join)


@fault("window")
def gaps_not_saved(patch: Patch) -> None:
    """What was forgotten is not written down."""
    after(
        patch, SinkWindowBlocks, "state", lambda given, *_: {**given, "gaps": torch.zeros_like(given["gaps"])}
    )


@fault("static")
def shared_memory(patch: Patch) -> None:
    """What is written down shares memory."""
    after(
        patch, StaticStore, "state",
        lambda given, *_: given | {"again": next(iter(given.values())).view(-1)},
    )  # fmt: skip


@fault("static")
def nothing_held(patch: Patch) -> None:
    """It reports no memory."""
    patch.setattr(StaticStore, "nbytes", 0)


# ------------------------------------------------------------------------ blocks that are shared
def _padded(counts: np.ndarray, size: int) -> np.ndarray:
    return np.pad(counts, (0, size - len(counts)))


@fault("paged")
def no_copy_on_write(patch: Patch) -> None:
    """A row writes into a block that another holds."""
    reserve = PagedStore._reserve

    def broken(self: PagedStore, row: int, start: int, stop: int) -> None:
        pool, refs = self.pool, self.pool.ref_counts
        pool.ref_counts = np.minimum(refs, 1)
        reserve(self, row, start, stop)
        pool.ref_counts = np.where(
            pool.ref_counts > 0, np.maximum(pool.ref_counts, _padded(refs, len(pool.ref_counts))), 0
        )

    patch.setattr(PagedStore, "_reserve", broken)


@fault("paged")
def short_copy(patch: Patch) -> None:
    """A block that is copied loses its last slot."""
    before(patch, BlockPool, "copy_slots", lambda self, old, new, slots: (old, new, slots - 1))


@fault("paged")
def freed_twice(patch: Patch) -> None:
    """A fork is not counted."""
    before(patch, BlockPool, "incref", lambda self, blocks: (np.unique(blocks),))


@fault("paged")
def long_run(patch: Patch) -> None:
    """Attention passes over the first slot behind what rows share."""
    after(
        patch,
        shared_prefix_attention.PagedReadPlan,
        "tail_starts",
        lambda given, *_: np.where(given > 0, given + 1, given),
    )


@fault("paged")
def not_merged(patch: Patch) -> None:
    """Attention weighs what rows share as much as what they do not."""
    old = shared_prefix_attention._merge_by_lse
    patch.setattr(
        shared_prefix_attention, "_merge_by_lse", lambda one, weight, other, sums: old(one, sums, other, sums)
    )


# ------------------------------------------------------------------------ faulty eviction
@fault("window")
def stale_slot(patch: Patch) -> None:
    """One position more is shown than the window has."""
    before(
        patch,
        SinkWindowBlocks,
        "__init__",
        lambda self, head, keep, slack, *rest: (head, keep + 1, slack, *rest),
    )


@fault("window")
def early_trim(patch: Patch) -> None:
    """A row is trimmed to its window, and what it may be cut to is gone."""

    def made(_: None, self: SinkWindowBlocks, *given: Any) -> None:
        self._trimmed_size -= self._settings[2]

    after(patch, SinkWindowBlocks, "__init__", made)


@fault("sink")
def no_sinks(patch: Patch) -> None:
    """The first positions are forgotten like all others."""

    def made(_: None, self: SinkStore, *given: Any) -> None:
        settings = self._settings
        SinkWindowBlocks.__init__(self, 0, given[0] - 1, *settings[3:])
        self._settings = settings

    after(patch, SinkStore, "__init__", made)


@fault("window")
def unannounced(patch: Patch) -> None:
    """The announcement of a layer's positions is missing."""
    patch.setattr(WindowStore, "visible_slots", lambda *_: None)


@fault("h2o")
def out_of_order(patch: Patch) -> None:
    """The kept slots are in reverse order."""

    def update(given: Any, *_: Any) -> Any:
        keys, values = given
        if isinstance(keys, torch.Tensor):
            return given
        keys.tensor, values.tensor = keys.tensor.flip(2), values.tensor.flip(2)
        return given

    after(patch, H2OStore, "update", update)


@fault("snapkv")
def too_much_told(patch: Patch) -> None:
    """It reports that it shows all positions."""

    def visible_slots(given: Any, self: SnapKVStore, layer: int, span: Any) -> Any:
        return given and VisibleSlots(torch.from_numpy(span.on_host(len(self))[1]), span.read_length)

    after(patch, SnapKVStore, "visible_slots", visible_slots)


# ------------------------------------------------------------------------ quantised and offloaded caches
@fault("quantized")
def uncut_chunk(patch: Patch) -> None:
    """A chunk that is cut counts as a whole."""
    patch.setattr(quantized, "truncate_chunks", lambda held, length: held)


@fault("quantized")
def wrong_scale(patch: Patch) -> None:
    """Numbers come back a fifth too large."""

    def update(given: Any, self: QuantizedStore, layer: int, key: Any, value: Any, span: Any) -> Any:
        return given if span.is_first_write else [1.2 * one for one in given]

    after(patch, QuantizedStore, "update", update)


@fault("static")
def short_reach(patch: Patch) -> None:
    """It shows a slot less than it reports."""
    after(patch, StaticStore, "update", lambda given, *_: tuple(one[:, :, :-1] for one in given))


@fault("offloaded")
def not_stowed(patch: Patch) -> None:
    """What is written is written only where the model is."""
    write = OffloadedStore._write

    def broken(self: OffloadedStore, layer: int, key: Any, value: Any, span: Any) -> None:
        if span.is_first_write:
            write(self, layer, key, value, span)

    patch.setattr(OffloadedStore, "_write", broken)


@pytest.fixture
def hasty() -> Iterator[None]:
    """What is found is not made shorter, which takes longer than to find it."""
    old = hypothesis.settings()
    hypothesis.settings.register_profile("hasty", old, phases=[hypothesis.Phase.generate])
    hypothesis.settings.register_profile("usual", old)
    hypothesis.settings.load_profile("hasty")
    yield
    hypothesis.settings.load_profile("usual")


def fault_report(name: str, patch: Patch, broken: Broken) -> str:
    """The report of a fault."""
    quietly(patch)
    broken(patch)
    kind, said = store(name), ""
    try:
        with small():
            check_cache(kind.make, 400, traits=kind.traits)
    except AssertionError as error:
        said = str(error)
    gc.collect()  # what is left of broken caches goes before they are mended
    return said


@pytest.mark.ci_cases(
    "dense: A row continues another row",
    "dense: Diverged rows are treated as sharing what one of them lost",
    "dense: What is cut stays",
    "dense: A row that is selected twice is given once",
    "paged: Rows that join come first",
    "paged: A row writes into a block that another holds",
    "paged: Attention weighs what rows share as much as what they do not",
    "window: One position more is shown than the window has",
    "sink: The first positions are forgotten like all others",
    "h2o: The kept slots are in reverse order",
    "snapkv: It reports that it shows all positions",
    "quantized: Numbers come back a fifth too large",
    "static: It reports no memory",
    "offloaded: What is written is written only where the model is",
)
@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("name", FAULTS)
def test_a_cache_with_a_fault_is_found(monkeypatch, name):
    which, broken = FAULTS[name]
    assert re.search(
        r"(?s): .*, after\n  cache 0 = a new one\n  extend", fault_report(which, monkeypatch, broken)
    )


def test_what_is_found_is_short(monkeypatch):
    """A fault that takes a fork and two forwards is reported with no more than that."""
    told = fault_report("paged", monkeypatch, short_copy).split(", after\n")[1]
    lines = [line for line in told.splitlines() if re.match(r"  \w", line)]
    assert len(lines) <= 9, told


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    ("make", "promise", "said"),
    [
        (DenseStore, {"traits": CacheTraits(frees_memory=True)}, r"nbytes is \d+ without any row"),
        (DenseStore, {"retention": last(3)}, "visible_slots of layer 0 are None, must have past lengths"),
        (lambda: ReferenceCache(last(3)), {}, r"past lengths of layer 0 are .*, must be"),
        (lambda: ReferenceCache(last(3)), {"retention": last(2)}, r"past lengths of layer 0 are .*, must be"),
        (lambda: QuantizedStore(Quanto(2), 2), {"error": 0.01}, "are wrong in slots"),
        (lambda: StaticStore(4), {}, "visible_slots of layer 0 are 4, must hold"),
    ],
)
def test_a_promise_that_is_not_kept_is_found(make, promise, said):
    with pytest.raises(AssertionError, match=said):
        check_cache(make, 200, **promise)


def test_promises_are_taken_as_arguments():
    check_cache(lambda: ReferenceCache(last(3)), 40, retention=last(3))
    check_cache(lambda: QuantizedStore(Quanto(4), 2), 40, error=0.3)

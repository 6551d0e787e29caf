"""The contract of caches: each equals the reference cache, a list of positions per row.

A fuzzer applies random operations to caches and to reference caches, and compares them. An operation is
decoded from a few bytes, all zeros being none. Row numbers are taken modulo the number of rows, and lists are
cycled. So every list of operations is valid, also a shrunk one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from descant.core.interfaces import KVCache, KVSpan, VisibleSlots
from descant.engine.session import Request
from descant.errors import MissingExtra
from descant.testing.outcome import TOLERANCE, Schedule, compare, outcomes
from descant.testing.reference_cache import ReferenceCache, Retention

CACHE_DECIDES = "own"
_NEVER = 10**9


@dataclass(frozen=True)
class CacheTraits:
    """Traits of a cache that `check_cache` must know.

    `retention` gives the visible positions of an evicting cache; "own" if the cache decides by attention.
    `error` is the maximum error of a stored value, where all values are between -4 and 4.
    """

    retention: Retention | str | None = None
    error: float = 0.0
    capacity: int | None = None  # maximum positions per row
    frees_memory: bool = False  # without rows it is as small as a new cache
    # Per layer: heads, key size, value size.
    shapes: tuple[tuple[int, int, int], ...] = ((2, 4, 4), (1, 4, 2))


class CachePair:
    """A cache and the reference that it must equal."""

    def __init__(
        self, cache: KVCache, reference: ReferenceCache, layers: int, max_lengths: Sequence[int] = ()
    ) -> None:
        self.cache, self.reference = cache, reference
        self.max_lengths = list(max_lengths)  # [R] the longest length that each row ever had
        self.written_lengths = [[length] * layers for length in self.lengths]  # [R][layer]
        self.promised_lengths = [0] * len(self.written_lengths)  # [R] what was told to be committed
        # [R] first position written only in the first layer: never committed.
        self.partial_from = [_NEVER] * len(self.written_lengths)
        self._num_layers = layers

    @property
    def lengths(self) -> list[int]:
        """Committed lengths [R]."""
        lengths: list[int] = self.reference.lengths.tolist()
        return lengths

    @property
    def has_uncommitted(self) -> bool:
        """Whether there are uncommitted writes."""
        return any(
            max(layer_lengths) > length
            for layer_lengths, length in zip(self.written_lengths, self.lengths, strict=True)
        )

    def extend(self, rows: int) -> None:
        """Append empty rows to both."""
        for cache in (self.cache, self.reference):
            cache.extend(rows)
        self.max_lengths += [0] * rows
        self.written_lengths += [[0] * self._num_layers for _ in range(rows)]
        self.promised_lengths += [0] * rows
        self.partial_from += [_NEVER] * rows

    def commit(self, parents: Sequence[int] | None, lengths: Sequence[int]) -> None:
        """Commit in both."""
        for cache in (self.cache, self.reference):
            parent_index = None if parents is None else torch.tensor(parents, dtype=torch.long)
            cache.commit(parent_index, torch.tensor(lengths, dtype=torch.long))
        if parents is not None:
            self.max_lengths = [self.max_lengths[row] for row in parents]
        self.max_lengths = [max(pair) for pair in zip(self.max_lengths, lengths, strict=True)]
        self.written_lengths = [[length] * self._num_layers for length in lengths]
        self.promised_lengths = [0] * len(lengths)
        self.partial_from = [_NEVER] * len(lengths)


_MAX_ROWS, _MAX_CACHES = 6, 3
_MAX_WIDTH = 7  # positions of a forward
_NUM_BYTES = 10  # of an operation; drawing field by field would take most of the time
_CUT_CHOICES = (0, 0, 0, 1, 1, 2, 3, 5, 99)  # the last cuts everything
_OPERATIONS = (
    "nothing", *["write"] * 9, *["commit"] * 6, "extend", "extend", "select", "new", "join", "switch",
    "switch", "save", "move",
)  # fmt: skip


def operation_lists(strategies: Any) -> Any:
    """A hypothesis strategy for lists of operations."""
    operation = strategies.binary(min_size=_NUM_BYTES, max_size=_NUM_BYTES)
    return strategies.lists(operation, min_size=10, max_size=24)


class CacheFuzzer:
    """Runs a list of operations; after each one every cache must equal its reference."""

    def __init__(self, make_cache: Callable[[], KVCache], traits: CacheTraits) -> None:
        self._make_cache, self._traits = make_cache, traits
        self._pairs: list[CachePair] = []
        self._current = 0
        self._num_values = 0
        self._log: list[str] = []

    def run(self, operations: Sequence[bytes]) -> None:
        """Apply the operations, and read every cache after the last one."""
        self._add_new_cache(1)
        try:
            for operation in operations:
                self._apply(operation)
                self._check_invariants()
            for commits in (True, False):  # a cache that shares what it should not has seen the others write
                for index in range(len(self._pairs)):
                    self._current = index
                    self._log.append(f"look at cache {index}")
                    self._write()
                    if commits:
                        self._commit()
        except Exception as error:
            reason = error if isinstance(error, AssertionError) else f"{type(error).__name__}, {error}"
            log = "\n  ".join(self._log)
            raise AssertionError(f"{type(self._pair.cache).__name__}: {reason}, after\n  {log}") from error

    @property
    def _pair(self) -> CachePair:
        return self._pairs[self._current]

    @property
    def _layers(self) -> int:
        return len(self._traits.shapes)

    def _apply(self, data: bytes) -> None:
        """Apply an operation; small bytes give simple ones."""
        pair, (one, two, three, four) = self._pair, data[1:5]
        free_rows = _MAX_ROWS - len(pair.reference)
        match _OPERATIONS[data[0] % len(_OPERATIONS)]:
            case "extend" if free_rows > 0:
                rows = min(1 + one % 3, free_rows)
                self._log.append(f"extend({rows})")
                pair.extend(rows)
            case "write":
                skipped = tuple(bool(two >> at & 1) for at in range(4)) if two > 128 else (False,)
                offsets = tuple(three >> 2 * at & 3 for at in range(3)) if three > 160 else (0,)
                num_drafts = four % 4 if 140 < four <= 200 else None
                self._write(1 + one % _MAX_WIDTH, skipped, offsets, four > 200, num_drafts)
            case "commit":
                parents = [at % 6 for at in data[2 : 2 + one % 7]] if one > 128 else None
                cuts = [_CUT_CHOICES[at % len(_CUT_CHOICES)] for at in data[8:10]]
                self._commit(parents, cuts if data[8] > 150 else (0,))
            case "select":
                count = len(pair.reference)
                self._select([at % 6 % count for at in data[2 : 2 + one % 5]] if count else [])
            case "join" if len(self._pairs) > 1:
                self._join()
            case "new":
                self._add_new_cache(1 + one % 3)
            case "switch" if len(self._pairs) > 1:
                self._current = (self._current + 1) % len(self._pairs)
                self._log.append(f"turn to cache {self._current}")
            case "save":
                self._save()
            case "move":
                self._log.append("to(cpu)")
                pair.cache.to("cpu")

    # -------------------------------------------------------------------- other caches
    def _add(self, pair: CachePair) -> None:
        """Switch to a new cache; drops the oldest of the others if there are too many."""
        if len(self._pairs) == _MAX_CACHES:
            del self._pairs[0 if self._current else 1]
        self._pairs.append(pair)
        self._current = len(self._pairs) - 1

    def _add_new_cache(self, rows: int) -> None:
        retention = None if isinstance(self._traits.retention, str) else self._traits.retention
        self._add(CachePair(self._make_cache(), ReferenceCache(retention), self._layers))
        self._log.append(f"cache {self._current} = a new one")
        self._log.append(f"extend({rows})")
        self._pair.extend(rows)

    def _pair_of_rows(self, cache: KVCache, rows: Sequence[int]) -> CachePair:
        """A pair for a cache that must equal the given rows of the current one."""
        pair = self._pair
        reference = pair.reference.select(torch.tensor(rows, dtype=torch.long))
        return CachePair(cache, reference, self._layers, [pair.max_lengths[row] for row in rows])

    def _select(self, rows: Sequence[int]) -> None:
        self._log.append(f"cache {min(len(self._pairs), _MAX_CACHES - 1)} = select({rows})")
        self._add(self._pair_of_rows(self._pair.cache.select(torch.tensor(rows, dtype=torch.long)), rows))

    def _join(self) -> None:
        pair = self._pair
        other = self._pairs[(self._current + 1) % len(self._pairs)]
        if len(pair.reference) + len(other.reference) > _MAX_ROWS:
            return
        if any(joined.has_uncommitted and any(joined.promised_lengths) for joined in (pair, other)):
            return  # promised lengths must be committed first
        for joined in (pair, other):
            if joined.has_uncommitted:
                self._log.append("commit what was committed, in both")
                joined.commit(None, joined.lengths)
        self._log.append("join(the next cache)")
        pair.cache.join(other.cache)
        pair.reference.join(other.reference)
        pair.max_lengths += other.max_lengths
        pair.written_lengths += other.written_lengths
        pair.promised_lengths += other.promised_lengths
        pair.partial_from += other.partial_from
        self._pairs.remove(other)
        self._current = self._pairs.index(pair)

    def _save(self) -> None:
        self._log.append(f"cache {min(len(self._pairs), _MAX_CACHES - 1)} = load(state())")
        state = self._pair.cache.state()
        storages: set[int] = set()
        for name, tensor in state.items():
            value: object = tensor
            if not isinstance(value, Tensor):
                self._fail(f"state has {name!r}: {type(value).__name__}, must be tensors")
            if not tensor.is_contiguous():
                self._fail(f"state's {name!r} is not contiguous")
            if tensor.numel() and tensor.untyped_storage().data_ptr() in storages:
                self._fail(f"state's {name!r} shares memory with another")
            storages.add(tensor.untyped_storage().data_ptr())
        loaded = self._make_cache()
        loaded.load({name: tensor.clone() for name, tensor in state.items()})
        self._add(self._pair_of_rows(loaded, range(len(self._pair.reference))))

    # -------------------------------------------------------------------- rows
    def _commit(self, requested: Sequence[int] | None = None, cuts: Sequence[int] = (0,)) -> None:
        """Reorder, fork, drop and truncate rows; or only truncate; or nothing."""
        pair, max_rewind = self._pair, self._pair.cache.max_rewind
        count = len(pair.reference)
        parents = range(count) if requested is None else [row % count for row in requested] if count else []
        lengths = []
        for row, cut in zip(parents, _cycled(cuts, len(parents)), strict=True):
            written = min(*pair.written_lengths[row], pair.partial_from[row])
            min_length = max(
                pair.promised_lengths[row], 0 if max_rewind is None else pair.max_lengths[row] - max_rewind
            )
            # Uncommitted writes can be truncated regardless of `max_rewind`.
            lengths.append(min(written, max(min_length, written - cut)))
        self._log.append(f"commit({None if requested is None else parents}, {lengths})")
        pair.commit(None if requested is None else parents, lengths)

    def _write(
        self,
        width: int = 1,
        skipped_rows: Sequence[bool] = (False,),
        start_offsets: Sequence[int] = (0,),
        first_layer_only: bool = False,
        num_drafts: int | None = None,
    ) -> None:
        """One forward, of which all but the last `num_drafts` positions will be committed."""
        pair = self._pair
        skipped = _cycled(skipped_rows, len(pair.reference))
        rows = [
            row for row, is_skipped in enumerate(skipped) if not is_skipped and not pair.promised_lengths[row]
        ]
        layers, offsets = 1 if first_layer_only else self._layers, _cycled(start_offsets, len(skipped))
        starts = [min(pair.lengths[row] + offsets[row], *pair.written_lengths[row][:layers]) for row in rows]
        capacity = self._traits.capacity
        if capacity is not None and rows:
            # Padding of a shorter row may exceed the capacity.
            width = min(width, capacity - (max(starts) if len(set(starts)) == 1 else min(starts)))
        if not rows or width < 1 or (capacity is not None and max(starts) >= capacity):
            return
        all_rows = len(rows) == len(skipped)
        is_level = len(set(starts)) == 1
        self._log.append(
            f"update({'all' if all_rows else f'rows {rows}'}, start={starts[0] if is_level else starts}, "
            f"width={width}{', layer 0 alone' if first_layer_only else ''}"
            f"{'' if num_drafts is None else f', the last {num_drafts} guessed'})"
        )
        start = starts[0] if is_level else torch.tensor(starts)
        index = None if all_rows else torch.tensor(rows)
        span = KVSpan(index, start, width, max(starts) + width)
        if self._num_values % 2:  # who feeds a cache may tell it what a device has, and need not
            span = span._replace(host_rows=index, host_starts=None if isinstance(start, int) else start)
        if num_drafts is not None and not first_layer_only:
            span = self._promise(rows, starts, span, num_drafts)
        visible = [pair.cache.visible_slots(layer, span) for layer in range(layers)]
        for layer, slots in enumerate(visible):
            key = self._unique_values(layer, len(rows), width)
            value = -key[..., : self._traits.shapes[layer][2]]
            past_lengths = self._check_visible_slots(slots, starts, layer, span)
            actual: tuple[Any, Any] = pair.cache.update(layer, key, value, span)  # tensors, or KV proxies
            expected = pair.reference.update(layer, key, value, span)
            num_slots = span.read_length if slots is None else slots.num_slots
            for name, tensor, expected_tensor in zip(("keys", "values"), actual, expected, strict=True):
                shape = [*expected_tensor.shape[:2], num_slots, expected_tensor.shape[3]]
                if list(tensor.shape) != shape:
                    self._fail(f"{name} of layer {layer} are {list(tensor.shape)}, must be {shape}")
            self._compare(rows, layer, past_lengths, width, (actual, expected))
            if not isinstance(actual[0], Tensor):
                self._compare_attention(
                    actual, expected, past_lengths, self._visible_mask(layer, starts, past_lengths, width)
                )
            for row, row_start in zip(rows, starts, strict=True):
                pair.written_lengths[row][layer] = row_start + self._num_real_slots(row_start, width)
        for row, row_start in zip(rows, starts, strict=True):
            if first_layer_only:
                pair.partial_from[row] = min(pair.partial_from[row], row_start)
            elif row_start <= pair.partial_from[row]:
                pair.partial_from[row] = _NEVER

    def _promise(self, rows: Sequence[int], starts: Sequence[int], span: KVSpan, num_drafts: int) -> KVSpan:
        """The span, told which of its positions will be committed."""
        committed = [max(self._num_real_slots(start, span.width) - num_drafts, 0) for start in starts]
        for row, start, count in zip(rows, starts, committed, strict=True):
            self._pair.promised_lengths[row] = start + count
        return span._replace(num_committed=torch.tensor(committed))

    def _num_real_slots(self, start: int, width: int) -> int:
        """The number of written slots within the capacity."""
        capacity = self._traits.capacity
        return width if capacity is None else min(width, capacity - start)

    def _check_visible_slots(
        self, slots: VisibleSlots | None, starts: Sequence[int], layer: int, span: KVSpan
    ) -> list[int]:
        """The number of visible past slots per row, checked against the reference."""
        expected = self._pair.reference.visible_slots(layer, span)
        expected_lengths = list(starts) if expected is None else expected.past_lengths.tolist()
        if slots is None:
            if expected_lengths != starts:
                self._fail(
                    f"visible_slots of layer {layer} are None, must have past lengths {expected_lengths}"
                )
            return expected_lengths
        past_lengths: list[int] = slots.past_lengths.tolist()
        if self._traits.retention == CACHE_DECIDES:
            if any(length > start for length, start in zip(past_lengths, starts, strict=True)):
                self._fail(f"past lengths of layer {layer} are {past_lengths}, must be at most {starts}")
        elif past_lengths != expected_lengths:
            self._fail(f"past lengths of layer {layer} are {past_lengths}, must be {expected_lengths}")
        if slots.num_slots < min(max(past_lengths) + span.width, self._traits.capacity or span.read_length):
            needed = f"{past_lengths} + {span.width}"
            self._fail(f"visible_slots of layer {layer} are {slots.num_slots}, must hold {needed}")
        return past_lengths

    def _unique_values(self, layer: int, rows: int, width: int) -> Tensor:
        """Values between -4 and 4 that were not written before [N, H, T, D]."""
        heads, size, _ = self._traits.shapes[layer]
        count = rows * heads * width * size
        self._num_values += count
        new = torch.arange(self._num_values - count + 1, self._num_values + 1)
        # An odd factor permutes 2**16 numbers and spreads neighbours.
        return (((new * 40503) % 2**16).float() / 2**13 - 4).view(rows, heads, width, size)

    # -------------------------------------------------------------------- comparison
    def _compare(
        self,
        rows: Sequence[int],
        layer: int,
        past_lengths: Sequence[int],
        width: int,
        pair: tuple[tuple[Any, Any], tuple[Tensor, Tensor]],
    ) -> None:
        actual = [tensor if isinstance(tensor, Tensor) else tensor.materialize() for tensor in pair[0]]
        if self._traits.retention == CACHE_DECIDES:
            for line, row in enumerate(rows):
                self._compare_subset(
                    row, layer, [tensor[line, :, : past_lengths[line] + width] for tensor in actual], width
                )
            return
        stops = (torch.tensor(past_lengths) + width).clamp(max=actual[0].shape[2])
        visible = torch.arange(int(stops.max())) < stops[:, None]  # [N, S]
        for name, tensor, expected_tensor in zip(("keys", "values"), actual, pair[1], strict=True):
            error = (tensor[:, :, : visible.shape[1]] - expected_tensor[:, :, : visible.shape[1]]).abs()
            # Not `>`: NaN is wrong too.
            wrong = ~(error <= self._traits.error) & visible[:, None, :, None]
            if bool(wrong.any()):
                line = int(wrong.flatten(1).any(1).int().argmax())
                slots = wrong[line].any(-1).any(0).nonzero().flatten().tolist()
                self._fail(f"{name} of row {rows[line]}, layer {layer}, are wrong in slots {slots}")

    def _compare_subset(self, row: int, layer: int, actual: Sequence[Tensor], width: int) -> None:
        """The visible entries must be positions of the row, in order, the new ones last."""
        entries = self._pair.reference._rows[row][layer]
        for head in range(actual[0].shape[0]):
            position_of = {
                (*key[head].tolist(), *value[head].tolist()): position
                for position, (key, value) in enumerate(entries)
            }
            shown = [
                position_of.get((*key.tolist(), *value.tolist()), -1)
                for key, value in zip(actual[0][head], actual[1][head], strict=True)
            ]
            new = list(range(len(entries) - width, len(entries)))
            if shown != sorted(set(shown)) or shown[:1] == [-1] or shown[-width:] != new:
                self._fail(f"row {row}, layer {layer}, head {head} shows positions {shown} of {len(entries)}")

    def _visible_mask(
        self, layer: int, starts: Sequence[int], past_lengths: Sequence[int], width: int
    ) -> Tensor:
        """The slots that each query sees, as if it were fed alone [N, T, S]."""
        if self._traits.retention == CACHE_DECIDES:
            return _causal_mask(past_lengths, width)
        mask = torch.zeros(len(starts), width, max(past_lengths) + width, dtype=torch.bool)
        for line, start in enumerate(starts):
            shown = [*self._pair.reference.visible_positions(layer, start), *range(start, start + width)]
            for offset in range(width):
                visible = {*self._pair.reference.visible_positions(layer, start + offset), start + offset}
                mask[line, offset, : len(shown)] = torch.tensor([position in visible for position in shown])
        return mask

    def _compare_attention(
        self,
        actual: tuple[Any, Any],
        reference: tuple[Tensor, Tensor],
        past_lengths: list[int],
        visible: Tensor,
    ) -> None:
        """Attention over a KV proxy equals attention over dense keys and values."""
        keys, values = actual
        rows, heads, size, depth = keys.shape
        width = visible.shape[1]
        generator = torch.Generator().manual_seed(self._num_values)
        query = torch.randn(rows, 2 * heads, width, depth, generator=generator)
        attention: Any = torch.nn.functional.scaled_dot_product_attention
        dense = (
            [tensor.materialize() for tensor in actual]
            if self._traits.retention == CACHE_DECIDES or self._traits.error
            else reference
        )
        repeated = [tensor[:, :, : visible.shape[2]].repeat_interleave(2, 1) for tensor in dense]
        expected = attention(query, *repeated, attn_mask=visible[:, None])
        # A model passes no mask if rows are uniform and one position is fed.
        causal = _causal_mask(past_lengths, width, size)
        mask = None if bool(causal.all()) else causal[:, None]
        if self._num_values % 3:  # how models of transformers repeat heads, and how torch can
            expanded = (
                tensor[:, :, None, :, :].expand(rows, heads, 2, size, tensor.shape[3]) for tensor in actual
            )
            flattened = (tensor.reshape(rows, 2 * heads, size, tensor.shape[4]) for tensor in expanded)
            result = attention(query, *flattened, attn_mask=mask)
        else:
            result = attention(query, keys, values, attn_mask=mask, enable_gqa=True)
        if self._traits.retention == CACHE_DECIDES:  # the first query decides what later ones see
            result, expected = result[:, :, :1], expected[:, :, :1]
        if not torch.allclose(result, expected, rtol=0.0, atol=1e-4):
            error = (result - expected).abs().max()
            self._fail(f"attention is off by {error:.3g}, for past lengths {past_lengths}")

    def _check_invariants(self) -> None:
        """Check lengths and sizes that the caches report."""
        for pair in self._pairs:
            cache, reference = pair.cache, pair.reference
            if len(cache) != len(reference):
                self._fail(f"it has {len(cache)} rows, must have {len(reference)}")
            if cache.lengths.tolist() != pair.lengths:
                self._fail(f"lengths are {cache.lengths}, must be {pair.lengths}")
            size = cache.nbytes
            if type(size) is not int or size < 0:
                self._fail(f"nbytes is {size!r}, must be a number of bytes")
            exact = self._traits.error == 0 and self._traits.retention != CACHE_DECIDES
            if exact and size < reference.visible_nbytes:
                self._fail(f"nbytes is {size}, and its rows alone take {reference.visible_nbytes}")
            if (check := getattr(cache, "check", None)) is not None:
                check()  # internal consistency check of some caches
            if self._traits.frees_memory and not len(cache) and size > self._make_cache().nbytes:
                self._fail(f"nbytes is {size} without any row")

    def _fail(self, message: str) -> NoReturn:
        raise AssertionError(message)


def _cycled(values: Sequence[Any], count: int) -> list[Any]:
    """The first `count` values of a cycle."""
    return [values[index % len(values)] for index in range(count)]


def _causal_mask(past_lengths: Sequence[int], width: int, size: int | None = None) -> Tensor:
    """The slots up to each query's own slot [N, T, S]."""
    positions = torch.tensor(past_lengths)[:, None] + torch.arange(width)
    return positions[..., None] >= torch.arange(max(past_lengths) + width if size is None else size)


def check_cache(
    make_cache: Callable[[], KVCache],
    examples: int = 200,
    retention: Retention | str | None = None,
    error: float | None = None,
    traits: CacheTraits = CacheTraits(),  # noqa: B008 - frozen
) -> None:
    """Any sequence of operations leaves every row's keys and values equal to those of ReferenceCache.

    The operations are those of the engine and of cache owners: append empty rows; forwards that write to all
    or some rows, uniform or ragged, several between two commits, or only the first layer; commits that
    reorder, fork, drop and truncate; select rows into another cache; join, move, save and load caches. All
    caches stay in use. The reported lengths and sizes must be right. A failure is shrunk to the shortest list
    of operations.

    `retention` is for an evicting cache: it maps a row's positions to the visible ones, in slot order; one
    for all layers or one per layer, or "own" if the cache decides by attention. `error` is for a quantized
    cache: the maximum error of a value, where all values are between -4 and 4.
    """
    try:
        from hypothesis import HealthCheck, given, settings, strategies
    except ImportError:
        raise MissingExtra("testing", "check_cache") from None
    traits = replace(
        traits,
        retention=traits.retention if retention is None else retention,
        error=traits.error if error is None else error,
    )

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(operation_lists(strategies))
    def check_operations(operations: Any) -> None:
        CacheFuzzer(make_cache, traits).run(operations)

    check_operations()


def check_generation(
    make_cache: Callable[[], KVCache],
    model: Any,
    requests: Sequence[Request],
    schedules: int = 3,
    tolerance: float = TOLERANCE,
) -> None:
    """Generation with the cache equals generation with ReferenceCache, for several admission schedules."""
    rng = random.Random(len(requests))
    count = len(requests)
    schedule_list = [Schedule.at_once(range(count))]
    schedule_list += [Schedule.random(rng, count + 1, cancelled=[count]) for _ in range(schedules)]
    for number, schedule in enumerate(schedule_list):
        all_requests = [*requests, requests[number % count]]
        expected = outcomes(model, all_requests, schedule, ReferenceCache())
        actual = outcomes(model, all_requests, schedule, make_cache())
        for index in range(count):
            label = f"request {index} in schedule {number}, against ReferenceCache"
            compare(expected[index], actual[index], label, tolerance)

"""Applies random operations to caches and to reference caches, and compares them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from descant.core.interfaces import KVCache, KVSpan, VisibleSlots
from descant.testing.cache_pair import CACHE_DECIDES, CachePair, CacheTraits
from descant.testing.operations import (
    CommitOp,
    ExtendOp,
    JoinOp,
    MoveOp,
    NewCacheOp,
    Operation,
    SaveOp,
    SelectOp,
    SwitchCacheOp,
    WriteOp,
    cycle_values,
)
from descant.testing.reference_cache import ReferenceCache

__all__ = ["CacheFuzzer"]

_MAX_ROWS, _MAX_CACHES = 6, 3


class CacheFuzzer:
    """Runs a list of operations; after each one every cache must equal its reference."""

    def __init__(self, make_cache: Callable[[], KVCache], traits: CacheTraits) -> None:
        self._make_cache, self._traits = make_cache, traits
        self._pairs: list[CachePair] = []
        self._current = 0
        self._num_values = 0
        self._log: list[str] = []

    def run(self, operations: Sequence[Operation]) -> None:
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
                    self._write(WriteOp())
                    if commits:
                        self._commit(CommitOp())
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

    def _apply(self, operation: Operation) -> None:
        pair = self._pair
        free_rows = _MAX_ROWS - len(pair.reference)
        match operation:
            case ExtendOp(rows) if free_rows > 0:
                self._log.append(f"extend({min(rows, free_rows)})")
                pair.extend(min(rows, free_rows))
            case WriteOp():
                self._write(operation)
            case CommitOp():
                self._commit(operation)
            case SelectOp(rows):
                self._select([row % len(pair.reference) for row in rows] if len(pair.reference) else [])
            case JoinOp() if len(self._pairs) > 1:
                self._join()
            case NewCacheOp(rows):
                self._add_new_cache(rows)
            case SwitchCacheOp() if len(self._pairs) > 1:
                self._current = (self._current + 1) % len(self._pairs)
                self._log.append(f"turn to cache {self._current}")
            case SaveOp():
                self._save()
            case MoveOp():
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
    def _commit(self, operation: CommitOp) -> None:
        """Reorder, fork, drop and truncate rows; or only truncate; or nothing."""
        pair, max_rewind = self._pair, self._pair.cache.max_rewind
        requested, count = operation.parents, len(pair.reference)
        parents = range(count) if requested is None else [row % count for row in requested] if count else []
        lengths = []
        for row, cut in zip(parents, cycle_values(operation.cuts, len(parents)), strict=True):
            written = min(*pair.written_lengths[row], pair.partial_from[row])
            min_length = max(
                pair.promised_lengths[row], 0 if max_rewind is None else pair.max_lengths[row] - max_rewind
            )
            # Uncommitted writes can be truncated regardless of `max_rewind`.
            lengths.append(min(written, max(min_length, written - cut)))
        self._log.append(f"commit({None if requested is None else parents}, {lengths})")
        pair.commit(None if requested is None else parents, lengths)

    def _write(self, operation: WriteOp) -> None:
        pair = self._pair
        skipped = cycle_values(operation.skipped_rows, len(pair.reference))
        rows = [
            row for row, is_skipped in enumerate(skipped) if not is_skipped and not pair.promised_lengths[row]
        ]
        layers = 1 if operation.first_layer_only else self._layers
        offsets = cycle_values(operation.start_offsets, len(pair.reference))
        starts = [min(pair.lengths[row] + offsets[row], *pair.written_lengths[row][:layers]) for row in rows]
        width, capacity = operation.width, self._traits.capacity
        if capacity is not None and rows:
            # Padding of a shorter row may exceed the capacity.
            width = min(width, capacity - (max(starts) if len(set(starts)) == 1 else min(starts)))
        if not rows or width < 1 or (capacity is not None and max(starts) >= capacity):
            return
        all_rows = len(rows) == len(skipped)
        start_text = f"{starts[0]}" if len(set(starts)) == 1 else f"{starts}"
        self._log.append(
            f"update({'all' if all_rows else f'rows {rows}'}, start={start_text}, width={width}"
            f"{', layer 0 alone' if operation.first_layer_only else ''}"
            f"{'' if operation.num_drafts is None else f', the last {operation.num_drafts} guessed'})"
        )
        start = starts[0] if len(set(starts)) == 1 else torch.tensor(starts)
        index = None if all_rows else torch.tensor(rows)
        span = KVSpan(index, start, width, max(starts) + width)
        if self._num_values % 2:  # who feeds a cache may tell it what a device has, and need not
            span = span._replace(host_rows=index, host_starts=None if isinstance(start, int) else start)
        if operation.num_drafts is not None and not operation.first_layer_only:
            committed = [
                max(self._num_real_slots(start, width) - operation.num_drafts, 0) for start in starts
            ]
            span = span._replace(num_committed=torch.tensor(committed))
            for row, row_start, count in zip(rows, starts, committed, strict=True):
                pair.promised_lengths[row] = row_start + count
        visible = [pair.cache.visible_slots(layer, span) for layer in range(layers)]
        for layer, slots in enumerate(visible):
            key = self._unique_values(layer, len(rows), width)
            value = -key[..., : self._traits.shapes[layer][2]]
            past_lengths = self._check_visible_slots(slots, starts, layer, span)
            actual = pair.cache.update(layer, key, value, span)
            expected = pair.reference.update(layer, key, value, span)
            num_slots = span.read_length if slots is None else slots.num_slots
            for name, tensor, expected_tensor in zip(("keys", "values"), actual, expected, strict=True):
                shape = [*expected_tensor.shape[:2], num_slots, expected_tensor.shape[3]]
                if list(tensor.shape) != shape:
                    self._fail(f"{name} of layer {layer} are {list(tensor.shape)}, must be {shape}")
            self._compare(rows, layer, past_lengths, width, (actual, expected))
            if not _is_tensor(actual[0]):
                self._compare_attention(
                    actual, expected, past_lengths, self._visible_mask(layer, starts, past_lengths, width)
                )
            for row, row_start in zip(rows, starts, strict=True):
                pair.written_lengths[row][layer] = row_start + self._num_real_slots(row_start, width)
        for row, row_start in zip(rows, starts, strict=True):
            if operation.first_layer_only:
                pair.partial_from[row] = min(pair.partial_from[row], row_start)
            elif row_start <= pair.partial_from[row]:
                pair.clear_partial(row)

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
        actual, expected = (
            [tensor if _is_tensor(tensor) else tensor.materialize() for tensor in pair[0]],
            pair[1],
        )
        if self._traits.retention == CACHE_DECIDES:
            for line, row in enumerate(rows):
                self._compare_subset(
                    row, layer, [tensor[line, :, : past_lengths[line] + width] for tensor in actual], width
                )
            return
        stops = (torch.tensor(past_lengths) + width).clamp(max=actual[0].shape[2])
        visible = torch.arange(int(stops.max())) < stops[:, None]  # [N, S]
        for name, tensor, expected_tensor in zip(("keys", "values"), actual, expected, strict=True):
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
        if (
            self._traits.retention == CACHE_DECIDES
        ):  # what later queries see depends on what the cache makes of the first
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


def _is_tensor(value: object) -> bool:
    """Whether it is a tensor and not a KV proxy."""
    return isinstance(value, Tensor)


def _causal_mask(past_lengths: Sequence[int], width: int, size: int | None = None) -> Tensor:
    """The slots up to each query's own slot [N, T, S]."""
    positions = torch.tensor(past_lengths)[:, None] + torch.arange(width)
    return positions[..., None] >= torch.arange(max(past_lengths) + width if size is None else size)

"""A trial: caches and lists that are told the same things, as a trace says."""

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
    """Caches of one kind that go through a trace; after each operation all is as with lists."""

    def __init__(self, make_cache: Callable[[], KVCache], traits: CacheTraits) -> None:
        self._make_cache, self._traits = make_cache, traits
        self._pairs: list[CachePair] = []
        self._current = 0
        self._num_values = 0
        self._log: list[str] = []

    def run(self, trace: Sequence[Operation]) -> None:
        """Go through a trace, and look at everything after the last operation."""
        self._add_new_cache(1)
        try:
            for operation in trace:
                self._apply(operation)
                self._check_invariants()
            for commits in (True, False):  # a cache that shares what it should not has seen the others write
                for at in range(len(self._pairs)):
                    self._current = at
                    self._log.append(f"look at cache {at}")
                    self._write(WriteOp())
                    if commits:
                        self._commit(CommitOp())
        except Exception as error:
            what = error if isinstance(error, AssertionError) else f"{type(error).__name__}, {error}"
            told = "\n  ".join(self._log)
            raise AssertionError(f"{type(self._pair.cache).__name__}: {what}, after\n  {told}") from error

    @property
    def _pair(self) -> CachePair:
        return self._pairs[self._current]

    @property
    def _layers(self) -> int:
        return len(self._traits.shapes)

    def _apply(self, operation: Operation) -> None:
        pair = self._pair
        room = _MAX_ROWS - len(pair.reference)
        match operation:
            case ExtendOp(rows) if room > 0:
                self._log.append(f"extend({min(rows, room)})")
                pair.extend(min(rows, room))
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
        """Go on with another cache, and forget the oldest of the others where there are many."""
        if len(self._pairs) == _MAX_CACHES:
            del self._pairs[0 if self._current else 1]
        self._pairs.append(pair)
        self._current = len(self._pairs) - 1

    def _add_new_cache(self, rows: int) -> None:
        keeps = None if isinstance(self._traits.retention, str) else self._traits.retention
        self._add(CachePair(self._make_cache(), ReferenceCache(keeps), self._layers))
        self._log.append(f"cache {self._current} = a new one")
        self._log.append(f"extend({rows})")
        self._pair.extend(rows)

    def _pair_of_rows(self, cache: KVCache, rows: Sequence[int]) -> CachePair:
        """Another cache that must be what some rows of this one are."""
        pair = self._pair
        lists = pair.reference.select(torch.tensor(rows, dtype=torch.long))
        return CachePair(cache, lists, self._layers, [pair.max_lengths[row] for row in rows])

    def _select(self, rows: Sequence[int]) -> None:
        self._log.append(f"cache {min(len(self._pairs), _MAX_CACHES - 1)} = select({rows})")
        self._add(self._pair_of_rows(self._pair.cache.select(torch.tensor(rows, dtype=torch.long)), rows))

    def _join(self) -> None:
        pair = self._pair
        other = self._pairs[(self._current + 1) % len(self._pairs)]
        if len(pair.reference) + len(other.reference) > _MAX_ROWS:
            return
        if any(one.has_uncommitted and any(one.promised_lengths) for one in (pair, other)):
            return  # what was told has to be done first
        for one in (pair, other):
            if one.has_uncommitted:
                self._log.append("commit what was committed, in both")
                one.commit(None, one.lengths)
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
        places: set[int] = set()
        for name, one in state.items():
            given: object = one
            if not isinstance(given, Tensor):
                self._fail(f"state has {name!r}: {type(given).__name__}, must be tensors")
            if not one.is_contiguous():
                self._fail(f"state's {name!r} is not contiguous")
            if one.numel() and one.untyped_storage().data_ptr() in places:
                self._fail(f"state's {name!r} shares memory with another")
            places.add(one.untyped_storage().data_ptr())
        made = self._make_cache()
        made.load({name: one.clone() for name, one in state.items()})
        self._add(self._pair_of_rows(made, range(len(self._pair.reference))))

    # -------------------------------------------------------------------- rows
    def _commit(self, operation: CommitOp) -> None:
        """Reorder, fork, drop and cut, or only cut, or nothing."""
        pair, back = self._pair, self._pair.cache.max_rewind
        whence, count = operation.parents, len(pair.reference)
        parents = range(count) if whence is None else [row % count for row in whence] if count else []
        lengths = []
        for row, cut in zip(parents, cycle_values(operation.cuts, len(parents)), strict=True):
            held = min(*pair.written_lengths[row], pair.partial_from[row])
            least = max(pair.promised_lengths[row], 0 if back is None else pair.max_lengths[row] - back)
            # What was only written can be cut, whatever a cache says of how far it goes back.
            lengths.append(min(held, max(least, held - cut)))
        self._log.append(f"commit({None if whence is None else parents}, {lengths})")
        pair.commit(None if whence is None else parents, lengths)

    def _write(self, operation: WriteOp) -> None:
        pair = self._pair
        idle = cycle_values(operation.skipped_rows, len(pair.reference))
        rows = [row for row, rests in enumerate(idle) if not rests and not pair.promised_lengths[row]]
        layers = 1 if operation.first_layer_only else self._layers
        ahead = cycle_values(operation.start_offsets, len(pair.reference))
        starts = [min(pair.lengths[row] + ahead[row], *pair.written_lengths[row][:layers]) for row in rows]
        width, limit = operation.width, self._traits.capacity
        if limit is not None and rows:
            # What only fills a shorter row up beside a wider one may lie behind the last slot.
            width = min(width, limit - (max(starts) if len(set(starts)) == 1 else min(starts)))
        if not rows or width < 1 or (limit is not None and max(starts) >= limit):
            return
        whole = len(rows) == len(idle)
        told = f"{starts[0]}" if len(set(starts)) == 1 else f"{starts}"
        self._log.append(
            f"update({'all' if whole else f'rows {rows}'}, start={told}, width={width}"
            f"{', layer 0 alone' if operation.first_layer_only else ''}"
            f"{'' if operation.num_drafts is None else f', the last {operation.num_drafts} guessed'})"
        )
        start = starts[0] if len(set(starts)) == 1 else torch.tensor(starts)
        index = None if whole else torch.tensor(rows)
        span = KVSpan(index, start, width, max(starts) + width)
        if self._num_values % 2:  # who feeds a cache may tell it what a device has, and need not
            span = span._replace(host_rows=index, host_starts=None if isinstance(start, int) else start)
        if operation.num_drafts is not None and not operation.first_layer_only:
            sure = [max(self._num_real_slots(start, width) - operation.num_drafts, 0) for start in starts]
            span = span._replace(num_committed=torch.tensor(sure))
            for row, begin, count in zip(rows, starts, sure, strict=True):
                pair.promised_lengths[row] = begin + count
        reaches = [pair.cache.visible_slots(layer, span) for layer in range(layers)]
        for layer, reach in enumerate(reaches):
            key = self._unique_values(layer, len(rows), width)
            value = -key[..., : self._traits.shapes[layer][2]]
            held = self._check_visible_slots(reach, starts, layer, span)
            got = pair.cache.update(layer, key, value, span)
            expected = pair.reference.update(layer, key, value, span)
            size = span.read_length if reach is None else reach.num_slots
            for name, one, must in zip(("keys", "values"), got, expected, strict=True):
                shape = [*must.shape[:2], size, must.shape[3]]
                if list(one.shape) != shape:
                    self._fail(f"{name} of layer {layer} are {list(one.shape)}, must be {shape}")
            self._compare(rows, layer, held, width, (got, expected))
            if not _is_tensor(got[0]):
                self._compare_attention(got, expected, held, self._visible_mask(layer, starts, held, width))
            for row, begin in zip(rows, starts, strict=True):
                pair.written_lengths[row][layer] = begin + self._num_real_slots(begin, width)
        for row, begin in zip(rows, starts, strict=True):
            if operation.first_layer_only:
                pair.partial_from[row] = min(pair.partial_from[row], begin)
            elif begin <= pair.partial_from[row]:
                pair.clear_partial(row)

    def _num_real_slots(self, start: int, width: int) -> int:
        """How many of the written slots there are."""
        limit = self._traits.capacity
        return width if limit is None else min(width, limit - start)

    def _check_visible_slots(
        self, reach: VisibleSlots | None, starts: Sequence[int], layer: int, span: KVSpan
    ) -> list[int]:
        """How many slots the cache says that the rows hold, if that is what they must."""
        expected = self._pair.reference.visible_slots(layer, span)
        must = list(starts) if expected is None else expected.past_lengths.tolist()
        if reach is None:
            if must != starts:
                self._fail(f"reach of layer {layer} is None, must be told: rows hold {must}")
            return must
        held: list[int] = reach.past_lengths.tolist()
        if self._traits.retention == CACHE_DECIDES:
            if any(mine > start for mine, start in zip(held, starts, strict=True)):
                self._fail(f"reach of layer {layer} says {held}, of which rows have only {starts}")
        elif held != must:
            self._fail(f"reach of layer {layer} says that rows hold {held}, must be {must}")
        if reach.num_slots < min(max(held) + span.width, self._traits.capacity or span.read_length):
            self._fail(
                f"reach of layer {layer} has size {reach.num_slots}, too small for {held} + {span.width}"
            )
        return held

    def _unique_values(self, layer: int, rows: int, width: int) -> Tensor:
        """Numbers between -4 and 4 that were never written before [N, H, T, D]."""
        heads, size, _ = self._traits.shapes[layer]
        count = rows * heads * width * size
        self._num_values += count
        new = torch.arange(self._num_values - count + 1, self._num_values + 1)
        # An odd factor takes 2**16 numbers to as many others, and neighbours far from each other.
        return (((new * 40503) % 2**16).float() / 2**13 - 4).view(rows, heads, width, size)

    # -------------------------------------------------------------------- looking
    def _compare(
        self,
        rows: Sequence[int],
        layer: int,
        held: Sequence[int],
        width: int,
        pair: tuple[tuple[Any, Any], tuple[Tensor, Tensor]],
    ) -> None:
        got, expected = [one if _is_tensor(one) else one.materialize() for one in pair[0]], pair[1]
        if self._traits.retention == CACHE_DECIDES:
            for line, row in enumerate(rows):
                self._compare_subset(row, layer, [one[line, :, : held[line] + width] for one in got], width)
            return
        stops = (torch.tensor(held) + width).clamp(max=got[0].shape[2])
        seen = torch.arange(int(stops.max())) < stops[:, None]  # [N, S]
        for name, one, must in zip(("keys", "values"), got, expected, strict=True):
            far = (one[:, :, : seen.shape[1]] - must[:, :, : seen.shape[1]]).abs()
            # Not "greater": what is no number at all is wrong too.
            wrong = ~(far <= self._traits.error) & seen[:, None, :, None]
            if bool(wrong.any()):
                line = int(wrong.flatten(1).any(1).int().argmax())
                at = wrong[line].any(-1).any(0).nonzero().flatten().tolist()
                self._fail(f"{name} of row {rows[line]}, layer {layer}, are wrong in slots {at}")

    def _compare_subset(self, row: int, layer: int, got: Sequence[Tensor], width: int) -> None:
        """What is shown are positions of the row, in their order, the new ones last."""
        entries = self._pair.reference._rows[row][layer]
        for head in range(got[0].shape[0]):
            known = {
                (*key[head].tolist(), *value[head].tolist()): at for at, (key, value) in enumerate(entries)
            }
            shown = [
                known.get((*key.tolist(), *value.tolist()), -1)
                for key, value in zip(got[0][head], got[1][head], strict=True)
            ]
            new = list(range(len(entries) - width, len(entries)))
            if shown != sorted(set(shown)) or shown[:1] == [-1] or shown[-width:] != new:
                self._fail(f"row {row}, layer {layer}, head {head} shows positions {shown} of {len(entries)}")

    def _visible_mask(self, layer: int, starts: Sequence[int], held: Sequence[int], width: int) -> Tensor:
        """Which slots each query sees, those that it would see if it were fed by itself [N, T, S]."""
        if self._traits.retention == CACHE_DECIDES:
            return _causal_mask(held, width)
        seen = torch.zeros(len(starts), width, max(held) + width, dtype=torch.bool)
        for line, start in enumerate(starts):
            shown = [*self._pair.reference.visible_positions(layer, start), *range(start, start + width)]
            for at in range(width):
                mine = {*self._pair.reference.visible_positions(layer, start + at), start + at}
                seen[line, at, : len(shown)] = torch.tensor([one in mine for one in shown])
        return seen

    def _compare_attention(
        self, got: tuple[Any, Any], lists: tuple[Tensor, Tensor], held: list[int], seen: Tensor
    ) -> None:
        """Attention over what is not laid out is that over the same laid out, of what a query should see."""
        keys, values = got
        rows, heads, size, depth = keys.shape
        width = seen.shape[1]
        chance = torch.Generator().manual_seed(self._num_values)
        query = torch.randn(rows, 2 * heads, width, depth, generator=chance)
        attention: Any = torch.nn.functional.scaled_dot_product_attention
        known = (
            [one.materialize() for one in got]
            if self._traits.retention == CACHE_DECIDES or self._traits.error
            else lists
        )
        plain = [one[:, :, : seen.shape[2]].repeat_interleave(2, 1) for one in known]
        must = attention(query, *plain, attn_mask=seen[:, None])
        # What a model is told: nothing where rows are level and one position is fed.
        told = _causal_mask(held, width, size)
        mask = None if bool(told.all()) else told[:, None]
        if self._num_values % 3:  # how models of transformers repeat heads, and how torch can
            more = (one[:, :, None, :, :].expand(rows, heads, 2, size, one.shape[3]) for one in got)
            wide = (one.reshape(rows, 2 * heads, size, one.shape[4]) for one in more)
            found = attention(query, *wide, attn_mask=mask)
        else:
            found = attention(query, keys, values, attn_mask=mask, enable_gqa=True)
        if (
            self._traits.retention == CACHE_DECIDES
        ):  # what later queries see depends on what the cache makes of the first
            found, must = found[:, :, :1], must[:, :, :1]
        if not torch.allclose(found, must, rtol=0.0, atol=1e-4):
            self._fail(f"attention is off by {(found - must).abs().max():.3g}, for rows that hold {held}")

    def _check_invariants(self) -> None:
        """What the caches say of themselves."""
        for pair in self._pairs:
            cache, lists = pair.cache, pair.reference
            if len(cache) != len(lists):
                self._fail(f"it has {len(cache)} rows, must have {len(lists)}")
            if cache.lengths.tolist() != pair.lengths:
                self._fail(f"lengths are {cache.lengths}, must be {pair.lengths}")
            size = cache.nbytes
            if type(size) is not int or size < 0:
                self._fail(f"nbytes is {size!r}, must be a number of bytes")
            exact = self._traits.error == 0 and self._traits.retention != CACHE_DECIDES
            if exact and size < lists.visible_nbytes:
                self._fail(f"nbytes is {size}, and its rows alone take {lists.visible_nbytes}")
            if (check := getattr(cache, "check", None)) is not None:
                check()  # some can tell whether their books are right
            if self._traits.frees_memory and not len(cache) and size > self._make_cache().nbytes:
                self._fail(f"nbytes is {size} without any row")

    def _fail(self, what: str) -> NoReturn:
        raise AssertionError(what)


def _is_tensor(given: object) -> bool:
    """Whether it is a tensor, and not what a cache gives in the place of one."""
    return isinstance(given, Tensor)


def _causal_mask(held: Sequence[int], width: int, size: int | None = None) -> Tensor:
    """The slots up to each query's own [N, T, S]."""
    own = torch.tensor(held)[:, None] + torch.arange(width)
    return own[..., None] >= torch.arange(max(held) + width if size is None else size)

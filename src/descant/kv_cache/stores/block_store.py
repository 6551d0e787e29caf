"""Groups of rows that share a prefix after forks, and the length of that prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, ClassVar, Final, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import Array, KVSpan, RowCache, TransactionalCache, VisibleSlots


class WrittenSlots:
    """The end of what each row of a block may hold, also behind the end of the row itself.

    Slots behind the end of a row are masked, but a mask does not hide what is not finite: zero times NaN is
    NaN. So a slot that a row can read is zero or was written by that row or its parents. Whatever another
    row has left is cleared when a row takes its place.
    """

    def __init__(self) -> None:
        self._stops: Array = np.zeros(0, dtype=np.int64)  # [R] rows behind the last one are not written
        # The first rows may be written up to a common stop, which is not in `_stops` yet.
        self._num_first, self._first_stop = 0, 0

    def mark(self, rows: Array, stops: Array | int) -> None:
        """Rows [N] are written up to `stops`."""
        self._update_stops(int(rows.max(initial=-1)) + 1)
        self._stops[rows] = np.maximum(self._stops[rows], stops)

    def mark_first(self, count: int, stop: int) -> None:
        """The first `count` rows are written up to `stop`: most forwards, so it costs no array operation."""
        if count != self._num_first:
            self._update_stops(count)
            self._num_first = count
        self._first_stop = max(self._first_stop, stop)

    def clear(self, blocks: Iterable[Tensor], rows: Array, starts: Array) -> None:
        """Zero the slots of rows [N] from `starts` [N] on in blocks [R, H, S, D], where they were written.

        The slots before `starts` count as written.
        """
        self._update_stops(int(rows.max(initial=-1)) + 1)
        dirty = self._stops[rows] > starts
        if dirty.any():
            groups = []
            for start in np.unique(starts[dirty]).tolist():
                group = rows[dirty & (starts == start)]
                groups.append((group, slice(start, int(self._stops[group].max()))))
            for block in blocks:
                for group, slots in groups:
                    present = torch.from_numpy(group[group < len(block)])
                    block[:, :, slots].index_fill_(0, present.to(block.device), 0)
        self._stops[rows] = starts

    def _update_stops(self, count: int) -> None:
        """Bring `_stops` up to date, for at least `count` rows."""
        missing = max(count, self._num_first) - len(self._stops)
        if missing > 0:
            self._stops = np.concatenate((self._stops, np.zeros(missing, dtype=np.int64)))
        if self._num_first:
            first = self._stops[: self._num_first]
            np.maximum(first, self._first_stop, out=first)
            self._num_first, self._first_stop = 0, 0


class SlotCopy(NamedTuple):
    """Slots of some rows of a tensor, and the place in a block that they are copied to."""

    source: Tensor  # [R, H, S, D], or a view of the block
    rows: Tensor  # [N] rows of the source, on its device
    target: Tensor  # a view of slots of the block [R', H, K, D]
    target_rows: Tensor  # [N]
    slots: Tensor | None = None  # [N, H or 1, K] the slots of each head; None: the first ones


class SlotCopies:
    """Copies in several blocks, for which all memory is allocated before the first one is made.

    A copy that runs out of memory half-way would leave some layers copied and others not. Buffers are shared
    by all blocks of one shape.
    """

    def __init__(self) -> None:
        self.num_slots = 0  # slots that are copied in each block, counted by the owner
        self._by_block: list[list[tuple[SlotCopy, list[Tensor] | None, Tensor]]] = []
        self._buffers: dict[tuple[object, ...], Tensor] = {}
        # With the index on the host, so that its id stays its own.
        self._sent: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def send(self, index: Tensor, device: torch.device) -> Tensor:
        """An index of copies (host) on a device, sent once for all blocks there."""
        key = id(index), device
        if key not in self._sent:
            self._sent[key] = index, index.to(device, non_blocking=True)
        return self._sent[key][1]

    def add(self, copies: Sequence[SlotCopy]) -> None:
        """Add the copies to one block; the source of one may be the target of another."""
        with_buffers = []
        for number, copy in enumerate(copies):
            shape = (len(copy.rows), *copy.target.shape[1:])
            key = (number, shape, copy.source.dtype, copy.source.device)
            if key not in self._buffers:
                self._buffers[key] = copy.source.new_empty(shape)
            index = None
            if copy.slots is not None:
                heads = torch.arange(copy.source.shape[1], device=copy.source.device)[:, None]
                index = [copy.rows[:, None, None], heads, copy.slots]
            with_buffers.append((copy, index, self._buffers[key]))
        self._by_block.append(with_buffers)

    def run(self) -> None:
        """Make the copies, without an allocation."""
        with torch.no_grad():
            for copies in self._by_block:
                for copy, index, buffer in copies:
                    if index is None:
                        torch.index_select(
                            copy.source.narrow(2, 0, buffer.shape[2]), 0, copy.rows, out=buffer
                        )
                    else:
                        torch.ops.aten.index(copy.source, index, out=buffer)
                for copy, _, buffer in copies:
                    copy.target.index_copy_(0, copy.target_rows, buffer)


class PrefixGroups:
    """Groups of rows with a common ancestor; rows of a group hold the same in their shared positions.

    A row that replaces another of its group copies only the positions after the shared prefix, so beam
    search never copies the prompt.
    """

    def __init__(self) -> None:
        self._group_ids: Array = np.zeros(0, dtype=np.int64)  # [R]
        self._shared_lengths: Array = np.zeros(0, dtype=np.int64)  # [R] positions shared within the group
        self._next_id = count(1)

    def extend(self, rows: int) -> None:
        """Append rows, each in a group of its own."""
        ids = np.array([next(self._next_id) for _ in range(rows)], dtype=np.int64)
        self._group_ids = np.concatenate((self._group_ids, ids))
        self._shared_lengths = np.concatenate((self._shared_lengths, np.zeros(rows, dtype=np.int64)))

    def shared_length(self, rows: Array, others: Array) -> Array:
        """The length of the prefix that `rows[i]` shares with `others[i]` [N]; 0 if `rows[i]` is new."""
        exists = rows < len(self._group_ids)
        ids = self._group_ids
        if len(rows) and exists.all() and (ids == ids[0]).all():  # beams of one request
            return np.minimum(self._shared_lengths[rows], self._shared_lengths[others])
        rows = np.where(exists, rows, 0)
        related = exists & (self._group_ids[rows] == self._group_ids[others])
        return np.where(related, np.minimum(self._shared_lengths[rows], self._shared_lengths[others]), 0)

    def commit(self, parents: Array | None, lengths: Array) -> None:
        """New row `i` is old row `parents[i]` (None: `i`) cut to `lengths[i]`."""
        if parents is not None:
            group_ids, shared = self._group_ids[parents], self._shared_lengths[parents]
            self._group_ids = group_ids
            if len(parents) and (group_ids == group_ids[0]).all():  # beams of one request
                is_one = bool((parents == parents[0]).all())
                self._shared_lengths = lengths.copy() if is_one else np.minimum(shared, lengths)
                return
            _, first, group = np.unique(group_ids, return_index=True, return_inverse=True)
            is_split = np.zeros(len(first), dtype=bool)
            is_split[group[parents != parents[first][group]]] = True
            # Where all rows of a group continue one row, they share everything that row had.
            self._shared_lengths = np.where(is_split[group], shared, lengths)
        self._shared_lengths = np.minimum(self._shared_lengths, lengths)

    def select(self, rows: Array, lengths: Array) -> PrefixGroups:
        """The groups of copies of some rows: copies of one row share all of it."""
        other = PrefixGroups()
        other._group_ids, other._shared_lengths = rows + 1, lengths.copy()
        other._next_id = count(int(rows.max(initial=0)) + 2)
        return other

    def join(self, other: PrefixGroups) -> None:
        """Append the rows of another table."""
        old_ids, group = np.unique(other._group_ids, return_inverse=True)
        new_ids = np.array([next(self._next_id) for _ in old_ids], dtype=np.int64)
        self._group_ids = np.concatenate((self._group_ids, new_ids[group] if len(group) else group))
        self._shared_lengths = np.concatenate((self._shared_lengths, other._shared_lengths))


# Tokens are written in strides, for speed: a cache is as large after a stride as after its tokens one by one,
# except for where it last grew. In short runs a stride must not be long enough to count as a prompt.
_NUM_STRIDES: Final = 256
_MAX_STRIDE: Final = 48
_LONG_RUN: Final = 2**16


class Workload(NamedTuple):
    """Prompts that fork after their prefill, and grow to their final length."""

    num_prompts: int
    rows_per_prompt: int
    prompt_length: int  # positions
    final_length: int  # positions of a row at the end
    num_candidates: int = 1  # rows that each row becomes while its next token is chosen
    has_cfg_rows: bool = False  # every row has an unconditional row
    encoder_length: int = 0  # positions of the encoder per prompt

    @property
    def num_prefilled(self) -> int:
        """The number of rows before the fork."""
        return self.num_prompts * (1 + self.has_cfg_rows)

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return self.num_prefilled * self.rows_per_prompt

    @property
    def num_fed(self) -> int:
        """The number of rows of a forward."""
        return self.num_rows * self.num_candidates

    def strides(self) -> Iterator[tuple[int, int]]:
        """The start and stop of each stride in which rows grow after the prompt."""
        growth = self.final_length - self.prompt_length
        stride = max(1, -(-growth // _NUM_STRIDES))
        stride = stride if growth > _LONG_RUN else min(stride, _MAX_STRIDE)
        for start in range(self.prompt_length, self.final_length, stride):
            yield start, min(start + stride, self.final_length)


class HeadSize(NamedTuple):
    """The sizes of the keys and values of one head."""

    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of a key and a value."""
        return (self.key_dim + self.value_dim) * self.dtype.itemsize


KVPair = tuple[Tensor, Tensor]  # keys and values [R, H, S, D]


class Store:
    """The base of the stores of keys and values: what they are unless they say otherwise."""

    max_rewind: int | None = None
    capacity: int | None = None
    exact_reads = True
    grows = True  # whether it takes memory for every position of a row, as the row grows
    is_padded = False  # whether every row takes as much memory as the longest

    def __init__(self) -> None:
        self._lengths = torch.zeros(0, dtype=torch.long)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def lengths(self) -> Tensor:
        """The number of positions of each row [R] (host), dropped ones included."""
        return self._lengths

    def extend(self, rows: int) -> None:
        """Append empty rows."""
        self._lengths = torch.cat((self._lengths, torch.zeros(rows, dtype=torch.long)))

    def commit(self, parents: Tensor | None, lengths: Tensor) -> None:
        """New row `i` is old row `parents[i]` cut to `lengths[i]`."""
        self.prepare_commit(parents, lengths)()

    def prepare_commit(self, parents: Tensor | None, lengths: Tensor) -> Callable[[], None]:
        """A commit for which all memory is allocated; nothing changes until it is called."""
        raise NotImplementedError

    def visible_slots(self, layer: int, span: KVSpan) -> VisibleSlots | None:  # noqa: ARG002 - the interface
        """The slots that `update` will return; None: slot `p` is position `p`."""
        return None

    def count_slots(self, workload: Workload) -> int | None:  # noqa: ARG002 - the interface
        """The slots of the rows of a workload; None: not known without running it."""
        return None

    def head_bytes(self, layer: int, head: HeadSize, workload: Workload) -> tuple[int, int]:
        """The final and peak bytes of one head of a layer; uses up an empty store."""
        store: Any = self
        peak = 0

        def write(start: int, stop: int) -> None:
            nonlocal peak
            part = torch.zeros(len(store), 1, stop - start, 1, dtype=torch.uint8)
            span = KVSpan(None, start, stop - start, stop)
            store.visible_slots(layer, span)
            store.update(layer, part, part, span)
            peak = max(peak, store.nbytes)

        def commit(parents: Tensor | None, length: int) -> None:
            store.commit(parents, torch.full((len(store) if parents is None else len(parents),), length))

        store.extend(workload.num_prefilled)
        write(0, workload.prompt_length)
        prompts = torch.arange(workload.num_prefilled)
        commit(prompts.repeat_interleave(workload.rows_per_prompt), workload.prompt_length)
        for start, stop in workload.strides():
            if workload.num_candidates > 1:
                commit(torch.arange(workload.num_rows).repeat_interleave(workload.num_candidates), start)
            write(start, stop)
            chosen = torch.arange(0, len(store), workload.num_candidates)
            commit(chosen if workload.num_candidates > 1 else None, stop)
        return store.nbytes // 2 * head.nbytes, peak // 2 * head.nbytes


class StoreGroup(Store):
    """Several caches whose rows move together."""

    def __init__(self, members: Sequence[RowCache]) -> None:
        super().__init__()
        self.members = members
        limits = [member.max_rewind for member in members if member.max_rewind is not None]
        self.max_rewind = min(limits, default=None)

    def extend(self, rows: int) -> None:
        """Append empty rows."""
        super().extend(rows)
        for member in self.members:
            member.extend(rows)

    def prepare_commit(self, parents: Tensor | None, lengths: Tensor) -> Callable[[], None]:
        """A commit of all members, prepared by those that can."""
        prepared, others = [], []
        for member in self.members:
            if isinstance(member, Store | TransactionalCache):
                prepared.append(member.prepare_commit(parents, lengths))
            else:
                others.append(member)

        def commit() -> None:
            for member in others:  # first, as only these may fail
                member.commit(parents, lengths)
            for commit_member in prepared:
                commit_member()
            self._lengths = lengths

        return commit


class BlockStore(Store):
    """Blocks [R, H, S, ...] by name and layer, in which each row has its first slots.

    Cutting a row only changes its length: stale slots are masked until they are written again. Moving a row
    copies it, but not the prefix that it shares with the row whose place it takes. Every operation allocates
    before it writes, so that one that runs out of memory changes nothing.
    """

    block_names: ClassVar[Sequence[str]] = ("keys", "values")
    new_row: ClassVar[Mapping[str, int | bool]] = {}  # what else is known of a row, and its first value
    row_growth: ClassVar[float] = 2.0  # the factor by which the rows of a block grow

    def __init__(self, *settings: Any) -> None:
        super().__init__()
        self._settings = settings  # the arguments for an empty store like this one
        self._blocks: dict[str, dict[int, Tensor]] = {name: {} for name in self.block_names}
        self._keys, self._values = self._blocks["keys"], self._blocks["values"]
        self._num_rows = 0
        # [R] each (host)
        self._columns = {name: torch.tensor([value])[:0] for name, value in self.new_row.items()}
        self._prefix_groups = PrefixGroups()
        self._written = WrittenSlots()
        self.copied_slots = 0  # slots copied between rows; part of what bench/beams.py measures

    @property
    def slot_counts(self) -> Tensor:
        """The number of slots of each row [R] (host)."""
        return self._lengths

    @property
    def layers(self) -> Sequence[int]:
        """The layers that were written."""
        return sorted(self._keys)

    @property
    def nbytes(self) -> int:
        """The memory of all blocks in bytes."""
        return sum(block.nbytes for block in self._all_blocks())

    def _all_blocks(self) -> list[Tensor]:
        return [block for blocks in self._blocks.values() for block in blocks.values()]

    def _check_room(self, rows: int, lengths: Tensor) -> None:
        """Raise for more rows, or longer ones, than the store can have."""

    def _restore_slots(self) -> None:
        """Undo what a forward has overwritten for its own time only."""

    # -------------------------------------------------------------------- rows
    def extend(self, rows: int) -> None:
        """Append empty rows."""
        lengths = torch.cat((self._lengths, torch.zeros(rows, dtype=torch.long)))
        self._check_room(len(lengths), lengths)
        columns = {
            name: torch.cat((column, torch.full((rows,), self.new_row[name])))
            for name, column in self._columns.items()
        }
        self._clear_rows(np.arange(self._num_rows, len(lengths)))
        self._prefix_groups.extend(rows)
        self._num_rows, self._lengths, self._columns = len(lengths), lengths, columns

    def _clear_rows(self, rows: Array) -> None:
        """Zero all that earlier rows have left in the place of these rows [N]."""
        self._restore_slots()
        self._written.clear(self._all_blocks(), rows, np.zeros_like(rows))

    def _set_rows(self, parents: Tensor | None, lengths: Tensor) -> None:
        """The rows after a commit, whose slots are in their place."""
        self._prefix_groups.commit(None if parents is None else parents.numpy(), lengths.numpy())
        self._num_rows, self._lengths = len(lengths), lengths

    def _prepare_moves(self, rows: Array, sources: Array, shared: Array, stop: int) -> SlotCopies:
        """Copies of the slots up to `stop` from old rows to rows [N] that share `shared` [N] slots with them.

        All blocks must have the rows.
        """
        copies, related = SlotCopies(), shared > 0
        moves = []
        # At most two copies, each of one slice of slots.
        for group in (slice(None),) if related.all() else (related, ~related):
            start = int(shared[group].min(initial=stop))
            if start < stop:
                moves.append((start, torch.from_numpy(rows[group]), torch.from_numpy(sources[group])))
                copies.num_slots += (stop - start) * len(rows[group])
        for block in self._all_blocks() if moves else ():
            parts = []
            for start, *index in moves:
                slots = block.narrow(2, start, stop - start)
                targets, found = (copies.send(part, block.device) for part in index)
                parts.append(SlotCopy(slots, found, slots, targets))
            copies.add(parts)
        return copies

    def read(self, layer: int, rows: Tensor) -> KVPair:
        """The committed slots of rows [N] (host) in a layer [N, H, S, D]; stale behind a row's end."""
        self._restore_slots()
        stop = largest(self.slot_counts[rows])
        return take_rows(self._keys[layer], rows, stop), take_rows(self._values[layer], rows, stop)

    def select(self, rows: Tensor) -> Self:
        """A copy of the committed content of these rows [N] (host)."""
        self._check_room(len(rows), self._lengths)
        self._restore_slots()
        other = self._make_empty()
        other._num_rows, other._lengths = len(rows), self._lengths[rows]
        other._columns = {name: column[rows] for name, column in self._columns.items()}
        other._prefix_groups = self._prefix_groups.select(rows.numpy(), other._lengths.numpy())
        stop = largest(other.slot_counts)
        other._set_blocks(
            {
                name: {layer: take_rows(block, rows, stop) for layer, block in blocks.items()}
                for name, blocks in self._blocks.items()
            }
        )
        return other

    def join(self, other: Self) -> None:
        """Append the rows of another store."""
        self._restore_slots()
        other._restore_slots()
        first, count, stop = len(self), len(other), largest(other.slot_counts)
        lengths = torch.cat((self._lengths, other._lengths))
        self._check_room(len(lengths), lengths)
        columns = {name: torch.cat((old, other._columns[name])) for name, old in self._columns.items()}
        for layer in other._keys:
            like = tuple(blocks[layer] for blocks in other._blocks.values())
            self._ensure_capacity(layer, like, stop, len(lengths))
        added = np.arange(first, first + count)
        self._clear_rows(added)
        self._written.mark(added, stop)
        for name, blocks in other._blocks.items():
            for layer, source in blocks.items():
                content = source[:count, :, :stop]
                self._blocks[name][layer][first : first + len(content), :, : content.shape[2]] = content
        self._prefix_groups.join(other._prefix_groups)
        self._num_rows, self._lengths, self._columns = len(lengths), lengths, columns

    def to(self, device: torch.device | str) -> None:
        """Move all blocks."""
        self._restore_slots()
        for blocks in self._blocks.values():
            blocks.update({layer: block.to(device) for layer, block in blocks.items()})

    def state(self) -> dict[str, Tensor]:
        """All committed rows: lengths, what else is known of them, and by layer a block of each name."""
        self._restore_slots()
        rows, stop = torch.arange(len(self)), largest(self.slot_counts)
        columns = {"lengths": self._lengths.clone()}
        columns |= {name: column.clone() for name, column in self._columns.items()}
        return columns | {
            f"{name}.{layer}": take_rows(block, rows, stop)
            for name, blocks in self._blocks.items()
            for layer, block in blocks.items()
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load a copy of the result of `state` into an empty store like it."""
        self._check_room(len(state["lengths"]), state["lengths"])
        self.extend(len(state["lengths"]))
        self._lengths = state["lengths"].cpu().long().clone()
        self._columns = {
            name: state[name].cpu().to(column.dtype, copy=True) for name, column in self._columns.items()
        }
        for key, block in state.items():
            name, _, layer = key.partition(".")
            if layer:
                copy = block.clone(memory_format=torch.contiguous_format)
                self._set_blocks({name: {int(layer): copy}})

    def _make_empty(self) -> Self:
        """An empty store with the same settings."""
        return type(self)(*self._settings)

    def _set_blocks(self, blocks: Mapping[str, Mapping[int, Tensor]]) -> None:
        """Take over blocks with the slots of all rows."""
        for name, by_layer in blocks.items():
            self._blocks[name].update(
                {layer: self._prepare_block(block) for layer, block in by_layer.items()}
            )
        self._written.mark(np.arange(len(self)), largest(self.slot_counts))

    def _prepare_block(self, block: Tensor) -> Tensor:
        """A block in the layout and on the device of this store."""
        return block.contiguous()

    # -------------------------------------------------------------------- blocks
    def _ensure_capacity(self, layer: int, like: Sequence[Tensor], slots: int, rows: int) -> KVPair:
        """The layer's keys and values; all its blocks get at least so many rows and slots, or none does."""
        grown = [
            self._grow_block(blocks.get(layer), part, slots, rows)
            for blocks, part in zip(self._blocks.values(), like, strict=True)
        ]
        for blocks, block in zip(self._blocks.values(), grown, strict=True):
            blocks[layer] = block
        return grown[0], grown[1]

    def _ensure_rows(self, rows: int) -> None:
        """Grow the blocks of all layers to at least so many rows."""
        for layer, keys in list(self._keys.items()):
            if min(len(keys), len(self._values[layer])) < rows:
                like = [blocks[layer] for blocks in self._blocks.values()]
                self._ensure_capacity(layer, like, 0, rows)

    def _grow_block(self, block: Tensor | None, like: Tensor, slots: int, rows: int) -> Tensor:
        """A block of at least so many rows and slots, zero where the old one has none."""
        if block is None:
            return like.new_zeros(rows, like.shape[1], self._grown_length(0, slots), *like.shape[3:])
        old_rows, _, old_slots = block.shape[:3]
        if old_rows < rows or old_slots < slots:
            factor = 1 if old_slots < slots or old_rows >= rows else self.row_growth
            rows = max(rows, int(factor * old_rows))
            slots = old_slots if old_slots >= slots else self._grown_length(old_slots, slots)
            grown = block.new_zeros(rows, block.shape[1], slots, *block.shape[3:])
            grown[:old_rows, :, :old_slots] = block
            return grown
        return block

    def _shrink_blocks(self, sizes: Mapping[int, tuple[int, int]]) -> None:
        """Copy layers to blocks of the first rows and slots; where memory lacks the larger ones stay."""
        try:
            for layer, (rows, slots) in sizes.items():
                smaller = [
                    take_rows(blocks[layer], torch.arange(rows), slots) for blocks in self._blocks.values()
                ]
                for blocks, block in zip(self._blocks.values(), smaller, strict=True):
                    blocks[layer] = block
        except (RuntimeError, MemoryError):
            return

    def _grown_length(self, old: int, slots: int) -> int:
        """The new size of a block of `old` slots, 0 for a new one, that must have at least `slots`."""
        raise NotImplementedError


def take_rows(block: Tensor, rows: Tensor, stop: int) -> Tensor:
    """A copy of the first slots of rows [N] (host) of a block, zero where it has not grown to them."""
    present = (rows < len(block)).nonzero().squeeze(1)
    found = block[rows[present].to(block.device), :, :stop]
    if len(found) == len(rows) and found.shape[2] == stop:
        return found
    taken = block.new_zeros(len(rows), block.shape[1], stop, *block.shape[3:])
    taken[present.to(block.device), :, : found.shape[2]] = found
    return taken


def write_slots(blocks: Sequence[Tensor], contents: Sequence[Tensor], rows: Tensor, slots: Tensor) -> None:
    """Write [N, H, T, D] to slots [N, T] of rows [N] of blocks."""
    for block, new in zip(blocks, contents, strict=True):
        block[rows[:, None], :, slots] = new.transpose(1, 2)


def largest(counts: Tensor) -> int:
    """The largest of some counts; 0: there are none."""
    return int(counts.max()) if len(counts) else 0

"""The quantized cache: immutable quantized chunks that forks share, and a full-precision residual."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import prod
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import Array, KVSpan
from descant.errors import ConfigError, InputError
from descant.kv_cache.stores.block_store import HeadSize, Store, Workload, largest
from descant.kv_cache.stores.dense import DenseStore
from descant.kv_cache.stores.quantizers import GroupCodec, QuantizedTensor, Quantizer


@dataclass(frozen=True, eq=False)
class QuantizedChunk:
    """Consecutive positions of a row in every layer, quantized; immutable, so rows can share it."""

    length: int
    layers: Mapping[int, tuple[QuantizedTensor, QuantizedTensor]]  # keys and values

    @property
    def nbytes(self) -> int:
        """The memory in bytes."""
        return sum(tensor.nbytes for pair in self.layers.values() for tensor in pair)

    def to(self, device: torch.device | str) -> QuantizedChunk:
        """A copy on a device."""
        pairs = self.layers.items()
        return QuantizedChunk(
            self.length, {layer: (keys.to(device), values.to(device)) for layer, (keys, values) in pairs}
        )


class ChunkRef(NamedTuple):
    """A chunk in a row, and how many of its positions the row uses."""

    chunk: QuantizedChunk
    used_length: int


class ChunkCopy(NamedTuple):
    """A slice of the decoded positions, copied to a slice of positions of some rows."""

    rows: slice
    target: slice
    source: slice


@dataclass(frozen=True, eq=False)
class ChunkReadPlan:
    """The decoding of the chunks of rows: each distinct chunk once."""

    base_lengths: Sequence[int]  # the number of positions in chunks, by row
    chunks: Sequence[QuantizedChunk]  # the chunks to decode, in order
    copies: Sequence[ChunkCopy] | None  # copies to rows; None: the decoded chunks are the rows in order

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[ChunkRef]]) -> Self:
        """The plan for rows of chunks."""
        return cls([sum(ref.used_length for ref in refs) for refs in rows], *_plan_copies(rows))

    @property
    def is_uniform(self) -> bool:
        """Whether all rows have the same number of positions."""
        return min(self.base_lengths) == max(self.base_lengths)

    @property
    def total_length(self) -> int:
        """The number of decoded positions."""
        return sum(chunk.length for chunk in self.chunks)


def truncate_chunks(refs: Sequence[ChunkRef], length: int) -> tuple[ChunkRef, ...]:
    """The chunks of a row cut to `length` positions."""
    truncated = []
    for chunk, used in refs:
        if length > 0:
            truncated.append(ChunkRef(chunk, min(used, length)))
        length -= used
    return tuple(truncated)


def _plan_copies(rows: Sequence[Sequence[ChunkRef]]) -> tuple[list[QuantizedChunk], list[ChunkCopy] | None]:
    """The distinct chunks of rows in decoding order, and the copies from decoded positions to rows."""
    offsets: dict[QuantizedChunk, int] = {}  # chunk -> its first decoded position
    total = 0
    runs: list[tuple[int, int, int, int]] = []  # row, source, target, length
    for row, refs in enumerate(rows):
        target, has_run = 0, False
        for chunk, used in refs:
            if chunk not in offsets:
                offsets[chunk] = total
                total += chunk.length
            source = offsets[chunk]
            if has_run and runs[-1][1] + runs[-1][3] == source:
                runs[-1] = (*runs[-1][:3], runs[-1][3] + used)
            else:
                runs.append((row, source, target, used))
            target, has_run = target + used, True
    size = total // max(len(rows), 1)
    if total == size * len(rows) and runs == [(row, row * size, 0, size) for row in range(len(rows))]:
        return list(offsets), None
    rows_by_run: dict[tuple[int, int, int], list[int]] = {}
    for row, source, target, length in runs:
        rows_by_run.setdefault((source, target, length), []).append(row)
    copies = [
        ChunkCopy(row_slice, slice(target, target + length), slice(source, source + length))
        for (source, target, length), run_rows in rows_by_run.items()
        for row_slice in _contiguous_slices(run_rows)
    ]
    return list(offsets), copies


def _contiguous_slices(numbers: Sequence[int]) -> Iterator[slice]:
    """Ascending numbers as slices of consecutive numbers."""
    begin = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
            yield slice(numbers[begin], numbers[end - 1] + 1)
            begin = end


class ScratchBuffer:
    """Host memory that is reused once the last tensor on it is gone.

    Large tensors come on fresh pages, and faulting pages in costs more than filling them. On other devices
    torch's own allocator reuses memory.
    """

    def __init__(self) -> None:
        self._free: list[Array] = []
        self._in_use: dict[int, tuple[weakref.ref[Array], Array]] = {}
        self._next_id = count()

    @property
    def nbytes(self) -> int:
        """The bytes in use and free."""
        in_use = sum(array.nbytes for _, array in self._in_use.values())
        return in_use + sum(array.nbytes for array in self._free)

    def empty(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """An uninitialised tensor of that shape, with the dtype and device of `like`."""
        size = prod(shape) * like.element_size()
        if like.device.type != "cpu" or not size:
            return like.new_empty(shape)
        array = next((free for free in self._free if free.nbytes >= size), None)
        if array is None:
            self._free.clear()  # all too small from now on
            array = np.empty(size, dtype=np.uint8)
        else:
            self._free = [free for free in self._free if free is not array]
        view, number = array[:size], next(self._next_id)
        # The tensor's storage owns the view, so the view dies with the last tensor on it.
        self._in_use[number] = weakref.ref(view, lambda _: self._release(number)), array
        return torch.from_numpy(view).view(like.dtype).view(*shape)

    def clear(self) -> None:
        """Drop all memory; what is in use is freed with its tensors."""
        self._free, self._in_use = [], {}

    def _release(self, number: int) -> None:
        if number in self._in_use:
            self._free.append(self._in_use.pop(number)[1])


# How many unused slots the residual may have before it is copied to fit.
_RESIDUAL_SLACK = 128
_KV_NAMES, _PACKED_FIELDS = ("keys", "values"), ("codes", "scale", "offset")
RowKV = dict[int, tuple[Tensor, Tensor]]  # by layer a row's keys and values [H, S, D]


class ResidualStore(DenseStore):
    """The positions of rows after their chunks, in full precision."""

    @property
    def num_slots(self) -> int:
        """The number of slots of the widest layer."""
        return max((block.shape[2] for block in self._keys.values()), default=0)

    def read_row(self, row: int) -> RowKV:
        """By layer the slots of a row, stale ones included; without layers that have no block for it yet."""
        return {
            layer: (keys[row], self._values[layer][row])
            for layer, keys in self._keys.items()
            if row < len(keys)
        }

    def reserve(self, content: RowKV, rows: int) -> None:
        """Grow all blocks for so many rows of such content."""
        for layer, (keys, values) in content.items():
            self._ensure_capacity(layer, (keys[None], values[None]), keys.shape[1], rows)

    def write_row(self, row: int, content: RowKV) -> None:
        """Write the first slots of a row, for which there is capacity."""
        for layer, pair in content.items():
            self._written.mark(np.array([row]), pair[0].shape[1])
            for blocks, new in zip((self._keys, self._values), pair, strict=True):
                blocks[layer][row, :, : new.shape[1]] = new


class QuantizedStore(Store):
    """Rows of quantized chunks and a full-precision residual (KIVI, Liu et al. 2024, arXiv 2402.02750).

    A prompt becomes a chunk at its commit; so does the residual when it reaches `residual_length`. Forks
    share chunks. A chunk is never copied or quantized again, and is decoded only for the attention of one
    layer. Cutting into a chunk changes only how much of it a row uses. No quantization group spans two rows.
    """

    exact_reads = False  # reads differ from what was written

    def __init__(self, quantizer: Quantizer, residual_length: int = 128) -> None:
        if residual_length < 0:
            raise ConfigError("residual_length", "must be >= 0", residual_length)
        super().__init__()
        self.quantizer, self.residual_length = quantizer, residual_length
        self._codecs: tuple[GroupCodec, GroupCodec] = (quantizer.key_codec, quantizer.value_codec)
        self._chunk_refs: list[tuple[ChunkRef, ...]] = []
        self._residual = ResidualStore(residual_length)
        self._layer_templates: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # by layer [H, 0, D], for shape and dtype
        # Uncommitted prompts by layer, which bypass the residual, and the rows they restart.
        self._pending_prompts: dict[int, list[tuple[KVSpan, Tensor, Tensor]]] = {}
        self._restarted_rows: set[int] = set()
        self._scratch = ScratchBuffer()  # for decoded chunks
        self._plan: tuple[KVSpan, ChunkReadPlan, KVSpan] | None = None  # span, its plan, span in the residual

    @property
    def nbytes(self) -> int:
        """The memory of chunks, residual, uncommitted prompts and decoded chunks in bytes."""
        prompts = [prompt for layer in self._pending_prompts.values() for prompt in layer]
        pending = sum(key.nbytes + value.nbytes for _, key, value in prompts)
        chunks = sum(chunk.nbytes for chunk in self._distinct_chunks())
        return chunks + self._residual.nbytes + pending + self._scratch.nbytes

    def head_bytes(self, layer: int, head: HeadSize, workload: Workload) -> tuple[int, int]:  # noqa: ARG002
        """The final and peak bytes of one head: chunks, shared for prompts, and the residual of every row."""
        every = max(self.residual_length, 1)
        full, rest = divmod(workload.final_length - workload.prompt_length, every)
        chunks = workload.num_prefilled * self._chunk_bytes(head, workload.prompt_length)
        if full:
            chunks += workload.num_rows * full * self._chunk_bytes(head, every)
        self._residual.extend(workload.num_fed)
        for stop in range(1, (every if full else rest) + 1):
            part = torch.zeros(workload.num_fed, 1, 1, 1, dtype=torch.uint8)
            self._residual.update(0, part, part, KVSpan(None, stop - 1, 1, stop))
        end = chunks + self._residual.nbytes // 2 * head.nbytes
        return end, max(end, workload.num_prefilled * workload.prompt_length * head.nbytes)

    def _chunk_bytes(self, head: HeadSize, length: int) -> int:
        """The bytes of `length` quantized positions."""
        contents = [torch.empty(1, length, size, dtype=head.dtype, device="meta") for size in head[:2]]
        return sum(codec.encode(part).nbytes for codec, part in zip(self._codecs, contents, strict=True))

    def max_drafts(self, rows: Tensor, pending: Tensor) -> Tensor:
        """The most drafts of these rows [N] (host) behind `pending` [N] positions that read as one by one.

        One by one, a draft would read the prompt or a full residual quantized.
        """
        chunked = [sum(ref.used_length for ref in self._chunk_refs[row]) for row in rows.tolist()]
        lengths = self._lengths[rows]
        room = max(self.residual_length, 1) - (lengths - torch.tensor(chunked, dtype=torch.long)) - pending
        return torch.where(lengths == 0, 0, room.clamp(min=0))

    def extend(self, rows: int) -> None:
        """Append empty rows."""
        super().extend(rows)
        self._chunk_refs += [()] * rows
        self._residual.extend(rows)

    # -------------------------------------------------------------------- a forward
    def update(self, layer: int, key: Tensor, value: Tensor, span: KVSpan) -> tuple[Tensor, Tensor]:
        """Write [N, H, T, D] at the span; returns the slots of its rows [N, H, S, D], stale ones included."""
        self._layer_templates.setdefault(
            layer, (key[:1, :, :0].flatten(0, 1), value[:1, :, :0].flatten(0, 1))
        )
        if span.is_first_write:
            if span.width:
                self._pending_prompts.setdefault(layer, []).append((span, key, value))
                self._restarted_rows.update(_span_rows(span, len(key)))
            return key, value
        plan, residual_span = self._plan_forward(span, len(key))
        if self._pending_prompts.get(layer):
            self._flush_prompts(layer, set(_span_rows(span, len(key))))
        keys, values = self._residual.update(layer, key, value, residual_span)
        if not plan.chunks:
            return keys[:, :, : span.read_length], values[:, :, : span.read_length]
        keys = self._assemble(layer, 0, keys, plan, span.read_length)
        return keys, self._assemble(layer, 1, values, plan, span.read_length)

    def _plan_forward(self, span: KVSpan, num_rows: int) -> tuple[ChunkReadPlan, KVSpan]:
        """The chunks that a forward reads, and its span in the residual; computed once for all layers."""
        if self._plan is None or self._plan[0] is not span:
            rows, starts = span.on_host(num_rows)
            plan = ChunkReadPlan.from_rows([self._row_chunks(row) for row in rows.tolist()])
            begins = torch.from_numpy(starts) - torch.tensor(plan.base_lengths)
            first, last = int(begins.min()), int(begins.max())
            device = span.start.device if isinstance(span.start, Tensor) else None
            begin = first if first == last else begins.to(device, non_blocking=True)
            residual = KVSpan(span.rows, begin, span.width, last + span.width, span.host_rows, begins)
            self._plan = span, plan, residual
        return self._plan[1:]

    def _row_chunks(self, row: int) -> tuple[ChunkRef, ...]:
        """The chunks of a row; none if it was restarted since the last commit."""
        return () if row in self._restarted_rows else self._chunk_refs[row]

    def _flush_prompts(self, layer: int, rows: set[int]) -> None:
        """Write uncommitted prompts to the residual if one of their rows is written before the commit."""
        if any(
            not rows.isdisjoint(_span_rows(span, len(key))) for span, key, _ in self._pending_prompts[layer]
        ):
            for span, key, value in self._pending_prompts[layer]:
                # Rows may have been added since the span was made.
                fed = torch.arange(len(key)) if span.rows is None else span.rows
                self._residual.update(layer, key, value, span._replace(rows=fed))
            self._pending_prompts[layer] = []

    def _assemble(self, layer: int, part: int, residual: Tensor, plan: ChunkReadPlan, stop: int) -> Tensor:
        """Decoded chunks followed by the residual [N, H, S, D]; `part` is 0 for keys, 1 for values."""
        rows, heads, slots, size = residual.shape
        base = max(plan.base_lengths)
        num_slots = stop if plan.is_uniform else base + slots
        out = self._scratch.empty((rows, heads, num_slots, size), residual)
        if not plan.is_uniform:
            out.zero_()  # slots without content are masked, but must be finite
        encoded = [chunk.layers[layer][part] for chunk in plan.chunks]
        if plan.copies is None:
            self._codecs[part].decode(encoded, out[:, :, :base].transpose(0, 1))
        else:
            decoded = self._scratch.empty((heads, 1, plan.total_length, size), residual)
            self._codecs[part].decode(encoded, decoded)
            for copy in plan.copies:
                out[copy.rows, :, copy.target] = decoded[:, 0, copy.source]
        if plan.is_uniform:
            out[:, :, base:] = residual[:, :, : stop - base]
            return out
        begins = torch.tensor(plan.base_lengths).to(residual.device, non_blocking=True)
        targets = begins[:, None] + torch.arange(slots, device=residual.device)
        out[torch.arange(rows, device=residual.device)[:, None], :, targets] = residual.transpose(1, 2)
        return out[:, :, :stop]

    # -------------------------------------------------------------------- between forwards
    def prepare_commit(self, parents: Tensor | None, lengths: Tensor) -> Callable[[], None]:
        """A commit that quantizes prompts and full residuals; nothing changes until it is called."""
        prompts = self._prompts_by_row()
        new_chunks: dict[tuple[int, int], QuantizedChunk] = {}
        chunk_refs, residual_lengths = [], []
        rests: dict[int, RowKV] = {}  # by new row what remains of its residual after a new chunk
        old_lengths = self._lengths.tolist()
        source_rows = range(len(self)) if parents is None else parents.tolist()
        for child, (row, length) in enumerate(zip(source_rows, lengths.tolist(), strict=True)):
            refs = self._row_chunks(row)
            after = max(length - sum(ref.used_length for ref in refs), 0)  # positions after the chunks
            # All of a prompt becomes a chunk, else a multiple of the residual.
            is_prompt = row in self._restarted_rows or old_lengths[row] == 0
            count = after if is_prompt else after - after % max(self.residual_length, 1)
            if count:
                source = self._residual.read_row(row) | prompts.get(row, {})
                if (row, count) not in new_chunks:
                    new_chunks[row, count] = self._quantize(source, count)
                refs = (*refs, ChunkRef(new_chunks[row, count], count))
                rests[child] = {
                    layer: (keys[:, count:after].clone(), values[:, count:after].clone())
                    for layer, (keys, values) in source.items()
                }
            chunk_refs.append(truncate_chunks(refs, length))
            residual_lengths.append(after - count)
        commit_residual = self._prepare_residual(parents, residual_lengths, rests)

        def commit() -> None:
            commit_residual()
            self._chunk_refs, self._lengths = chunk_refs, lengths
            self._pending_prompts, self._restarted_rows, self._plan = {}, set(), None
            self._scratch.clear()
            if rests:
                self._shrink_residual()

        return commit

    def _prompts_by_row(self) -> dict[int, RowKV]:
        """The uncommitted prompts by row."""
        by_row: dict[int, RowKV] = {}
        for layer, prompts in self._pending_prompts.items():
            for span, key, value in prompts:
                for index, row in enumerate(_span_rows(span, len(key))):
                    by_row.setdefault(row, {})[layer] = (key[index], value[index])
        return by_row

    def _quantize(self, source: RowKV, length: int) -> QuantizedChunk:
        key_codec, value_codec = self._codecs
        layers = {
            layer: (key_codec.encode(keys[:, :length]), value_codec.encode(values[:, :length]))
            for layer, (keys, values) in source.items()
        }
        return QuantizedChunk(length, layers)

    def _prepare_residual(
        self, parents: Tensor | None, lengths: Sequence[int], rests: Mapping[int, RowKV]
    ) -> Callable[[], None]:
        """The commit of the residual; rows with a new chunk are rewritten with what remains after it."""
        residual, final = self._residual, torch.tensor(lengths, dtype=torch.long)
        moved = [0 if child in rests else length for child, length in enumerate(lengths)]
        written = {child: rest for child, rest in rests.items() if lengths[child]}
        for rest in written.values():  # first, as a block that grows is replaced
            residual.reserve(rest, len(lengths))
        commit = residual.prepare_commit(parents, torch.tensor(moved, dtype=torch.long))

        def commit_all() -> None:
            commit()
            for child, rest in written.items():
                residual.write_row(child, rest)
            if rests:
                residual.commit(None, final)

        return commit_all

    def _shrink_residual(self) -> None:
        """Copy the residual where most of its slots are unused, if there is memory for it."""
        longest = largest(self._residual.lengths)
        if self._residual.num_slots > longest + self.residual_length + _RESIDUAL_SLACK:
            try:
                self._residual = self._residual.select(torch.arange(len(self)))
            except (RuntimeError, MemoryError):
                return

    # -------------------------------------------------------------------- whole rows
    @property
    def layers(self) -> Sequence[int]:
        """The layers that were written."""
        return list(self._layer_templates)

    def read(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The committed keys and values [N, H, S, D] of rows [N] (host), stale slots included."""
        plan = ChunkReadPlan.from_rows([self._chunk_refs[row] for row in rows.tolist()])
        stop = largest(self._lengths[rows])
        lengths = (self._lengths[rows] - torch.tensor(plan.base_lengths, dtype=torch.long)).tolist()
        pair = []
        for part, like in enumerate(self._layer_templates[layer]):
            residual = like.new_zeros(len(rows), len(like), max(lengths, default=0), like.shape[-1])
            for index, (row, length) in enumerate(zip(rows.tolist(), lengths, strict=True)):
                if length:
                    residual[index, :, :length] = self._residual.read_row(row)[layer][part][:, :length]
            pair.append(self._assemble(layer, part, residual, plan, stop) if plan.chunks else residual)
        return pair[0], pair[1]

    def select(self, rows: Tensor) -> Self:
        """A copy of the committed content of these rows [N] (host); chunks are shared."""
        other = type(self)(self.quantizer, self.residual_length)
        other._chunk_refs = [self._chunk_refs[row] for row in rows.tolist()]
        other._lengths = self._lengths[rows].clone()
        other._residual, other._layer_templates = self._residual.select(rows), dict(self._layer_templates)
        return other

    def join(self, other: Self) -> None:
        """Append the rows of another store."""
        self._chunk_refs += other._chunk_refs
        self._lengths = torch.cat((self._lengths, other._lengths))
        self._residual.join(other._residual)
        self._layer_templates = other._layer_templates | self._layer_templates
        self._plan = None

    def to(self, device: torch.device | str) -> None:
        """Move everything; stores that share chunks keep them on the old device."""
        moved = {chunk: chunk.to(device) for chunk in self._distinct_chunks()}
        self._chunk_refs = [
            tuple(ChunkRef(moved[chunk], used) for chunk, used in row) for row in self._chunk_refs
        ]
        self._pending_prompts = {
            layer: [(span, key.to(device), value.to(device)) for span, key, value in prompts]
            for layer, prompts in self._pending_prompts.items()
        }
        self._layer_templates = {
            layer: (key.to(device), value.to(device)) for layer, (key, value) in self._layer_templates.items()
        }
        self._residual.to(device)
        self._plan = None

    def state(self) -> dict[str, Tensor]:
        """All committed rows: their chunk references, by layer every chunk once, and the residual."""
        index = {chunk: number for number, chunk in enumerate(self._distinct_chunks())}
        refs = [
            [row, index[chunk], used] for row, refs in enumerate(self._chunk_refs) for chunk, used in refs
        ]
        state = {
            "lengths": self._lengths.clone(),
            "pieces": torch.tensor(refs, dtype=torch.long).view(-1, 3),
            "chunks": torch.tensor([chunk.length for chunk in index], dtype=torch.long),
        }
        for chunk, number in index.items():
            for layer, quantized in chunk.layers.items():
                for kind, packed in zip(_KV_NAMES, quantized, strict=True):
                    for name, tensor in zip(_PACKED_FIELDS, packed, strict=True):
                        state[f"chunk.{number}.{layer}.{kind}.{name}"] = tensor.clone(
                            memory_format=torch.contiguous_format
                        )
        for layer, pair in self._layer_templates.items():
            state |= {
                f"like.{kind}.{layer}": like.clone() for kind, like in zip(_KV_NAMES, pair, strict=True)
            }
        return state | {f"tail.{name}": tensor for name, tensor in self._residual.state().items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `state` into an empty store with the same settings."""
        chunks = []
        prefix = "like.keys."
        layer_numbers = [int(name.removeprefix(prefix)) for name in state if name.startswith(prefix)]
        for number, length in enumerate(state["chunks"].tolist()):
            prefix = f"chunk.{number}."
            layers: dict[int, Any] = {}
            for layer in layer_numbers:
                names = [f"{prefix}{layer}.{kind}.{name}" for kind in _KV_NAMES for name in _PACKED_FIELDS]
                missing = [name for name in names if name not in state]
                if missing:
                    raise InputError("state", f"must have the tensor `{missing[0]}`", None, "save it again")
                packed = [state[name] for name in names]
                layers[layer] = QuantizedTensor(*packed[:3]), QuantizedTensor(*packed[3:])
            chunks.append(QuantizedChunk(length, layers))
        self._lengths = state["lengths"].long().cpu()
        refs_by_row: list[list[ChunkRef]] = [[] for _ in self._lengths]
        for row, number, used in state["pieces"].tolist():
            refs_by_row[row].append(ChunkRef(chunks[number], used))
        self._chunk_refs = [tuple(refs) for refs in refs_by_row]
        for layer in layer_numbers:
            self._layer_templates[layer] = state[f"like.keys.{layer}"], state[f"like.values.{layer}"]
        prefix = "tail."
        residual = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        self._residual.load(residual)

    def _distinct_chunks(self) -> list[QuantizedChunk]:
        """All chunks of all rows, each once."""
        return list(dict.fromkeys(chunk for row in self._chunk_refs for chunk, _ in row))


def _span_rows(span: KVSpan, count: int) -> list[int]:
    """The rows of a span with `count` rows."""
    rows: list[int] = span.on_host(count)[0].tolist()
    return rows

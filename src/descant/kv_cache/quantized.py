"""The quantized cache: chunks of few bits that forks share, and the latest positions as they came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from descant.core.interfaces import KVSpan
from descant.errors import ConfigError
from descant.kv_cache.dense import DenseStore
from descant.kv_cache.quantized_chunks import ChunkReadPlan, ChunkRef, QuantizedChunk, truncate_chunks
from descant.kv_cache.quantizers import GroupCodec, QuantizedTensor, Quantizer
from descant.kv_cache.scratch_buffer import ScratchBuffer

__all__ = ["QuantizedStore"]

# How much wider than its use what is kept as it came may grow before it is copied to fit.
_RESIDUAL_SLACK = 128
_KV_NAMES, _PACKED_FIELDS = ("keys", "values"), ("codes", "scale", "offset")
RowKV = dict[int, tuple[Tensor, Tensor]]  # a row's keys and values [H, S, D], layer by layer


class ResidualStore(DenseStore):
    """What rows hold as it came: the positions after their chunks."""

    @property
    def num_slots(self) -> int:
        """How wide it has grown."""
        return max((block.shape[2] for block in self._keys.values()), default=0)

    def read_row(self, row: int) -> RowKV:
        """What a row holds, what is stale included; nothing of layers in which it was never written."""
        return {
            layer: (keys[row], self._values[layer][row])
            for layer, keys in self._keys.items()
            if row < len(keys)
        }


class QuantizedStore:
    """Rows of immutable quantised chunks and a tail of full precision, shorter than `residual`.

    A prompt becomes a chunk when it is committed, and so does the tail whenever it has reached `residual`.
    Forks share chunks; none is ever copied, quantised again or decoded for longer than a layer's attention.
    Cutting into a chunk keeps it and notes how much of it counts. No group of numbers that share a scale
    spans two rows. After KIVI: Liu et al. 2024, arXiv 2402.02750.
    """

    max_rewind: int | None = None
    lossless = False  # what it is read as is not what was written

    def __init__(self, quantizer: Quantizer, residual_length: int = 128) -> None:
        if residual_length < 0:
            raise ConfigError("residual_length", "must be >= 0", residual_length)
        self.quantizer, self.residual_length = quantizer, residual_length
        self._codecs: tuple[GroupCodec, GroupCodec] = (quantizer.key_codec, quantizer.value_codec)
        self._lengths = torch.zeros(0, dtype=torch.long)
        self._chunk_refs: list[tuple[ChunkRef, ...]] = []
        self._residual = ResidualStore()
        self._layer_templates: dict[int, tuple[Tensor, Tensor]] = {}  # [H, 0, D] of every layer
        # Whole texts written since the last commit, which need no place in the tail, and whose they are.
        self._pending_prompts: dict[int, list[tuple[KVSpan, Tensor, Tensor]]] = {}
        self._restarted_rows: set[int] = set()
        self._scratch = ScratchBuffer()  # within a forward
        self._plan: tuple[KVSpan, ChunkReadPlan, KVSpan] | None = (
            None  # for a span, and where it writes in the tail
        )

    def __len__(self) -> int:
        return len(self._chunk_refs)

    @property
    def lengths(self) -> Tensor:
        """How many positions each row holds [R] (host)."""
        return self._lengths

    @property
    def nbytes(self) -> int:
        """What chunks and tails take in memory, and what is not yet committed or decoded to be read."""
        fresh = sum(
            key.nbytes + value.nbytes for some in self._pending_prompts.values() for _, key, value in some
        )
        return (
            sum(chunk.nbytes for chunk in self._distinct_chunks())
            + self._residual.nbytes
            + fresh
            + self._scratch.nbytes
        )

    def visible_slots(self, layer: int, span: KVSpan) -> None:
        """Slot `p` is position `p`."""

    def extend(self, rows: int) -> None:
        """Append empty rows."""
        self._lengths = torch.cat((self._lengths, torch.zeros(rows, dtype=torch.long)))
        self._chunk_refs += [()] * rows
        self._residual.extend(rows)

    # -------------------------------------------------------------------- a forward
    def update(self, layer: int, key: Tensor, value: Tensor, span: KVSpan) -> tuple[Tensor, Tensor]:
        """Write [N, H, T, D] at the span; what its rows hold then [N, H, S, D], stale slots included."""
        self._layer_templates.setdefault(
            layer, (key[:1, :, :0].flatten(0, 1), value[:1, :, :0].flatten(0, 1))
        )
        if span.is_first_write:
            if span.width:
                self._pending_prompts.setdefault(layer, []).append((span, key, value))
                self._restarted_rows.update(_span_rows(span, len(key)))
            return key, value
        plan, inner = self._plan_forward(span, len(key))
        if self._pending_prompts.get(layer):
            self._flush_prompts(layer, set(_span_rows(span, len(key))))
        keys, values = self._residual.update(layer, key, value, inner)
        if not plan.chunks:
            return keys[:, :, : span.read_length], values[:, :, : span.read_length]
        return self._assemble(layer, 0, keys, plan, span.read_length), self._assemble(
            layer, 1, values, plan, span.read_length
        )

    def _plan_forward(self, span: KVSpan, lines: int) -> tuple[ChunkReadPlan, KVSpan]:
        """How a forward reads chunks and where it writes after them, found once for all its layers."""
        if self._plan is None or self._plan[0] is not span:
            rows, starts = span.on_host(lines)
            plan = ChunkReadPlan.from_rows([self._row_chunks(row) for row in rows.tolist()])
            begins = torch.from_numpy(starts) - torch.tensor(plan.base_lengths)
            first, last = int(begins.min()), int(begins.max())
            device = span.start.device if isinstance(span.start, Tensor) else None
            begin = first if first == last else begins.to(device, non_blocking=True)
            self._plan = span, plan, KVSpan(span.rows, begin, span.width, last + span.width)
        return self._plan[1:]

    def _row_chunks(self, row: int) -> tuple[ChunkRef, ...]:
        """A row's pieces, none where it was written anew."""
        return () if row in self._restarted_rows else self._chunk_refs[row]

    def _flush_prompts(self, layer: int, rows: set[int]) -> None:
        """Write whole texts to the tail after all, where one of their rows goes on before a commit."""
        if any(
            not rows.isdisjoint(_span_rows(span, len(key))) for span, key, _ in self._pending_prompts[layer]
        ):
            for span, key, value in self._pending_prompts[layer]:
                self._residual.update(layer, key, value, span._replace(rows=_span_row_index(span, len(key))))
            self._pending_prompts[layer] = []

    def _assemble(self, layer: int, part: int, tail: Tensor, plan: ChunkReadPlan, stop: int) -> Tensor:
        """Chunks and tail [N, H, S, D] together."""
        lines, heads, slots, size = tail.shape
        base = max(plan.base_lengths)
        room = self._scratch.empty((lines, heads, stop if plan.is_uniform else base + slots, size), tail)
        if not plan.is_uniform:
            room.zero_()  # what no row has is read by none, but it must be numbers
        parts = [chunk.layers[layer][part] for chunk in plan.chunks]
        if plan.copies is None:
            self._codecs[part].decode(parts, room[:, :, :base].transpose(0, 1))
        else:
            plain = self._scratch.empty((heads, 1, plan.total_length, size), tail)
            self._codecs[part].decode(parts, plain)
            for move in plan.copies:
                room[move.rows, :, move.target] = plain[:, 0, move.source]
        if plan.is_uniform:
            room[:, :, base:] = tail[:, :, : stop - base]
            return room
        begins = torch.tensor(plan.base_lengths).to(tail.device, non_blocking=True)
        places = begins[:, None] + torch.arange(slots, device=tail.device)
        room[torch.arange(lines, device=tail.device)[:, None], :, places] = tail.transpose(1, 2)
        return room[:, :, :stop]

    # -------------------------------------------------------------------- between forwards
    def commit(self, parents: Tensor | None, lengths: Tensor) -> None:
        """New row `i` is old row `parents[i]` cut to `lengths[i]`; what is ripe becomes a chunk."""
        texts = self._prompts_by_row()
        chunks: dict[tuple[int, int], QuantizedChunk] = {}
        pieces, tails, rests = [], [], {}
        before = self._lengths.tolist()
        whence = range(len(self)) if parents is None else parents.tolist()
        for child, (row, length) in enumerate(zip(whence, lengths.tolist(), strict=True)):
            held = self._row_chunks(row)
            more = max(length - sum(piece.used_length for piece in held), 0)
            ripe = self._num_to_quantize(more, row in self._restarted_rows or before[row] == 0)
            if ripe:
                source = self._residual.read_row(row) | texts.get(row, {})
                if (row, ripe) not in chunks:
                    chunks[row, ripe] = self._quantize(source, ripe)
                held = (*held, ChunkRef(chunks[row, ripe], ripe))
                rests[child] = {
                    layer: (keys[:, ripe:more].clone(), values[:, ripe:more].clone())
                    for layer, (keys, values) in source.items()
                }
            pieces.append(truncate_chunks(held, length))
            tails.append(more - ripe)
        self._commit_residual(parents, tails, rests)
        self._chunk_refs, self._lengths = pieces, lengths
        self._pending_prompts, self._restarted_rows, self._plan = {}, set(), None
        self._scratch.clear()

    def _prompts_by_row(self) -> dict[int, RowKV]:
        """What whole texts say of rows."""
        texts: dict[int, RowKV] = {}
        for layer, some in self._pending_prompts.items():
            for span, key, value in some:
                for line, row in enumerate(_span_rows(span, len(key))):
                    texts.setdefault(row, {})[layer] = (key[line], value[line])
        return texts

    def _num_to_quantize(self, more: int, first: bool) -> int:
        """How many of the positions after its chunks become another one: all of a prompt, or a multiple."""
        every = max(self.residual_length, 1)
        return more if first else more // every * every

    def _quantize(self, source: RowKV, length: int) -> QuantizedChunk:
        first, second = self._codecs
        layers = {
            layer: (first.encode(keys[:, :length]), second.encode(values[:, :length]))
            for layer, (keys, values) in source.items()
        }
        return QuantizedChunk(length, layers)

    def _commit_residual(
        self, parents: Tensor | None, tails: Sequence[int], rests: Mapping[int, RowKV]
    ) -> None:
        """Move the tails; those of which the beginning became a chunk hold the rest."""
        kept = [0 if child in rests else length for child, length in enumerate(tails)]
        self._residual.commit(parents, torch.tensor(kept, dtype=torch.long))
        for child, rest in rests.items():
            if tails[child]:
                span = KVSpan(torch.tensor([child]), 0, tails[child], tails[child])
                for layer, (keys, values) in rest.items():
                    self._residual.update(layer, keys[None], values[None], span)
        if rests:
            self._residual.commit(None, torch.tensor(tails, dtype=torch.long))
            if self._residual.num_slots > max(tails) + self.residual_length + _RESIDUAL_SLACK:
                self._residual = self._residual.select(torch.arange(len(tails)))

    # -------------------------------------------------------------------- whole rows
    @property
    def layers(self) -> Sequence[int]:
        """Those that were ever written."""
        return list(self._layer_templates)

    def read(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [N, H, S, D] of rows [N] (host) as last committed, stale slots included."""
        plan = ChunkReadPlan.from_rows([self._chunk_refs[row] for row in rows.tolist()])
        stop = int(self._lengths[rows].max()) if len(rows) else 0
        tails = (self._lengths[rows] - torch.tensor(plan.base_lengths, dtype=torch.long)).tolist()
        both = []
        for part, like in enumerate(self._layer_templates[layer]):
            tail = like.new_zeros(len(rows), len(like), max(tails, default=0), like.shape[-1])
            for line, (row, length) in enumerate(zip(rows.tolist(), tails, strict=True)):
                if length:
                    tail[line, :, :length] = self._residual.read_row(row)[layer][part][:, :length]
            both.append(self._assemble(layer, part, tail, plan, stop) if plan.chunks else tail)
        return both[0], both[1]

    def select(self, rows: Tensor) -> Self:
        """A cache of its own with these rows [N] (host), as last committed; chunks are shared."""
        other = type(self)(self.quantizer, self.residual_length)
        other._chunk_refs = [self._chunk_refs[row] for row in rows.tolist()]
        other._lengths = self._lengths[rows].clone()
        other._residual, other._layer_templates = self._residual.select(rows), dict(self._layer_templates)
        return other

    def join(self, other: Self) -> None:
        """Take the rows of another one below its own."""
        self._chunk_refs += other._chunk_refs
        self._lengths = torch.cat((self._lengths, other._lengths))
        self._residual.join(other._residual)
        self._layer_templates = other._layer_templates | self._layer_templates
        self._plan = None

    def to(self, device: torch.device | str) -> None:
        """Move everything; other caches keep the chunks that they share where they are."""
        moved = {chunk: chunk.to(device) for chunk in self._distinct_chunks()}
        self._chunk_refs = [
            tuple(ChunkRef(moved[chunk], used) for chunk, used in row) for row in self._chunk_refs
        ]
        self._pending_prompts = {
            layer: [(span, key.to(device), value.to(device)) for span, key, value in some]
            for layer, some in self._pending_prompts.items()
        }
        self._layer_templates = {
            layer: (key.to(device), value.to(device)) for layer, (key, value) in self._layer_templates.items()
        }
        self._residual.to(device)
        self._plan = None

    def state(self) -> dict[str, Tensor]:
        """All rows as last committed: which chunks they are made of, all chunks a layer, and the tails."""
        number = {chunk: place for place, chunk in enumerate(self._distinct_chunks())}
        made = [
            [row, number[chunk], used] for row, some in enumerate(self._chunk_refs) for chunk, used in some
        ]
        state = {
            "lengths": self._lengths.clone(),
            "pieces": torch.tensor(made, dtype=torch.long).view(-1, 3),
            "chunks": torch.tensor([chunk.length for chunk in number], dtype=torch.long),
        }
        for layer in next(iter(number)).layers if number else ():
            for place, kind in enumerate(_KV_NAMES):
                whole = GroupCodec.concat([chunk.layers[layer][place] for chunk in number])
                state |= {
                    f"{kind}.{layer}.{name}": part for name, part in zip(_PACKED_FIELDS, whole, strict=True)
                }
        for layer, pair in self._layer_templates.items():
            state |= {
                f"like.{kind}.{layer}": like.clone() for kind, like in zip(_KV_NAMES, pair, strict=True)
            }
        return state | {f"tail.{name}": part for name, part in self._residual.state().items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take what `state` gave, into a cache that is made alike and holds nothing."""
        lengths = state["chunks"].tolist()
        layers: list[dict[int, tuple[QuantizedTensor, QuantizedTensor]]] = [{} for _ in lengths]
        for layer in sorted({int(name.split(".")[1]) for name in state if name.endswith(".codes")}):
            both = []
            for kind, coding in zip(_KV_NAMES, self._codecs, strict=True):
                whole = QuantizedTensor(*(state[f"{kind}.{layer}.{name}"] for name in _PACKED_FIELDS))
                both.append(coding.split(whole, lengths))
            for chunk, keys, values in zip(layers, *both, strict=True):
                chunk[layer] = keys, values
        chunks = [QuantizedChunk(length, one) for length, one in zip(lengths, layers, strict=True)]
        self._lengths = state["lengths"].long().cpu()
        made: list[list[ChunkRef]] = [[] for _ in self._lengths]
        for row, number, used in state["pieces"].tolist():
            made[row].append(ChunkRef(chunks[number], used))
        self._chunk_refs = [tuple(one) for one in made]
        for name in state:
            if name.startswith("like.keys."):
                layer = int(name.removeprefix("like.keys."))
                self._layer_templates[layer] = state[name], state[f"like.values.{layer}"]
        tail = {name.removeprefix("tail."): part for name, part in state.items() if name.startswith("tail.")}
        self._residual.load(tail)

    def _distinct_chunks(self) -> list[QuantizedChunk]:
        """All chunks, each once."""
        return list(dict.fromkeys(chunk for row in self._chunk_refs for chunk, _ in row))


def _span_rows(span: KVSpan, lines: int) -> list[int]:
    """The rows of a span of so many lines."""
    rows: list[int] = span.on_host(lines)[0].tolist()
    return rows


def _span_row_index(span: KVSpan, lines: int) -> Tensor:
    """The rows of a span by number, for others may have been added since it was made."""
    return torch.arange(lines) if span.rows is None else span.rows

"""The quantized cache: chunks of few bits that forks share, and the latest positions as they came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from descant.core.interfaces import Span
from descant.errors import ConfigError
from descant.kv_cache.dense import DenseCache
from descant.kv_cache.quantized_chunks import Chunk, Piece, Plan, cut
from descant.kv_cache.quantizers import Coding, Packed, Quantizer
from descant.kv_cache.scratch_buffer import Scratch

__all__ = ["QuantizedStore"]

# How much wider than its use what is kept as it came may grow before it is copied to fit.
_SLACK = 128
_KINDS, _PARTS = ("keys", "values"), ("codes", "scale", "offset")
Content = dict[int, tuple[Tensor, Tensor]]  # a row's keys and values [H, S, D], layer by layer


class Tail(DenseCache):
    """What rows hold as it came: the positions after their chunks."""

    @property
    def slots(self) -> int:
        """How wide it has grown."""
        return max((block.shape[2] for block in self._keys.values()), default=0)

    def row(self, row: int) -> Content:
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

    rewind: int | None = None
    lossless = False  # what it is read as is not what was written

    def __init__(self, quantizer: Quantizer, residual: int = 128) -> None:
        if residual < 0:
            raise ConfigError("residual_length", "must be >= 0", residual)
        self.quantizer, self.residual = quantizer, residual
        self._codings: tuple[Coding, Coding] = (quantizer.keys, quantizer.values)
        self._lengths = torch.zeros(0, dtype=torch.long)
        self._pieces: list[tuple[Piece, ...]] = []
        self._tail = Tail()
        self._like: dict[int, tuple[Tensor, Tensor]] = {}  # [H, 0, D] of every layer
        # Whole texts written since the last commit, which need no place in the tail, and whose they are.
        self._fresh: dict[int, list[tuple[Span, Tensor, Tensor]]] = {}
        self._renewed: set[int] = set()
        self._scratch = Scratch()  # within a forward
        self._plan: tuple[Span, Plan, Span] | None = None  # for a span, and where it writes in the tail

    def __len__(self) -> int:
        return len(self._pieces)

    @property
    def lengths(self) -> Tensor:
        """How many positions each row holds [R] (host)."""
        return self._lengths

    @property
    def nbytes(self) -> int:
        """What chunks and tails take in memory, and what is not yet committed or decoded to be read."""
        fresh = sum(key.nbytes + value.nbytes for some in self._fresh.values() for _, key, value in some)
        return (
            sum(chunk.nbytes for chunk in self._chunks()) + self._tail.nbytes + fresh + self._scratch.nbytes
        )

    def reach(self, layer: int, span: Span) -> None:
        """Slot `p` is position `p`."""

    def extend(self, rows: int) -> None:
        """Append empty rows."""
        self._lengths = torch.cat((self._lengths, torch.zeros(rows, dtype=torch.long)))
        self._pieces += [()] * rows
        self._tail.extend(rows)

    # -------------------------------------------------------------------- a forward
    def update(self, layer: int, key: Tensor, value: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        """Write [N, H, T, D] at the span; what its rows hold then [N, H, S, D], stale slots included."""
        self._like.setdefault(layer, (key[:1, :, :0].flatten(0, 1), value[:1, :, :0].flatten(0, 1)))
        if span.fresh:
            if span.width:
                self._fresh.setdefault(layer, []).append((span, key, value))
                self._renewed.update(_rows(span, len(key)))
            return key, value
        plan, inner = self._planned(span, len(key))
        if self._fresh.get(layer):
            self._settle(layer, set(_rows(span, len(key))))
        keys, values = self._tail.update(layer, key, value, inner)
        if not plan.chunks:
            return keys[:, :, : span.stop], values[:, :, : span.stop]
        return self._whole(layer, 0, keys, plan, span.stop), self._whole(layer, 1, values, plan, span.stop)

    def _planned(self, span: Span, lines: int) -> tuple[Plan, Span]:
        """How a forward reads chunks and where it writes after them, found once for all its layers."""
        if self._plan is None or self._plan[0] is not span:
            rows, starts = span.on_host(lines)
            plan = Plan.of([self._held(row) for row in rows.tolist()])
            begins = torch.from_numpy(starts) - torch.tensor(plan.bases)
            first, last = int(begins.min()), int(begins.max())
            device = span.start.device if isinstance(span.start, Tensor) else None
            begin = first if first == last else begins.to(device, non_blocking=True)
            self._plan = span, plan, Span(span.rows, begin, span.width, last + span.width)
        return self._plan[1:]

    def _held(self, row: int) -> tuple[Piece, ...]:
        """A row's pieces, none where it was written anew."""
        return () if row in self._renewed else self._pieces[row]

    def _settle(self, layer: int, rows: set[int]) -> None:
        """Write whole texts to the tail after all, where one of their rows goes on before a commit."""
        if any(not rows.isdisjoint(_rows(span, len(key))) for span, key, _ in self._fresh[layer]):
            for span, key, value in self._fresh[layer]:
                self._tail.update(layer, key, value, span._replace(rows=_index(span, len(key))))
            self._fresh[layer] = []

    def _whole(self, layer: int, part: int, tail: Tensor, plan: Plan, stop: int) -> Tensor:
        """Chunks and tail [N, H, S, D] together."""
        lines, heads, slots, size = tail.shape
        base = max(plan.bases)
        room = self._scratch.empty((lines, heads, stop if plan.level else base + slots, size), tail)
        if not plan.level:
            room.zero_()  # what no row has is read by none, but it must be numbers
        parts = [chunk.layers[layer][part] for chunk in plan.chunks]
        if plan.moves is None:
            self._codings[part].decode(parts, room[:, :, :base].transpose(0, 1))
        else:
            plain = self._scratch.empty((heads, 1, plan.total, size), tail)
            self._codings[part].decode(parts, plain)
            for move in plan.moves:
                room[move.lines, :, move.into] = plain[:, 0, move.out_of]
        if plan.level:
            room[:, :, base:] = tail[:, :, : stop - base]
            return room
        begins = torch.tensor(plan.bases).to(tail.device, non_blocking=True)
        places = begins[:, None] + torch.arange(slots, device=tail.device)
        room[torch.arange(lines, device=tail.device)[:, None], :, places] = tail.transpose(1, 2)
        return room[:, :, :stop]

    # -------------------------------------------------------------------- between forwards
    def commit(self, parents: Tensor | None, lengths: Tensor) -> None:
        """New row `i` is old row `parents[i]` cut to `lengths[i]`; what is ripe becomes a chunk."""
        texts = self._texts()
        chunks: dict[tuple[int, int], Chunk] = {}
        pieces, tails, rests = [], [], {}
        before = self._lengths.tolist()
        whence = range(len(self)) if parents is None else parents.tolist()
        for child, (row, length) in enumerate(zip(whence, lengths.tolist(), strict=True)):
            held = self._held(row)
            more = max(length - sum(piece.used for piece in held), 0)
            ripe = self._ripe(more, row in self._renewed or before[row] == 0)
            if ripe:
                source = self._tail.row(row) | texts.get(row, {})
                if (row, ripe) not in chunks:
                    chunks[row, ripe] = self._quantised(source, ripe)
                held = (*held, Piece(chunks[row, ripe], ripe))
                rests[child] = {
                    layer: (keys[:, ripe:more].clone(), values[:, ripe:more].clone())
                    for layer, (keys, values) in source.items()
                }
            pieces.append(cut(held, length))
            tails.append(more - ripe)
        self._follow(parents, tails, rests)
        self._pieces, self._lengths = pieces, lengths
        self._fresh, self._renewed, self._plan = {}, set(), None
        self._scratch.clear()

    def _texts(self) -> dict[int, Content]:
        """What whole texts say of rows."""
        texts: dict[int, Content] = {}
        for layer, some in self._fresh.items():
            for span, key, value in some:
                for line, row in enumerate(_rows(span, len(key))):
                    texts.setdefault(row, {})[layer] = (key[line], value[line])
        return texts

    def _ripe(self, more: int, first: bool) -> int:
        """How many of the positions after its chunks become another one: all of a prompt, or a multiple."""
        every = max(self.residual, 1)
        return more if first else more // every * every

    def _quantised(self, source: Content, length: int) -> Chunk:
        first, second = self._codings
        layers = {
            layer: (first.encode(keys[:, :length]), second.encode(values[:, :length]))
            for layer, (keys, values) in source.items()
        }
        return Chunk(length, layers)

    def _follow(self, parents: Tensor | None, tails: Sequence[int], rests: Mapping[int, Content]) -> None:
        """Move the tails; those of which the beginning became a chunk hold the rest."""
        kept = [0 if child in rests else length for child, length in enumerate(tails)]
        self._tail.commit(parents, torch.tensor(kept, dtype=torch.long))
        for child, rest in rests.items():
            if tails[child]:
                span = Span(torch.tensor([child]), 0, tails[child], tails[child])
                for layer, (keys, values) in rest.items():
                    self._tail.update(layer, keys[None], values[None], span)
        if rests:
            self._tail.commit(None, torch.tensor(tails, dtype=torch.long))
            if self._tail.slots > max(tails) + self.residual + _SLACK:
                self._tail = self._tail.select(torch.arange(len(tails)))

    # -------------------------------------------------------------------- whole rows
    @property
    def layers(self) -> Sequence[int]:
        """Those that were ever written."""
        return list(self._like)

    def read(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [N, H, S, D] of rows [N] (host) as last committed, stale slots included."""
        plan = Plan.of([self._pieces[row] for row in rows.tolist()])
        stop = int(self._lengths[rows].max()) if len(rows) else 0
        tails = (self._lengths[rows] - torch.tensor(plan.bases, dtype=torch.long)).tolist()
        both = []
        for part, like in enumerate(self._like[layer]):
            tail = like.new_zeros(len(rows), len(like), max(tails, default=0), like.shape[-1])
            for line, (row, length) in enumerate(zip(rows.tolist(), tails, strict=True)):
                if length:
                    tail[line, :, :length] = self._tail.row(row)[layer][part][:, :length]
            both.append(self._whole(layer, part, tail, plan, stop) if plan.chunks else tail)
        return both[0], both[1]

    def select(self, rows: Tensor) -> Self:
        """A cache of its own with these rows [N] (host), as last committed; chunks are shared."""
        other = type(self)(self.quantizer, self.residual)
        other._pieces = [self._pieces[row] for row in rows.tolist()]
        other._lengths = self._lengths[rows].clone()
        other._tail, other._like = self._tail.select(rows), dict(self._like)
        return other

    def join(self, other: Self) -> None:
        """Take the rows of another one below its own."""
        self._pieces += other._pieces
        self._lengths = torch.cat((self._lengths, other._lengths))
        self._tail.join(other._tail)
        self._like = other._like | self._like
        self._plan = None

    def to(self, device: torch.device | str) -> None:
        """Move everything; other caches keep the chunks that they share where they are."""
        moved = {chunk: chunk.moved(device) for chunk in self._chunks()}
        self._pieces = [tuple(Piece(moved[chunk], used) for chunk, used in row) for row in self._pieces]
        self._fresh = {
            layer: [(span, key.to(device), value.to(device)) for span, key, value in some]
            for layer, some in self._fresh.items()
        }
        self._like = {layer: (key.to(device), value.to(device)) for layer, (key, value) in self._like.items()}
        self._tail.to(device)
        self._plan = None

    def state(self) -> dict[str, Tensor]:
        """All rows as last committed: which chunks they are made of, all chunks a layer, and the tails."""
        number = {chunk: place for place, chunk in enumerate(self._chunks())}
        made = [[row, number[chunk], used] for row, some in enumerate(self._pieces) for chunk, used in some]
        state = {
            "lengths": self._lengths.clone(),
            "pieces": torch.tensor(made, dtype=torch.long).view(-1, 3),
            "chunks": torch.tensor([chunk.length for chunk in number], dtype=torch.long),
        }
        for layer in next(iter(number)).layers if number else ():
            for place, kind in enumerate(_KINDS):
                whole = Coding.joined([chunk.layers[layer][place] for chunk in number])
                state |= {f"{kind}.{layer}.{name}": part for name, part in zip(_PARTS, whole, strict=True)}
        for layer, pair in self._like.items():
            state |= {f"like.{kind}.{layer}": like.clone() for kind, like in zip(_KINDS, pair, strict=True)}
        return state | {f"tail.{name}": part for name, part in self._tail.state().items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take what `state` gave, into a cache that is made alike and holds nothing."""
        lengths = state["chunks"].tolist()
        layers: list[dict[int, tuple[Packed, Packed]]] = [{} for _ in lengths]
        for layer in sorted({int(name.split(".")[1]) for name in state if name.endswith(".codes")}):
            both = []
            for kind, coding in zip(_KINDS, self._codings, strict=True):
                whole = Packed(*(state[f"{kind}.{layer}.{name}"] for name in _PARTS))
                both.append(coding.split(whole, lengths))
            for chunk, keys, values in zip(layers, *both, strict=True):
                chunk[layer] = keys, values
        chunks = [Chunk(length, one) for length, one in zip(lengths, layers, strict=True)]
        self._lengths = state["lengths"].long().cpu()
        made: list[list[Piece]] = [[] for _ in self._lengths]
        for row, number, used in state["pieces"].tolist():
            made[row].append(Piece(chunks[number], used))
        self._pieces = [tuple(one) for one in made]
        for name in state:
            if name.startswith("like.keys."):
                layer = int(name.removeprefix("like.keys."))
                self._like[layer] = state[name], state[f"like.values.{layer}"]
        tail = {name.removeprefix("tail."): part for name, part in state.items() if name.startswith("tail.")}
        self._tail.load(tail)

    def _chunks(self) -> list[Chunk]:
        """All chunks, each once."""
        return list(dict.fromkeys(chunk for row in self._pieces for chunk, _ in row))


def _rows(span: Span, lines: int) -> list[int]:
    """The rows of a span of so many lines."""
    rows: list[int] = span.on_host(lines)[0].tolist()
    return rows


def _index(span: Span, lines: int) -> Tensor:
    """The rows of a span by number, for others may have been added since it was made."""
    return torch.arange(lines) if span.rows is None else span.rows

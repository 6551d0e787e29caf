"""What caches that forget by attention have in common: slots, votes, and what a commit makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Self, cast

import torch
from torch import Tensor

from descant.core.interfaces import Reach, Span
from descant.errors import InputError
from descant.kv_cache.attention_proxy import Attention
from descant.kv_cache.attention_scores import Overheard, Where, Write, chosen, lines_of, votes
from descant.kv_cache.commit_plan import Fate, Move, Plan, planned
from descant.kv_cache.slot_blocks import Slots

__all__ = ["Forgetting"]


class Forgetting:
    """A cache of at most so many slots a row: every head of every layer has those that it looked at most.

    What a row keeps lies packed and in order, the newest last, as many slots in every layer and head. Keys
    stay as they were rotated, queries stand at their true positions. Which queries of a forward count is
    known at commit, so those that may be padding or wrong guesses are held until then. Slots are dropped
    there and nowhere else. Query heads that share a head of keys vote together.
    """

    _remembers = False  # whether votes add up from commit to commit
    _voters: int | None = None  # how many of the last queries vote; None: all

    def __init__(self, budget: int, spared: int) -> None:
        self.budget = budget
        self._spared = spared  # how many of the newest slots are never dropped
        self._slots = Slots(self._remembers)
        self._writes: dict[int, list[Write]] = {}  # since the last commit
        self._spans: list[Where] = []
        # `floor`: what a row cannot be cut below; `reading`: whether its prompt may still go on.
        self._columns = {name: torch.zeros(0, dtype=torch.long) for name in ("lengths", "held", "floor")}
        self._columns["reading"] = torch.zeros(0, dtype=torch.bool)

    def _listens(self, where: Where) -> bool:  # noqa: ARG002 - for those that need not
        """Whether queries of this forward may have to vote."""
        return True

    def _heard(self, layer: int, write: Write, pair: tuple[Tensor, Tensor], asked: Attention) -> Tensor:
        """What queries find in keys and values [N, Hq, T, E]; they are held."""
        raise NotImplementedError

    def _kept(self, held: Tensor, given: Tensor, reading: Tensor) -> Tensor:
        """How many of `held` slots are kept by rows that were given so many tokens at once [U]."""
        raise NotImplementedError

    def _weighed(self, score: Tensor, held: Tensor) -> Tensor:  # noqa: ARG002 - for those that do
        """What decides, of votes [N, H, S] for so many slots [N] (host)."""
        return score

    def _empty(self) -> Self:
        """Another one like it that holds nothing."""
        raise NotImplementedError

    # -------------------------------------------------------------------- what is held
    @property
    def rewind(self) -> int | None:
        """The newest slots are all there, so a row can be cut by so many."""
        return self._spared

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def lengths(self) -> Tensor:
        """How many positions each row has [R] (host), those that it forgot included."""
        return self._columns["lengths"]

    @property
    def held(self) -> Tensor:
        """How many slots each row holds [R] (host)."""
        return self._columns["held"]

    @property
    def layers(self) -> Sequence[int]:
        """The layers that were written."""
        return sorted(self._slots.blocks)

    @property
    def nbytes(self) -> int:
        """What slots, votes and whatever waits for a commit take in memory."""
        waiting = sum(write.nbytes for writes in self._writes.values() for write in writes)
        return waiting + self._slots.nbytes

    def read(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """What these rows (host) hold of a layer as last committed, packed [N, H, S, D]."""
        block = self._slots.take(rows, _most(self.held[rows]), [layer]).blocks[layer]
        return block.keys, block.values

    def extend(self, rows: int) -> None:
        """Append empty rows."""
        for name, column in self._columns.items():
            self._columns[name] = torch.cat((column, column.new_full((rows,), name == "reading")))

    # -------------------------------------------------------------------- a forward
    def reach(self, layer: int, span: Span) -> Reach | None:  # noqa: ARG002 - all layers hold as much
        """What `update` is about to show."""
        if torch.equal(self.held, self.lengths):
            return None
        where = self._where(span)
        return Reach(where.held, where.size)

    def update(self, layer: int, key: Tensor, value: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        """Write [N, H, T, D] at the span; what its rows hold then [N, H, S, D], stale slots included."""
        where = self._where(span)
        write = Write(where)
        if span.fresh:
            # A prompt lies beside the block until it is known what stays of it.
            write.pair = key, value
        else:
            self._settle(layer, where.rows)
            key, value = self._written(layer, key, value, where)
        if not span.width:
            return key, value
        where.written = True
        self._writes.setdefault(layer, []).append(write)
        if not self._listens(where):
            return key, value
        hear = partial(self._heard, layer, write)
        return cast(Tensor, Overheard(key, hear)), cast(Tensor, Overheard(value, hear))

    def _where(self, span: Span) -> Where:
        for known in reversed(self._spans):
            if known.span is span:
                return known
        rows, start = map(torch.from_numpy, span.on_host(len(self)))
        gone = self.lengths - self.held
        for known in self._spans:
            if known.written and known.span.fresh:
                gone[known.rows] = 0  # what is read from its first position on replaces all that there was
        held = start if span.fresh else start - gone[rows]
        self._spans.append(Where(span, rows, start, held, _most(held) + span.width, span.sure))
        return self._spans[-1]

    def _written(self, layer: int, key: Tensor, value: Tensor, where: Where) -> tuple[Tensor, Tensor]:
        """Write to the block; what the rows have there."""
        block = self._slots.room(layer, (key, value), len(self), where.size)
        rows, at = where.on(key.device)
        every = where.span.rows is None
        first = where.size - where.span.width
        level = every and bool((where.held == first).all())
        shown = []
        for part, new in ((block.keys, key), (block.values, value)):
            if level:
                part[: len(rows), :, first : where.size] = new
            else:
                part[rows[:, None], :, at] = new.transpose(1, 2)
            shown.append(part[: len(rows), :, : where.size] if every else part[rows, :, : where.size])
        return shown[0], shown[1]

    def _settle(self, layer: int, rows: Tensor) -> None:
        """Lay what rows began with into the block where more of them is written before the next commit."""
        waiting = [write for write in self._writes.get(layer, ()) if write.pair is not None]
        if any(bool(torch.isin(rows, write.where.rows).any()) for write in waiting):
            for write in waiting:  # all, in order: a row may have begun more than once
                self._written(layer, *cast(tuple[Tensor, Tensor], write.pair), write.where)
                write.pair = None

    # -------------------------------------------------------------------- a commit
    def commit(self, parents: Tensor | None, lengths: Tensor) -> None:
        """New row `i` is old row `parents[i]` cut to `lengths[i]`, less what it can do without."""
        fate, columns = self._fated(parents, lengths)
        plans: dict[object, Plan] = {}
        for layer in sorted(self._slots.blocks.keys() | self._writes.keys()):
            writes = self._writes.get(layer, [])
            alike = tuple((id(write.where), write.pair is None) for write in writes)
            if alike not in plans:
                plans[alike] = planned(fate, writes, self._remembers, self._voters)
            self._commit(layer, fate, plans[alike])
        self._columns = {name: column[fate.which] for name, column in columns.items()}
        self._writes, self._spans = {}, []
        self._slots.fit(len(self), _most(self.held))

    def _fated(self, parents: Tensor | None, lengths: Tensor) -> tuple[Fate, dict[str, Tensor]]:
        """What becomes of the rows, and the columns of the cut rows [U]."""
        whence = torch.arange(len(lengths)) if parents is None else parents
        base = _most(lengths) + 1
        both, which = torch.unique(whence * base + lengths, return_inverse=True)
        parent, length = both // base, both % base
        fresh = [where.rows for where in self._spans if where.written and where.span.fresh]
        begun = torch.isin(parent, torch.cat([*fresh, parent[:0]]))
        old = {name: column[parent].masked_fill(begun, 0) for name, column in self._columns.items()}
        short = (length < old["floor"]).nonzero()
        if len(short):
            row, floor = int(parent[short[0]]), int(old["floor"][short[0]])
            must = f"must leave row {row}, which has forgotten some of them, at least {floor} positions"
            raise InputError("lengths", must, int(length[short[0]]), "read its text again")
        grown = length - old["lengths"]
        held, reading = old["held"] + grown, old["reading"] | begun
        given = torch.zeros(len(self), dtype=torch.long)
        for where in self._spans:
            if where.written:
                told = where.sure if where.sure is not None else torch.full_like(where.rows, where.span.width)
                given[where.rows] = torch.maximum(given[where.rows], told)
        piece = torch.minimum(grown, given[parent])
        keep = self._kept(held, piece, reading)
        columns = {
            "lengths": length,
            "held": keep,
            "floor": torch.where(keep < held, length - self._spared, old["floor"]),
            # A text that is written comes a token at a time, guesses aside.
            "reading": reading & ((old["lengths"] == 0) | (grown <= 0) | (piece > 1)),
        }
        before = torch.minimum(old["held"], held)
        return Fate(whence, which, parent, length, before, held, keep, begun), columns

    def _commit(self, layer: int, fate: Fate, plan: Plan) -> None:
        """Vote, evict and move in one layer."""
        score, seen = self._scored(layer, plan) if plan.wide else (None, None)
        parts = [self._moved(layer, fate, move, score, seen) for move in plan.moves]
        if not parts and (score is None or not self._remembers):
            return
        wide = _most(fate.keep)
        block = self._slots.room(layer, self._like(layer), len(fate.which), wide)
        for move, (keys, values) in zip(plan.moves, parts, strict=True):
            at = move.rows.to(keys.device)
            block.keys[at, :, : keys.shape[2]], block.values[at, :, : keys.shape[2]] = keys, values
        if score is not None and self._remembers:
            block.score[: len(fate.which), :, :wide] = score[fate.which.to(score.device), :, :wide]

    def _scored(self, layer: int, plan: Plan) -> tuple[Tensor, Tensor | None]:
        """The votes for what rows hold [V, H, S], and where slots went before every guess what is left."""
        keys = self._like(layer)[0]
        score = torch.zeros(len(plan.parent), keys.shape[1], plan.wide, device=keys.device)
        seen: Tensor | None = None
        block = self._slots.blocks.get(layer)
        if block is not None and self._remembers and len(block.score):
            at = plan.parent.clamp(max=len(block.score) - 1).to(keys.device)
            old = block.score[at, :, : plan.wide]
            stays = plan.stays[..., : old.shape[2]].to(keys.device)
            score[:, :, : old.shape[2]] = torch.where(stays, old, 0.0)
        for ballot in plan.ballots:
            write = self._writes[layer][ballot.write]
            stop, mine = min(plan.wide, write.where.size), ballot.voted.to(keys.device)
            line = torch.arange(len(ballot.voted)) if ballot.line is None else ballot.line
            at = line.to(keys.device)
            if write.trail:
                assert write.where.sure is not None
                accepted = (ballot.last - write.where.sure[line]).to(keys.device)
                seen = torch.ones_like(score, dtype=torch.bool) if seen is None else seen
                score[mine, :, :stop], seen[mine, :, :stop] = (
                    torch.stack(parts)[accepted, at, :, :stop] for parts in zip(*write.trail, strict=True)
                )
                continue
            if write.sums is not None and write.where.sure is not None:
                score[mine, :, :stop] += write.sums[at, :, :stop]
                ballot = ballot._replace(first=torch.maximum(ballot.first, write.where.sure[line]))
            source = -1 if write.pair is None else ballot.write
            found = votes(write, ballot, self._laid(layer, source, ballot.parent, stop)[0])
            score[mine, :, :stop] += found
        return score, seen

    def _moved(
        self, layer: int, fate: Fate, move: Move, score: Tensor | None, seen: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The keys and values of rows that are laid elsewhere [N, H, S, D]; scores go with what they keep."""
        held, keep, parent = fate.held[move.which], fate.keep[move.which], fate.parent[move.which]
        if move.voted is None:
            # Copies, for others may be laid there first.
            pair = tuple(one.clone() for one in self._laid(layer, move.source, parent, _most(held)))
        else:
            assert score is not None
            at = move.voted.to(score.device)
            mine = score[at]
            left = None if seen is None else seen[at]
            kept = chosen(self._weighed(mine, held), held, keep, self._spared, left)
            lies, line = self._lying(layer, move.source, parent)
            row, head = line.to(score.device)[:, None, None], torch.arange(kept.shape[1], device=score.device)
            pair = tuple(one[row, head[:, None], kept] for one in lies)
            if self._remembers:
                score[at, :, : kept.shape[2]] = mine.gather(2, kept)
        if move.line is not None:
            pair = tuple(one[move.line.to(one.device)] for one in pair)
        return pair[0], pair[1]

    def _lying(self, layer: int, source: int, rows: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """The keys and values among which rows [N] (host) lie, and their lines there."""
        pair = self._writes[layer][source].pair if source >= 0 else None
        if pair is None:
            return self._like(layer), rows
        return pair, lines_of(self._writes[layer][source].where.rows, rows)

    def _laid(self, layer: int, source: int, rows: Tensor, stop: int) -> tuple[Tensor, Tensor]:
        """The keys and values of rows [N] (host) where they lie [N, H, S, D]."""
        (keys, values), line = self._lying(layer, source, rows)
        if torch.equal(line, torch.arange(len(line))):
            return keys[: len(line), :, :stop], values[: len(line), :, :stop]
        at = line.to(keys.device)
        return keys[at, :, :stop], values[at, :, :stop]

    def _like(self, layer: int) -> tuple[Tensor, Tensor]:
        """The layer's block, or what a forward brought where there is none yet."""
        block = self._slots.blocks.get(layer)
        if block is not None:
            return block.keys, block.values
        return next(write.pair for write in self._writes[layer] if write.pair is not None)

    # -------------------------------------------------------------------- whole rows
    def select(self, rows: Tensor) -> Self:
        """A copy of these rows [N] (host), as last committed."""
        other = self._empty()
        other._columns = {name: column[rows] for name, column in self._columns.items()}
        other._slots = self._slots.take(rows, _most(other.held))
        return other

    def join(self, other: Self) -> None:
        """Take the rows of another one below its own."""
        self._slots.append(other._slots, len(self), len(other), _most(other.held))
        self._columns = {
            name: torch.cat((mine, other._columns[name])) for name, mine in self._columns.items()
        }

    def to(self, device: torch.device | str) -> None:
        """Move all blocks."""
        self._slots.to(device)

    def state(self) -> dict[str, Tensor]:
        """All rows as last committed: what is known of each, and its slots in every layer."""
        columns = {name: column.clone() for name, column in self._columns.items()}
        return columns | self._slots.state(len(self), _most(self.held))

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take what `state` gave, into an empty cache."""
        self._columns = {name: state[name].cpu().to(mine.dtype) for name, mine in self._columns.items()}
        self._slots.load(state)


def _most(counts: Tensor) -> int:
    return int(counts.max()) if len(counts) else 0

"""What caches that forget by attention have in common: slots, votes, and what a commit makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Self, cast

import torch
from torch import Tensor

from descant.core.interfaces import KVSpan, VisibleSlots
from descant.errors import InputError
from descant.kv_cache.attention_proxy import AttentionCall
from descant.kv_cache.attention_scores import (
    PendingWrite,
    RecordingKV,
    WriteRegion,
    index_of_rows,
    score_slots,
    select_slots,
)
from descant.kv_cache.commit_plan import CommitPlan, RowMove, RowOutcomes, plan_commit
from descant.kv_cache.slot_blocks import SlotBlocks

__all__ = ["EvictingStore"]


class EvictingStore:
    """A cache of at most so many slots a row: every head of every layer has those that it looked at most.

    What a row keeps lies packed and in order, the newest last, as many slots in every layer and head. Keys
    stay as they were rotated, queries stand at their true positions. Which queries of a forward count is
    known at commit, so those that may be padding or wrong guesses are held until then. Slots are dropped
    there and nowhere else. Query heads that share a head of keys vote together.
    """

    _accumulates_scores = False  # whether votes add up from commit to commit
    _num_scoring_queries: int | None = None  # how many of the last queries vote; None: all

    def __init__(self, budget: int, spared: int) -> None:
        self.budget = budget
        self._num_protected = spared  # how many of the newest slots are never dropped
        self._slots = SlotBlocks(self._accumulates_scores)
        self._pending_writes: dict[int, list[PendingWrite]] = {}  # since the last commit
        self._regions: list[WriteRegion] = []
        # `floor`: what a row cannot be cut below; `reading`: whether its prompt may still go on.
        self._row_state = {name: torch.zeros(0, dtype=torch.long) for name in ("lengths", "held", "floor")}
        self._row_state["reading"] = torch.zeros(0, dtype=torch.bool)

    def _needs_queries(self, where: WriteRegion) -> bool:  # noqa: ARG002 - for those that need not
        """Whether queries of this forward may have to vote."""
        return True

    def _on_attention(
        self, layer: int, write: PendingWrite, pair: tuple[Tensor, Tensor], asked: AttentionCall
    ) -> Tensor:
        """What queries find in keys and values [N, Hq, T, E]; they are held."""
        raise NotImplementedError

    def _num_to_keep(self, held: Tensor, given: Tensor, reading: Tensor) -> Tensor:
        """How many of `held` slots are kept by rows that were given so many tokens at once [U]."""
        raise NotImplementedError

    def _eviction_scores(self, score: Tensor, held: Tensor) -> Tensor:  # noqa: ARG002 - for those that do
        """What decides, of votes [N, H, S] for so many slots [N] (host)."""
        return score

    def _make_empty(self) -> Self:
        """Another one like it that holds nothing."""
        raise NotImplementedError

    # -------------------------------------------------------------------- what is held
    @property
    def max_rewind(self) -> int | None:
        """The newest slots are all there, so a row can be cut by so many."""
        return self._num_protected

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def lengths(self) -> Tensor:
        """How many positions each row has [R] (host), those that it forgot included."""
        return self._row_state["lengths"]

    @property
    def slot_counts(self) -> Tensor:
        """How many slots each row holds [R] (host)."""
        return self._row_state["held"]

    @property
    def layers(self) -> Sequence[int]:
        """The layers that were written."""
        return sorted(self._slots.blocks)

    @property
    def nbytes(self) -> int:
        """What slots, votes and whatever waits for a commit take in memory."""
        waiting = sum(write.nbytes for writes in self._pending_writes.values() for write in writes)
        return waiting + self._slots.nbytes

    def read(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """What these rows (host) hold of a layer as last committed, packed [N, H, S, D]."""
        block = self._slots.select_rows(rows, _max_or_zero(self.slot_counts[rows]), [layer]).blocks[layer]
        return block.keys, block.values

    def extend(self, rows: int) -> None:
        """Append empty rows."""
        for name, column in self._row_state.items():
            self._row_state[name] = torch.cat((column, column.new_full((rows,), name == "reading")))

    # -------------------------------------------------------------------- a forward
    def visible_slots(self, layer: int, span: KVSpan) -> VisibleSlots | None:  # noqa: ARG002 - all layers hold as much
        """What `update` is about to show."""
        if torch.equal(self.slot_counts, self.lengths):
            return None
        where = self._region(span)
        return VisibleSlots(where.past_lengths, where.num_slots)

    def update(self, layer: int, key: Tensor, value: Tensor, span: KVSpan) -> tuple[Tensor, Tensor]:
        """Write [N, H, T, D] at the span; what its rows hold then [N, H, S, D], stale slots included."""
        where = self._region(span)
        write = PendingWrite(where)
        if span.is_first_write:
            # A prompt lies beside the block until it is known what stays of it.
            write.prompt_kv = key, value
        else:
            self._flush_prompts(layer, where.rows)
            key, value = self._write_block(layer, key, value, where)
        if not span.width:
            return key, value
        where.is_written = True
        self._pending_writes.setdefault(layer, []).append(write)
        if not self._needs_queries(where):
            return key, value
        hear = partial(self._on_attention, layer, write)
        return cast(Tensor, RecordingKV(key, hear)), cast(Tensor, RecordingKV(value, hear))

    def _region(self, span: KVSpan) -> WriteRegion:
        for known in reversed(self._regions):
            if known.span is span:
                return known
        rows, start = map(torch.from_numpy, span.on_host(len(self)))
        gone = self.lengths - self.slot_counts
        for known in self._regions:
            if known.is_written and known.span.is_first_write:
                gone[known.rows] = 0  # what is read from its first position on replaces all that there was
        held = start if span.is_first_write else start - gone[rows]
        self._regions.append(
            WriteRegion(span, rows, start, held, _max_or_zero(held) + span.width, span.num_committed)
        )
        return self._regions[-1]

    def _write_block(
        self, layer: int, key: Tensor, value: Tensor, where: WriteRegion
    ) -> tuple[Tensor, Tensor]:
        """Write to the block; what the rows have there."""
        block = self._slots.ensure_capacity(layer, (key, value), len(self), where.num_slots)
        rows, at = where.index_on(key.device)
        every = where.span.rows is None
        first = where.num_slots - where.span.width
        level = every and bool((where.past_lengths == first).all())
        shown = []
        for part, new in ((block.keys, key), (block.values, value)):
            if level:
                part[: len(rows), :, first : where.num_slots] = new
            else:
                part[rows[:, None], :, at] = new.transpose(1, 2)
            shown.append(
                part[: len(rows), :, : where.num_slots] if every else part[rows, :, : where.num_slots]
            )
        return shown[0], shown[1]

    def _flush_prompts(self, layer: int, rows: Tensor) -> None:
        """Lay what rows began with into the block where more of them is written before the next commit."""
        waiting = [write for write in self._pending_writes.get(layer, ()) if write.prompt_kv is not None]
        if any(bool(torch.isin(rows, write.region.rows).any()) for write in waiting):
            for write in waiting:  # all, in order: a row may have begun more than once
                self._write_block(layer, *cast(tuple[Tensor, Tensor], write.prompt_kv), write.region)
                write.prompt_kv = None

    # -------------------------------------------------------------------- a commit
    def commit(self, parents: Tensor | None, lengths: Tensor) -> None:
        """New row `i` is old row `parents[i]` cut to `lengths[i]`, less what it can do without."""
        fate, columns = self._row_outcomes(parents, lengths)
        plans: dict[object, CommitPlan] = {}
        for layer in sorted(self._slots.blocks.keys() | self._pending_writes.keys()):
            writes = self._pending_writes.get(layer, [])
            alike = tuple((id(write.region), write.prompt_kv is None) for write in writes)
            if alike not in plans:
                plans[alike] = plan_commit(fate, writes, self._accumulates_scores, self._num_scoring_queries)
            self._commit_layer(layer, fate, plans[alike])
        self._row_state = {name: column[fate.outcome] for name, column in columns.items()}
        self._pending_writes, self._regions = {}, []
        self._slots.shrink_to_fit(len(self), _max_or_zero(self.slot_counts))

    def _row_outcomes(self, parents: Tensor | None, lengths: Tensor) -> tuple[RowOutcomes, dict[str, Tensor]]:
        """What becomes of the rows, and the columns of the cut rows [U]."""
        whence = torch.arange(len(lengths)) if parents is None else parents
        base = _max_or_zero(lengths) + 1
        both, which = torch.unique(whence * base + lengths, return_inverse=True)
        parent, length = both // base, both % base
        fresh = [where.rows for where in self._regions if where.is_written and where.span.is_first_write]
        begun = torch.isin(parent, torch.cat([*fresh, parent[:0]]))
        old = {name: column[parent].masked_fill(begun, 0) for name, column in self._row_state.items()}
        short = (length < old["floor"]).nonzero()
        if len(short):
            row, floor = int(parent[short[0]]), int(old["floor"][short[0]])
            must = f"must leave row {row}, which has forgotten some of them, at least {floor} positions"
            raise InputError("lengths", must, int(length[short[0]]), "read its text again")
        grown = length - old["lengths"]
        held, reading = old["held"] + grown, old["reading"] | begun
        given = torch.zeros(len(self), dtype=torch.long)
        for where in self._regions:
            if where.is_written:
                told = (
                    where.num_committed
                    if where.num_committed is not None
                    else torch.full_like(where.rows, where.span.width)
                )
                given[where.rows] = torch.maximum(given[where.rows], told)
        piece = torch.minimum(grown, given[parent])
        keep = self._num_to_keep(held, piece, reading)
        columns = {
            "lengths": length,
            "held": keep,
            "floor": torch.where(keep < held, length - self._num_protected, old["floor"]),
            # A text that is written comes a token at a time, guesses aside.
            "reading": reading & ((old["lengths"] == 0) | (grown <= 0) | (piece > 1)),
        }
        before = torch.minimum(old["held"], held)
        return RowOutcomes(whence, which, parent, length, before, held, keep, begun), columns

    def _commit_layer(self, layer: int, fate: RowOutcomes, plan: CommitPlan) -> None:
        """Vote, evict and move in one layer."""
        score, seen = self._layer_scores(layer, plan) if plan.max_slots else (None, None)
        parts = [self._gather_move(layer, fate, move, score, seen) for move in plan.moves]
        if not parts and (score is None or not self._accumulates_scores):
            return
        wide = _max_or_zero(fate.num_keep)
        block = self._slots.ensure_capacity(layer, self._layer_kv(layer), len(fate.outcome), wide)
        for move, (keys, values) in zip(plan.moves, parts, strict=True):
            at = move.rows.to(keys.device)
            block.keys[at, :, : keys.shape[2]], block.values[at, :, : keys.shape[2]] = keys, values
        if score is not None and self._accumulates_scores:
            block.score[: len(fate.outcome), :, :wide] = score[fate.outcome.to(score.device), :, :wide]

    def _layer_scores(self, layer: int, plan: CommitPlan) -> tuple[Tensor, Tensor | None]:
        """The votes for what rows hold [V, H, S], and where slots went before every guess what is left."""
        keys = self._layer_kv(layer)[0]
        score = torch.zeros(len(plan.scored_rows), keys.shape[1], plan.max_slots, device=keys.device)
        seen: Tensor | None = None
        block = self._slots.blocks.get(layer)
        if block is not None and self._accumulates_scores and len(block.score):
            at = plan.scored_rows.clamp(max=len(block.score) - 1).to(keys.device)
            old = block.score[at, :, : plan.max_slots]
            stays = plan.old_score_mask[..., : old.shape[2]].to(keys.device)
            score[:, :, : old.shape[2]] = torch.where(stays, old, 0.0)
        for ballot in plan.scoring_queries:
            write = self._pending_writes[layer][ballot.write_index]
            stop, mine = min(plan.max_slots, write.region.num_slots), ballot.scored_index.to(keys.device)
            line = torch.arange(len(ballot.scored_index)) if ballot.write_rows is None else ballot.write_rows
            at = line.to(keys.device)
            if write.draft_states:
                assert write.region.num_committed is not None
                accepted = (ballot.stop - write.region.num_committed[line]).to(keys.device)
                seen = torch.ones_like(score, dtype=torch.bool) if seen is None else seen
                score[mine, :, :stop], seen[mine, :, :stop] = (
                    torch.stack(parts)[accepted, at, :, :stop]
                    for parts in zip(*write.draft_states, strict=True)
                )
                continue
            if write.committed_scores is not None and write.region.num_committed is not None:
                score[mine, :, :stop] += write.committed_scores[at, :, :stop]
                ballot = ballot._replace(start=torch.maximum(ballot.start, write.region.num_committed[line]))
            source = -1 if write.prompt_kv is None else ballot.write_index
            found = score_slots(write, ballot, self._read_rows(layer, source, ballot.rows, stop)[0])
            score[mine, :, :stop] += found
        return score, seen

    def _gather_move(
        self, layer: int, fate: RowOutcomes, move: RowMove, score: Tensor | None, seen: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The keys and values of rows that are laid elsewhere [N, H, S, D]; scores go with what they keep."""
        held, keep, parent = (
            fate.num_slots[move.outcomes],
            fate.num_keep[move.outcomes],
            fate.parent[move.outcomes],
        )
        if move.scored_index is None:
            # Copies, for others may be laid there first.
            pair = tuple(
                one.clone() for one in self._read_rows(layer, move.source, parent, _max_or_zero(held))
            )
        else:
            assert score is not None
            at = move.scored_index.to(score.device)
            mine = score[at]
            left = None if seen is None else seen[at]
            kept = select_slots(self._eviction_scores(mine, held), held, keep, self._num_protected, left)
            lies, line = self._locate_rows(layer, move.source, parent)
            row, head = line.to(score.device)[:, None, None], torch.arange(kept.shape[1], device=score.device)
            pair = tuple(one[row, head[:, None], kept] for one in lies)
            if self._accumulates_scores:
                score[at, :, : kept.shape[2]] = mine.gather(2, kept)
        if move.repeat_index is not None:
            pair = tuple(one[move.repeat_index.to(one.device)] for one in pair)
        return pair[0], pair[1]

    def _locate_rows(self, layer: int, source: int, rows: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """The keys and values among which rows [N] (host) lie, and their lines there."""
        pair = self._pending_writes[layer][source].prompt_kv if source >= 0 else None
        if pair is None:
            return self._layer_kv(layer), rows
        return pair, index_of_rows(self._pending_writes[layer][source].region.rows, rows)

    def _read_rows(self, layer: int, source: int, rows: Tensor, stop: int) -> tuple[Tensor, Tensor]:
        """The keys and values of rows [N] (host) where they lie [N, H, S, D]."""
        (keys, values), line = self._locate_rows(layer, source, rows)
        if torch.equal(line, torch.arange(len(line))):
            return keys[: len(line), :, :stop], values[: len(line), :, :stop]
        at = line.to(keys.device)
        return keys[at, :, :stop], values[at, :, :stop]

    def _layer_kv(self, layer: int) -> tuple[Tensor, Tensor]:
        """The layer's block, or what a forward brought where there is none yet."""
        block = self._slots.blocks.get(layer)
        if block is not None:
            return block.keys, block.values
        return next(write.prompt_kv for write in self._pending_writes[layer] if write.prompt_kv is not None)

    # -------------------------------------------------------------------- whole rows
    def select(self, rows: Tensor) -> Self:
        """A copy of these rows [N] (host), as last committed."""
        other = self._make_empty()
        other._row_state = {name: column[rows] for name, column in self._row_state.items()}
        other._slots = self._slots.select_rows(rows, _max_or_zero(other.slot_counts))
        return other

    def join(self, other: Self) -> None:
        """Take the rows of another one below its own."""
        self._slots.append(other._slots, len(self), len(other), _max_or_zero(other.slot_counts))
        self._row_state = {
            name: torch.cat((mine, other._row_state[name])) for name, mine in self._row_state.items()
        }

    def to(self, device: torch.device | str) -> None:
        """Move all blocks."""
        self._slots.to(device)

    def state(self) -> dict[str, Tensor]:
        """All rows as last committed: what is known of each, and its slots in every layer."""
        columns = {name: column.clone() for name, column in self._row_state.items()}
        return columns | self._slots.state(len(self), _max_or_zero(self.slot_counts))

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take what `state` gave, into an empty cache."""
        self._row_state = {name: state[name].cpu().to(mine.dtype) for name, mine in self._row_state.items()}
        self._slots.load(state)


def _max_or_zero(counts: Tensor) -> int:
    return int(counts.max()) if len(counts) else 0

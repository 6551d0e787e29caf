"""One step of every method: propose -> forward -> process -> select -> commit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from descant.rows import Column, Rows, identity, join, pick

if TYPE_CHECKING:
    from descant.ports import Cache, Model, Processor, Strategy

__all__ = [
    "Context",
    "Emission",
    "Hypothesis",
    "Lane",
    "Observation",
    "Output",
    "Params",
    "Proposal",
    "Selection",
    "params_of",
    "settle",
    "step",
]


# ------------------------------------------------------------------------ the records of a step
@dataclass(frozen=True)
class Proposal:
    """Rows to feed: row `i` forks row `parents[i]` and tries `drafts[i, :n[i]]` after its pending tokens."""

    parents: Tensor  # [R] (host)
    drafts: Tensor  # [R, K]
    n: Tensor  # [R] (host)
    probs: Tensor | None = None  # [R, K, V] the drafter's own law; None: certain

    @classmethod
    def none(cls, rows: Rows) -> Proposal:
        """Every row as it is, nothing tried: ordinary decoding."""
        count = len(rows)
        return cls(torch.arange(count), rows.tokens.new_empty(count, 0), torch.zeros(count, dtype=torch.long))


@dataclass
class Output:
    """What the model says: `logits[:, j]` predicts what follows draft `j - 1`, slot 0 what follows the row.

    `states` holds whatever else was asked for (hidden states, attentions), one entry a forward, with
    the fed rows and where each row's positions lie in it.
    """

    logits: Tensor  # [R, K + 1, V], float32
    states: list[Mapping[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Emission:
    """Tokens that became final in a step, row by row, on the host."""

    request: Tensor  # [N]
    slot: Tensor  # [N]
    tokens: Tensor  # [N]


@dataclass(frozen=True)
class Hypothesis:
    """One returned sequence: its new tokens, why it ended, and its score where the method has one."""

    tokens: Tensor  # [T] (host)
    reason: str  # "eos", "length", "time", "stop"
    score: float | None = None
    beams: tuple[int, ...] | None = None  # which slot of its request each token was chosen from


@dataclass(frozen=True)
class Selection:
    """Rows to keep: new row `i` continues fed row `parents[i]`, keeps `accepted[i]` drafts, then `tokens[i]`.

    `columns` and `slot` are aligned to the new rows. `emits` is False where no token is chosen yet.
    """

    parents: Tensor  # [R'] (host)
    accepted: Tensor  # [R'] (host)
    tokens: Tensor  # [R']
    slot: Tensor  # [R'] (host)
    columns: Mapping[str, Tensor | Column] = field(default_factory=dict)
    emits: bool | Tensor = True  # or [R'] of 0 and 1 (host)
    emitted: Emission | None = None
    finished: Sequence[int] = ()  # requests that have ended
    failed: Sequence[int] = ()  # requests with a row that has no token to choose


@dataclass(frozen=True)
class Observation:
    """What a step looked like before its choice, for one lane: for scores, traces and pictures."""

    rows: Rows
    logits: Tensor  # [R, K + 1, V] raw
    scores: Tensor  # [R, K + 1, V] processed
    output: Output


@dataclass(frozen=True)
class Params:
    """The column of parameters: `values[name]` is [R] or [R, W] on the host, equal inside a request."""

    values: Mapping[str, Tensor]
    constant: bool = True

    def __getitem__(self, name: str) -> Tensor:
        return self.values[name]

    def take(self, parents: Tensor) -> Self:
        """The parameters of the new rows."""
        return type(self)({name: value[parents] for name, value in self.values.items()})

    def cat(self, other: Self) -> Self:
        """These rows' parameters with another table's below."""
        return type(self)({name: join(value, other.values[name]) for name, value in self.values.items()})


def params_of(rows: Rows) -> Params:
    """The parameters of a table."""
    params = rows.columns["params"]
    assert isinstance(params, Params)
    return params


# ------------------------------------------------------------------------ what processors see
class Context:
    """Where each line of logits stands: line `i` follows `tokens[i, :length[i]]`.

    `param(name)` is that line's own parameter, [N, 1] for a number and [N, W] for a list padded with -1;
    `largest(name)` is its maximum over the lines, known on the host.
    """

    def __init__(
        self,
        tokens: Tensor,
        length: Tensor,
        prompt: Tensor,
        params: Mapping[str, Tensor],
        cache: dict[str, Tensor] | None = None,
    ) -> None:
        self._tokens = tokens  # [N, C]
        self._length = length  # [N] (host)
        self._prompt = prompt  # [N] (host)
        self._params = params  # [N] or [N, W] each (host)
        self._device: dict[str, Tensor] = {} if cache is None else cache

    @classmethod
    def of(cls, rows: Rows, proposal: Proposal, cache: dict[str, Tensor]) -> Context:
        """The lines of a table and its drafts, `K + 1` lines a row."""
        params = params_of(rows)
        width = proposal.drafts.shape[1]
        if not width:
            return cls(rows.tokens, rows.length, rows.prompt, params.values, cache)
        tokens = rows.append(proposal.drafts, proposal.n).tokens.repeat_interleave(width + 1, 0)
        row = torch.arange(len(rows)).repeat_interleave(width + 1)
        length = (rows.length[:, None] + torch.arange(width + 1)).flatten()
        values = {name: value[row] for name, value in params.values.items()}
        return cls(tokens, length, rows.prompt[row], values)

    @classmethod
    def standalone(cls, input_ids: Tensor, params: Mapping[str, Any]) -> Context:
        """A documented processor called by hand, as `(input_ids, scores)`: every id counts as real."""
        count, length = input_ids.shape
        prompt = torch.full((count,), int(params.get("prompt", 0)))
        return cls(input_ids, torch.full((count,), length), prompt, _lines(params, count))

    def fixed(self, params: Mapping[str, Any]) -> Context:
        """The same lines, with some parameters the same for all of them."""
        values = {**self._params, **_lines(params, len(self._length))}
        return Context(self._tokens, self._length, self._prompt, values)

    @property
    def tokens(self) -> Tensor:
        """What each line follows, right padded [N, L]."""
        return self._tokens[:, : int(self._length.max())]

    @cached_property
    def length(self) -> Tensor:
        """How many tokens each line follows [N, 1]."""
        return self._length.to(self._tokens.device, non_blocking=True)[:, None]

    @cached_property
    def generated(self) -> Tensor:
        """How many of them are new, not prompt [N, 1]."""
        return (self._length - self._prompt).to(self._tokens.device, non_blocking=True)[:, None]

    @cached_property
    def valid(self) -> Tensor:
        """Which of `tokens` are real [N, L]."""
        return torch.arange(self.tokens.shape[1], device=self._tokens.device) < self.length

    def param(self, name: str) -> Tensor:
        """That parameter on the device, [N, 1] or [N, W]."""
        if name not in self._device:
            value = self._params[name]
            kind = torch.float32 if value.is_floating_point() else value.dtype
            value = value.to(self._tokens.device, kind, non_blocking=True)
            self._device[name] = value if value.ndim > 1 else value[:, None]
        return self._device[name]

    def largest(self, name: str) -> int:
        """The largest value of an integer parameter, without asking the device."""
        return int(self._params[name].max())

    def level(self, name: str) -> bool:
        """Whether the parameter is the same for every line."""
        value = self._params[name]
        return bool((value == value[0]).all())

    def left_padded(self, fill: int) -> Tensor:
        """The tokens as a documented processor expects them: aligned at the right, `fill` before [N, W].

        The width is that of the call's padded prompts and what is new, also when the longest has left.
        """
        padding = (
            self._params["width"] - self._prompt
            if "width" in self._params
            else torch.zeros(1, dtype=torch.long)
        )
        wide = int((padding + self._length).max())
        at = torch.arange(wide, device=self._tokens.device) - (wide - self.length)
        return torch.where(at >= 0, self._tokens.gather(1, at.clamp(min=0)), fill)

    def take(self, index: Tensor) -> Context:
        """The lines `index` (host) alone."""
        values = {name: value[index] for name, value in self._params.items()}
        return Context(pick(self._tokens, index), self._length[index], self._prompt[index], values)


def _lines(params: Mapping[str, Any], count: int) -> dict[str, Tensor]:
    """Numbers and lists of numbers, repeated for so many lines."""
    values = {}
    for name, value in params.items():
        if isinstance(value, float):
            values[name] = torch.full((count,), value, dtype=torch.float64)
        elif isinstance(value, int | list):
            line = torch.tensor(value)
            values[name] = line.expand(count, *line.shape)
    return values


# ------------------------------------------------------------------------ the loop
@dataclass
class Lane:
    """The rows of one strategy, and the processors that any of them uses, in order."""

    strategy: Strategy
    index: Tensor | None  # [N] (host); None: the whole table
    stages: Sequence[tuple[Processor, Tensor | None]]  # each with the lane's rows that use it; None: all
    uploaded: dict[str, Tensor] = field(default_factory=dict)  # parameters on the device

    def process(self, rows: Rows, proposal: Proposal, logits: Tensor) -> Tensor:
        """The logits as the strategy reads them [R, K + 1, V]."""
        scores = logits.log_softmax(-1) if self.strategy.normalised else logits
        if not self.stages:
            return scores
        context = Context.of(rows, proposal, self.uploaded)
        lines, flat = logits.shape[1], scores.flatten(0, 1)
        for processor, index in self.stages:
            if index is None:
                flat = processor.process(context, flat)
                continue
            if lines > 1:
                index = (index[:, None] * lines + torch.arange(lines)).flatten()
            changed = processor.process(context.take(index), pick(flat, index))
            flat = flat.index_copy(0, index.to(flat.device), changed)
        return flat.view_as(scores)


def step(
    model: Model,
    cache: Cache,
    rows: Rows,
    lanes: Callable[[Rows], Sequence[Lane]],
    observe: Callable[[Observation], None] | None = None,
) -> tuple[Rows, list[Selection]]:
    """Advance every row: one forward for all, one choice per strategy, one commit."""
    proposal = _proposed(rows, lanes(rows))
    if not identity(proposal.parents, len(rows)):
        rows = rows.take(proposal.parents)
        cache.commit(proposal.parents, rows.cached)

    output = model.forward(rows, proposal, cache)

    chosen: list[tuple[Tensor | None, Selection]] = []
    for lane in lanes(rows):
        mine, tried, heard = _narrow(rows, proposal, output, lane.index)
        scores = lane.process(mine, tried, heard.logits)
        if observe is not None:
            observe(Observation(mine, heard.logits, scores, heard))
        chosen.append((lane.index, lane.strategy.select(mine, tried, replace(heard, logits=scores))))

    selection = _joined(rows, chosen)
    moved = settle(selection.parents.numpy(), len(rows))
    if moved is not None:
        selection = _ordered(selection, moved)
    fed = rows.pending[selection.parents] + selection.accepted
    rows = _extended(rows, proposal, selection)
    rows = replace(rows, cached=rows.cached + fed)
    cache.commit(selection.parents, rows.cached)
    return rows, [one for _, one in chosen]


def settle(parents: np.ndarray[Any, Any], rows: int) -> Tensor | None:
    """An order of the new rows that leaves each surviving row where its first child can keep it.

    A table has no order of its own, so only rows that were forked, or that fill a hole, need to move:
    None when the given order does so already.
    """
    count = len(parents)
    if count == rows and (parents == np.arange(rows)).all():
        return None
    place = np.full(max(count, rows), -1)
    first = np.unique(parents, return_index=True)[1]
    stays = first[parents[first] < count]
    place[parents[stays]] = stays
    rest = np.setdiff1d(np.arange(count), stays, assume_unique=True)
    place[np.flatnonzero(place[:count] < 0)] = rest
    return torch.from_numpy(place[:count])


def _proposed(rows: Rows, lanes: Sequence[Lane]) -> Proposal:
    """All lanes' proposals as one."""
    parts = [(lane.index, lane.strategy.propose(_rows_of(rows, lane.index))) for lane in lanes]
    if len(parts) == 1:
        return parts[0][1]
    width = max(part.drafts.shape[1] for _, part in parts)
    parents = torch.cat([part.parents if index is None else index[part.parents] for index, part in parts])
    drafts = torch.cat([_widened(part.drafts, width) for _, part in parts])
    joint = Proposal(
        parents, drafts, torch.cat([part.n for _, part in parts]), _laws([part for _, part in parts], width)
    )
    # Lanes are slices of one table, not blocks of it: rows keep their places unless somebody forks.
    order = settle(parents.numpy(), len(rows))
    if order is None:
        return joint
    probs = None if joint.probs is None else pick(joint.probs, order)
    return Proposal(parents[order], pick(drafts, order), joint.n[order], probs)


def _widened(drafts: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(drafts, (0, width - drafts.shape[1]))


def _laws(parts: Sequence[Proposal], width: int) -> Tensor | None:
    """The drafters' laws one below the other, certainty spelt out where another lane has a law [R, K, V]."""
    vocabulary = max((part.probs.shape[2] for part in parts if part.probs is not None), default=0)
    if not vocabulary:
        return None
    laws = []
    for part in parts:
        law = (
            torch.nn.functional.one_hot(part.drafts, vocabulary).float() if part.probs is None else part.probs
        )
        laws.append(torch.nn.functional.pad(law, (0, 0, 0, width - law.shape[1])))
    return torch.cat(laws)


def _rows_of(rows: Rows, index: Tensor | None) -> Rows:
    return rows if index is None else rows.take(index)


def _narrow(
    rows: Rows, proposal: Proposal, output: Output, index: Tensor | None
) -> tuple[Rows, Proposal, Output]:
    """What one lane sees of a step."""
    if index is None:
        return rows, proposal, output
    probs = None if proposal.probs is None else pick(proposal.probs, index)
    tried = Proposal(torch.arange(len(index)), pick(proposal.drafts, index), proposal.n[index], probs)
    # Named after the table and the lane, so that what is compiled for it lasts as long as they do.
    mine = replace(rows.take(index), version=(rows.version, int(index[0])))
    return mine, tried, Output(pick(output.logits, index), output.states)


def _joined(rows: Rows, chosen: Sequence[tuple[Tensor | None, Selection]]) -> Selection:
    """The lanes' selections as one; a column that a lane does not write follows its row."""
    if len(chosen) == 1:
        return chosen[0][1]
    ones = [one for _, one in chosen]
    parents = [one.parents if index is None else index[one.parents] for index, one in chosen]
    columns: dict[str, Tensor | Column] = {}
    for name in {name for one in ones for name in one.columns}:
        parts = [
            one.columns[name] if name in one.columns else _taken(rows.columns[name], whence)
            for one, whence in zip(ones, parents, strict=True)
        ]
        columns[name] = parts[0]
        for part in parts[1:]:
            columns[name] = _stacked(columns[name], part)
    return Selection(
        torch.cat(parents),
        torch.cat([one.accepted for one in ones]),
        torch.cat([one.tokens for one in ones]),
        torch.cat([one.slot for one in ones]),
        columns,
        torch.cat([_emitting(one) for one in ones]),
    )


def _emitting(selection: Selection) -> Tensor:
    """How many tokens beyond its accepted drafts each new row decides, 0 or 1 [R'] (host)."""
    if isinstance(selection.emits, Tensor):
        return selection.emits
    return torch.full_like(selection.accepted, int(selection.emits))


def _taken(column: Tensor | Column, parents: Tensor) -> Tensor | Column:
    return pick(column, parents) if isinstance(column, Tensor) else column.take(parents)


def _stacked(first: Tensor | Column, second: Tensor | Column) -> Tensor | Column:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return join(first, second)
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        raise TypeError("a column is a tensor in one lane and Python state in another")
    return first.cat(second)


def _ordered(selection: Selection, order: Tensor) -> Selection:
    """The same selection with its new rows in another order."""
    return replace(
        selection,
        parents=selection.parents[order],
        accepted=selection.accepted[order],
        tokens=pick(selection.tokens, order),
        slot=selection.slot[order],
        columns={name: _taken(value, order) for name, value in selection.columns.items()},
        emits=selection.emits if isinstance(selection.emits, bool) else selection.emits[order],
    )


def _extended(rows: Rows, proposal: Proposal, selection: Selection) -> Rows:
    """The kept rows with their accepted drafts and their next token decided."""
    width = proposal.drafts.shape[1]
    rows = rows.take(selection.parents)
    if width:
        rows = rows.append(pick(proposal.drafts, selection.parents), selection.accepted)
    if selection.emits is not False:
        rows = rows.append(selection.tokens[:, None], _emitting(selection))
    columns = {**rows.columns, **selection.columns} if selection.columns else rows.columns
    return replace(rows, slot=selection.slot, columns=columns)

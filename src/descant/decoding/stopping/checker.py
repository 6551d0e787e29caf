"""What ends a row: its end token, its length, its time, its text, or a criterion of the user's own."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.core.context import Context, params_of
from descant.core.interfaces import Peers
from descant.core.records import Observation, Proposal, Selection
from descant.core.rows import Rows, pick
from descant.errors import InputError

if TYPE_CHECKING:
    from descant.tokenization.stop_strings import StopTable
    from descant.tokenization.token_bytes import Vocabulary
    from descant.tokenization.token_healing import Tail

__all__ = ["Criterion", "Pattern", "Stops"]

Array = np.ndarray[Any, np.dtype[Any]]
Criterion = Callable[..., Any]  # (input_ids [N, L], scores) -> bool, or bool [N]


class Pattern(NamedTuple):
    """A regular expression that ends a row once its new text matches, and the bytes its tokens stand for."""

    expression: re.Pattern[str]
    vocabulary: Vocabulary

    def found(self, tokens: Sequence[int], skip: int = 0) -> bool:
        """Whether the text of these tokens matches, but for its first `skip` bytes."""
        return self.expression.search(self.vocabulary.text(tokens, skip)) is not None


class _Terms(NamedTuple):
    """What the rows of one layout of the table are measured by, worked out once."""

    version: object
    last: Array  # [R] the length before a row's last choice
    soonest: int  # the least of them
    eos: Array | None  # [R, E] end tokens, None where no row has any
    stops: Array | None  # [R, E] further tokens that end a row
    deadline: Array | None  # [R], None where no row has one
    tables: Sequence[tuple[StopTable, Array]]  # each with the rows [R] that it watches
    patterns: Sequence[tuple[Pattern, Array]]
    criteria: Sequence[tuple[Criterion, Array]]


class Stops:
    """Every reason that can end a row of the table, asked about candidates that are not appended yet.

    What is not a number is kept on a shelf, and a parameter of the row names its place there.
    """

    state = "stop_state"  # the column that says how much of a stop string a row's text ends with

    def __init__(self) -> None:
        self.criteria: Mapping[int, tuple[Criterion, ...]] = {}
        self.tables: Mapping[int, StopTable] = {}
        self.patterns: Mapping[int, Pattern] = {}
        self.peers: Peers | None = None
        # Whether any of the peers has a deadline or a criterion: then all exchange their verdicts.
        self.heeded = False
        self._terms: _Terms | None = None

    def ended(self, rows: Rows, parents: Tensor | None, tokens: Tensor) -> Sequence[tuple[str, Array]]:
        """Reasons that end somebody, and which candidates [N]: `tokens[i]` after row `parents[i]` (host)."""
        # Numpy, here and where else a step works on a handful of host numbers: torch's dispatch would
        # take longer than the work.
        terms, even = self._terms_of(rows), rows.even
        index = None if parents is None else parents.numpy()
        found: list[tuple[str, Array]] = []
        for name, ids in (("eos", terms.eos), ("stop", terms.stops)):
            if ids is not None:
                ends = (tokens.numpy()[:, None] == (ids if index is None else ids[index])).any(1)
                if ends.any():
                    found.append((name, ends))
        if even is None or even.length >= terms.soonest:
            full = rows.length.numpy() >= terms.last
            if full.any():
                found.append(("length", full if index is None else full[index]))
        if terms.deadline is None and not (terms.tables or terms.patterns or terms.criteria or self.heeded):
            return found
        parents = torch.arange(len(rows)) if parents is None else parents
        late, asked = self._outside(terms, rows, parents, tokens)
        found += [("time", late)] if late.any() else []
        if terms.tables or terms.patterns:
            found += self._texts(terms, rows, parents, tokens)
        return [*found, ("stop", asked)] if asked.any() else found

    def first(self, rows: Rows, run: Tensor, count: Array) -> tuple[Array, list[str | None]]:
        """How many of each row's next tokens `run[i, :count[i]]` (host) stand until one ends it, and why."""
        terms, stands = self._terms_of(rows), count.copy()
        why: list[str | None] = [None] * len(rows)
        longest = int(count.max(initial=0))
        if longest > 1 and (terms.tables or terms.patterns or terms.criteria):
            rows = rows.append(run.to(rows.tokens.device), rows.length)  # for those who read what came before
        now = rows
        for place in range(longest):
            here = np.flatnonzero((count > place) & (stands > place))
            if not len(here):
                break
            parents = None if len(here) == len(rows) else torch.from_numpy(here)
            for name, which in self.ended(now, parents, run[torch.from_numpy(here), place]):
                for row in here[which].tolist():
                    stands[row], why[row] = place + 1, why[row] or name
            if place + 1 < longest:
                now = self._moved(terms, rows, now, run[:, place], place + 1)
        return stands, why

    def _moved(self, terms: _Terms, rows: Rows, now: Rows, tokens: Tensor, count: int) -> Rows:
        """The rows with `count` tokens more, of which `tokens` [R] are the last."""
        fields: dict[str, Any] = {"length": rows.length + count}
        if terms.tables:
            state = now.column(self.state).numpy().copy()
            for table, mine in terms.tables:
                _read(table, mine, tokens.numpy(), state)
            fields["columns"] = {**rows.columns, self.state: torch.from_numpy(state)}
        return now.changed(**fields)

    def follow(self, seen: Observation, proposal: Proposal, selection: Selection) -> Selection:
        """The selection with the state of every row's stop strings after its new tokens."""
        rows, terms = seen.rows, self._terms_of(seen.rows)
        if not terms.tables:
            return selection
        parents = np.arange(len(rows)) if selection.parents is None else selection.parents.numpy()
        tokens = selection.tokens.cpu() if selection.host is None else selection.host
        state = rows.column(self.state).numpy()[parents]
        accepted = np.zeros(len(parents), dtype=np.int64)
        drafts = None
        if selection.accepted is not None:
            accepted = selection.accepted.numpy()
            if proposal.drafts is not None and accepted.max(initial=0) > 0:
                drafts = pick(proposal.drafts, torch.from_numpy(parents)).cpu().numpy()
        spoken = np.broadcast_to(np.asarray(selection.emits) > 0, len(parents))
        for table, mine in terms.tables:
            users = mine[parents]
            for place in range(0 if drafts is None else int(accepted.max())):
                assert drafts is not None
                _read(table, users & (accepted > place), drafts[:, place], state)
            _read(table, users & spoken, tokens.numpy(), state)
            for row in np.flatnonzero(users & (accepted < 0)).tolist():  # what was taken back is unsaid
                left = int(rows.length[parents[row]] + accepted[row])
                state[row] = table.run(rows.tokens[parents[row], :left].tolist())
        return selection._replace(columns={**selection.columns, self.state: torch.from_numpy(state)})

    def _outside(self, terms: _Terms, rows: Rows, parents: Tensor, tokens: Tensor) -> tuple[Array, Array]:
        """Which candidates [N] the clock ends, and which the user: what does not follow from the tokens."""
        index = parents.numpy()
        late = asked = np.zeros(len(index), dtype=bool)
        if terms.deadline is not None:
            late = (terms.deadline <= time.monotonic())[index]
        for criterion, mine in terms.criteria:
            asked = asked | _asked(criterion, rows, parents, tokens, mine)
        if self.peers is not None and self.heeded:
            late, asked = self.peers.word(torch.from_numpy(np.stack((late, asked))).long()).bool().numpy()
        return late, asked

    def _texts(self, terms: _Terms, rows: Rows, parents: Tensor, tokens: Tensor) -> list[tuple[str, Array]]:
        """The verdicts on what the candidates say."""
        verdicts = []
        index = parents.numpy()
        if terms.tables:
            state, verdict = rows.column(self.state).numpy()[index], np.zeros(len(index), dtype=bool)
            for table, mine in terms.tables:
                here = np.flatnonzero(mine[index] & (tokens.numpy() < table.size))
                verdict[here] = table.hits[tokens.numpy()[here], state[here]]
                for place in here[verdict[here]].tolist() if "healing" in params_of(rows).values else ():
                    verdict[place] = _closed(table, rows, int(index[place]), int(tokens[place]))
            verdicts.append(verdict)
        verdicts += [_matched(pattern, rows, parents, tokens, mine) for pattern, mine in terms.patterns]
        return [("stop", verdict) for verdict in verdicts if verdict.any()]

    def _terms_of(self, rows: Rows) -> _Terms:
        terms = self._terms
        if terms is None or terms.version != rows.version:
            terms = self._terms = self._measured(rows)
        return terms

    def _measured(self, rows: Rows) -> _Terms:
        params = params_of(rows)
        last, eos, stops, deadline = (
            params[name].numpy() for name in ("last", "eos", "stop_ids", "deadline")
        )
        own = params["criteria"].numpy()
        criteria = {id(one): one for some in self.criteria.values() for one in some}
        masks = {
            name: np.isin(
                own, [place for place, some in self.criteria.items() if any(one is c for c in some)]
            )
            for name, one in criteria.items()
        }
        return _Terms(
            rows.version,
            last,
            int(last.min()),
            eos if bool((eos >= 0).any()) else None,
            stops if bool((stops >= 0).any()) else None,
            deadline if bool(np.isfinite(deadline).any()) else None,
            _users(self.tables, params["stop_table"].numpy()),
            _users(self.patterns, params["stop_pattern"].numpy()),
            [(criteria[name], mask) for name, mask in masks.items() if mask.any()],
        )


def _read(table: StopTable, mine: Array, tokens: Array, state: Array) -> None:
    """Bring the state [R] of the rows `mine` forward by a token each, in place."""
    # A model may have more tokens than its tokenizer: these have no text and move nothing.
    here = np.flatnonzero(mine & (tokens < table.size))
    state[here] = table.next[tokens[here], state[here]]


def _users(shelf: Mapping[int, Any], places: Array) -> list[tuple[Any, Array]]:
    """What the rows name on a shelf, each with which rows do."""
    return [(one, mine) for place, one in shelf.items() if (mine := places == place).any()]


def _closed(table: StopTable, rows: Rows, row: int, token: int) -> bool:
    """Whether a candidate that completes a stop string does so after what token healing says again."""
    tail, start = _healing(rows, row), int(rows.prompt[row])
    if tail is None:
        return True
    ids = rows.tokens[row, : int(rows.length[row])].tolist()
    return tail.closes(ids[max(0, start - table.reach) : start], [*ids[start:], token], table.strings)


def _healing(rows: Rows, row: int) -> Tail | None:
    """What token healing has taken off a row's prompt."""
    tails = params_of(rows).values.get("healing")
    return None if tails is None else tails[row]  # type: ignore[return-value]


def _matched(pattern: Pattern, rows: Rows, parents: Tensor, tokens: Tensor, mine: Array) -> Array:
    """Which candidates [N] make a row's new text match."""
    verdict = np.zeros(len(parents), dtype=bool)
    here = np.flatnonzero(mine[parents.numpy()])
    written = pick(rows.tokens, parents[here]).cpu()
    for line, place in enumerate(here.tolist()):
        row = int(parents[place])
        new = written[line, int(rows.prompt[row]) : int(rows.length[row])].tolist()
        tail = _healing(rows, row)
        verdict[place] = pattern.found([*new, int(tokens[place])], 0 if tail is None else len(tail.text))
    return verdict


def _asked(criterion: Criterion, rows: Rows, parents: Tensor, tokens: Tensor, mine: Array) -> Array:
    """A user's verdict on the candidates [N] of the rows `mine`, who sees ids padded on the left."""
    index = torch.from_numpy(np.flatnonzero(mine[parents.numpy()]))
    answer = torch.zeros(len(parents), dtype=torch.bool)
    if not len(index):
        return answer.numpy()
    after = rows.take(parents[index])
    after = after.append(tokens[index].to(rows.tokens.device)[:, None], after.length + 1)
    context = Context(after.tokens, after.length, after.prompt, params_of(after).values)
    for part in context.abreast():
        some = index if part is None else index[part]
        answer[some] = _verdict(criterion, context if part is None else context.take(part), len(some))
    return answer.numpy()


def _verdict(criterion: Criterion, context: Context, count: int) -> Tensor:
    """What a user says of `count` equally wide lines [N]."""
    verdict: Any = criterion(context.left_padded(), None)
    if isinstance(verdict, bool):
        verdict = torch.full((count,), verdict)
    alike = isinstance(verdict, Tensor) and verdict.dtype == torch.bool
    if not alike or verdict.shape not in (torch.Size([]), torch.Size([count])):
        must = f"must answer a bool, or a tensor of {count} bools, one a row"
        do = "return torch.zeros(len(input_ids), dtype=torch.bool) where no row is to end"
        raise InputError("stopping_criteria", must, verdict, do)
    told: Tensor = verdict.cpu().expand(count)
    return told

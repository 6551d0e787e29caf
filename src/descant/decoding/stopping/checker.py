"""What ends a row: its end token, its length, its time, its text, or a criterion of the user's own."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.core.context import Context, row_params
from descant.core.interfaces import RankGroup
from descant.core.records import Observation, Proposal, Selection
from descant.core.rows import Rows, index_rows
from descant.errors import InputError

if TYPE_CHECKING:
    from descant.tokenization.stop_strings import StopStringMatcher
    from descant.tokenization.token_bytes import TokenBytes
    from descant.tokenization.token_healing import HealedSuffix

__all__ = ["Criterion", "RegexStop", "StopChecker"]

Array = np.ndarray[Any, np.dtype[Any]]
Criterion = Callable[..., Any]  # (input_ids [N, L], scores) -> bool, or bool [N]


class RegexStop(NamedTuple):
    """A regular expression that ends a row once its new text matches, and the bytes its tokens stand for."""

    regex: re.Pattern[str]
    token_bytes: TokenBytes

    def matches(self, tokens: Sequence[int], skip: int = 0) -> bool:
        """Whether the text of these tokens matches, but for its first `skip` bytes."""
        return self.regex.search(self.token_bytes.text(tokens, skip)) is not None


class _StopTerms(NamedTuple):
    """What the rows of one layout of the table are measured by, worked out once."""

    version: object
    last_length: Array  # [R] the length before a row's last choice
    min_last_length: int  # the least of them
    eos_token_ids: Array | None  # [R, E] end tokens, None where no row has any
    stop_token_ids: Array | None  # [R, E] further tokens that end a row
    deadlines: Array | None  # [R], None where no row has one
    string_matchers: Sequence[tuple[StopStringMatcher, Array]]  # each with the rows [R] that it watches
    regex_stops: Sequence[tuple[RegexStop, Array]]
    criteria: Sequence[tuple[Criterion, Array]]


class StopChecker:
    """Every reason that can end a row of the table, asked about candidates that are not appended yet.

    What is not a number is kept on a shelf, and a parameter of the row names its place there.
    """

    state_column = "stop_state"  # the column that says how much of a stop string a row's text ends with

    def __init__(self) -> None:
        self.criteria: Mapping[int, tuple[Criterion, ...]] = {}
        self.string_matchers: Mapping[int, StopStringMatcher] = {}
        self.regex_stops: Mapping[int, RegexStop] = {}
        self.rank_group: RankGroup | None = None
        # Whether any of the peers has a deadline or a criterion: then all exchange their verdicts.
        self.syncs_across_ranks = False
        self._terms: _StopTerms | None = None

    def finish_reasons(
        self, rows: Rows, parents: Tensor | None, tokens: Tensor
    ) -> Sequence[tuple[str, Array]]:
        """Reasons that end somebody, and which candidates [N]: `tokens[i]` after row `parents[i]` (host)."""
        # Numpy, here and where else a step works on a handful of host numbers: torch's dispatch would
        # take longer than the work.
        terms, even = self._get_terms(rows), rows.uniform_length
        index = None if parents is None else parents.numpy()
        found: list[tuple[str, Array]] = []
        for name, ids in (("eos", terms.eos_token_ids), ("stop", terms.stop_token_ids)):
            if ids is not None:
                ends = (tokens.numpy()[:, None] == (ids if index is None else ids[index])).any(1)
                if ends.any():
                    found.append((name, ends))
        if even is None or even.length >= terms.min_last_length:
            full = rows.length.numpy() >= terms.last_length
            if full.any():
                found.append(("length", full if index is None else full[index]))
        if terms.deadlines is None and not (
            terms.string_matchers or terms.regex_stops or terms.criteria or self.syncs_across_ranks
        ):
            return found
        parents = torch.arange(len(rows)) if parents is None else parents
        late, asked = self._check_time_and_criteria(terms, rows, parents, tokens)
        found += [("time", late)] if late.any() else []
        if terms.string_matchers or terms.regex_stops:
            found += self._check_texts(terms, rows, parents, tokens)
        return [*found, ("stop", asked)] if asked.any() else found

    def first_stop(self, rows: Rows, run: Tensor, count: Array) -> tuple[Array, list[str | None]]:
        """How many of each row's next tokens `run[i, :count[i]]` (host) stand until one ends it, and why."""
        terms, stands = self._get_terms(rows), count.copy()
        why: list[str | None] = [None] * len(rows)
        longest = int(count.max(initial=0))
        if longest > 1 and (terms.string_matchers or terms.regex_stops or terms.criteria):
            rows = rows.append(run.to(rows.tokens.device), rows.length)  # for those who read what came before
        now = rows
        for place in range(longest):
            here = np.flatnonzero((count > place) & (stands > place))
            if not len(here):
                break
            parents = None if len(here) == len(rows) else torch.from_numpy(here)
            for name, which in self.finish_reasons(now, parents, run[torch.from_numpy(here), place]):
                for row in here[which].tolist():
                    stands[row], why[row] = place + 1, why[row] or name
            if place + 1 < longest:
                now = self._advance(terms, rows, now, run[:, place], place + 1)
        return stands, why

    def _advance(self, terms: _StopTerms, rows: Rows, now: Rows, tokens: Tensor, count: int) -> Rows:
        """The rows with `count` tokens more, of which `tokens` [R] are the last."""
        fields: dict[str, Any] = {"length": rows.length + count}
        if terms.string_matchers:
            state = now.column(self.state_column).numpy().copy()
            for table, mine in terms.string_matchers:
                _advance_states(table, mine, tokens.numpy(), state)
            fields["columns"] = {**rows.columns, self.state_column: torch.from_numpy(state)}
        return now.replace(**fields)

    def observe(self, seen: Observation, proposal: Proposal, selection: Selection) -> Selection:
        """The selection with the state of every row's stop strings after its new tokens."""
        rows, terms = seen.rows, self._get_terms(seen.rows)
        if not terms.string_matchers:
            return selection
        parents = np.arange(len(rows)) if selection.parents is None else selection.parents.numpy()
        tokens = selection.tokens.cpu() if selection.host_tokens is None else selection.host_tokens
        state = rows.column(self.state_column).numpy()[parents]
        accepted = np.zeros(len(parents), dtype=np.int64)
        drafts = None
        if selection.accepted is not None:
            accepted = selection.accepted.numpy()
            if proposal.drafts is not None and accepted.max(initial=0) > 0:
                drafts = index_rows(proposal.drafts, torch.from_numpy(parents)).cpu().numpy()
        spoken = np.broadcast_to(np.asarray(selection.emit_mode) > 0, len(parents))
        for table, mine in terms.string_matchers:
            users = mine[parents]
            for place in range(0 if drafts is None else int(accepted.max())):
                assert drafts is not None
                _advance_states(table, users & (accepted > place), drafts[:, place], state)
            _advance_states(table, users & spoken, tokens.numpy(), state)
            for row in np.flatnonzero(users & (accepted < 0)).tolist():  # what was taken back is unsaid
                left = int(rows.length[parents[row]] + accepted[row])
                state[row] = table.state_after(rows.tokens[parents[row], :left].tolist())
        return selection._replace(columns={**selection.columns, self.state_column: torch.from_numpy(state)})

    def _check_time_and_criteria(
        self, terms: _StopTerms, rows: Rows, parents: Tensor, tokens: Tensor
    ) -> tuple[Array, Array]:
        """Which candidates [N] the clock ends, and which the user: what does not follow from the tokens."""
        index = parents.numpy()
        late = asked = np.zeros(len(index), dtype=bool)
        if terms.deadlines is not None:
            late = (terms.deadlines <= time.monotonic())[index]
        for criterion, mine in terms.criteria:
            asked = asked | _call_criterion(criterion, rows, parents, tokens, mine)
        if self.rank_group is not None and self.syncs_across_ranks:
            late, asked = (
                self.rank_group.broadcast(torch.from_numpy(np.stack((late, asked))).long()).bool().numpy()
            )
        return late, asked

    def _check_texts(
        self, terms: _StopTerms, rows: Rows, parents: Tensor, tokens: Tensor
    ) -> list[tuple[str, Array]]:
        """The verdicts on what the candidates say."""
        verdicts = []
        index = parents.numpy()
        if terms.string_matchers:
            state, verdict = rows.column(self.state_column).numpy()[index], np.zeros(len(index), dtype=bool)
            for table, mine in terms.string_matchers:
                here = np.flatnonzero(mine[index] & (tokens.numpy() < table.vocab_size))
                verdict[here] = table.matches[tokens.numpy()[here], state[here]]
                for place in (
                    here[verdict[here]].tolist() if "healed_suffix" in row_params(rows).values else ()
                ):
                    verdict[place] = _completes_after_healing(
                        table, rows, int(index[place]), int(tokens[place])
                    )
            verdicts.append(verdict)
        verdicts += [
            _match_regex(pattern, rows, parents, tokens, mine) for pattern, mine in terms.regex_stops
        ]
        return [("stop", verdict) for verdict in verdicts if verdict.any()]

    def _get_terms(self, rows: Rows) -> _StopTerms:
        terms = self._terms
        if terms is None or terms.version != rows.version:
            terms = self._terms = self._build_terms(rows)
        return terms

    def _build_terms(self, rows: Rows) -> _StopTerms:
        params = row_params(rows)
        last, eos, stops, deadline = (
            params[name].numpy() for name in ("last_length", "eos_token_ids", "stop_token_ids", "deadline")
        )
        own = params["criteria_id"].numpy()
        criteria = {id(one): one for some in self.criteria.values() for one in some}
        masks = {
            name: np.isin(
                own, [place for place, some in self.criteria.items() if any(one is c for c in some)]
            )
            for name, one in criteria.items()
        }
        return _StopTerms(
            rows.version,
            last,
            int(last.min()),
            eos if bool((eos >= 0).any()) else None,
            stops if bool((stops >= 0).any()) else None,
            deadline if bool(np.isfinite(deadline).any()) else None,
            _rows_by_entry(self.string_matchers, params["stop_strings_id"].numpy()),
            _rows_by_entry(self.regex_stops, params["stop_regex_id"].numpy()),
            [(criteria[name], mask) for name, mask in masks.items() if mask.any()],
        )


def _advance_states(table: StopStringMatcher, mine: Array, tokens: Array, state: Array) -> None:
    """Bring the state [R] of the rows `mine` forward by a token each, in place."""
    # A model may have more tokens than its tokenizer: these have no text and move nothing.
    here = np.flatnonzero(mine & (tokens < table.vocab_size))
    state[here] = table.transition[tokens[here], state[here]]


def _rows_by_entry(shelf: Mapping[int, Any], places: Array) -> list[tuple[Any, Array]]:
    """What the rows name on a shelf, each with which rows do."""
    return [(one, mine) for place, one in shelf.items() if (mine := places == place).any()]


def _completes_after_healing(table: StopStringMatcher, rows: Rows, row: int, token: int) -> bool:
    """Whether a candidate that completes a stop string does so after what token healing says again."""
    tail, start = _get_healed_suffix(rows, row), int(rows.prompt_length[row])
    if tail is None:
        return True
    ids = rows.tokens[row, : int(rows.length[row])].tolist()
    return tail.completes_string(
        ids[max(0, start - table.max_match_tokens) : start], [*ids[start:], token], table.strings
    )


def _get_healed_suffix(rows: Rows, row: int) -> HealedSuffix | None:
    """What token healing has taken off a row's prompt."""
    tails = row_params(rows).values.get("healed_suffix")
    return None if tails is None else tails[row]  # type: ignore[return-value]


def _match_regex(pattern: RegexStop, rows: Rows, parents: Tensor, tokens: Tensor, mine: Array) -> Array:
    """Which candidates [N] make a row's new text match."""
    verdict = np.zeros(len(parents), dtype=bool)
    here = np.flatnonzero(mine[parents.numpy()])
    written = index_rows(rows.tokens, parents[here]).cpu()
    for line, place in enumerate(here.tolist()):
        row = int(parents[place])
        new = written[line, int(rows.prompt_length[row]) : int(rows.length[row])].tolist()
        tail = _get_healed_suffix(rows, row)
        verdict[place] = pattern.matches([*new, int(tokens[place])], 0 if tail is None else len(tail.text))
    return verdict


def _call_criterion(criterion: Criterion, rows: Rows, parents: Tensor, tokens: Tensor, mine: Array) -> Array:
    """A user's verdict on the candidates [N] of the rows `mine`, who sees ids padded on the left."""
    index = torch.from_numpy(np.flatnonzero(mine[parents.numpy()]))
    answer = torch.zeros(len(parents), dtype=torch.bool)
    if not len(index):
        return answer.numpy()
    after = rows.take(parents[index])
    after = after.append(tokens[index].to(rows.tokens.device)[:, None], after.length + 1)
    context = Context(after.tokens, after.length, after.prompt_length, row_params(after).values)
    for part in context.equal_width_groups():
        some = index if part is None else index[part]
        answer[some] = _criterion_mask(criterion, context if part is None else context.take(part), len(some))
    return answer.numpy()


def _criterion_mask(criterion: Criterion, context: Context, count: int) -> Tensor:
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

"""Stop conditions: the checker that ends rows, and the documented `StoppingCriteria`."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from descant.core.context import CallBatches, Context, row_params
from descant.core.interfaces import Array, RankGroup
from descant.core.records import Observation, Proposal, Selection
from descant.core.rows import Rows, index_rows
from descant.errors import InputError
from descant.tokenization.stop_strings import StopStringMatcher, normalize_stop_strings
from descant.tokenization.token_bytes import TokenBytes

if TYPE_CHECKING:
    from descant.tokenization.token_healing import HealedSuffix


class StoppingCriteria:
    """Base class of stopping criteria; a subclass defines `__call__`."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Return which rows [N, L], padded on the left, end: bool [N] on their device."""
        raise NotImplementedError(f"{type(self).__name__} must define `__call__`")


class StoppingCriteriaList(list[Any]):
    """Criteria any of which ends a row; each returns a bool for all rows or one per row."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Return which rows [N, L] any criterion ends, bool [N]."""
        ended = _full_mask(input_ids, False)
        for criterion in self:
            verdict = criterion(input_ids, scores, **kwargs)
            ended = ended | _checked_mask(type(criterion).__name__, verdict, len(input_ids)).to(ended.device)
        return ended

    @property
    def max_length(self) -> int | None:
        """The `max_length` of the first `MaxLengthCriteria`, if there is one."""
        return next(
            (criterion.max_length for criterion in self if isinstance(criterion, MaxLengthCriteria)), None
        )


class MaxLengthCriteria(StoppingCriteria):
    """Ends rows of at least `max_length` tokens, prompt included on decoder-only models.

    `max_position_embeddings` is the model's maximum length. Rows that reach it and do not end give one
    warning, as transformers 4.52 documents it: some models read longer rows, and some fail.
    """

    def __init__(self, max_length: int, max_position_embeddings: int | None = None) -> None:
        self.max_length = _check_count("max_length", max_length)
        if max_position_embeddings is not None:
            _check_count("max_position_embeddings", max_position_embeddings)
        self.max_position_embeddings = max_position_embeddings
        self._has_warned = False

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:  # noqa: ARG002
        """Return whether the rows [N, L] are long enough, the same for all [N]."""
        length, limit = input_ids.shape[1], self.max_position_embeddings
        is_done = length >= self.max_length
        if limit is not None and length >= limit and not is_done and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"rows of {length} tokens have reached the {limit} positions of the model and go on to "
                f"`max_length` = {self.max_length}: longer rows may raise an error or lose quality",
                stacklevel=2,
            )
        return _full_mask(input_ids, is_done)


class MaxTimeCriteria(StoppingCriteria):
    """Ends all rows `max_time` seconds after `initial_timestamp`, by default the time of construction.

    Both use `time.time()`. `initial_time` is the documented name of the same argument.
    """

    def __init__(
        self, max_time: float, initial_timestamp: float | None = None, *, initial_time: float | None = None
    ) -> None:
        self.max_time = _check_seconds("max_time", max_time)
        if initial_timestamp is not None and initial_time is not None:
            must = "must not be given with `initial_timestamp`, which is the same argument"
            raise InputError("initial_time", must, initial_time, "leave it out")
        initial_timestamp = initial_time if initial_timestamp is None else initial_timestamp
        self.initial_timestamp = time.time() if initial_timestamp is None else initial_timestamp

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:  # noqa: ARG002
        """Return whether the time is over, the same for all rows [N]."""
        return _full_mask(input_ids, time.time() - self.initial_timestamp > self.max_time)


class EosTokenCriteria(StoppingCriteria):
    """Ends rows whose last token is `eos_token_id`, or one of them."""

    def __init__(self, eos_token_id: int | Sequence[int] | Tensor) -> None:
        try:
            ids = torch.as_tensor(eos_token_id).reshape(-1)
        except (TypeError, ValueError, RuntimeError):
            ids = torch.zeros(0)
        if not len(ids) or ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
            raise InputError("eos_token_id", "must be a token id or a list of them", eos_token_id)
        self.eos_token_id = ids.long()

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:  # noqa: ARG002
        """Return which rows [N, L] end with such a token [N]."""
        if input_ids.shape[1] == 0:
            return _full_mask(input_ids, False)
        return torch.isin(input_ids[:, -1], self.eos_token_id.to(input_ids.device))


class StopStringCriteria(StoppingCriteria):
    """Ends rows whose last token completes a stop string, wherever it started.

    Strings are compared as UTF-8 bytes, independently of token boundaries. Leading padding is no text.
    """

    def __init__(self, tokenizer: Any, stop_strings: str | Iterable[str]) -> None:
        self.stop_strings = normalize_stop_strings(stop_strings)
        self.matcher = StopStringMatcher.from_tokenizer(tokenizer, self.stop_strings)
        self._pad_token_id = _get_pad_token_id(tokenizer)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:  # noqa: ARG002
        """Return which rows [N, L] have just completed a stop string [N]."""
        ids = _mask_left_padding(input_ids.cpu().numpy(), self._pad_token_id)
        return torch.from_numpy(self.matcher.ends_with_match(ids)).to(input_ids.device)


class StopRegexCriteria(StoppingCriteria):
    """Ends rows whose text after the first `prompt_length` tokens matches a regular expression.

    Incomplete UTF-8 characters at the end are ignored.
    """

    def __init__(self, tokenizer: Any, pattern: str | re.Pattern[str], prompt_length: int = 0) -> None:
        try:
            self.pattern = re.compile(pattern)
        except (re.error, TypeError) as error:
            raise InputError("pattern", f"must be a regular expression ({error})", pattern) from error
        self.prompt_length = _check_count("prompt_length", prompt_length)
        self._token_bytes = TokenBytes.from_tokenizer(tokenizer)
        self._pad_token_id = _get_pad_token_id(tokenizer)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:  # noqa: ARG002
        """Return which rows [N, L] match [N]."""
        ids = _mask_left_padding(input_ids.cpu().numpy(), self._pad_token_id)[:, self.prompt_length :]
        matches = [self.pattern.search(self._token_bytes.text(row)) is not None for row in ids.tolist()]
        return torch.tensor(matches, dtype=torch.bool, device=input_ids.device)


def validate_stopping_criteria(
    stopping_criteria: StoppingCriteriaList, max_length: int
) -> StoppingCriteriaList:
    """A copy of the list with a `MaxLengthCriteria`, added if it has none; warns if its length is another."""
    checked = deepcopy(stopping_criteria)
    own = checked.max_length
    if own is None:
        checked.append(MaxLengthCriteria(max_length=max_length))
    elif own != max_length:
        text = f"`max_length` differs: {own} in the stopping criteria, {max_length} as the argument"
        warnings.warn(text, UserWarning, stacklevel=2)
    return checked


def _checked_mask(name: str, verdict: Any, count: int, do: str = "") -> Tensor:
    """The verdict of a criterion on `count` rows as a mask, of no or one dimension."""
    mask = torch.tensor(verdict) if isinstance(verdict, bool) else verdict
    is_mask = isinstance(mask, Tensor) and mask.dtype == torch.bool
    if not is_mask or mask.shape not in (torch.Size([]), torch.Size([count])):
        must = f"must return a bool, or a bool tensor with one entry per row ({count})"
        raise InputError(name, must, verdict, do)
    return cast(Tensor, mask)


def _full_mask(input_ids: Tensor, verdict: bool) -> Tensor:
    return torch.full((len(input_ids),), verdict, dtype=torch.bool, device=input_ids.device)


def _check_count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InputError(name, "must be an integer >= 0", value)
    return value


def _check_seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise InputError(name, "must be a number of seconds >= 0", value)
    return value


def _get_pad_token_id(tokenizer: Any) -> int | None:
    pad_token_id = getattr(tokenizer, "pad_token_id", None)
    return pad_token_id if isinstance(pad_token_id, int) else None


def _mask_left_padding(ids: Array, pad_token_id: int | None) -> Array:
    """Replace the leading padding of each row [N, L] by -1; the last token is never padding."""
    if pad_token_id is None or not (ids[:, :1] == pad_token_id).any():
        return ids
    leading = np.logical_and.accumulate(ids[:, :-1] == pad_token_id, axis=1)
    ids = ids.copy()
    ids[:, :-1][leading] = -1
    return ids


# So many tokens are looked up in a set in less time than numpy compares them.
_FEW_TOKENS = 32
_NONE: Final[Mapping[int, Any]] = MappingProxyType({})

Criterion = Callable[..., Any]  # (input_ids [N, L], scores) -> bool, or bool [N]


class RegexStop(NamedTuple):
    """A regular expression that ends a row when its generated text matches, with the token bytes."""

    regex: re.Pattern[str]
    token_bytes: TokenBytes

    def matches(self, tokens: Sequence[int], skip: int = 0) -> bool:
        """Whether the text of these tokens matches, without its first `skip` bytes."""
        return self.regex.search(self.token_bytes.text(tokens, skip)) is not None


class _StopTerms(NamedTuple):
    """Stop conditions of the current rows, cached per version of the table."""

    version: object
    last_length: Array  # [R] row length before the last possible token
    min_last_length: int  # minimum of `last_length`
    end_token_ids: frozenset[int]  # of any row; a step without one of them compares nothing row by row
    eos_token_ids: Array | None  # [R, E], None if no row has any
    stop_token_ids: Array | None  # [R, E], further stop tokens
    deadlines: Array | None  # [R], None if no row has one
    string_matchers: Sequence[tuple[StopStringMatcher, Array]]  # each with the mask [R] of its rows
    regex_stops: Sequence[tuple[RegexStop, Array]]
    criteria: Sequence[tuple[Criterion, Array]]


class StopChecker:
    """Evaluates every stop condition for candidate tokens that are not appended yet.

    Objects such as matchers live in registries; a row parameter holds their id.
    """

    state_column = "stop_state"  # column: matcher state of the row's text

    def __init__(
        self,
        criteria: Mapping[int, tuple[Criterion, ...]] = _NONE,
        string_matchers: Mapping[int, StopStringMatcher] = _NONE,
        regex_stops: Mapping[int, RegexStop] = _NONE,
        rank_group: RankGroup | None = None,
        errors: dict[int, Exception] | None = None,
    ) -> None:
        self.criteria, self.string_matchers, self.regex_stops = criteria, string_matchers, regex_stops
        self.rank_group = rank_group
        self.errors = errors  # by request, of criteria; None: they are raised
        # Whether any rank has a deadline or a criterion; if so, all ranks exchange verdicts.
        self.syncs_across_ranks = False
        self._terms: _StopTerms | None = None
        self._batches: dict[int, CallBatches] = {}  # by id of a criterion: the rows it is shown

    def finish_reasons(
        self, rows: Rows, parents: Tensor | None, tokens: Tensor
    ) -> Sequence[tuple[str, Array]]:
        """Return the candidates [N] that each reason ends: `tokens[i]` after row `parents[i]` (host)."""
        # Numpy, here and elsewhere on small host arrays: torch's dispatch would take longer than the work.
        terms, uniform = self._terms, rows.uniform_length
        if terms is None or terms.version != rows.version:
            terms = self._get_terms(rows)
        index = None if parents is None else parents.numpy()
        reasons: list[tuple[str, Array]] = []
        may_end = len(terms.end_token_ids) > 0
        if may_end and tokens.shape[0] <= _FEW_TOKENS:
            may_end = not terms.end_token_ids.isdisjoint(tokens.tolist())
        for name, ids in (("eos", terms.eos_token_ids), ("stop", terms.stop_token_ids)) if may_end else ():
            if ids is not None:
                is_end = tokens.numpy()[:, None] == (ids if index is None else ids[index])
                if is_end.any():
                    reasons.append((name, is_end.any(1)))
        if uniform is None or uniform.length >= terms.min_last_length:
            is_full = rows.length.numpy() >= terms.last_length
            if is_full.any():
                reasons.append(("length", is_full if index is None else is_full[index]))
        if terms.deadlines is None and not (
            terms.string_matchers or terms.regex_stops or terms.criteria or self.syncs_across_ranks
        ):
            return reasons
        parents = torch.arange(len(rows)) if parents is None else parents
        timed_out, by_criteria = self._check_time_and_criteria(terms, rows, parents, tokens)
        reasons += [("time", timed_out)] if timed_out.any() else []
        if terms.string_matchers or terms.regex_stops:
            reasons += self._check_texts(terms, rows, parents, tokens)
        return [*reasons, ("stop", by_criteria)] if by_criteria.any() else reasons

    def first_stop(self, rows: Rows, run: Tensor, count: Array) -> tuple[Array, list[str | None]]:
        """Return how many of each row's tokens `run[i, :count[i]]` (host) remain until a stop, and why."""
        terms, num_kept = self._get_terms(rows), count.copy()
        reasons: list[str | None] = [None] * len(rows)
        longest = int(count.max(initial=0))
        if longest > 1 and (terms.string_matchers or terms.regex_stops or terms.criteria):
            rows = rows.append(run.to(rows.tokens.device), rows.length)  # matchers read the preceding tokens
        current = rows
        for step in range(longest):
            active = np.flatnonzero((count > step) & (num_kept > step))
            if not len(active):
                break
            parents = None if len(active) == len(rows) else torch.from_numpy(active)
            for name, stopped in self.finish_reasons(current, parents, run[torch.from_numpy(active), step]):
                for row in active[stopped].tolist():
                    num_kept[row], reasons[row] = step + 1, reasons[row] or name
            if step + 1 < longest:
                current = self._advance(terms, rows, current, run[:, step], step + 1)
        return num_kept, reasons

    def _advance(self, terms: _StopTerms, rows: Rows, current: Rows, tokens: Tensor, count: int) -> Rows:
        """Return the rows after `count` more tokens, of which `tokens` [R] are the last."""
        fields: dict[str, Any] = {"length": rows.length + count}
        if terms.string_matchers:
            state = current.column(self.state_column).numpy().copy()
            for matcher, row_mask in terms.string_matchers:
                _advance_states(matcher, row_mask, tokens.numpy(), state)
            fields["columns"] = {**rows.columns, self.state_column: torch.from_numpy(state)}
        return current.replace(**fields)

    def observe(self, seen: Observation, proposal: Proposal, selection: Selection) -> Selection:
        """Return the selection with each row's stop string state after its new tokens."""
        rows, terms = seen.rows, self._get_terms(seen.rows)
        if selection.emitted is not None:
            for batches in self._batches.values():
                batches.record_finished(rows, selection.emitted)
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
        emits = np.broadcast_to(np.asarray(selection.emit_mode) > 0, len(parents))
        for matcher, row_mask in terms.string_matchers:
            uses_matcher = row_mask[parents]
            for step in range(0 if drafts is None else int(accepted.max())):
                assert drafts is not None
                _advance_states(matcher, uses_matcher & (accepted > step), drafts[:, step], state)
            _advance_states(matcher, uses_matcher & emits, tokens.numpy(), state)
            for row in np.flatnonzero(uses_matcher & (accepted < 0)).tolist():
                length = int(rows.length[parents[row]] + accepted[row])
                state[row] = matcher.state_after(rows.tokens[parents[row], :length].tolist())
        return selection._replace(columns={**selection.columns, self.state_column: torch.from_numpy(state)})

    def _check_time_and_criteria(
        self, terms: _StopTerms, rows: Rows, parents: Tensor, tokens: Tensor
    ) -> tuple[Array, Array]:
        """Return which candidates [N] are past their deadline, and which a user's criterion ends."""
        index = parents.numpy()
        timed_out = by_criteria = np.zeros(len(index), dtype=bool)
        if terms.deadlines is not None:
            timed_out = (terms.deadlines <= time.monotonic())[index]
        for criterion, row_mask in terms.criteria:
            batches = self._batches.setdefault(id(criterion), CallBatches())
            try:
                ended = _call_criterion(criterion, rows, parents, tokens, row_mask, batches)
                by_criteria = by_criteria | ended
            except Exception as error:
                if self.errors is None:
                    raise
                for request in rows.request.numpy()[row_mask].tolist():
                    self.errors.setdefault(request, error)
        if self.rank_group is not None and self.syncs_across_ranks:
            timed_out, by_criteria = (
                self.rank_group.broadcast(torch.from_numpy(np.stack((timed_out, by_criteria))).long())
                .bool()
                .numpy()
            )
        return timed_out, by_criteria

    def _check_texts(
        self, terms: _StopTerms, rows: Rows, parents: Tensor, tokens: Tensor
    ) -> list[tuple[str, Array]]:
        """Return the verdicts of stop strings and regular expressions."""
        verdicts = []
        index = parents.numpy()
        if terms.string_matchers:
            state, verdict = rows.column(self.state_column).numpy()[index], np.zeros(len(index), dtype=bool)
            for matcher, row_mask in terms.string_matchers:
                candidates = np.flatnonzero(row_mask[index] & (tokens.numpy() < matcher.vocab_size))
                verdict[candidates] = matcher.matches[tokens.numpy()[candidates], state[candidates]]
                for candidate in (
                    candidates[verdict[candidates]].tolist()
                    if "healed_suffix" in row_params(rows).values
                    else ()
                ):
                    verdict[candidate] = _completes_after_healing(
                        matcher, rows, int(index[candidate]), int(tokens[candidate])
                    )
            verdicts.append(verdict)
        verdicts += [
            _match_regex(pattern, rows, parents, tokens, row_mask) for pattern, row_mask in terms.regex_stops
        ]
        return [("stop", verdict) for verdict in verdicts if verdict.any()]

    def _get_terms(self, rows: Rows) -> _StopTerms:
        if self._terms is not None and self._terms.version == rows.version:
            return self._terms
        params = row_params(rows)
        last_length, deadline = params["last_length"].numpy(), params["deadline"].numpy()
        eos, stops = params["eos_token_ids"].numpy(), params["stop_token_ids"].numpy()
        criteria, strings, regexes = self.criteria, self.string_matchers, self.regex_stops
        if not criteria:
            self._batches.clear()
        self._terms = _StopTerms(
            rows.version,
            last_length,
            int(last_length.min()),
            frozenset(eos[eos >= 0].tolist()) | frozenset(stops[stops >= 0].tolist()),
            eos if bool((eos >= 0).any()) else None,
            stops if bool((stops >= 0).any()) else None,
            deadline if bool(np.isfinite(deadline).any()) else None,
            _rows_by_entry(strings, params["stop_strings_id"].numpy()) if strings else (),
            _rows_by_entry(regexes, params["stop_regex_id"].numpy()) if regexes else (),
            self._rows_by_criterion(params["criteria_id"].numpy()) if criteria else (),
        )
        return self._terms

    def _rows_by_criterion(self, criteria_ids: Array) -> list[tuple[Criterion, Array]]:
        """Return the criteria of the rows, each with its row mask."""
        criteria = {id(criterion): criterion for group in self.criteria.values() for criterion in group}
        self._batches = {key: batches for key, batches in self._batches.items() if key in criteria}
        found = []
        for criterion in criteria.values():
            keys = [key for key, group in self.criteria.items() if any(criterion is one for one in group)]
            row_mask = np.isin(criteria_ids, keys)
            if row_mask.any():
                found.append((criterion, row_mask))
        return found


def _advance_states(matcher: StopStringMatcher, row_mask: Array, tokens: Array, state: Array) -> None:
    """Advance the state [R] of the masked rows by one token each, in place."""
    # A model may have more tokens than its tokenizer: these have no text and keep the state.
    index = np.flatnonzero(row_mask & (tokens < matcher.vocab_size))
    state[index] = matcher.transition[tokens[index], state[index]]


def _rows_by_entry(registry: Mapping[int, Any], ids: Array) -> list[tuple[Any, Array]]:
    """Return the registry entries that rows refer to, each with its row mask."""
    return [(entry, row_mask) for key, entry in registry.items() if (row_mask := ids == key).any()]


def _completes_after_healing(matcher: StopStringMatcher, rows: Rows, row: int, token: int) -> bool:
    """Whether a stop string is completed by text beyond what token healing reproduces."""
    suffix, start = _get_healed_suffix(rows, row), int(rows.prompt_length[row])
    if suffix is None:
        return True
    ids = rows.tokens[row, : int(rows.length[row])].tolist()
    return suffix.completes_string(
        ids[max(0, start - matcher.max_match_tokens) : start], [*ids[start:], token], matcher.strings
    )


def _get_healed_suffix(rows: Rows, row: int) -> HealedSuffix | None:
    """The text that token healing removed from a row's prompt."""
    suffixes = row_params(rows).values.get("healed_suffix")
    return None if suffixes is None else suffixes[row]  # type: ignore[return-value]


def _match_regex(pattern: RegexStop, rows: Rows, parents: Tensor, tokens: Tensor, row_mask: Array) -> Array:
    """Mask of the candidates [N] whose generated text matches."""
    verdict = np.zeros(len(parents), dtype=bool)
    candidates = np.flatnonzero(row_mask[parents.numpy()])
    row_tokens = index_rows(rows.tokens, parents[candidates]).cpu()
    for index, candidate in enumerate(candidates.tolist()):
        row = int(parents[candidate])
        generated = row_tokens[index, int(rows.prompt_length[row]) : int(rows.length[row])].tolist()
        suffix = _get_healed_suffix(rows, row)
        verdict[candidate] = pattern.matches(
            [*generated, int(tokens[candidate])], 0 if suffix is None else len(suffix.text)
        )
    return verdict


def _call_criterion(
    criterion: Criterion, rows: Rows, parents: Tensor, tokens: Tensor, row_mask: Array, batches: CallBatches
) -> Array:
    """Call a user's criterion on the candidates [N] of the masked rows [R], with ids padded on the left."""
    index = torch.from_numpy(np.flatnonzero(row_mask[parents.numpy()]))
    verdict = torch.zeros(len(parents), dtype=torch.bool)
    if not len(index):
        return verdict.numpy()
    after = rows.take(parents[index])
    after = after.append(tokens[index].to(rows.tokens.device)[:, None], after.length + 1)
    params = row_params(after).values
    context = Context(after.tokens, after.length, after.prompt_length, params, slot=after.slot)
    for part in batches.split(context):
        members = index if part.lines is None else index[part.lines]
        lines = slice(None) if part.lines is None else part.lines
        rows_shown = (after.request[lines], after.slot[lines]) if part.line_of_row is None else None
        verdict[members] = part.select(_criterion_mask(criterion, part.input_ids, rows_shown))
    return verdict.numpy()


def _criterion_mask(
    criterion: Criterion, input_ids: Tensor, rows_shown: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Call a user's criterion on rows [M, W] of equal width and check its result [M].

    `rows_shown` are the request and slot of each, for a criterion that looks up their scores; None: all rows
    of its call.
    """
    count = len(input_ids)
    call_on_rows = getattr(criterion, "call_on_rows", None)
    verdict: Any = criterion(input_ids, None) if call_on_rows is None else call_on_rows(input_ids, rows_shown)
    do = "return torch.zeros(len(input_ids), dtype=torch.bool) to end no row"
    return _checked_mask("stopping_criteria", verdict, count, do).cpu().expand(count)

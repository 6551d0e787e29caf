"""What a step's logits come to in a trace: reduced where they lie, then fetched at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import Array
from descant.core.records import Observation, ProcessorTrace
from descant.core.rows import index_rows
from descant.trace.records import CandidateRecord, ChoiceRecord, ProcessorRecord, TokenShift

__all__ = ["LogitPosition", "LogitSummary", "fetch_choices", "processor_name"]

_LOGPROB_TOLERANCE = 1e-4  # log-probabilities that differ by less are the same
_MAX_SHIFTS = 3  # tokens told of what a processor moved most, and of what it cut
NestedList = list[Any]  # what `tolist` gives


class LogitPosition(NamedTuple):
    """One place where a choice was made, and the tokens that must be told of there."""

    row: int  # of the lane
    draft_index: int  # after which of the row's drafts
    required_tokens: tuple[int, ...]
    recorded_line: int | None = None  # its line of `told.scores`; None: as the lane processed them
    call_index: int = 0  # in which of several calls it was processed, of those that had its row


class _LogSoftmax:
    """Log-probabilities [N, V], and what is asked of them more than once."""

    def __init__(self, scores: Tensor) -> None:
        self.log_probs = scores.log_softmax(-1)
        self._top_tokens: Tensor | None = None

    @cached_property
    def probs(self) -> Tensor:
        """The probabilities."""
        return self.log_probs.exp()

    def gather(self, tokens: Tensor) -> Tensor:
        """The log-probabilities of some tokens [N, n]."""
        return self.log_probs.gather(1, tokens)

    @cached_property
    def entropy(self) -> Tensor:
        """In nats [N]."""
        found: Tensor = torch.special.entr(self.probs).sum(-1)
        return found

    def top_tokens(self, count: int) -> Tensor:
        """The likeliest tokens [N, n]; all who ask in a step ask for as many."""
        best = self.log_probs.topk(count).indices if self._top_tokens is None else self._top_tokens
        self._top_tokens = best
        return best


class _LogSoftmaxCache:
    """The laws of scores in a step, each made once: what one processor made is what the next was given."""

    def __init__(self) -> None:
        # With the scores themselves, so that nothing else comes to lie where they did.
        self._cache: dict[tuple[int, tuple[int, ...]], tuple[Tensor, _LogSoftmax]] = {}

    def get(self, scores: Tensor, index: Sequence[int]) -> _LogSoftmax:
        """The law of some lines of scores [N, V]."""
        key = (scores.data_ptr(), tuple(index))
        if key not in self._cache:
            whole = key[1] == tuple(range(len(scores)))
            self._cache[key] = (
                scores,
                _LogSoftmax(scores if whole else index_rows(scores, torch.tensor(index))),
            )
        return self._cache[key][1]


@dataclass
class LogitSummary:
    """The lines of one lane, reduced: all that a trace keeps of them, on the device until it is fetched."""

    positions: Sequence[LogitPosition]
    num_top: int
    required_tokens: Array  # [L, W] tokens, padded
    is_unprocessed: bool  # whether nobody changed what the model said
    tensors: list[Tensor] = field(default_factory=list)
    processor_lines: list[tuple[str, list[int]]] = field(default_factory=list)  # names, each with its lines

    @classmethod
    def from_observation(
        cls, seen: Observation, lines: Sequence[LogitPosition], top: int, wrappers: Sequence[str]
    ) -> LogitSummary:
        """What is to be known of these lines; without any candidates but those wanted where `top` is 0.

        `wrappers` [R] are the names of what stands between the network and each row.
        """
        told = None if seen.recorded_lines is None else seen.recorded_lines.scores
        wrapped = seen.output.base_logits is not None
        wide = max((len(line.required_tokens) for line in lines), default=0)
        padded = [[*line.required_tokens, *[0] * (wide - len(line.required_tokens))] for line in lines]
        wanted = np.array(padded, dtype=np.int64).reshape(len(lines), wide)
        same = not seen.processor_traces and not wrapped and told is None
        made = cls(lines, min(top, seen.logits.shape[-1]), wanted, same)
        if not lines:
            return made
        laws, count = _LogSoftmaxCache(), seen.logits.shape[1]
        flat = [line.row * count + line.draft_index for line in lines]
        plain = seen.logits.flatten(0, 1)
        raw = processed = laws.get(plain, flat)
        if told is not None:
            processed = laws.get(told, [line.recorded_line or 0 for line in lines])
        elif not same:
            processed = laws.get(seen.scores.flatten(0, 1), flat)
        made._add_candidates(raw, processed)
        if top:
            said = seen.output.logits.flatten(0, 1)
            for name in dict.fromkeys(wrappers[line.row] for line in lines) if wrapped else ():
                mine = [number for number, line in enumerate(lines) if wrappers[line.row] == name]
                index = [flat[number] for number in mine]
                made._add_effect(name, laws.get(plain, index), laws.get(said, index), mine)
            turns = _calls_by_row(seen.processor_traces)
            for one in seen.processor_traces:
                made._add_processor(one, flat, turns, laws)
        return made

    def _add_candidates(self, raw: _LogSoftmax, processed: _LogSoftmax) -> None:
        """Entropies, the likeliest tokens and those wanted."""
        wanted = torch.from_numpy(self.required_tokens).to(raw.log_probs.device, non_blocking=True)
        laws = (raw,) if self.is_unprocessed else (raw, processed)
        self.tensors += [law.entropy for law in laws]
        self.tensors += [law.gather(wanted) for law in laws]
        for law in laws if self.num_top else ():
            best = law.top_tokens(self.num_top)
            self.tensors += [best, *(other.gather(best) for other in laws)]

    def _add_processor(
        self, one: ProcessorTrace, flat: Sequence[int], turns: dict[int, list[int]], laws: _LogSoftmaxCache
    ) -> None:
        """What one processor did to the lines that it was given."""
        if one.before is one.after:
            return
        where = (
            {} if one.line_index is None else {place: at for at, place in enumerate(one.line_index.tolist())}
        )
        mine, places = [], []
        for number, (line, place) in enumerate(zip(self.positions, flat, strict=True)):
            if one.call_index:
                place = line.row
                mine_turns = turns.get(place, [])
                if line.call_index >= len(mine_turns) or mine_turns[line.call_index] != one.call_index:
                    continue
            if one.line_index is None or place in where:
                mine.append(number)
                places.append(place if one.line_index is None else where[place])
        if mine:
            self._add_effect(
                processor_name(one.processor), laws.get(one.before, places), laws.get(one.after, places), mine
            )

    def _add_effect(self, name: str, before: _LogSoftmax, after: _LogSoftmax, mine: Sequence[int]) -> None:
        """What was done to these lines."""
        was, now = before.log_probs, after.log_probs
        gone = (now == -torch.inf) & (was > -torch.inf)
        self.processor_lines.append((name, list(mine)))
        self.tensors += [
            ((was - now).abs() > _LOGPROB_TOLERANCE).any(-1),
            (now > -torch.inf).sum(-1),
            gone.sum(-1),
            (before.probs * gone).sum(-1),
        ]
        some = min(_MAX_SHIFTS, was.shape[1])
        most = (before.probs - after.probs).abs_().topk(some).indices
        # What was likely before, what it made much of a difference to, and what of it is gone.
        for best in (
            before.top_tokens(self.num_top),
            most,
            was.masked_fill(~gone, -torch.inf).topk(some).indices,
        ):
            self.tensors += [best, before.gather(best), after.gather(best)]

    # -------------------------------------------------------------------- on the host
    def choice_records(self, values: Sequence[Array]) -> list[ChoiceRecord]:
        """The looks of the lines, of the parts as they were fetched."""
        given = iter([_to_rounded_list(part) for part in values])
        if not self.positions:
            return []
        entropy = next(given)
        left = entropy if self.is_unprocessed else next(given)
        own = next(given)
        made = own if self.is_unprocessed else next(given)
        found: list[list[CandidateRecord]] = [[] for _ in self.positions]
        best: list[tuple[NestedList, NestedList, NestedList]] = []
        for _ in range((1 if self.is_unprocessed else 2) if self.num_top else 0):
            tokens, raw = next(given), next(given)
            best.append((tokens, raw, raw if self.is_unprocessed else next(given)))
        if len(best) == 2:
            best.reverse()  # the likeliest after the processors first, the others where these are too few
        for number, line in enumerate(self.positions):
            some: dict[int, CandidateRecord] = {}
            for tokens, raw, processed in best:
                for one in zip(tokens[number], raw[number], processed[number], strict=True):
                    likely = one[2] > -math.inf or tokens is best[-1][0]
                    if len(some) < self.num_top and likely and one[1] > -math.inf:
                        some.setdefault(int(one[0]), CandidateRecord(int(one[0]), one[1], one[2]))
            for at, token in enumerate(line.required_tokens):
                some.setdefault(token, CandidateRecord(token, own[number][at], made[number][at]))
            found[number] = sorted(some.values(), key=lambda one: (-one.processed, -one.raw))
        stages: list[list[ProcessorRecord]] = [[] for _ in self.positions]
        for name, mine in self.processor_lines:
            parts = [next(given) for _ in range(13)]
            for place, number in enumerate(mine):
                if parts[0][place]:
                    stages[number].append(_processor_record(name, [part[place] for part in parts[1:]]))
        return [
            # Of what holds no number there is none.
            ChoiceRecord(
                max(entropy[number], 0.0), max(left[number], 0.0), tuple(found[number]), tuple(stages[number])
            )
            for number in range(len(self.positions))
        ]


def fetch_choices(sights: Sequence[LogitSummary]) -> list[list[ChoiceRecord]]:
    """The looks of several lanes, with one transfer where that costs anything."""
    parts = [part for sight in sights for part in sight.tensors]
    if any(part.device.type != "cpu" for part in parts):
        # Tokens are whole numbers that a float32 can hold.
        whole = torch.cat([part.flatten().float() for part in parts]).cpu()
        sizes = [part.numel() for part in parts]
        shapes = [part.shape for part in parts]
        parts = [one.view(shape) for one, shape in zip(whole.split(sizes), shapes, strict=True)]
    arrays = iter([part.numpy() for part in parts])
    return [sight.choice_records([next(arrays) for _ in sight.tensors]) for sight in sights]


def processor_name(processor: Any) -> str:
    """What a processor is called: its class, or a function's own name."""
    given = getattr(processor, "function", processor)
    kind = type(given).__name__
    return str(getattr(given, "__name__", kind)) if kind in ("function", "method") else kind


def _calls_by_row(watched: Sequence[ProcessorTrace]) -> dict[int, list[int]]:
    """In which calls each row was processed by a strategy that asks by itself, in order."""
    turns: dict[int, list[int]] = {}
    for one in watched:
        for row in () if not one.call_index or one.line_index is None else one.line_index.tolist():
            mine = turns.setdefault(row, [])
            if one.call_index not in mine:
                mine.append(one.call_index)
    return turns


def _to_rounded_list(part: Array) -> NestedList:
    """Numbers as they are written: rounded, and -inf for what is none."""
    if part.dtype.kind == "f":
        part = np.where(np.isnan(part), -np.inf, np.round(part.astype(np.float64), 4)) + 0.0
    values: NestedList = part.tolist()
    return values


def _processor_record(name: str, parts: Sequence[Any]) -> ProcessorRecord:
    """What a processor did to one line."""
    kept, cut, mass, *told = parts
    moved: dict[int, TokenShift] = {}
    for number, (tokens, before, after) in enumerate((told[:3], told[3:6], told[6:])):
        for token, was, now in zip(tokens, before, after, strict=True):
            # The last are those cut, of which there may be fewer; what never was possible was not moved.
            if was > -math.inf and (number < 2 or now == -math.inf):
                moved.setdefault(int(token), TokenShift(int(token), was, now))
    ordered = tuple(sorted(moved.values(), key=lambda one: (-one.before, -one.after)))
    return ProcessorRecord(name, int(kept), int(cut), mass if math.isfinite(mass) else 0.0, ordered)

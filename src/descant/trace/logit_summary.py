"""Summaries of a step's logits for a trace: reduced on the device, then copied to the host at once."""

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

_LOGPROB_TOLERANCE = 1e-4  # log-probabilities that differ by less count as equal
_MAX_SHIFTS = 3  # tokens recorded of those a processor shifted most, and of those it removed
NestedList = list[Any]  # the result of `tolist`


class LogitPosition(NamedTuple):
    """One position at which a token was chosen, and the tokens that must be recorded there."""

    row: int  # within the strategy group
    draft_index: int  # number of the row's draft tokens before this position
    required_tokens: tuple[int, ...]
    recorded_line: int | None = None  # its line of `recorded_lines.scores`; None: scored by the group's chain
    call_index: int = 0  # which of the processor calls on its row it belongs to


class _LogSoftmax:
    """Log-probabilities [N, V], with cached probabilities, entropy and top tokens."""

    def __init__(self, scores: Tensor) -> None:
        self.log_probs = scores.log_softmax(-1)
        self._top_tokens: Tensor | None = None

    @cached_property
    def probs(self) -> Tensor:
        """Probabilities [N, V]."""
        return self.log_probs.exp()

    def gather(self, tokens: Tensor) -> Tensor:
        """Log-probabilities of the given tokens [N, n]."""
        return self.log_probs.gather(1, tokens)

    @cached_property
    def entropy(self) -> Tensor:
        """Entropy in nats [N]."""
        entropy: Tensor = torch.special.entr(self.probs).sum(-1)
        return entropy

    def top_tokens(self, count: int) -> Tensor:
        """The likeliest tokens [N, n]; cached, since every call of a step has the same count."""
        best = self.log_probs.topk(count).indices if self._top_tokens is None else self._top_tokens
        self._top_tokens = best
        return best


class _LogSoftmaxCache:
    """Log-softmax of the score tensors of a step: the output of one processor is the input of the next."""

    def __init__(self) -> None:
        # Keeps the scores alive: a freed tensor's address could be used again.
        self._cache: dict[tuple[int, tuple[int, ...]], tuple[Tensor, _LogSoftmax]] = {}

    def get(self, scores: Tensor, index: Sequence[int]) -> _LogSoftmax:
        """Log-softmax of the selected lines of `scores` [N, V]."""
        key = (scores.data_ptr(), tuple(index))
        if key not in self._cache:
            all_rows = key[1] == tuple(range(len(scores)))
            self._cache[key] = (
                scores,
                _LogSoftmax(scores if all_rows else index_rows(scores, torch.tensor(index))),
            )
        return self._cache[key][1]


@dataclass
class LogitSummary:
    """Reduced logits of one strategy group: all that a trace records of them, on the device until fetched."""

    positions: Sequence[LogitPosition]
    num_top: int
    required_tokens: Array  # [L, W] tokens, padded
    tensors: list[Tensor] = field(default_factory=list)
    processor_lines: list[tuple[str, list[int]]] = field(default_factory=list)  # name -> position numbers

    @classmethod
    def from_observation(
        cls,
        observation: Observation,
        positions: Sequence[LogitPosition],
        num_top: int,
        wrappers: Sequence[str],
    ) -> LogitSummary:
        """Summarise these positions; with `num_top` 0 only the required tokens are candidates.

        `wrappers` [R] holds the name of the model wrapper of each row.
        """
        recorded_scores = None if observation.recorded_lines is None else observation.recorded_lines.scores
        wrapped = observation.output.base_logits is not None
        width = max((len(position.required_tokens) for position in positions), default=0)
        padded = [
            [*position.required_tokens, *[0] * (width - len(position.required_tokens))]
            for position in positions
        ]
        required = np.array(padded, dtype=np.int64).reshape(len(positions), width)
        summary = cls(positions, min(num_top, observation.logits.shape[-1]), required)
        if not positions:
            return summary
        cache, num_positions = _LogSoftmaxCache(), observation.logits.shape[1]
        flat_index = [position.row * num_positions + position.draft_index for position in positions]
        raw_logits = observation.logits.flatten(0, 1)
        raw = processed = cache.get(raw_logits, flat_index)
        if recorded_scores is not None:
            processed = cache.get(recorded_scores, [position.recorded_line or 0 for position in positions])
        elif observation.processor_traces or wrapped:
            processed = cache.get(observation.scores.flatten(0, 1), flat_index)
        summary._add_candidates(raw, processed)
        if num_top:
            model_logits = observation.output.logits.flatten(0, 1)
            for name in dict.fromkeys(wrappers[position.row] for position in positions) if wrapped else ():
                numbers = [
                    number for number, position in enumerate(positions) if wrappers[position.row] == name
                ]
                index = [flat_index[number] for number in numbers]
                summary._add_effect(
                    name, cache.get(raw_logits, index), cache.get(model_logits, index), numbers
                )
            calls_by_row = _calls_by_row(observation.processor_traces)
            for trace in observation.processor_traces:
                summary._add_processor(trace, flat_index, calls_by_row, cache)
        return summary

    def _add_candidates(self, raw: _LogSoftmax, processed: _LogSoftmax) -> None:
        """Entropies, the likeliest tokens and the required tokens."""
        required = torch.from_numpy(self.required_tokens).to(raw.log_probs.device, non_blocking=True)
        self.tensors += [raw.entropy, processed.entropy, raw.gather(required), processed.gather(required)]
        for distribution in (processed, raw) if self.num_top else ():  # raw order fills up
            top = distribution.top_tokens(self.num_top)
            self.tensors += [top, raw.gather(top), processed.gather(top)]

    def _add_processor(
        self,
        trace: ProcessorTrace,
        flat_index: Sequence[int],
        calls_by_row: dict[int, list[int]],
        cache: _LogSoftmaxCache,
    ) -> None:
        """The effect of one processor on the positions that it processed."""
        if trace.before is trace.after:
            return
        line_of = (
            {}
            if trace.line_index is None
            else {index: line for line, index in enumerate(trace.line_index.tolist())}
        )
        numbers, lines = [], []
        for number, (position, index) in enumerate(zip(self.positions, flat_index, strict=True)):
            if trace.call_index:
                index = position.row
                row_calls = calls_by_row.get(index, [])
                if (
                    position.call_index >= len(row_calls)
                    or row_calls[position.call_index] != trace.call_index
                ):
                    continue
            if trace.line_index is None or index in line_of:
                numbers.append(number)
                lines.append(index if trace.line_index is None else line_of[index])
        if numbers:
            self._add_effect(
                processor_name(trace.processor),
                cache.get(trace.before, lines),
                cache.get(trace.after, lines),
                numbers,
            )

    def _add_effect(self, name: str, before: _LogSoftmax, after: _LogSoftmax, numbers: Sequence[int]) -> None:
        """The change from `before` to `after` at these positions."""
        before_log_probs, after_log_probs = before.log_probs, after.log_probs
        removed = (after_log_probs == -torch.inf) & (before_log_probs > -torch.inf)
        self.processor_lines.append((name, list(numbers)))
        self.tensors += [
            ((before_log_probs - after_log_probs).abs() > _LOGPROB_TOLERANCE).any(-1),
            (after_log_probs > -torch.inf).sum(-1),
            removed.sum(-1),
            (before.probs * removed).sum(-1),
        ]
        count = min(_MAX_SHIFTS, before_log_probs.shape[1])
        most_shifted = (before.probs - after.probs).abs_().topk(count).indices
        # The likeliest before, the most shifted, and the likeliest of the removed.
        for tokens in (
            before.top_tokens(self.num_top),
            most_shifted,
            before_log_probs.masked_fill(~removed, -torch.inf).topk(count).indices,
        ):
            self.tensors += [tokens, before.gather(tokens), after.gather(tokens)]

    # -------------------------------------------------------------------- host side
    def choice_records(self, values: Sequence[Array]) -> list[ChoiceRecord]:
        """The records of the positions, from the fetched values of `tensors`."""
        arrays = iter([_to_rounded_list(part) for part in values])
        if not self.positions:
            return []
        entropy, entropy_left, raw_required, processed_required = (next(arrays) for _ in range(4))
        candidates: list[list[CandidateRecord]] = [[] for _ in self.positions]
        tops = [[next(arrays) for _ in range(3)] for _ in range(2 if self.num_top else 0)]
        for number, position in enumerate(self.positions):
            chosen: dict[int, CandidateRecord] = {}
            for tokens, raw, processed in tops:
                for candidate in zip(tokens[number], raw[number], processed[number], strict=True):
                    likely = candidate[2] > -math.inf or tokens is tops[-1][0]
                    if len(chosen) < self.num_top and likely and candidate[1] > -math.inf:
                        chosen.setdefault(
                            int(candidate[0]), CandidateRecord(int(candidate[0]), candidate[1], candidate[2])
                        )
            for at, token in enumerate(position.required_tokens):
                chosen.setdefault(
                    token, CandidateRecord(token, raw_required[number][at], processed_required[number][at])
                )
            candidates[number] = sorted(
                chosen.values(), key=lambda candidate: (-candidate.processed, -candidate.raw)
            )
        processors: list[list[ProcessorRecord]] = [[] for _ in self.positions]
        for name, numbers in self.processor_lines:
            parts = [next(arrays) for _ in range(13)]
            for index, number in enumerate(numbers):
                if parts[0][index]:
                    processors[number].append(_processor_record(name, [part[index] for part in parts[1:]]))
        return [
            # The entropy of a line without a finite score is -inf here: record 0.
            ChoiceRecord(
                max(entropy[number], 0.0),
                max(entropy_left[number], 0.0),
                tuple(candidates[number]),
                tuple(processors[number]),
            )
            for number in range(len(self.positions))
        ]


def fetch_choices(summaries: Sequence[LogitSummary]) -> list[list[ChoiceRecord]]:
    """The records of several strategy groups, with at most one device-to-host copy."""
    parts = [part for summary in summaries for part in summary.tensors]
    if any(part.device.type != "cpu" for part in parts):
        # A float32 holds token ids exactly.
        joined = torch.cat([part.flatten().float() for part in parts]).cpu()
        sizes = [part.numel() for part in parts]
        shapes = [part.shape for part in parts]
        parts = [values.view(shape) for values, shape in zip(joined.split(sizes), shapes, strict=True)]
    arrays = iter([part.numpy() for part in parts])
    return [summary.choice_records([next(arrays) for _ in summary.tensors]) for summary in summaries]


def processor_name(processor: Any) -> str:
    """The display name of a processor: its class, or the name of a function."""
    target = getattr(processor, "function", processor)
    kind = type(target).__name__
    return str(getattr(target, "__name__", kind)) if kind in ("function", "method") else kind


def _calls_by_row(traces: Sequence[ProcessorTrace]) -> dict[int, list[int]]:
    """The calls in which each row was processed, in order, for strategies that call processors themselves."""
    calls: dict[int, list[int]] = {}
    for trace in traces:
        for row in () if not trace.call_index or trace.line_index is None else trace.line_index.tolist():
            row_calls = calls.setdefault(row, [])
            if trace.call_index not in row_calls:
                row_calls.append(trace.call_index)
    return calls


def _to_rounded_list(array: Array) -> NestedList:
    """Values rounded as they are written; NaN becomes -inf."""
    if array.dtype.kind == "f":
        array = np.where(np.isnan(array), -np.inf, np.round(array.astype(np.float64), 4)) + 0.0
    values: NestedList = array.tolist()
    return values


def _processor_record(name: str, values: Sequence[Any]) -> ProcessorRecord:
    """The effect of a processor at one position."""
    kept, cut, mass, *shifts_parts = values
    shifts: dict[int, TokenShift] = {}
    for number, (tokens, before, after) in enumerate((shifts_parts[:3], shifts_parts[3:6], shifts_parts[6:])):
        for token, before_log_prob, after_log_prob in zip(tokens, before, after, strict=True):
            # The last group holds removed tokens, padded with others; impossible tokens cannot shift.
            if before_log_prob > -math.inf and (number < 2 or after_log_prob == -math.inf):
                shifts.setdefault(int(token), TokenShift(int(token), before_log_prob, after_log_prob))
    ordered = tuple(sorted(shifts.values(), key=lambda shift: (-shift.before, -shift.after)))
    return ProcessorRecord(name, int(kept), int(cut), mass if math.isfinite(mass) else 0.0, ordered)

"""The records of a step: proposal, model output, selection, emitted tokens, observation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from descant.core.context import Context, Processor, RowParams, row_params
from descant.core.rows import Column, Rows, index_rows

__all__ = [
    "Context",
    "ForwardOutput",
    "Hypothesis",
    "Logprobs",
    "Observation",
    "ProcessorTrace",
    "Proposal",
    "RecordedLines",
    "RequestFault",
    "RowParams",
    "Selection",
    "Speculation",
    "Support",
    "Tokens",
    "row_params",
]


# Named tuples: immutable as frozen dataclasses are, and several times cheaper to create in every step.
class Proposal(NamedTuple):
    """Rows to feed: row `i` forks row `parents[i]` and feeds `drafts[i, :num_drafts[i]]` after its tokens.

    The default is the most common proposal: every row as it is, without drafts.
    """

    parents: Tensor | None = None  # [R] (host); None: every row as it is
    drafts: Tensor | None = None  # [R, K]; None: no drafts
    num_drafts: Tensor | None = None  # [R] (host); None: K for every row
    draft_probs: Tensor | None = None  # [R, K, V] the drafter's distribution; None: one-hot

    @property
    def width(self) -> int:
        """The largest number of drafts of a row."""
        return 0 if self.drafts is None else self.drafts.shape[1]

    def take(self, index: Tensor) -> Proposal:
        """The drafts of the rows `index` [N] (host), in that order; forks are made already."""
        if self.drafts is None:
            return Proposal()
        return Proposal(
            None,
            index_rows(self.drafts, index),
            None if self.num_drafts is None else self.num_drafts[index],
            None if self.draft_probs is None else index_rows(self.draft_probs, index),
        )

    def draft_counts(self, index: Tensor | None = None) -> Tensor | int:
        """The number of drafts of each row [R] (host), or of the rows `index`; 0 if no row has any."""
        if self.drafts is None:
            return 0
        counts = self.num_drafts
        if counts is None:
            counts = torch.full((len(self.drafts),), self.width)
        return counts if index is None else counts[index]


class ForwardOutput(NamedTuple):
    """The output of a forward: `logits[:, j]` predicts what follows draft `j - 1`; `logits[:, 0]` the row.

    `states` holds the requested hidden states and attentions, one entry per forward, with the fed rows and
    the positions of each row.
    """

    logits: Tensor  # [R, K + 1, V], float32
    states: Sequence[Mapping[str, Any]] = ()
    base_logits: Tensor | None = None  # [R, K + 1, V] of the network, where a wrapper changed `logits`
    row_index: Tensor | None = None  # [R] (host) the fed row of the table; None: row `i` is row `i`
    # Processed scores [N, V] of some rows [N] with further columns, for a strategy with `has_groups`.
    process_rows: Callable[[Tensor, Mapping[str, Tensor]], Tensor] | None = None
    # Launches the forward that follows, given the token of each fed row [R] on the device. A strategy that
    # adds one token to every row may call it before it reads the tokens. None: it must not.
    launch_next: Callable[[Tensor], None] | None = None


class Tokens(NamedTuple):
    """New tokens of a step, one for each of several rows, as columns on the host."""

    request: Tensor  # [N]
    slot: Tensor  # [N] the index of the sequence in its request
    token: Tensor  # [N]
    row: Tensor | None = None  # [N] the fed row that each follows; None: row `i`
    raw: Tensor | None = None  # [N] log-probabilities before the processors, where `num_top` is not -1
    processed: Tensor | None = None  # [N] log-probabilities after the processors
    finished: Mapping[int, Hypothesis] = MappingProxyType({})  # by index: the sequences these tokens end
    already_appended: bool = False  # chosen in an earlier step: each is its row's last token already
    new_index: Tensor | None = None  # [N] the index among its row's new tokens; None: the next one
    num_drafts: Tensor | None = None  # [N] the number of drafts of its row in this step
    is_draft: Tensor | None = None  # [N] whether it was a draft
    num_top: Tensor | None = None  # [N] alternatives that its request asks for; -1: no log-probabilities
    top: Tensor | None = None  # [N, n] the most probable tokens before the processors, best first
    top_raw: Tensor | None = None  # [N, n]
    top_processed: Tensor | None = None  # [N, n]


class Speculation(NamedTuple):
    """The drafts of a sequence: how many were fed and accepted at each index of a draft."""

    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    forwards: int  # of the model, the prefill included

    @property
    def saved_forwards(self) -> int:
        """The number of forwards that drafts have saved."""
        return sum(self.accepted)

    @property
    def acceptance_rate(self) -> float:
        """The share of accepted drafts; 0 if there was none."""
        return self.saved_forwards / max(sum(self.drafted), 1)


@dataclass(frozen=True)
class Support:
    """The tokens that each token of a sequence was chosen from, in the form of sparse rows (CSR).

    Those at index `i` are `token_ids[offsets[i] : offsets[i + 1]]`, ascending. `logprobs` are the model's own
    log-probabilities of the chosen tokens, normalised over these.
    """

    token_ids: Tensor  # [N] int32 (host)
    offsets: Tensor  # [T + 1] (host)
    logprobs: Tensor  # [T] (host)

    def mask(self, vocab_size: int) -> Tensor:
        """Whether each token of the vocabulary is in the support of each index [T, V] (host)."""
        sizes, (first, last) = self.offsets.diff(), self.offsets[[0, -1]].tolist()
        lines = torch.arange(len(sizes)).repeat_interleave(sizes)
        mask = torch.zeros(len(sizes), vocab_size, dtype=torch.bool)
        mask[lines, self.token_ids[first:last].long()] = True
        return mask


@dataclass(frozen=True)
class Logprobs:
    """The log-probability of each token of a sequence before and after the processors.

    `top` holds the `n` most probable tokens of the model itself at each index, best first.
    """

    raw: Tensor  # [T] (host)
    processed: Tensor  # [T]
    top: Tensor  # [T, n] tokens
    top_raw: Tensor  # [T, n]
    top_processed: Tensor  # [T, n]
    support: Support | None = None  # with `logprobs_support`


@dataclass
class Hypothesis:
    """One returned sequence: its new tokens, why it ended, and its score where the method has one."""

    tokens: Tensor  # [T] (host)
    reason: str  # "eos", "length", "time", "stop"
    score: float | None = None
    beam_indices: tuple[int, ...] | None = None  # the slot of its request each token was chosen from
    logprobs: Logprobs | None = None  # where its request asks for them
    unmet_constraints: tuple[int, ...] | None = None  # indices of constraints; None: it had none
    constraint_steps: int | None = None  # met steps of its constraints; None: it had none
    speculation: Speculation | None = None  # None: no drafter


class RecordedLines(NamedTuple):
    """The lines of a step that outputs and traces record, where these are not the fed rows."""

    rows: Tensor  # [N] (host) the fed row of each
    slot: Tensor  # [N] (host) the index of the line in its request
    scores: Tensor | None = None  # [N, V] processed; None: those of the step
    draft_index: Tensor | None = None  # [N] (host) the draft it follows; None: it follows the row


class Selection(NamedTuple):
    """Rows to keep: new row `i` continues fed row `parents[i]`, keeps `accepted[i]` drafts, then `tokens[i]`.

    `slot` and `columns` are aligned to the new rows. A negative `accepted` takes back that many of the row's
    last tokens. `emit_mode` is False (0) where no token is chosen yet, and -1 where in addition the row's
    last token is fed again.
    """

    tokens: Tensor  # [R']
    parents: Tensor | None = None  # [R'] (host); None: every row as it is
    accepted: Tensor | None = None  # [R'] (host); None: no drafts
    slot: Tensor | None = None  # [R'] (host); None: the parent's
    columns: Mapping[str, Tensor | Column] = MappingProxyType({})
    emit_mode: bool | Tensor = True  # or [R'] of 1, 0 and -1 (host)
    emitted: Tokens | None = None
    finished: Sequence[int] = ()  # requests that have ended
    failed: Sequence[int] = ()  # requests with a row without a candidate
    nonfinite: Sequence[int] = ()  # those of them whose raw logits were not finite
    host_tokens: Tensor | None = None  # [R'] `tokens` on the host
    finished_sequences: Sequence[tuple[int, Hypothesis]] = ()  # each with the fed row it continued
    recorded_lines: RecordedLines | None = None  # None: every fed row is recorded


class ProcessorTrace(NamedTuple):
    """The input and output of one processor call, for traces."""

    processor: Processor
    line_index: Tensor | None  # [N] (host) lines of the group, K + 1 per row; None: all
    before: Tensor  # [N, V]
    after: Tensor
    call_index: int = 0  # the index of a strategy's own call of the processors; 0: the engine's call


class Observation(NamedTuple):
    """A step of one group of rows, for outputs and traces."""

    rows: Rows
    logits: Tensor  # [R, K + 1, V] raw
    scores: Tensor  # [R, K + 1, V] processed
    output: ForwardOutput
    recorded_lines: RecordedLines | None = None
    processor_traces: Sequence[ProcessorTrace] = ()  # for observers, if the session traces


class RequestFault(Exception):
    """Requests that cannot take part in a step, each with its error; nothing of the step has happened.

    The engine fails these requests, and makes the step again without them.
    """

    def __init__(self, errors: Mapping[int, Exception]) -> None:
        super().__init__(*errors.values())
        self.errors = errors

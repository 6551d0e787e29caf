"""The records of a step: what is proposed, heard, selected and told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from descant.core.context import Context, RowParams, row_params
from descant.core.rows import Column, Rows

if TYPE_CHECKING:
    from descant.core.interfaces import Processor, RowCache

__all__ = [
    "Context",
    "DraftContext",
    "ForwardOutput",
    "Hypothesis",
    "Logprobs",
    "Observation",
    "ProcessorTrace",
    "Proposal",
    "RecordedLines",
    "RowParams",
    "Selection",
    "Speculation",
    "Tokens",
    "row_params",
]


# Named tuples: as immutable as frozen dataclasses, and several times cheaper to make, every step.
class Proposal(NamedTuple):
    """Rows to feed: row `i` forks row `parents[i]` and tries `drafts[i, :n[i]]` after its pending tokens.

    Nothing given is the commonest proposal: every row as it is, nothing tried.
    """

    parents: Tensor | None = None  # [R] (host); None: every row as it is
    drafts: Tensor | None = None  # [R, K]; None: nothing is tried
    num_drafts: Tensor | None = None  # [R] (host); None: all of them
    draft_probs: Tensor | None = None  # [R, K, V] the drafter's own law; None: certain

    @property
    def width(self) -> int:
        """How many tokens are tried at the most."""
        return 0 if self.drafts is None else self.drafts.shape[1]

    def draft_counts(self, index: Tensor | None = None) -> Tensor | int:
        """How many tokens each row tries [R] (host), of the rows `index`; 0 when none does."""
        if self.drafts is None:
            return 0
        n = torch.full((len(self.drafts),), self.width) if self.num_drafts is None else self.num_drafts
        return n if index is None else n[index]


class DraftContext(NamedTuple):
    """What a step offers to whoever guesses ahead."""

    # The scores [R, V] that the lane's processors make of logits [R, V] that follow its rows, which may
    # have further tokens by then.
    process: Callable[[Rows, Tensor], Tensor]
    cache: RowCache  # the table's
    row_index: Tensor | None = (
        None  # [R] (host) where the lane's rows lie in the table; None: they are the table
    )


class ForwardOutput(NamedTuple):
    """What the model says: `logits[:, j]` predicts what follows draft `j - 1`, slot 0 what follows the row.

    `states` holds whatever else was asked for (hidden states, attentions), one entry a forward, with
    the fed rows and where each row's positions lie in it.
    """

    logits: Tensor  # [R, K + 1, V], float32
    states: Sequence[Mapping[str, Any]] = ()
    base_logits: Tensor | None = (
        None  # [R, K + 1, V] what the network itself says, where `logits` are not that
    )
    row_index: Tensor | None = (
        None  # [R] (host) which fed row of the table each is; None: the first the first
    )
    # The processed scores [N, V] of some rows [N] with further columns, for a strategy that asks by itself.
    process_rows: Callable[[Tensor, Mapping[str, Tensor]], Tensor] | None = None


class Tokens(NamedTuple):
    """New tokens of a step, one for each of several rows: columns on the host, not one object a token."""

    request: Tensor  # [N]
    slot: Tensor  # [N] which of the request's sequences
    token: Tensor  # [N]
    row: Tensor | None = None  # [N] the fed row that each follows; None: the first the first, and so on
    raw: Tensor | None = None  # [N] log-probabilities before the processors, where a row asks for them
    processed: Tensor | None = None  # [N] and after them
    finished: Mapping[int, Hypothesis] = MappingProxyType({})  # by place: the sequences that these tokens end
    already_appended: bool = False  # chosen in an earlier step: each is its row's last token already
    new_index: Tensor | None = None  # [N] which new token of its row each is; None: the one after its row
    num_drafts: Tensor | None = None  # [N] how many guesses its row tried in this step
    is_draft: Tensor | None = None  # [N] whether it was guessed


class Speculation(NamedTuple):
    """What became of a sequence's guesses: how many were tried and stood at each place of a run."""

    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    forwards: int  # steps of the model, the prompt's among them

    @property
    def saved_forwards(self) -> int:
        """How many forwards it would have taken more without them."""
        return sum(self.accepted)

    @property
    def acceptance_rate(self) -> float:
        """The share of the guesses that stood; 0 where there was none."""
        return self.saved_forwards / max(sum(self.drafted), 1)


@dataclass(frozen=True)
class Logprobs:
    """The log-probability of each token of a sequence before and after the processors, and the likeliest.

    `top` holds the `n` tokens that the model itself found likeliest at each place, best first.
    """

    raw: Tensor  # [T] (host)
    processed: Tensor  # [T]
    top: Tensor  # [T, n] tokens
    top_raw: Tensor  # [T, n]
    top_processed: Tensor  # [T, n]


@dataclass
class Hypothesis:
    """One returned sequence: its new tokens, why it ended, and its score where the method has one."""

    tokens: Tensor  # [T] (host)
    reason: str  # "eos", "length", "time", "stop"
    score: float | None = None
    beam_indices: tuple[int, ...] | None = None  # which slot of its request each token was chosen from
    logprobs: Logprobs | None = None  # where its request asks for them
    unmet_constraints: tuple[int, ...] | None = (
        None  # places of the constraints it does not meet; None: it had none
    )
    constraint_steps: int | None = None  # steps of its constraints that it has met; None: it had none
    speculation: Speculation | None = None  # of its guesses; None: nothing guessed


class RecordedLines(NamedTuple):
    """Which lines of a step count for the record, where not every fed row is one of them."""

    rows: Tensor  # [N] (host) the fed row that each is of
    slot: Tensor  # [N] (host) which of its request's lines it is
    scores: Tensor | None = None  # [N, V] processed; None: as the lane processed them
    draft_index: Tensor | None = (
        None  # [N] (host) after which of the row's drafts; None: after the row itself
    )


class Selection(NamedTuple):
    """Rows to keep: new row `i` continues fed row `parents[i]`, keeps `accepted[i]` drafts, then `tokens[i]`.

    `slot` and `columns` are aligned to the new rows. Where `accepted` is below 0 the row takes back so many
    of its own last tokens. `emits` is False (0) where no token is chosen yet, and -1 where in addition the
    row's last token is to be fed again.
    """

    tokens: Tensor  # [R']
    parents: Tensor | None = None  # [R'] (host); None: every row as it is
    accepted: Tensor | None = None  # [R'] (host); None: no draft
    slot: Tensor | None = None  # [R'] (host); None: the parent's
    columns: Mapping[str, Tensor | Column] = MappingProxyType({})
    emit_mode: bool | Tensor = True  # or [R'] of 1, 0 and -1 (host)
    emitted: Tokens | None = None
    finished: Sequence[int] = ()  # requests that have ended
    failed: Sequence[int] = ()  # requests with a row that has no token to choose
    nonfinite: Sequence[int] = ()  # those of them that the model itself left none
    host_tokens: Tensor | None = None  # [R'] `tokens` on the host
    finished_sequences: Sequence[
        tuple[int, Hypothesis]
    ] = ()  # sequences that ended, each with the fed row it continued
    recorded_lines: RecordedLines | None = None  # None: every fed row is a line of the record


class ProcessorTrace(NamedTuple):
    """What one processor was given and made of it, for who traces."""

    processor: Processor
    line_index: Tensor | None  # [N] (host) which lines of the lane, row by row, K + 1 each; None: all
    before: Tensor  # [N, V]
    after: Tensor
    call_index: int = 0  # which call of a strategy that asks by itself; 0: of the lane


class Observation(NamedTuple):
    """What a step looked like to one lane: for scores, traces and pictures."""

    rows: Rows
    logits: Tensor  # [R, K + 1, V] raw
    scores: Tensor  # [R, K + 1, V] processed
    output: ForwardOutput
    recorded_lines: RecordedLines | None = None
    processor_traces: Sequence[ProcessorTrace] = ()  # for followers alone, and only where somebody traces

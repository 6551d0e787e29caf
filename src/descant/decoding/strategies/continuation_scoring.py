"""The log-probabilities of given continuations: their tokens are drafts that are all accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from descant.core.interfaces import DraftContext, StrategyDefaults
from descant.core.records import ForwardOutput, Hypothesis, Logprobs, Proposal, Selection
from descant.core.rows import Rows

_MAX_LOGITS: Final = 2**25  # of a step [R, K + 1, V]: 128 MiB in float32
_LEAST_LINES: Final = 64  # of a step, however large the vocabulary
_MAX_RUN: Final = 256  # tokens of a row in a step, between which a request can be cancelled
_LEAST_RUN: Final = 16  # where another row has fewer tokens left: its logits are padded


@dataclass
class _Continuation:
    """A continuation while it is scored."""

    tokens: Tensor  # [T] (host)
    # By the index of its first token: the log-probabilities [N], the most probable tokens [N, n] and theirs.
    parts: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)

    def hypothesis(self) -> Hypothesis:
        """All its tokens with their log-probabilities, on the host."""
        parts = [self.parts[start] for start in sorted(self.parts)]
        own, top, top_values = (torch.cat(columns).cpu() for columns in zip(*parts, strict=True))
        logprobs = Logprobs(own, own, top, top_values, top_values)
        return Hypothesis(self.tokens, "length", logprobs=logprobs)


@dataclass
class _ScoredRequest:
    """The continuations of a request. Each is a row once the prompt is read; `done` has those that ended."""

    continuations: list[_Continuation]
    num_top: int
    done: dict[int, Hypothesis] = field(default_factory=dict)


class ContinuationScoring(StrategyDefaults):
    """Feeds the continuations of each request, whatever the model finds likely, and records their scores.

    A prompt is read once: after it, its row becomes one row for each continuation. The continuations are
    added by request before its admission. Models with a recurrent state may not continue it by several
    tokens at once: with `is_recurrent` only the first part of a single continuation has more than one.
    """

    def __init__(self, vocab_size: int, *, is_recurrent: bool = False) -> None:
        self._max_lines = max(_LEAST_LINES, _MAX_LOGITS // vocab_size)
        self._is_recurrent = is_recurrent
        self._requests: dict[int, _ScoredRequest] = {}

    def add(self, request: int, continuations: Sequence[Tensor], num_top: int) -> None:
        """Add the continuations of a request (host), and the number of alternatives of each token."""
        self._requests[request] = _ScoredRequest([_Continuation(tokens) for tokens in continuations], num_top)

    def propose(self, rows: Rows, context: DraftContext) -> Proposal:  # noqa: ARG002
        """The next tokens of each continuation but one, which follows them; none where a row is to fork."""
        places = self._places(rows)
        shortest = min(len(one.continuations[slot].tokens) - start for one, slot, start in places)
        width = min(max(_LEAST_RUN, shortest), _MAX_RUN, max(1, self._max_lines // len(rows)))
        drafts = []
        for one, slot, start in places:
            size = 1 if (start and self._is_recurrent) or _forks(one, start) else width
            drafts.append(one.continuations[slot].tokens[start : start + size][:-1])
        num_drafts = torch.tensor([len(run) for run in drafts])
        if not int(num_drafts.max()):
            return Proposal()
        padded = torch.nn.utils.rnn.pad_sequence(drafts, batch_first=True)
        return Proposal(None, padded.to(rows.tokens.device), num_drafts)

    def select(self, rows: Rows, proposal: Proposal, output: ForwardOutput) -> Selection:
        """Accept all drafts and take the next token of each continuation; those that end here are removed."""
        requests, places = rows.request.tolist(), self._places(rows)
        counts = proposal.draft_counts()
        sizes = [1] * len(rows) if isinstance(counts, int) else (counts + 1).tolist()
        # Each run of tokens that is scored: its row, the continuation, the index of its first token.
        runs = [
            (row, index, start)
            for row, (one, slot, start) in enumerate(places)
            for index in (range(len(one.continuations)) if _forks(one, start) else [slot])
        ]
        tokens = [
            places[row][0].continuations[index].tokens[start : start + sizes[row]]
            for row, index, start in runs
        ]
        num_top = max(one.num_top for one, _, _ in places)
        scored = _score(output.logits, [row for row, _, _ in runs], tokens, num_top)
        children, ended = [], []
        for number, (row, index, start) in enumerate(runs):
            one, size = places[row][0], sizes[row]
            continuation = one.continuations[index]
            own, top, values = (column[number, :size] for column in scored)
            # By its start: a step that is made again writes the same.
            continuation.parts[start] = own, top[:, : one.num_top], values[:, : one.num_top]
            if start + size == len(continuation.tokens):
                one.done[index] = continuation.hypothesis()
                ended.append((row, one.done[index]))
            else:
                children.append((row, size - 1, index, int(tokens[number][-1])))
        parents, accepted, slot, last = torch.tensor(children, dtype=torch.long).view(-1, 4).unbind(1)
        finished = [request for request in dict.fromkeys(requests) if self._is_done(request)]
        return Selection(
            last.to(rows.tokens.device),
            parents,
            accepted,
            slot,
            finished=finished,
            host_tokens=last,
            finished_sequences=ended,
        )

    def finish(self, request: int) -> list[Hypothesis]:
        """The continuations in the order in which they were given, each with its log-probabilities."""
        done = self._requests.pop(request).done
        return [done[index] for index in sorted(done)]

    def drop(self, request: int) -> None:
        """Discard a request."""
        self._requests.pop(request, None)

    def finished_so_far(self, request: int) -> list[Hypothesis]:
        """The continuations that have ended."""
        return list(self._requests[request].done.values()) if request in self._requests else []

    def _is_done(self, request: int) -> bool:
        one = self._requests[request]
        return len(one.done) == len(one.continuations)

    def _places(self, rows: Rows) -> list[tuple[_ScoredRequest, int, int]]:
        """The request of each row, its continuation, and the index of the next token of that."""
        starts = (rows.length - rows.prompt_length).tolist()
        places = zip(rows.request.tolist(), rows.slot.tolist(), starts, strict=True)
        return [(self._requests[request], slot, start) for request, slot, start in places]


def _forks(one: _ScoredRequest, start: int) -> bool:
    """Whether the row of a request that has `start` new tokens becomes several."""
    return start == 0 and len(one.continuations) > 1


def _score(
    logits: Tensor, rows: Sequence[int], runs: Sequence[Tensor], num_top: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The log-probabilities [N, K] of runs of tokens after these rows of logits [R, K, V], and the best.

    The tokens [N, K, n] that are most probable there, and theirs. What is behind a run's end is undefined.
    """
    device = logits.device
    index = torch.tensor(rows).to(device, non_blocking=True)
    tokens = torch.nn.utils.rnn.pad_sequence(list(runs), batch_first=True).to(device, non_blocking=True)
    columns = torch.arange(tokens.shape[1], device=device)
    total = logits.logsumexp(-1)  # [R, K]
    own = logits[index[:, None], columns, tokens] - total[index]
    # `max` has the token of greedy search where two are equally probable.
    values, top = logits.max(-1, keepdim=True) if num_top == 1 else logits.topk(num_top)
    values = values - total[..., None]
    return own, top[index], values[index]

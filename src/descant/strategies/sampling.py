"""Greedy search and sampling: one row, one choice a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from descant.ports import Noise, Stop
from descant.rows import Rows, pick
from descant.step import Emission, Hypothesis, Output, Proposal, Selection, params_of

__all__ = ["Sampling"]


class Sampling:
    """Each row takes one token: the likeliest, or where its request samples, one drawn by the noise.

    A request is prefilled as one row; its first choice fans out into as many rows as it returns.
    """

    normalised = False
    columns: Mapping[str, Tensor] = {}

    def __init__(self, noise: Noise, stop: Stop) -> None:
        self._noise = noise
        self._stop = stop
        self._done: dict[int, dict[int, Hypothesis]] = {}
        self._split: tuple[object, Tensor, Tensor] | None = None  # (version, greedy rows, sampling rows)

    def propose(self, rows: Rows) -> Proposal:  # noqa: ARG002
        """Nothing is guessed ahead."""
        return Proposal()

    def select(self, rows: Rows, proposal: Proposal, output: Output) -> Selection:  # noqa: ARG002
        """One token a row; rows that end leave."""
        scores = output.logits[:, 0]  # [R, V]
        rows, parents = _fanned(rows)
        if parents is not None:
            scores = pick(scores, parents)
        tokens = self._chosen(rows, scores)
        # The one transfer of the step: what was chosen, and whether it could be chosen at all.
        chosen = tokens[:, None]
        possible = scores.gather(1, chosen) > -torch.inf
        host, sound = torch.cat((chosen, possible), 1).cpu().unbind(1)
        emitted = Emission(rows.request, rows.slot, host)

        reasons = self._stop.ended(rows, None, host)
        if sound.numpy().all() and not any(which.numpy().any() for _, which in reasons):
            slot = None if parents is None else rows.slot
            return Selection(tokens, parents, slot=slot, emitted=emitted)
        gone = torch.stack([which for _, which in reasons]).any(0)
        failed = sorted(set(rows.request[sound == 0].tolist()))
        gone |= torch.isin(rows.request, torch.tensor(failed, dtype=torch.long))
        finished = self._retired(rows, host, gone, reasons, failed)
        keep = (~gone).nonzero().squeeze(1)
        return Selection(
            pick(tokens, keep),
            keep if parents is None else parents[keep],
            slot=rows.slot[keep],
            emitted=emitted,
            finished=finished,
            failed=failed,
        )

    def finish(self, request: int) -> list[Hypothesis]:
        """The request's sequences in the order of their slots."""
        done = self._done.pop(request, {})
        return [done[slot] for slot in sorted(done)]

    def drop(self, request: int) -> None:
        """Forget a request."""
        self._done.pop(request, None)

    def _chosen(self, rows: Rows, scores: Tensor) -> Tensor:
        """The token of each row [R]."""
        if self._split is None or self._split[0] != rows.version:
            sampled = params_of(rows)["do_sample"].bool()
            self._split = (rows.version, (~sampled).nonzero().squeeze(1), sampled.nonzero().squeeze(1))
        _, greedy, drawing = self._split
        if not len(drawing):
            return scores.argmax(-1)
        if not len(greedy):
            return self._drawn(rows, scores)
        drawn = self._drawn(rows.take(drawing), pick(scores, drawing))
        return scores.argmax(-1).index_copy(0, drawing.to(drawn.device), drawn)

    def _drawn(self, rows: Rows, scores: Tensor) -> Tensor:
        """One draw a row from the distribution of its scores [R]."""
        return (scores.softmax(-1) / self._noise.draw(rows, scores.shape[1])).argmax(-1)

    def _retired(
        self,
        rows: Rows,
        tokens: Tensor,
        gone: Tensor,
        reasons: Sequence[tuple[str, Tensor]],
        failed: Sequence[int],
    ) -> list[int]:
        """Keep what the rows that go have written; the requests none of whose rows stay."""
        index = gone.nonzero().squeeze(1)
        written = pick(rows.tokens, index).cpu()
        for line, row in enumerate(index.tolist()):
            request = int(rows.request[row])
            if request in failed:
                continue
            start, stop = int(rows.prompt[row]), int(rows.length[row])
            new = torch.cat((written[line, start:stop], tokens[row : row + 1]))
            reason = next(name for name, which in reasons if which[row])
            self._done.setdefault(request, {})[int(rows.slot[row])] = Hypothesis(new, reason)
        others = set(rows.request[~gone].tolist()) | set(failed)
        return [request for request in dict.fromkeys(rows.request[index].tolist()) if request not in others]


def _fanned(rows: Rows) -> tuple[Rows, Tensor | None]:
    """The rows that choose, and which fed row each stands on: more than were fed at a first choice."""
    if not (rows.length.numpy() == rows.prompt.numpy()).any():
        return rows, None
    fresh = rows.length == rows.prompt
    copies = torch.where(fresh, params_of(rows)["copies"], 1)
    parents = torch.arange(len(rows)).repeat_interleave(copies)
    if len(parents) == len(rows):
        return rows, None
    first = torch.cumsum(copies, 0) - copies
    slot = torch.arange(len(parents)) - first[parents]
    slot = torch.where(copies[parents] > 1, slot, rows.slot[parents])
    return rows.take(parents).changed(slot=slot), parents

"""Greedy search and sampling: one row, one choice a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from descant.core.context import row_params
from descant.core.interfaces import Array, NoiseSource, RankGroup, StopCondition
from descant.core.records import DraftContext, ForwardOutput, Hypothesis, Proposal, Selection, Tokens
from descant.core.rows import Column, Rows, index_rows

__all__ = ["Sampling", "finished_requests"]

NO_DRAFTS = Proposal()


class Sampling:
    """Each row takes one token: the likeliest, or where its request samples, one drawn by the noise.

    A request is prefilled as one row; its first choice fans out into as many rows as it returns.
    """

    needs_log_probs = False
    columns: Mapping[str, Tensor | Column] = {}

    def __init__(self, noise: NoiseSource, stop: StopCondition, peers: RankGroup | None = None) -> None:
        self._noise = noise
        self._stop = stop
        self._peers = peers
        self._done: dict[int, dict[int, Hypothesis]] = {}
        self._greedy_and_sampled: tuple[object, Tensor, Tensor] | None = (
            None  # (version, greedy rows, sampling rows)
        )
        self._expanded_version: object = None  # the version of a table none of whose rows is fresh

    def propose(self, rows: Rows, aid: DraftContext) -> Proposal:  # noqa: ARG002
        """Nothing is guessed ahead."""
        return NO_DRAFTS

    def select(self, rows: Rows, proposal: Proposal, output: ForwardOutput) -> Selection:  # noqa: ARG002
        """One token a row; rows that end leave."""
        scores = output.logits[:, 0]  # [R, V]
        rows, parents = self._expand_sequences(rows)
        if parents is not None:
            scores = index_rows(scores, parents)
        tokens, best, host = self._choose_tokens(rows, scores)
        emitted = Tokens(rows.request, rows.slot, host, parents)

        reasons = self._stop.finish_reasons(rows, None, host)
        if not reasons and best.min() > -np.inf:
            slot = None if parents is None else rows.slot
            return Selection(tokens, parents, slot=slot, emitted=emitted, host_tokens=host)
        failed = sorted(set(rows.request.numpy()[~(best > -np.inf)].tolist()))
        gone = np.isin(rows.request.numpy(), failed)
        for _, which in reasons:
            gone |= which
        retired = self._collect_finished(rows, host, gone, reasons, failed)
        told = torch.from_numpy(np.flatnonzero(~np.isin(rows.request.numpy(), failed)))
        if len(told) < len(rows):  # what a row that failed would have said is nothing
            whence = told if parents is None else parents[told]
            emitted = Tokens(rows.request[told], rows.slot[told], host[told], whence)
        places = {row: place for place, row in enumerate(told.tolist())}
        keep = torch.from_numpy(np.flatnonzero(~gone))
        return Selection(
            index_rows(tokens, keep),
            keep if parents is None else parents[keep],
            slot=rows.slot[keep],
            emitted=emitted._replace(finished={places[row]: one for row, one in retired}),
            finished=finished_requests(rows, gone, failed),
            failed=failed,
            host_tokens=host[keep],
            finished_sequences=[(row if parents is None else int(parents[row]), one) for row, one in retired],
        )

    def finish(self, request: int) -> list[Hypothesis]:
        """The request's sequences in the order of their slots."""
        done = self._done.pop(request, {})
        return [done[slot] for slot in sorted(done)]

    def drop(self, request: int) -> None:
        """Forget a request."""
        self._done.pop(request, None)

    def finished_so_far(self, request: int) -> list[Hypothesis]:
        """The request's sequences that have ended."""
        return list(self._done.get(request, {}).values())

    def _expand_sequences(self, rows: Rows) -> tuple[Rows, Tensor | None]:
        """The rows that choose, and which fed row each stands on: more than were fed at a first choice."""
        if rows.version == self._expanded_version:
            return rows, None
        # Rows are fresh only in the first step of a table's layout: new rows make a new layout.
        self._expanded_version = rows.version
        copies = torch.where(self._is_unexpanded(rows), row_params(rows)["num_sequences"], 1)
        parents = torch.arange(len(rows)).repeat_interleave(copies)
        if len(parents) == len(rows):
            return rows, None
        first = torch.cumsum(copies, 0) - copies
        slot = torch.arange(len(parents)) - first[parents]
        slot = torch.where(copies[parents] > 1, slot, rows.slot[parents])
        return rows.take(parents).replace(slot=slot), parents

    def _is_unexpanded(self, rows: Rows) -> Tensor:
        """Which rows have not split up yet [R]."""
        return rows.length == rows.prompt_length

    def _choose_tokens(self, rows: Rows, scores: Tensor) -> tuple[Tensor, Array, Tensor]:
        """The token of each row [R], its score (-inf: no token was possible), and the token on the host."""
        if self._greedy_and_sampled is None or self._greedy_and_sampled[0] != rows.version:
            sampled = row_params(rows)["do_sample"].bool()
            self._greedy_and_sampled = (
                rows.version,
                (~sampled).nonzero().squeeze(1),
                sampled.nonzero().squeeze(1),
            )
        _, greedy, drawing = self._greedy_and_sampled
        if not len(drawing):
            best, tokens = scores.max(-1)
        elif not len(greedy):
            best, tokens = self._sample(rows, scores)
        else:
            best, tokens = scores.max(-1)
            place = drawing.to(tokens.device)
            won, drawn = self._sample(rows.take(drawing), index_rows(scores, drawing))
            best, tokens = best.index_copy(0, place, won), tokens.index_copy(0, place, drawn)
        if tokens.device.type == "cpu" and self._peers is None:
            return tokens, best.numpy(), tokens
        # The one transfer of the step: the scores travel as their bits beside the tokens.
        choice = torch.stack((tokens, best.view(torch.int32).long()))
        if self._peers is not None:
            choice = self._peers.broadcast(choice)
            tokens = choice[0]
        host, bits = choice.cpu()
        return tokens, bits.to(torch.int32).view(torch.float32).numpy(), host

    def _sample(self, rows: Rows, scores: Tensor) -> tuple[Tensor, Tensor]:
        """One draw a row from the distribution of its scores: how it won the race, and the token [R] each."""
        race = scores.softmax(-1).div_(self._noise.draw(rows, scores.shape[1]))
        best, tokens = race.max(-1)
        return best.log(), tokens

    def _collect_finished(
        self,
        rows: Rows,
        tokens: Tensor,
        gone: Array,
        reasons: Sequence[tuple[str, Array]],
        failed: Sequence[int],
    ) -> list[tuple[int, Hypothesis]]:
        """Keep what the rows that go have written, but for those that failed: each with its row."""
        index = np.flatnonzero(gone & ~np.isin(rows.request.numpy(), failed))
        why = [next(name for name, which in reasons if which[row]) for row in index.tolist()]
        return self._record_finished(rows, index, [tokens[row : row + 1] for row in index.tolist()], why)

    def _record_finished(
        self, rows: Rows, index: Array, new: Sequence[Tensor], why: Sequence[str | None]
    ) -> list[tuple[int, Hypothesis]]:
        """Keep what the rows `index` have written that end, each with its new tokens and why: by its row."""
        written = index_rows(rows.tokens, torch.from_numpy(index)).cpu()
        kept = []
        for line, row in enumerate(index.tolist()):
            start, stop = int(rows.prompt_length[row]), int(rows.length[row])
            reason = why[line]
            assert reason is not None
            one = Hypothesis(torch.cat((written[line, start:stop], new[line])), reason)
            self._done.setdefault(int(rows.request[row]), {})[int(rows.slot[row])] = one
            kept.append((row, one))
        return kept


def finished_requests(rows: Rows, gone: Array, failed: Sequence[int]) -> list[int]:
    """The requests none of whose rows stay."""
    requests = rows.request.numpy()
    others = set(requests[~gone].tolist()) | set(failed)
    return [request for request in dict.fromkeys(requests[gone].tolist()) if request not in others]

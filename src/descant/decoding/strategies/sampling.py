"""Greedy search and sampling: one token per row and step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

import numpy as np
import torch
from torch import Tensor

from descant.core.context import row_params
from descant.core.host_copy import HostCopy
from descant.core.interfaces import Array, NoiseSource, RankGroup, StopCondition, StrategyDefaults
from descant.core.records import ForwardOutput, Hypothesis, Proposal, Selection, Tokens
from descant.core.rows import Rows, index_rows, on_device

_FEW_CANDIDATES = 8  # at most one token of so many
_FEW_ROWS = 16


class Sampling(StrategyDefaults):
    """Each row takes the most likely token, or a sampled one if its request samples.

    A request is prefilled as one row and expanded to `num_sequences` rows at its first token.
    """

    _launch_next: Callable[[Tensor], None] | None = None  # in this step

    def __init__(self, noise: NoiseSource, stop: StopCondition, rank_group: RankGroup | None = None) -> None:
        self._noise = noise
        self._stop = stop
        self._rank_group = rank_group
        self._done: dict[int, dict[int, Hypothesis]] = {}
        # (table version, number of greedy rows, sampling rows)
        self._greedy_and_sampled: tuple[object, int, Tensor | None] | None = None
        self._expanded_version: object = None  # version of a table whose rows are all expanded

    def select(self, rows: Rows, proposal: Proposal, output: ForwardOutput) -> Selection:  # noqa: ARG002
        """Choose one token per row; finished rows are removed."""
        scores = output.logits.select(1, 0)  # [R, V]
        parents = None
        if rows.version != self._expanded_version:  # most steps are not the first of a version
            rows, parents = self._expand_sequences(rows)
            if parents is not None:
                scores = index_rows(scores, parents)
        # Not of a subclass, which may change the tokens.
        self._launch_next = output.launch_next if parents is None and type(self) is Sampling else None
        return self.continue_rows(rows, scores, parents)

    def continue_rows(self, rows: Rows, scores: Tensor, parents: Tensor | None = None) -> Selection:
        """One token for each row by its scores [R', V]; row `i` was forked from the fed row `parents[i]`.

        Without `parents` [R'] (host) the rows are those that were fed.
        """
        tokens, best_scores, host = self._choose_tokens(rows, scores)
        emitted = Tokens(rows.request, rows.slot, host, parents)

        reasons = self._stop.finish_reasons(rows, None, host)
        # A sum is finite if all are, and NaN or -inf if one is. Python adds few numbers in less time.
        total = sum(best_scores.tolist()) if len(best_scores) <= _FEW_ROWS else best_scores.sum()
        if not reasons and total > -np.inf:
            slot = None if parents is None else rows.slot
            return Selection(tokens, parents, slot=slot, emitted=emitted, host_tokens=host)
        failed = sorted(set(rows.request.numpy()[~(best_scores > -np.inf)].tolist()))
        has_failed = np.isin(rows.request.numpy(), failed) if failed else np.zeros(len(rows), dtype=bool)
        removed = has_failed.copy()
        for _, mask in reasons:
            removed |= mask
        finished = self._collect_finished(rows, host, removed & ~has_failed, reasons)
        emitting = np.flatnonzero(~has_failed)
        if failed:  # failed requests emit nothing
            index = torch.from_numpy(emitting)
            parent_rows = index if parents is None else parents[index]
            emitted = Tokens(rows.request[index], rows.slot[index], host[index], parent_rows)
        index_of = dict(zip(emitting.tolist(), count()))
        ended: dict[int, Hypothesis] = {}
        finished_sequences = []
        for row, hypothesis in finished:
            ended[index_of[row]] = hypothesis
            finished_sequences.append((row if parents is None else int(parents[row]), hypothesis))
        kept_rows = torch.from_numpy(np.flatnonzero(~removed))
        return Selection(
            index_rows(tokens, kept_rows),
            kept_rows if parents is None else parents[kept_rows],
            slot=rows.slot[kept_rows],
            emitted=emitted._replace(finished=ended),
            finished=finished_requests(rows, removed, failed),
            failed=failed,
            host_tokens=host[kept_rows],
            finished_sequences=finished_sequences,
        )

    def finish(self, request: int) -> list[Hypothesis]:
        """The request's sequences, ordered by slot."""
        done = self._done.pop(request, {})
        return list(map(done.__getitem__, sorted(done)))

    def drop(self, request: int) -> None:
        """Discard a request."""
        self._done.pop(request, None)

    def checkpoint(self) -> Callable[[], None]:
        """A function that restores the sequences that have finished by now."""
        done: dict[int, dict[int, Hypothesis]] = {}
        for request, sequences in self._done.items():
            done[request] = dict(sequences)
        return partial(self._restore, done, self._expanded_version)

    def _restore(self, done: dict[int, dict[int, Hypothesis]], expanded_version: object) -> None:
        self._done, self._expanded_version = done, expanded_version

    def finished_so_far(self, request: int) -> list[Hypothesis]:
        """The request's sequences that have finished."""
        return list(self._done.get(request, {}).values())

    def _expand_sequences(self, rows: Rows) -> tuple[Rows, Tensor | None]:
        """The rows after expansion, and the fed row of each; None if no row was expanded."""
        if rows.version == self._expanded_version:
            return rows, None
        # Unexpanded rows occur only in the first step of a table version: new rows make a new version.
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
        """Which rows are not yet expanded into their sequences [R]."""
        return rows.length == rows.prompt_length

    def _choose_tokens(self, rows: Rows, scores: Tensor) -> tuple[Tensor, Array, Tensor]:
        """The token of each row [R], its score (-inf: no token possible), and the tokens on the host."""
        if self._greedy_and_sampled is None or self._greedy_and_sampled[0] != rows.version:
            sampled = row_params(rows)["do_sample"].bool().nonzero().squeeze(1)
            num_greedy = len(rows) - len(sampled)
            self._greedy_and_sampled = rows.version, num_greedy, sampled if len(sampled) else None
        _, num_greedy, sampled_rows = self._greedy_and_sampled
        if sampled_rows is None:
            best, tokens = scores.max(-1)
        elif not num_greedy:
            best, tokens = self._sample(rows, scores)
        else:
            best, tokens = scores.max(-1)
            index = on_device(sampled_rows, tokens.device)
            sampled_scores, sampled_tokens = self._sample(
                rows.take(sampled_rows), index_rows(scores, sampled_rows)
            )
            best, tokens = (
                best.index_copy(0, index, sampled_scores),
                tokens.index_copy(0, index, sampled_tokens),
            )
        if tokens.device.type == "cpu" and self._rank_group is None:
            if self._launch_next is not None:
                self._launch_next(tokens)
            return tokens, best.numpy(), tokens
        if self._rank_group is not None:  # one message: scores are bit-cast to integers next to the tokens
            choice = self._rank_group.broadcast(torch.stack((tokens, best.view(torch.int32).long())))
            host, bits = choice.cpu()
            return choice[0], bits.to(torch.int32).view(torch.float32).numpy(), host
        copy = HostCopy(tokens, best)
        if self._launch_next is not None:
            self._launch_next(tokens)
        host, host_scores = copy.wait()
        return tokens, host_scores.numpy(), host

    def _sample(self, rows: Rows, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Sample one token per row from the softmax of its scores: log of the winning ratio, token [R]."""
        probs = scores.softmax(-1)
        few = self._sample_few(rows, probs) if probs.is_cpu else None
        best, tokens = probs.div_(self._noise.draw(rows, scores.shape[1])).max(-1) if few is None else few
        return best.log(), tokens

    def _sample_few(self, rows: Rows, probs: Tensor) -> tuple[Tensor, Tensor] | None:
        """The winning ratio and token of each row [R], if filters have left few tokens; None: they have not.

        It draws noise for these tokens alone, and the result is the same. To count them would cost a device
        more than the noise does.
        """
        draw_at = getattr(self._noise, "draw_at", None)
        if draw_at is None:
            return None
        # Counted first: the indices of all tokens would take as long as a good part of the noise.
        if int(torch.count_nonzero(probs)) * _FEW_CANDIDATES > probs.numel():
            return None
        row, token = probs.nonzero(as_tuple=True)
        noise = draw_at(rows, row, token)
        if noise is None:
            return None
        counts = torch.bincount(row, minlength=probs.shape[0])
        start = counts.cumsum(0) - counts
        ratios = probs.new_zeros(probs.shape[0], int(counts.max()))
        ratios[row, torch.arange(row.shape[0]) - start[row]] = probs[row, token] / noise
        best, place = ratios.max(-1)
        return best, token[start + place]

    def _collect_finished(
        self,
        rows: Rows,
        tokens: Tensor,
        ended: Array,
        reasons: Sequence[tuple[str, Array]],
    ) -> list[tuple[int, Hypothesis]]:
        """Record the rows that ended [R]: (row, hypothesis) pairs."""
        index = np.flatnonzero(ended)
        last_tokens, row_reasons = [], []
        for row in index.tolist():
            last_tokens.append(tokens[row : row + 1])
            for name, mask in reasons:
                if mask[row]:
                    row_reasons.append(name)
                    break
        return self._record_finished(rows, index, last_tokens, row_reasons)

    def _record_finished(
        self, rows: Rows, index: Array, last_tokens: Sequence[Tensor], reasons: Sequence[str | None]
    ) -> list[tuple[int, Hypothesis]]:
        """Record the rows `index` as finished, with their last tokens: (row, hypothesis) pairs."""
        host_tokens = index_rows(rows.tokens, torch.from_numpy(index)).cpu()
        finished = []
        bounds = zip(
            rows.prompt_length.numpy()[index].tolist(), rows.length.numpy()[index].tolist(), strict=True
        )
        owners = zip(rows.request.numpy()[index].tolist(), rows.slot.numpy()[index].tolist(), strict=True)
        places = zip(index.tolist(), bounds, owners, strict=True)
        for position, (row, (start, stop), (request, slot)) in enumerate(places):
            reason = reasons[position]
            assert reason is not None
            hypothesis = Hypothesis(
                torch.cat((host_tokens[position, start:stop], last_tokens[position])), reason
            )
            self._done.setdefault(request, {})[slot] = hypothesis
            finished.append((row, hypothesis))
        return finished


def finished_requests(rows: Rows, removed: Array, failed: Sequence[int]) -> list[int]:
    """The requests that have no row left."""
    requests = rows.request.numpy()
    remaining = set(requests[~removed].tolist()) | set(failed)
    return [request for request in dict.fromkeys(requests[removed].tolist()) if request not in remaining]

"""A strategy as a third party writes it: rows fork while they run."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from descant.parts import ForwardOutput, GenerationConfig, Proposal, Rows, Sampling, Selection

__all__ = ["Branching"]


class Branching(Sampling):
    """A search in which each row forks at every second token, until its request has `most` sequences."""

    def __init__(self, noise: Any, stop: Any, rank_group: Any = None, *, most: int = 3) -> None:
        super().__init__(noise, stop, rank_group)
        self.most = most

    @staticmethod
    def params(_: GenerationConfig, most: int = 3) -> dict[str, int]:
        """The most rows of a request."""
        return {"max_rows": most}

    def select(self, rows: Rows, proposal: Proposal, output: ForwardOutput) -> Selection:  # noqa: ARG002
        """A token of each row, and a fork of some that must not take the best one."""
        scores = output.logits[:, 0]
        best, second = scores.topk(2).indices.unbind(1)
        sequences = Counter(rows.request.tolist())
        for request in sequences:
            sequences[request] += len(self.finished_so_far(request))
        parents, slots, forks = [], [], []
        for row in rows.slot.argsort(stable=True).tolist():  # the rows of a table come in any order
            request = int(rows.request[row])
            parents.append(row)
            slots.append(int(rows.slot[row]))
            is_even = int(rows.length[row] - rows.prompt_length[row]) % 2 == 0
            if is_even and sequences[request] < self.most and bool(scores[row, second[row]].isfinite()):
                forks.append(len(parents))
                parents.append(row)
                slots.append(sequences[request])
                sequences[request] += 1
        order = torch.tensor(parents)
        scores = scores[order]
        scores[forks, best[order[forks]]] = -torch.inf
        return self.continue_rows(rows.take(order).replace(slot=torch.tensor(slots)), scores, order)

"""What ends a row: its end token, its length, its time, or a criterion of the user's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.context import Context, params_of
from descant.errors import InputError
from descant.rows import Rows

__all__ = ["Criterion", "Stops"]

Array = np.ndarray[Any, np.dtype[Any]]
Criterion = Callable[..., Any]  # (input_ids [N, L], scores) -> bool, or bool [N]


class _Terms(NamedTuple):
    """What the rows of one layout of the table are measured by, worked out once."""

    version: object
    last: Array  # [R] the length before a row's last choice
    soonest: int  # the least of them
    eos: Array | None  # [R, E] end tokens, None where no row has any
    deadline: Array | None  # [R], None where no row has one


class Stops:
    """Every reason that can end a row of the table, asked about candidates that are not appended yet.

    `foreign` holds the criteria of the users; a request names its own by bits of the `criteria` column.
    """

    def __init__(self) -> None:
        self.foreign: dict[int, Criterion] = {}
        self._terms: _Terms | None = None

    def ended(self, rows: Rows, parents: Tensor | None, tokens: Tensor) -> Sequence[tuple[str, Array]]:
        """Reasons that end somebody, and which candidates [N]: `tokens[i]` after row `parents[i]` (host)."""
        # Numpy, here and where else a step works on a handful of host numbers: torch's dispatch would
        # take longer than the work.
        terms, even = self._terms, rows.even
        if terms is None or terms.version != rows.version:
            terms = self._terms = _terms_of(rows)
        index = None if parents is None else parents.numpy()
        found: list[tuple[str, Array]] = []
        if terms.eos is not None:
            eos = terms.eos if index is None else terms.eos[index]
            ends = (tokens.numpy()[:, None] == eos).any(1)
            if ends.any():
                found.append(("eos", ends))
        if even is None or even.length >= terms.soonest:
            full = rows.length.numpy() >= terms.last
            if full.any():
                found.append(("length", full if index is None else full[index]))
        if terms.deadline is not None:
            late = terms.deadline <= time.monotonic()
            if late.any():
                found.append(("time", late if index is None else late[index]))
        if self.foreign:
            found += self._asked(rows, torch.arange(len(rows)) if parents is None else parents, tokens)
        return found

    def _asked(self, rows: Rows, parents: Tensor, tokens: Tensor) -> list[tuple[str, Array]]:
        """The verdicts of the users' own criteria."""
        found = []
        wanted = params_of(rows)["criteria"][parents]
        for bit, criterion in self.foreign.items():
            mine = ((wanted >> bit) & 1).bool()
            if bool(mine.any()):
                verdict = self._ask(criterion, rows, parents, tokens, mine)
                if verdict.any():
                    found.append(("stop", verdict))
        return found

    def _ask(self, criterion: Criterion, rows: Rows, parents: Tensor, tokens: Tensor, mine: Tensor) -> Array:
        """A user's verdict on the candidates `mine` [N], who sees ids padded on the left."""
        index = mine.nonzero().squeeze(1)
        after = rows.take(parents[index])
        after = after.append(tokens[index].to(rows.tokens.device)[:, None], after.length + 1)
        context = Context(after.tokens, after.length, after.prompt, params_of(after).values)
        verdict = criterion(context.left_padded(), None)
        if isinstance(verdict, bool):
            verdict = torch.full((len(index),), verdict)
        alike = isinstance(verdict, Tensor) and verdict.dtype == torch.bool
        if not alike or verdict.shape not in (torch.Size([]), torch.Size([len(index)])):
            must = f"must answer a bool, or a tensor of {len(index)} bools, one a row"
            do = "return torch.zeros(len(input_ids), dtype=torch.bool) where no row is to end"
            raise InputError("stopping_criteria", must, verdict, do)
        answer = torch.zeros_like(mine)
        answer[index] = verdict.cpu().expand(len(index))
        return answer.numpy()


def _terms_of(rows: Rows) -> _Terms:
    params = params_of(rows)
    last, eos, deadline = (params[name].numpy() for name in ("last", "eos", "deadline"))
    ends, timed = bool((eos >= 0).any()), bool(np.isfinite(deadline).any())
    return _Terms(rows.version, last, int(last.min()), eos if ends else None, deadline if timed else None)

"""What ends a row: its end token, its length, its time, or a criterion of the user's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from descant.context import Context, params_of
from descant.errors import InputError
from descant.rows import Rows

__all__ = ["Criterion", "Stops"]

Criterion = Callable[..., Any]  # (input_ids [N, L], scores) -> bool, or bool [N]


class Stops:
    """Every reason that can end a row of the table, asked about candidates that are not appended yet.

    `foreign` holds the criteria of the users; a request names its own by bits of the `criteria` column.
    """

    def __init__(self) -> None:
        self.foreign: dict[int, Criterion] = {}
        self.timed = False  # whether any request that ever came has a deadline

    def ended(self, rows: Rows, parents: Tensor | None, tokens: Tensor) -> Sequence[tuple[str, Tensor]]:
        """Reasons, and which candidates each ends [N]: `tokens[i]` after row `parents[i]`, on the host."""
        params = params_of(rows)
        # Numpy, here and where else a step works on a handful of host numbers: torch's dispatch would
        # take longer than the work.
        eos, full = params["eos"].numpy(), rows.length.numpy() + 1 >= params["limit"].numpy()
        if parents is not None:
            eos, full = eos[parents.numpy()], full[parents.numpy()]
        ends = (tokens.numpy()[:, None] == eos).any(1)
        found = [("eos", torch.from_numpy(ends)), ("length", torch.from_numpy(full))]
        if self.timed:
            late = params["deadline"] <= time.monotonic()
            found.append(("time", late if parents is None else late[parents]))
        if self.foreign:
            whence = torch.arange(len(rows)) if parents is None else parents
            wanted = params["criteria"][whence]
            for bit, criterion in self.foreign.items():
                mine = ((wanted >> bit) & 1).bool()
                if bool(mine.any()):
                    found.append(("stop", self._ask(criterion, rows, whence, tokens, mine)))
        return found

    def _ask(self, criterion: Criterion, rows: Rows, parents: Tensor, tokens: Tensor, mine: Tensor) -> Tensor:
        """A user's verdict on the candidates `mine` [N], who sees ids padded on the left."""
        index = mine.nonzero().squeeze(1)
        whence = parents[index]
        params = params_of(rows)
        device = rows.tokens.device
        after = rows.take(whence)
        after = after.append(tokens[index].to(device)[:, None], after.length + 1)
        context = Context(after.tokens, after.length, after.prompt, params_of(after).values)
        verdict = torch.as_tensor(criterion(context.left_padded(int(params["pad"][whence][0])), None))
        if verdict.dtype != torch.bool or verdict.shape not in (torch.Size([]), torch.Size([len(index)])):
            raise InputError(
                "stopping_criteria",
                f"must answer a bool, or one bool for each of {len(index)} rows",
                verdict,
                "return torch.zeros(len(input_ids), dtype=torch.bool) where no row is to end",
            )
        answer = torch.zeros_like(mine)
        answer[index] = verdict.cpu().expand(len(index))
        return answer

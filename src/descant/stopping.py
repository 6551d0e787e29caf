"""What ends a row: its end token, its length, its time, or a criterion of the user's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from descant.errors import InputError
from descant.rows import Rows
from descant.step import Context, params_of

__all__ = ["Criterion", "Stops"]

Criterion = Callable[..., Any]  # (input_ids [N, L], scores) -> bool, or bool [N]


class Stops:
    """Every reason that can end a row of the table, asked about candidates that are not appended yet.

    `foreign` holds the criteria of the users; a request names its own by bits of the `criteria` column.
    """

    def __init__(self) -> None:
        self.foreign: dict[int, Criterion] = {}

    def ended(self, rows: Rows, parents: Tensor, tokens: Tensor) -> Sequence[tuple[str, Tensor]]:
        """Reasons with the candidates each ends [N]: `tokens[i]` after row `parents[i]`, all on the host."""
        params = params_of(rows)
        found = [
            ("eos", (tokens[:, None] == params["eos"][parents]).any(1)),
            ("length", (rows.length + 1 >= params["limit"])[parents]),
        ]
        deadline = params["deadline"]
        if bool((deadline < float("inf")).any()):
            found.append(("time", (deadline <= time.monotonic())[parents]))
        wanted = params["criteria"][parents]
        for bit, criterion in self.foreign.items():
            mine = ((wanted >> bit) & 1).bool()
            if bool(mine.any()):
                found.append(("stop", self._ask(criterion, rows, parents, tokens, mine)))
        return found

    def _ask(self, criterion: Criterion, rows: Rows, parents: Tensor, tokens: Tensor, mine: Tensor) -> Tensor:
        """A user's verdict on the candidates `mine` [N], who sees ids padded on the left."""
        index = mine.nonzero().squeeze(1)
        whence = parents[index]
        params = params_of(rows)
        device = rows.tokens.device
        after = rows.take(whence).append(tokens[index].to(device)[:, None], torch.ones_like(whence))
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

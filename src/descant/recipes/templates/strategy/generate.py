"""Sampling with a budget of surprisal."""

from types import MappingProxyType

import torch

from descant.parts import (
    ForwardOutput,
    Proposal,
    Rows,
    Sampling,
    Selection,
    check_number,
    index_rows,
)


class Budget(Sampling):
    """Samples until a row has used up its budget of surprisal, then searches greedily.

    The surprisal of a token is -log p, in nats. `columns` declares state per row; the
    engine moves it with its row, so that batches, several sequences per request and
    sessions need no code here.
    """

    columns = MappingProxyType({"spent": torch.zeros(1)})  # initial value of a row

    def __init__(self, noise, stop, rank_group=None, *, budget: float = 20.0):
        super().__init__(noise, stop, rank_group)
        self.budget = check_number("budget", budget, 0)

    def select(
        self, rows: Rows, proposal: Proposal, output: ForwardOutput
    ) -> Selection:
        """Select one token per row, the likeliest if the budget is used up."""
        logprobs = output.logits[:, 0].log_softmax(-1)  # [R, V], processed
        used_up = (rows.column("spent") >= self.budget).to(logprobs.device)[:, None]
        unlikely = logprobs < logprobs.max(-1, keepdim=True).values
        allowed = logprobs.masked_fill(used_up & unlikely, -torch.inf)[:, None]
        selection = super().select(rows, proposal, output._replace(logits=allowed))
        # Rows finish, and the first step expands a request to the sequences that it
        # returns: new row `i` continues row `parents[i]`.
        parents = selection.parents
        if parents is None:
            parents = torch.arange(len(rows))
        logprob = index_rows(logprobs, parents).gather(1, selection.tokens[:, None])
        spent = rows.column("spent")[parents] - logprob.squeeze(1).cpu()
        return selection._replace(columns={**selection.columns, "spent": spent})


strategy = Budget

"""Classifier-free guidance: away from what the model says after another prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from descant.core.context import Params, params_of
from descant.core.interfaces import Cache
from descant.core.records import Output, Proposal
from descant.core.rows import Rows, pick
from descant.decoding.guidance.model_wrapper import Wrapped
from descant.kv_cache.cfg_rows import Twins

__all__ = ["NEGATIVE", "Guidance"]

NEGATIVE: Final = "negative_prompt_ids"  # under which name a request gives it


class Guidance(Wrapped):
    """A model that says `u + scale * (c - u)`, of what it says after a prompt and without it (log-laws).

    Every row that is guided has a twin in the cache (Sanchez et al. 2023, arXiv 2306.17806): the same new
    tokens after the negative prompt, or where none is given after the prompt's last token. Both are fed
    in one forward; the twin follows its row wherever that is taken. Rows that are not guided have none.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._negative: dict[int, Tensor] = {}  # a request's negative prompt (host)

    def open(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        """Take the negative prompts of new requests, and hand the rest on."""
        for request, ids in zip(requests, inputs.get(NEGATIVE, ()), strict=False):
            if ids is not None:
                self._negative[request] = torch.as_tensor(ids).cpu()
        self.inner.open(requests, {name: lines for name, lines in inputs.items() if name != NEGATIVE})

    def close(self, requests: Sequence[int]) -> None:
        """Forget those requests."""
        self.inner.close(requests)
        for request in requests:
            self._negative.pop(request, None)

    def around(self, cache: Cache) -> Cache:
        """The cache with room for twins."""
        return Twins(cache)

    def forward(self, rows: Rows, proposal: Proposal, cache: Cache) -> Output:
        """What the model says of every row, guided where a row asks for it."""
        assert isinstance(cache, Twins)
        params = params_of(rows)
        guided = params.values.get("guided")
        mine, lone = torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.bool)
        if guided is not None:
            mine = (torch.as_tensor(guided) == 1).nonzero().squeeze(1)
            lone = cache.twin[mine] < 0
            self._seat(rows, mine[lone], cache)
        both, tried = rows, Proposal(None, proposal.drafts, proposal.n)
        if len(mine):
            both = rows.changed(columns={}).cat(self._twins(rows, mine, cache, lone))
            both = both.changed(columns={"params": _params(params, len(mine))})
            tried = _taken(tried, torch.cat((torch.arange(len(rows)), mine)))
        order = cache.order(mine)
        if order is not None:
            both, tried = both.take(order), _taken(tried, order)
        output: Output = self.inner.forward(both, tried, cache.inner)
        own = output.logits if output.plain is None else output.plain
        said, plain = (
            block[: len(rows)] if order is None else pick(block, cache.place)
            for block in (output.logits, own)
        )
        states = [{**part, "rows": cache.whose[part["rows"]]} for part in output.states]
        if not len(mine):
            return Output(said, states, None if output.plain is None else plain)
        without = pick(output.logits, cache.twin[mine]).log_softmax(-1)
        given = pick(said, mine).log_softmax(-1)
        scale = params["guidance_scale"][mine].to(given.device, torch.float32)[:, None, None]
        away = torch.where(given == without, without, without + (given - without) * scale)
        away = torch.where(given == -torch.inf, given, away)  # what a model rules out stays ruled out
        return Output(said.index_copy(0, mine.to(said.device), away), states, plain)

    def _seat(self, rows: Rows, new: Tensor, cache: Twins) -> None:
        """Give rows that are guided from now on their twins."""
        if not len(new):
            return
        shifts = []
        for row in new.tolist():
            request, prompt = int(rows.request[row]), int(rows.prompt[row])
            if request not in self._negative:
                self._negative[request] = rows.tokens[row, prompt - 1 : prompt].cpu()
            shifts.append(len(self._negative[request]) - prompt - int(rows.offset[row]))
        cache.seat(new, torch.tensor(shifts))

    def _twins(self, rows: Rows, mine: Tensor, cache: Twins, lone: Tensor) -> Rows:
        """The twins of the rows `mine` as rows: the negative prompts, and what is new in each.

        Those of the `lone` [N] have read nothing yet, whatever their rows begin with.
        """
        ahead = rows.changed(columns={}).take(mine)
        negative = [self._negative[request] for request in ahead.request.tolist()]
        size = torch.tensor([len(one) for one in negative])
        length = size + ahead.length - ahead.prompt
        # Position `p` of a twin is `p - size + prompt` of its row, from the negative prompt's end on.
        place = torch.arange(int(length.max())) + (ahead.prompt - size)[:, None]
        at = place.clamp(0, ahead.tokens.shape[1] - 1).to(ahead.tokens.device)
        tokens = ahead.tokens.gather(1, at)
        first = torch.nn.utils.rnn.pad_sequence(negative, batch_first=True)
        known = (torch.arange(first.shape[1]) < size[:, None]).to(tokens.device)
        tokens[:, : first.shape[1]] = torch.where(known, first.to(tokens.device), tokens[:, : first.shape[1]])
        return ahead.changed(
            tokens=tokens,
            length=length,
            cached=torch.where((ahead.cached > 0) & ~lone, ahead.cached + cache.shift[mine], 0),
            offset=torch.zeros_like(size),
            prompt=size,
            request=-1 - ahead.request,  # nobody's: what a request gives besides its prompt is not the twin's
        )


def _params(params: Params, twins: int) -> Params:
    """What wrappers inside read of the rows' parameters, of which twins have none."""
    early = params.values.get("early_layers")
    if not isinstance(early, Tensor):
        return Params({})
    return Params({"early_layers": torch.cat((early, early.new_full((twins, early.shape[1]), -1)))})


def _taken(proposal: Proposal, whose: Tensor) -> Proposal:
    """What the rows `whose` try."""
    if proposal.drafts is None:
        return proposal
    return Proposal(None, pick(proposal.drafts, whose), None if proposal.n is None else proposal.n[whose])

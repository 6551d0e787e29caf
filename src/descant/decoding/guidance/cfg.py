"""Classifier-free guidance: away from what the model says after another prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from descant.core.context import RowParams, row_params
from descant.core.interfaces import RowCache
from descant.core.records import ForwardOutput, Proposal
from descant.core.rows import Rows, index_rows
from descant.decoding.guidance.model_wrapper import ModelWrapper
from descant.kv_cache.cfg_rows import PairedRowCache

__all__ = ["NEGATIVE_PROMPT_KEY", "ClassifierFreeGuidance"]

NEGATIVE_PROMPT_KEY: Final = "negative_prompt_ids"  # under which name a request gives it


class ClassifierFreeGuidance(ModelWrapper):
    """A model that says `u + scale * (c - u)`, of what it says after a prompt and without it (log-laws).

    Every row that is guided has a twin in the cache (Sanchez et al. 2023, arXiv 2306.17806): the same new
    tokens after the negative prompt, or where none is given after the prompt's last token. Both are fed
    in one forward; the twin follows its row wherever that is taken. Rows that are not guided have none.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._negative_prompts: dict[int, Tensor] = {}  # a request's negative prompt (host)

    def add_requests(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        """Take the negative prompts of new requests, and hand the rest on."""
        for request, ids in zip(requests, inputs.get(NEGATIVE_PROMPT_KEY, ()), strict=False):
            if ids is not None:
                self._negative_prompts[request] = torch.as_tensor(ids).cpu()
        self.inner.add_requests(
            requests, {name: lines for name, lines in inputs.items() if name != NEGATIVE_PROMPT_KEY}
        )

    def remove_requests(self, requests: Sequence[int]) -> None:
        """Forget those requests."""
        self.inner.remove_requests(requests)
        for request in requests:
            self._negative_prompts.pop(request, None)

    def wrap_cache(self, cache: RowCache) -> RowCache:
        """The cache with room for twins."""
        return PairedRowCache(cache)

    def forward(self, rows: Rows, proposal: Proposal, cache: RowCache) -> ForwardOutput:
        """What the model says of every row, guided where a row asks for it."""
        assert isinstance(cache, PairedRowCache)
        params = row_params(rows)
        guided = params.values.get("uses_guidance")
        mine, lone = torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.bool)
        if guided is not None:
            mine = (torch.as_tensor(guided) == 1).nonzero().squeeze(1)
            lone = cache.uncond_row[mine] < 0
            self._add_unconditional(rows, mine[lone], cache)
        both, tried = rows, Proposal(None, proposal.drafts, proposal.num_drafts)
        if len(mine):
            both = rows.replace(columns={}).cat(self._unconditional_rows(rows, mine, cache, lone))
            both = both.replace(columns={"params": _inner_params(params, len(mine))})
            tried = _take_proposal(tried, torch.cat((torch.arange(len(rows)), mine)))
        order = cache.inner_order(mine)
        if order is not None:
            both, tried = both.take(order), _take_proposal(tried, order)
        output: ForwardOutput = self.inner.forward(both, tried, cache.inner)
        own = output.logits if output.base_logits is None else output.base_logits
        said, plain = (
            block[: len(rows)] if order is None else index_rows(block, cache.row_index)
            for block in (output.logits, own)
        )
        states = [{**part, "rows": cache.outer_row[part["rows"]]} for part in output.states]
        if not len(mine):
            return ForwardOutput(said, states, None if output.base_logits is None else plain)
        without = index_rows(output.logits, cache.uncond_row[mine]).log_softmax(-1)
        given = index_rows(said, mine).log_softmax(-1)
        scale = params["guidance_scale"][mine].to(given.device, torch.float32)[:, None, None]
        away = torch.where(given == without, without, without + (given - without) * scale)
        away = torch.where(given == -torch.inf, given, away)  # what a model rules out stays ruled out
        return ForwardOutput(said.index_copy(0, mine.to(said.device), away), states, plain)

    def _add_unconditional(self, rows: Rows, new: Tensor, cache: PairedRowCache) -> None:
        """Give rows that are guided from now on their twins."""
        if not len(new):
            return
        shifts = []
        for row in new.tolist():
            request, prompt = int(rows.request[row]), int(rows.prompt_length[row])
            if request not in self._negative_prompts:
                self._negative_prompts[request] = rows.tokens[row, prompt - 1 : prompt].cpu()
            shifts.append(len(self._negative_prompts[request]) - prompt - int(rows.offset[row]))
        cache.add_uncond_rows(new, torch.tensor(shifts))

    def _unconditional_rows(self, rows: Rows, mine: Tensor, cache: PairedRowCache, lone: Tensor) -> Rows:
        """The twins of the rows `mine` as rows: the negative prompts, and what is new in each.

        Those of the `lone` [N] have read nothing yet, whatever their rows begin with.
        """
        ahead = rows.replace(columns={}).take(mine)
        negative = [self._negative_prompts[request] for request in ahead.request.tolist()]
        size = torch.tensor([len(one) for one in negative])
        length = size + ahead.length - ahead.prompt_length
        # Position `p` of a twin is `p - size + prompt` of its row, from the negative prompt's end on.
        place = torch.arange(int(length.max())) + (ahead.prompt_length - size)[:, None]
        at = place.clamp(0, ahead.tokens.shape[1] - 1).to(ahead.tokens.device)
        tokens = ahead.tokens.gather(1, at)
        first = torch.nn.utils.rnn.pad_sequence(negative, batch_first=True)
        known = (torch.arange(first.shape[1]) < size[:, None]).to(tokens.device)
        tokens[:, : first.shape[1]] = torch.where(known, first.to(tokens.device), tokens[:, : first.shape[1]])
        return ahead.replace(
            tokens=tokens,
            length=length,
            cached_length=torch.where(
                (ahead.cached_length > 0) & ~lone, ahead.cached_length + cache.uncond_offset[mine], 0
            ),
            offset=torch.zeros_like(size),
            prompt_length=size,
            request=-1 - ahead.request,  # nobody's: what a request gives besides its prompt is not the twin's
        )


def _inner_params(params: RowParams, twins: int) -> RowParams:
    """What wrappers inside read of the rows' parameters, of which twins have none."""
    early = params.values.get("early_layers")
    if not isinstance(early, Tensor):
        return RowParams({})
    return RowParams({"early_layers": torch.cat((early, early.new_full((twins, early.shape[1]), -1)))})


def _take_proposal(proposal: Proposal, whose: Tensor) -> Proposal:
    """What the rows `whose` try."""
    if proposal.drafts is None:
        return proposal
    return Proposal(
        None,
        index_rows(proposal.drafts, whose),
        None if proposal.num_drafts is None else proposal.num_drafts[whose],
    )

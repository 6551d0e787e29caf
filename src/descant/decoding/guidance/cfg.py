"""Classifier-free guidance: move away from the model's prediction after a negative prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from descant.core.context import row_params
from descant.core.interfaces import RowCache
from descant.core.records import ForwardOutput, Proposal
from descant.core.rows import Rows, index_rows
from descant.decoding.guidance.model_wrapper import ModelWrapper
from descant.kv_cache.row_views import PairedRowCache

__all__ = ["NEGATIVE_PROMPT_KEY", "ClassifierFreeGuidance"]

NEGATIVE_PROMPT_KEY: Final = "negative_prompt_ids"  # the request input that holds it


class ClassifierFreeGuidance(ModelWrapper):
    """A model with logits `u + scale * (c - u)` of its conditional and unconditional log-probabilities.

    Every guided row has an unconditional row in the cache (Sanchez et al. 2023, arXiv 2306.17806): the same
    new tokens after the negative prompt, or by default after the prompt's last token. Both are fed in one
    forward, and the unconditional row follows its row on every fork. Rows without guidance have none.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._negative_prompts: dict[int, Tensor] = {}  # by request (host)

    def add_requests(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        """Store the negative prompts of new requests and pass on the other inputs."""
        for request, ids in zip(requests, inputs.get(NEGATIVE_PROMPT_KEY, ()), strict=False):
            if ids is not None:
                self._negative_prompts[request] = torch.as_tensor(ids).cpu()
        self.inner.add_requests(
            requests, {name: values for name, values in inputs.items() if name != NEGATIVE_PROMPT_KEY}
        )

    def remove_requests(self, requests: Sequence[int]) -> None:
        """Remove requests."""
        self.inner.remove_requests(requests)
        for request in requests:
            self._negative_prompts.pop(request, None)

    def wrap_cache(self, cache: RowCache) -> RowCache:
        """The cache with unconditional rows."""
        return PairedRowCache(cache)

    def forward(self, rows: Rows, proposal: Proposal, cache: RowCache) -> ForwardOutput:
        """The logits of every row, guided where a row enables it."""
        assert isinstance(cache, PairedRowCache)
        params = row_params(rows)
        flags = params.values.get("uses_guidance")
        guided = torch.zeros(0, dtype=torch.long)
        if flags is not None:
            guided = (torch.as_tensor(flags) == 1).nonzero().squeeze(1)
            self._add_unconditional(rows, guided[cache.uncond_row[guided] < 0], cache)
        fed_rows, fed_proposal = rows, Proposal(None, proposal.drafts, proposal.num_drafts)
        if len(guided):
            fed_rows = rows.replace(columns={}).cat(self._unconditional_rows(rows, guided, cache))
            fed_rows = fed_rows.replace(columns={"params": params.extend(len(guided))})
            fed_proposal = fed_proposal.take(torch.cat((torch.arange(len(rows)), guided)))
        order = cache.inner_order(guided)
        if order is not None:
            fed_rows, fed_proposal = fed_rows.take(order), fed_proposal.take(order)
        output: ForwardOutput = self.inner.forward(fed_rows, fed_proposal, cache.inner)
        base_logits = output.logits if output.base_logits is None else output.base_logits
        row_logits, row_base_logits = (
            block[: len(rows)] if order is None else index_rows(block, cache.row_index)
            for block in (output.logits, base_logits)
        )
        states = [{**part, "rows": cache.outer_row[part["rows"]]} for part in output.states]
        if not len(guided):
            return ForwardOutput(row_logits, states, None if output.base_logits is None else row_base_logits)
        unconditional = index_rows(output.logits, cache.uncond_row[guided]).log_softmax(-1)
        conditional = index_rows(row_logits, guided).log_softmax(-1)
        scale = params["guidance_scale"][guided].to(conditional.device, torch.float32)[:, None, None]
        combined = torch.where(
            conditional == unconditional, unconditional, unconditional + (conditional - unconditional) * scale
        )
        combined = torch.where(
            conditional == -torch.inf, conditional, combined
        )  # tokens at -inf stay at -inf
        return ForwardOutput(
            row_logits.index_copy(0, guided.to(row_logits.device), combined), states, row_base_logits
        )

    def _add_unconditional(self, rows: Rows, new: Tensor, cache: PairedRowCache) -> None:
        """Add unconditional rows for the rows `new`."""
        if not len(new):
            return
        offsets = []
        for row in new.tolist():
            request, prompt = int(rows.request[row]), int(rows.prompt_length[row])
            if request not in self._negative_prompts:
                self._negative_prompts[request] = rows.tokens[row, prompt - 1 : prompt].cpu()
            offsets.append(len(self._negative_prompts[request]) - prompt - int(rows.offset[row]))
        cache.add_uncond_rows(new, torch.tensor(offsets), rows.cached_length[new])

    def _unconditional_rows(self, rows: Rows, guided: Tensor, cache: PairedRowCache) -> Rows:
        """The unconditional rows of the rows `guided`: the negative prompts and the new tokens."""
        conditional = rows.replace(columns={}).take(guided)
        prompts = [self._negative_prompts[request] for request in conditional.request.tolist()]
        prompt_sizes = torch.tensor([len(prompt) for prompt in prompts])
        length = prompt_sizes + conditional.length - conditional.prompt_length
        # After the negative prompt, position `p` is position `p - prompt_size + prompt_length` of the row.
        source = torch.arange(int(length.max())) + (conditional.prompt_length - prompt_sizes)[:, None]
        index = source.clamp(0, conditional.tokens.shape[1] - 1).to(conditional.tokens.device)
        tokens = conditional.tokens.gather(1, index)
        padded = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
        in_prompt = (torch.arange(padded.shape[1]) < prompt_sizes[:, None]).to(tokens.device)
        tokens[:, : padded.shape[1]] = torch.where(
            in_prompt, padded.to(tokens.device), tokens[:, : padded.shape[1]]
        )
        return conditional.replace(
            tokens=tokens,
            length=length,
            cached_length=cache.uncond_lengths(guided, conditional.cached_length),
            offset=torch.zeros_like(prompt_sizes),
            prompt_length=prompt_sizes,
            request=-1 - conditional.request,  # no request's: side inputs do not apply to unconditional rows
        )

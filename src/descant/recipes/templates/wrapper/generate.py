"""A model that prefers the tokens of its prompt."""

from math import log, log1p
from typing import Any

import torch

from descant.parts import (
    ForwardOutput,
    ModelWrapper,
    Proposal,
    RowCache,
    Rows,
    check_number,
    index_rows,
)


class FromPrompt(ModelWrapper):
    """A model whose distribution is mixed with the token frequencies of the prompt.

    A wrapper runs before all processors and changes the logits of the rows that request
    it; other rows share the forward and keep their logits.
    """

    def __init__(self, inner: Any, *, share: float = 0.1):
        super().__init__(inner)
        self.share = check_number("share", share, 0.001, 0.999)

    def forward(self, rows: Rows, proposal: Proposal, cache: RowCache) -> ForwardOutput:
        """Run the model, and mix the distribution of active rows."""
        output = self.inner.forward(rows, proposal, cache)
        active = self.active_rows(rows)  # [N]
        if not len(active):
            return output
        # [N, K + 1, V]: after the row, and after each draft token.
        logprobs = index_rows(output.logits, active).log_softmax(-1)
        tokens = index_rows(rows.tokens, active)
        prompt_length = rows.prompt_length[active].to(logprobs.device)
        position = torch.arange(tokens.shape[1], device=logprobs.device)
        # The first token is left out: it is often a beginning-of-text token.
        in_prompt = (position > 0) & (position < prompt_length[:, None])
        counts = logprobs.new_zeros(len(active), logprobs.shape[-1])
        counts.scatter_add_(1, tokens, in_prompt.to(logprobs.dtype))
        frequency = counts / in_prompt.sum(1, keepdim=True).clamp(min=1)
        prompt_logprobs = frequency.log()[:, None]  # [N, 1, V]
        mixed = torch.logaddexp(
            logprobs + log1p(-self.share), prompt_logprobs + log(self.share)
        )
        logits = output.logits.index_copy(0, active.to(logprobs.device), mixed)
        # The model's own logits, for requests that return its log-probabilities.
        base = output.logits if output.base_logits is None else output.base_logits
        return output._replace(logits=logits, base_logits=base)


wrapper = FromPrompt

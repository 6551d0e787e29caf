"""Keep thinking: suppress the end of the text while the model is uncertain.

Longer reasoning often improves the answer: s1 replaces the end of thinking by "Wait" (Muennighoff et al.
2025, "s1: Simple test-time scaling", arXiv 2501.19393). This does so only if the model is uncertain: while
the mean entropy of its predictions, over about the last `window` tokens, is `above` so many nats, the tokens
`end` are masked. If one of them is the likeliest, the token `wait` is forced instead, if it is given. This
happens at most `most` times per sequence.

    generate(model, **inputs, recipe="keep-thinking", end=end_of_thinking_id, wait=wait_id)

The default of `end` is the eos token. A stateful processor: its state lives in columns of the table, which
fork and end with their row, and never in `self`, which all rows share.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from descant.parts import Context, LogitsProcessor, check_number, vocab_mask


class KeepThinking(LogitsProcessor):
    """Masks end tokens while the mean entropy is high."""

    state = {"thinking_entropy": 0.0, "thinking_waits": 0.0}  # noqa: RUF012 - initial values of a row

    def __init__(
        self,
        end: int | Sequence[int] | None = None,
        wait: int | None = None,
        most: int = 4,
        above: float = 1.0,
        window: int = 32,
    ) -> None:
        ends = [end] if isinstance(end, int) else end
        self.end = None if ends is None else [check_number("end", token, 0, integer=True) for token in ends]
        self.wait = None if wait is None else check_number("wait", wait, 0, integer=True)
        self.most = check_number("most", most, 0, integer=True)
        self.above = float(check_number("above", above, 0.0))
        self.window = check_number("window", window, 1, integer=True)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Mask end tokens of uncertain rows; force `wait` where a row was about to end."""
        is_end, uncertain, about_to_end = self._end_masks(context, scores)
        masked = scores.masked_fill(is_end & uncertain, -torch.inf)
        if self.wait is None:
            return masked
        wait_only = torch.zeros_like(scores).masked_fill(
            ~vocab_mask(scores.shape, context.param("wait")), -torch.inf
        )
        return torch.where(about_to_end, wait_only, masked)

    def advance(self, context: Context, before: Tensor, after: Tensor, tokens: Tensor) -> dict[str, Tensor]:  # noqa: ARG002
        """Update the mean entropy and the number of suppressed ends."""
        mean, waits = context.state("thinking_entropy"), context.state("thinking_waits")
        waits = waits + self._end_masks(context, before)[2]
        entropy = torch.special.entr(before.softmax(-1)).sum(-1, keepdim=True)  # [N, 1], in nats
        mean = mean + (entropy - mean) / (context.generated + 1).clamp(max=self.window)
        return {"thinking_entropy": mean[:, 0], "thinking_waits": waits[:, 0]}

    def _end_masks(self, context: Context, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """End tokens [N, V], lines that must not end [N, 1], and those of them that were about to [N, 1]."""
        is_end = vocab_mask(scores.shape, context.param("eos_token_ids" if self.end is None else "end"))
        # -inf: nothing else is possible.
        best_other = scores.masked_fill(is_end, -torch.inf).amax(-1, keepdim=True)
        uncertain = (context.state("thinking_entropy") > self.above) & (best_other > -torch.inf)
        uncertain &= context.state("thinking_waits") < self.most
        return is_end, uncertain, uncertain & (scores.amax(-1, keepdim=True) > best_other)


processor = KeepThinking

"""Keep thinking: a model that wants to end while it is uncertain has to go on.

Made to think longer, a model often finds its mistake: s1 takes the end of its thinking away and says "Wait"
in its place (Muennighoff et al. 2025, "s1: Simple test-time scaling", arXiv 2501.19393). This does so only
where it may pay: while the entropy of the model's own predictions, a mean over about the last `window`
tokens, is `above` so many nats, the tokens `end` are ruled out; and where one of them is the likeliest, the
token `wait` is said instead, if there is one. That happens at most `most` times to a sequence.

    generate(model, **inputs, recipe="keep-thinking", end=end_of_thinking_id, wait=wait_id)

Without `end` it is the end of the text. A processor with a state: what it has to remember of a row lives in
the loop's table, as columns that fork and end with the row, and never in `self`, which all rows share.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from descant.parts import Context, LogitsProcessor, check_number, vocab_mask


class KeepThinking(LogitsProcessor):
    """Puts off an end that comes while the text is uncertain."""

    state = {"thinking_entropy": 0.0, "thinking_waits": 0.0}  # noqa: RUF012 - what a row starts with

    def __init__(
        self,
        end: int | Sequence[int] | None = None,
        wait: int | None = None,
        most: int = 4,
        above: float = 1.0,
        window: int = 32,
    ) -> None:
        ends = [end] if isinstance(end, int) else end
        self.end = None if ends is None else [check_number("end", one, 0, integer=True) for one in ends]
        self.wait = None if wait is None else check_number("wait", wait, 0, integer=True)
        self.most = check_number("most", most, 0, integer=True)
        self.above = float(check_number("above", above, 0.0))
        self.window = check_number("window", window, 1, integer=True)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """No end where the row is uncertain, and only `wait` where it was about to."""
        ends, unsure, ending = self._end_masks(context, scores)
        kept = scores.masked_fill(ends & unsure, -torch.inf)
        if self.wait is None:
            return kept
        only = torch.zeros_like(scores).masked_fill(
            ~vocab_mask(scores.shape, context.param("wait")), -torch.inf
        )
        return torch.where(ending, only, kept)

    def advance(self, context: Context, before: Tensor, after: Tensor, tokens: Tensor) -> dict[str, Tensor]:  # noqa: ARG002
        """The mean with one more entropy in it, and how often an end was put off."""
        mean, waits = context.state("thinking_entropy"), context.state("thinking_waits")
        waits = waits + self._end_masks(context, before)[2]
        entropy = torch.special.entr(before.softmax(-1)).sum(-1, keepdim=True)  # [N, 1], in nats
        mean = mean + (entropy - mean) / (context.generated + 1).clamp(max=self.window)
        return {"thinking_entropy": mean[:, 0], "thinking_waits": waits[:, 0]}

    def _end_masks(self, context: Context, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Which tokens end [N, V], which lines must not, and which of these were about to [N, 1]."""
        ends = vocab_mask(scores.shape, context.param("eos_token_ids" if self.end is None else "end"))
        other = scores.masked_fill(ends, -torch.inf).amax(-1, keepdim=True)  # -inf: nothing else is possible
        unsure = (context.state("thinking_entropy") > self.above) & (other > -torch.inf)
        unsure &= context.state("thinking_waits") < self.most
        return ends, unsure, unsure & (scores.amax(-1, keepdim=True) > other)


processor = KeepThinking

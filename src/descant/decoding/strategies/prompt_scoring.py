"""The log-probabilities of a text: its tokens are drafts that are all accepted."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from descant.core.interfaces import DraftContext, StrategyDefaults
from descant.core.records import ForwardOutput, Hypothesis, Logprobs, Proposal, Selection
from descant.core.rows import Rows

MAX_DRAFTS = 63  # the logits of a step are [R, MAX_DRAFTS + 1, V]


@dataclass
class _ScoredText:
    """A text while it is scored."""

    tokens: Tensor  # [L - 1] (host) without the first, which is the row's prompt
    num_top: int
    # By the index of its first token: the log-probabilities [T], the most probable tokens [T, n] and theirs.
    parts: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)

    def logprobs(self) -> Logprobs:
        """Those of all its tokens, on the host."""
        parts = [self.parts[start] for start in sorted(self.parts)]
        raw, top, top_raw = (torch.cat(columns).cpu() for columns in zip(*parts, strict=True))
        return Logprobs(raw, raw, top, top_raw, top_raw)


class PromptScoring(StrategyDefaults):
    """Feeds the tokens of each request's text, whatever the model finds likely, and records their logits.

    The texts are added by request before its admission. Models with a recurrent state may not continue it by
    several tokens at once: with `is_recurrent` only the first part of a text has more than one.
    """

    def __init__(self, *, is_recurrent: bool = False) -> None:
        self._is_recurrent = is_recurrent
        self._texts: dict[int, _ScoredText] = {}
        self._done: dict[int, Hypothesis] = {}

    def add(self, request: int, tokens: Tensor, num_top: int) -> None:
        """Add a text: its tokens after the first [L - 1] (host), and the number of alternatives."""
        self._texts[request] = _ScoredText(tokens, num_top)

    def propose(self, rows: Rows, context: DraftContext) -> Proposal:  # noqa: ARG002
        """The next tokens of each text but one, which follows them."""
        runs = self._runs(rows)
        num_drafts = torch.tensor([len(run) - 1 for run in runs])
        if not int(num_drafts.max()):
            return Proposal()
        drafts = torch.nn.utils.rnn.pad_sequence([run[:-1] for run in runs], batch_first=True)
        return Proposal(None, drafts.to(rows.tokens.device), num_drafts)

    def select(self, rows: Rows, proposal: Proposal, output: ForwardOutput) -> Selection:  # noqa: ARG002
        """Accept all drafts and take the next token of each text; texts that end here are removed."""
        logits = output.logits  # [R, K + 1, V]
        runs = self._runs(rows)
        tokens = torch.nn.utils.rnn.pad_sequence(runs, batch_first=True).to(logits.device)
        total = logits.logsumexp(-1)  # [R, K + 1]
        own = logits.gather(2, tokens[..., None])[..., 0] - total
        requests, starts = rows.request.tolist(), (rows.length - rows.prompt_length).tolist()
        texts = [self._texts[request] for request in requests]
        values, top = logits.topk(max(text.num_top for text in texts))
        values = values - total[..., None]
        ended: list[int] = []
        for row, (text, run, start) in enumerate(zip(texts, runs, starts, strict=True)):
            size, count = len(run), text.num_top
            # By its start: a step that is made again writes the same.
            text.parts[start] = own[row, :size], top[row, :size, :count], values[row, :size, :count]
            if start + size == len(text.tokens):
                self._done[requests[row]] = Hypothesis(text.tokens, "length", logprobs=text.logprobs())
                ended.append(row)
        kept = torch.tensor([row for row in range(len(rows)) if row not in ended], dtype=torch.long)
        last = torch.stack([run[-1] for run in runs])[kept]
        return Selection(
            last.to(rows.tokens.device),
            kept,
            torch.tensor([len(run) - 1 for run in runs])[kept],
            finished=[requests[row] for row in ended],
            host_tokens=last,
            finished_sequences=[(row, self._done[requests[row]]) for row in ended],
        )

    def finish(self, request: int) -> list[Hypothesis]:
        """The text, with its log-probabilities."""
        del self._texts[request]
        return [self._done.pop(request)]

    def drop(self, request: int) -> None:
        """Discard a request."""
        self._texts.pop(request, None)
        self._done.pop(request, None)

    def finished_so_far(self, request: int) -> list[Hypothesis]:
        """The text, if it has ended."""
        return [self._done[request]] if request in self._done else []

    def _runs(self, rows: Rows) -> list[Tensor]:
        """The tokens of each text that this step scores (host)."""
        starts = (rows.length - rows.prompt_length).tolist()
        sizes = [1 if start and self._is_recurrent else MAX_DRAFTS + 1 for start in starts]
        return [
            self._texts[request].tokens[start : start + size]
            for request, start, size in zip(rows.request.tolist(), starts, sizes, strict=True)
        ]

"""The forward of the next step, launched before the host has read the tokens of this one."""

from __future__ import annotations

from torch import Tensor

from descant.core.context import row_params
from descant.core.interfaces import NO_DRAFTS, Model, RowCache
from descant.core.records import ForwardOutput, Proposal, Selection
from descant.core.rows import Rows, index_rows


class NextForward:
    """The forward of a table's next step, if it is launched in this one: docs/adr/0020-launch-then-settle.md.

    It feeds the new token of every row, as if none ended. It writes only slots that no commit has accepted,
    so it can be dropped at any time, and the next step makes it again.
    """

    def __init__(self) -> None:
        self.rows: Rows | None = None  # with their new tokens; None: nothing is launched
        self._output: ForwardOutput | None = None

    def launch(self, model: Model, cache: RowCache, rows: Rows, tokens: Tensor) -> None:
        """Feed rows with one new token each [R], which may not be on the host yet.

        A forward that raises is made again by the next step, which finds out who is at fault.
        """
        if bool((rows.length.numpy() >= row_params(rows)["last_length"].numpy()).all()):
            return  # every row ends in this step
        self.rows = rows.advance(tokens)
        cache.commit(None, self.rows.cached_length)
        try:
            self._output = model.forward(self.rows, NO_DRAFTS, cache)
        except Exception:
            self._output = None
            cache.commit(None, self.rows.cached_length)

    def settle(self, selection: Selection, rows: Rows) -> Tensor:
        """Keep what belongs to the rows of a selection; how much the cache is to hold of each [R] (host).

        States of a forward do not move with their rows: it is made again.
        """
        parents, output = selection.parents, self._output
        if self.rows is not None:
            self.rows = rows
        if parents is not None and output is not None:
            self._output = None if output.states else _take_logits(output, parents)
        return rows.cached_length if self._output is None else rows.position

    def take(self, rows: Rows, proposal: Proposal, cache: RowCache) -> ForwardOutput | None:
        """The output of the forward that a step is to make; None: it was not launched."""
        is_plain = proposal.parents is None and proposal.drafts is None
        output = self._output if is_plain and self.rows is rows else None
        if output is None and self.rows is not None:
            self.drop(cache, self.rows)
        self.rows = self._output = None
        return output

    def drop(self, cache: RowCache, rows: Rows) -> None:
        """Forget what was launched after these rows, which the cache holds again."""
        cache.commit(None, rows.cached_length)
        self.rows = self._output = None


def _take_logits(output: ForwardOutput, parents: Tensor) -> ForwardOutput:
    """The logits of the rows `parents` (host), none of which forks."""
    base = None if output.base_logits is None else index_rows(output.base_logits, parents)
    return ForwardOutput(index_rows(output.logits, parents), base_logits=base)

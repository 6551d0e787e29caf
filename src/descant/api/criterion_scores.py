"""Stopping criteria with the scores of all steps, where the call returns them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from descant.api.step_recorder import OutputLayout, StepRecorder, write_step
from descant.core.records import Observation
from descant.core.rows import index_rows

__all__ = ["CriterionScores", "ScoredCriterion", "SelectedScores"]


class CriterionScores:
    """The scores of a call so far, [rows, V] for each new token, as its output will have them.

    Every step is written once. Where a method records its scores only after it has chosen (drafts and
    candidates), those of the current step come with the next one.
    """

    def __init__(self, recorder: StepRecorder, layout: Callable[[], OutputLayout]) -> None:
        self._recorder = recorder
        self._layout = layout  # known once the prompts are admitted
        self._blocks: list[Tensor] = []
        self._num_written = 0
        self._current: tuple[Observation | None, tuple[Tensor, ...]] = (None, ())

    def of_rows(self, rows: tuple[Tensor, Tensor] | None) -> Sequence[Tensor]:
        """The scores so far of the rows of these requests and slots [M] (host); None: of all rows."""
        steps = self._so_far()
        if rows is None:
            return steps
        layout = self._layout()
        index = [layout.output_row(*pair) for pair in zip(rows[0].tolist(), rows[1].tolist(), strict=True)]
        return steps if index == list(range(layout.num_rows)) else SelectedScores(steps, torch.tensor(index))

    def _so_far(self) -> tuple[Tensor, ...]:
        """The scores of all steps, the current one included."""
        current = self._recorder.current
        if current is not None and self._current[0] is current:
            return self._current[1]
        layout = self._layout()
        new = self._recorder.observations[self._num_written :]
        for observation in new:
            write_step(self._blocks, observation, layout, "scores")
        self._num_written += len(new)
        if current is None or not layout.has_rows(current.rows.request, current.rows.slot):
            return tuple(self._blocks)
        blocks = list(self._blocks)
        first = int((current.rows.length - current.rows.prompt_length).min())
        blocks[first:] = [block.clone() for block in blocks[first:]]
        write_step(blocks, current, layout, "scores")
        self._current = (current, tuple(blocks))
        return self._current[1]


class SelectedScores(Sequence[Tensor]):
    """The scores of some rows in every step; each step is selected when it is read."""

    def __init__(self, steps: Sequence[Tensor], rows: Tensor) -> None:
        self._steps, self._rows = steps, rows

    def __len__(self) -> int:
        return len(self._steps)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> SelectedScores: ...

    def __getitem__(self, index: int | slice) -> Tensor | SelectedScores:
        if isinstance(index, slice):
            return SelectedScores(self._steps[index], self._rows)
        return index_rows(self._steps[index], self._rows)


class ScoredCriterion:
    """A user's criterion that is called with the scores of its call, one line for each row it is shown."""

    def __init__(self, criterion: Callable[..., Any], scores: CriterionScores) -> None:
        self.criterion, self.scores = criterion, scores

    def __call__(self, input_ids: Tensor, _: Any) -> Any:
        """The criterion's verdict on all rows of the call."""
        return self.call_on_rows(input_ids, None)

    def call_on_rows(self, input_ids: Tensor, rows: tuple[Tensor, Tensor] | None) -> Any:
        """The criterion's verdict on the rows of these requests and slots [M] (host); None: on all."""
        return self.criterion(input_ids, self.scores.of_rows(rows))

"""What families have in common whose codebooks are predicted in parallel, behind a prompt of codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers.masking_utils import create_bidirectional_mask

from descant.models.codebooks.frames import FrameInputs, LoopChanges, PreparedLoop, StepInputs

__all__ = ["CrossAttentionMask", "ParallelHeads"]


class CrossAttentionMask:
    """The mask of cross-attention, made once for a batch: most steps have the rows of the one before."""

    def __init__(self) -> None:
        self._last: tuple[Tensor, Any] | None = None  # as given and as made

    def of(self, config: Any, hidden: Tensor, states: Tensor, mask: Tensor) -> Any:
        """The mask of hidden states [N, 1, D] on encoder states [N, S, D], for a mask [N, S]."""
        if self._last is None or self._last[0] is not mask:
            made = create_bidirectional_mask(
                config=config, inputs_embeds=hidden, attention_mask=mask, encoder_hidden_states=states
            )
            self._last = mask, made
        return self._last[1]


class ParallelHeads:
    """A network that returns the logits of all codebooks, a row of its output for each."""

    num_codebooks: int
    num_rows: int
    reads_hidden = False
    has_guidance = True
    processors: frozenset[str] | None = None
    processes_forced = False

    def first_codes(self, loop: PreparedLoop) -> Tensor:
        """The codes before the first step [B, C, L]."""
        ids = loop.inputs.input_ids
        return ids.view(-1, self.num_codebooks, ids.shape[1])

    def frame_logits(self, output: Any, count: int) -> Tensor:
        """The logits [N * C, T, V] of all codebooks as [N, T, C * V]."""
        logits: Tensor = output.logits
        return logits.view(count, self.num_codebooks, logits.shape[1], -1).transpose(1, 2).flatten(2)

    def guide(self, cond: Tensor, uncond: Tensor, scales: Tensor, frames: Sequence[FrameInputs]) -> Tensor:  # noqa: ARG002
        """Classifier-free guidance on logits [N, C, V] with scales [N] (Ho and Salimans 2022)."""
        return uncond + (cond - uncond) * scales[:, None, None]

    @property
    def skipped_modules(self) -> Sequence[Any]:
        """None."""
        return ()

    def step(self, inputs: StepInputs) -> Tensor:
        """Nothing: the network is called whole."""
        raise NotImplementedError

    def prompt_inputs(self, prompts: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:  # noqa: ARG002
        """Nothing: prompts are codes."""
        return {}

    def loop_changes(self, loop: PreparedLoop, frames: Sequence[FrameInputs]) -> LoopChanges:  # noqa: ARG002
        """Nothing."""
        return LoopChanges()

    def loop_result(self, loop: PreparedLoop, frames: Sequence[FrameInputs], output: Any) -> Any:  # noqa: ARG002
        """The same: a row of transformers' loop is a codebook too."""
        return output

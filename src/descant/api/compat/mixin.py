"""Descant's generate() as a method: of one model, or of a class."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor

from descant.api.generate import generate_as_method
from descant.api.text_output import TextOutput
from descant.errors import InputError
from descant.models.model_output import GenerateOutput
from descant.models.wrapping.wrapped_model import ATTACHED_METHODS


class GenerationMixin:
    """The documented methods of a model, run by Descant: a first base of a model class, or `attach`.

    `class Model(descant.GenerationMixin, LlamaForCausalLM): ...`
    """

    def generate(self, *args: Any, **kwargs: Any) -> Tensor | GenerateOutput | TextOutput:
        """Continue prompts: `descant.generate` of this model, with the same arguments.

        As documented for this method, `max_length`, `min_length` and `forced_eos_token_id` count the width of
        the padded batch; in `descant.generate` they count each row's own tokens. A value without effect that
        transformers 4.52.4 ignores (`temperature` without `do_sample`) is a warning; there it is an error.
        """
        return generate_as_method(self, *args, **kwargs)

    # Marks the method for models/, which distinguishes models with a generate() of their own.
    generate.runs_descant = True  # type: ignore[attr-defined]

    def compute_transition_scores(
        self,
        sequences: Tensor,
        scores: tuple[Tensor, ...],
        beam_indices: Tensor | None = None,
        normalize_logits: bool = False,
    ) -> Tensor:
        """The score of each new token of each sequence [N, T], 0 beyond the end of a beam."""
        return compute_transition_scores(self, sequences, scores, beam_indices, normalize_logits)


def attach(model: Any) -> Any:
    """Replace the methods of `GenerationMixin` by Descant's, for this object only; returns the model."""
    for name in ATTACHED_METHODS:
        setattr(model, name, MethodType(getattr(GenerationMixin, name), model))
    return model


def detach(model: Any) -> Any:
    """Restore the model's own methods; returns the model."""
    if "generate" not in vars(model):
        raise InputError(
            "model", "must have been attached", type(model).__name__, "call descant.attach(model) first"
        )
    for name in ATTACHED_METHODS:
        if name in vars(model):
            delattr(model, name)
    return model


def compute_transition_scores(
    model: Any,  # noqa: ARG001 - documented as a method
    sequences: Tensor,
    scores: tuple[Tensor, ...],
    beam_indices: Tensor | None = None,
    normalize_logits: bool = False,
) -> Tensor:
    """The score of each new token of each sequence [N, T], in its own row or in the beam it came from.

    `scores` are those of an output, [rows, V] for each step; the new tokens are the last of `sequences`.
    The score is 0 beyond the end of a beam.
    """
    stacked = torch.stack(scores)  # [T, rows, V]
    if normalize_logits:
        stacked = stacked.log_softmax(-1)
    count = len(sequences)
    if beam_indices is None:
        beam_indices = torch.arange(count, device=sequences.device)[:, None].expand(count, len(stacked))
    steps = beam_indices.shape[1]
    tokens = sequences[:, sequences.shape[1] - steps :]
    token_scores = stacked[
        torch.arange(steps, device=tokens.device), beam_indices.clamp(min=0).long(), tokens
    ]
    return torch.where(beam_indices >= 0, token_scores, 0.0)

"""The output classes of generate(), and transition scores."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from descant.models.model_output import ModelOutput

__all__ = [
    "GenerateBeamDecoderOnlyOutput",
    "GenerateBeamEncoderDecoderOutput",
    "GenerateDecoderOnlyOutput",
    "GenerateEncoderDecoderOutput",
    "GenerateOutput",
    "transition_scores",
]


class GenerateOutput(ModelOutput):
    """An output read by attribute, key or index: a `ModelOutput` of transformers.

    A value that was not requested is None as an attribute, and neither a key nor an entry of the tuple.
    Attributes and keys are one: setting either sets both, and setting None removes the key. The documented
    fields come first, in their documented order, then those of Descant.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)  # type: ignore[no-untyped-call]
        if value is None and name in self:
            OrderedDict.__delitem__(self, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self)})"

    def _repr_html_(self) -> str | None:
        """The pictures of its trace in a notebook; None without a trace."""
        trace = self.get("trace")
        html: str | None = None if trace is None else trace._repr_html_()
        return html


@dataclass(repr=False)
class GenerateDecoderOnlyOutput(GenerateOutput):
    """Output of a decoder-only model without beams."""

    sequences: Any = None
    scores: Any = None
    logits: Any = None
    attentions: Any = None
    hidden_states: Any = None
    past_key_values: Any = None
    logprobs: Any = None
    speculation: Any = None
    sequence_counts: Any = None  # of each prompt, where a recipe says how many it has
    trace: Any = None


@dataclass(repr=False)
class GenerateEncoderDecoderOutput(GenerateOutput):
    """Output of an encoder-decoder model without beams."""

    sequences: Any = None
    scores: Any = None
    logits: Any = None
    encoder_attentions: Any = None
    encoder_hidden_states: Any = None
    decoder_attentions: Any = None
    cross_attentions: Any = None
    decoder_hidden_states: Any = None
    past_key_values: Any = None
    logprobs: Any = None
    speculation: Any = None
    sequence_counts: Any = None  # of each prompt, where a recipe says how many it has
    trace: Any = None


@dataclass(repr=False)
class GenerateBeamDecoderOnlyOutput(GenerateOutput):
    """Output of a decoder-only model with beams."""

    sequences: Any = None
    sequences_scores: Any = None
    scores: Any = None
    logits: Any = None
    beam_indices: Any = None
    attentions: Any = None
    hidden_states: Any = None
    past_key_values: Any = None
    logprobs: Any = None
    unmet_constraints: Any = None
    trace: Any = None


@dataclass(repr=False)
class GenerateBeamEncoderDecoderOutput(GenerateOutput):
    """Output of an encoder-decoder model with beams."""

    sequences: Any = None
    sequences_scores: Any = None
    scores: Any = None
    logits: Any = None
    beam_indices: Any = None
    encoder_attentions: Any = None
    encoder_hidden_states: Any = None
    decoder_attentions: Any = None
    cross_attentions: Any = None
    decoder_hidden_states: Any = None
    past_key_values: Any = None
    logprobs: Any = None
    unmet_constraints: Any = None
    trace: Any = None


def transition_scores(
    sequences: Tensor, scores: tuple[Tensor, ...], beam_indices: Tensor | None = None, normalize: bool = False
) -> Tensor:
    """The score of each new token of each sequence [N, T], in its own row or in the beam it came from.

    `scores` are those of an output, [rows, V] for each step; the new tokens are the last of `sequences`.
    The score is 0 beyond the end of a beam.
    """
    stacked = torch.stack(scores)  # [T, rows, V]
    if normalize:
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

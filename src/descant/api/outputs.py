"""The output classes of generate(), and transition scores."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from descant.errors import InputError

__all__ = [
    "GenerateBeamDecoderOnlyOutput",
    "GenerateBeamEncoderDecoderOutput",
    "GenerateDecoderOnlyOutput",
    "GenerateEncoderDecoderOutput",
    "GenerateOutput",
    "transition_scores",
]


class GenerateOutput(OrderedDict[str, Any]):
    """An output read by attribute, key or index. A value that was not requested is None as an attribute."""

    NAMES: tuple[str, ...] = ()

    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            if name not in self.NAMES:
                raise InputError(name, f"must be one of {self.NAMES}", value)
        super().__init__((name, values[name]) for name in self.NAMES if values.get(name) is not None)

    def __getattr__(self, name: str) -> Any:
        if name in type(self).NAMES:
            return self.get(name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else self.to_tuple()[key]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self)})"

    def _repr_html_(self) -> str | None:
        """The pictures of its trace in a notebook; None without a trace."""
        trace = self.get("trace")
        html: str | None = None if trace is None else trace._repr_html_()
        return html

    def to_tuple(self) -> tuple[Any, ...]:
        """The values that are not None, in order."""
        return tuple(self.values())


class GenerateDecoderOnlyOutput(GenerateOutput):
    """Output of a decoder-only model without beams."""

    NAMES = (
        "sequences",
        "scores",
        "logits",
        "logprobs",
        "attentions",
        "hidden_states",
        "past_key_values",
        "speculation",
        "trace",
    )


class GenerateEncoderDecoderOutput(GenerateOutput):
    """Output of an encoder-decoder model without beams."""

    NAMES = (
        "sequences",
        "scores",
        "logits",
        "logprobs",
        "encoder_attentions",
        "encoder_hidden_states",
        "decoder_attentions",
        "cross_attentions",
        "decoder_hidden_states",
        "past_key_values",
        "speculation",
        "trace",
    )


class GenerateBeamDecoderOnlyOutput(GenerateOutput):
    """Output of a decoder-only model with beams."""

    NAMES = (
        "sequences",
        "sequences_scores",
        "unmet_constraints",
        "scores",
        "logits",
        "logprobs",
        "beam_indices",
        "attentions",
        "hidden_states",
        "past_key_values",
        "trace",
    )


class GenerateBeamEncoderDecoderOutput(GenerateOutput):
    """Output of an encoder-decoder model with beams."""

    NAMES = (
        "sequences",
        "sequences_scores",
        "unmet_constraints",
        "scores",
        "logits",
        "logprobs",
        "beam_indices",
        "encoder_attentions",
        "encoder_hidden_states",
        "decoder_attentions",
        "cross_attentions",
        "decoder_hidden_states",
        "past_key_values",
        "trace",
    )


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

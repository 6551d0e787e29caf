"""What generate() returns, and the scores of its transitions."""

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
    """A record read by attribute, by key or by place; what was not asked for is None as an attribute only."""

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
        """The pictures of its trace, for a notebook; None without one."""
        trace = self.get("trace")
        shown: str | None = None if trace is None else trace._repr_html_()
        return shown

    def to_tuple(self) -> tuple[Any, ...]:
        """The values that are there, in order."""
        return tuple(self.values())


class GenerateDecoderOnlyOutput(GenerateOutput):
    """Of a decoder-only model, without beams."""

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
    """Of an encoder-decoder model, without beams."""

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
    """Of a decoder-only model, with beams."""

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
    """Of an encoder-decoder model, with beams."""

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
    """The score of each new token of each sequence [N, T]: of its own row, or of the beam it was chosen from.

    `scores` are those of an output, one [rows, V] a step; the new tokens are the last of `sequences`.
    Beyond a beam's end the score is 0.
    """
    stacked = torch.stack(scores)  # [T, rows, V]
    if normalize:
        stacked = stacked.log_softmax(-1)
    count = len(sequences)
    if beam_indices is None:
        beam_indices = torch.arange(count, device=sequences.device)[:, None].expand(count, len(stacked))
    steps = beam_indices.shape[1]
    tokens = sequences[:, sequences.shape[1] - steps :]
    there = beam_indices >= 0
    found = stacked[torch.arange(steps, device=tokens.device), beam_indices.clamp(min=0).long(), tokens]
    return torch.where(there, found, 0.0)

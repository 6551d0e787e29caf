"""The output of transcribe(): tokens, segments, and the outputs of the windows' calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from descant.api.whisper.fallback import WindowResult
from descant.api.whisper.options import WhisperOptions
from descant.api.whisper.windows import Audio, Segment
from descant.config.generation_config import GenerationConfig
from descant.models.model_output import GenerateOutput

__all__ = ["Transcript", "build_transcript"]


@dataclass(repr=False)
class Transcript(GenerateOutput):
    """Tokens of audios with their segments.

    `segments` holds a list for each audio. A segment is a dict with `start` and `end` in seconds, `tokens`,
    `idxs`, their range in the sequence of the window, and `result`, the window's part of the call's output.
    """

    sequences: Any = None
    token_timestamps: Any = None
    segments: Any = None


def build_transcript(
    options: WhisperOptions,
    config: GenerationConfig,
    audios: Sequence[Audio],
    results: Sequence[WindowResult],
    pad: int,
) -> Tensor | GenerateOutput:
    """Tokens [B, L], an output object, or a transcript with segments, as documented."""
    returns_dict = config.return_dict_in_generate
    if options.force_unique_generate_call or (returns_dict and not config.return_timestamps):
        output = results[0].output
        sequences: Tensor = output["sequences"]
        return output if returns_dict else sequences
    device = results[0].tokens.device
    rows = [[segment.tokens for segment in audio.segments] for audio in audios]
    tokens = _pad_rows([torch.cat(row) if row else torch.empty(0) for row in rows], [pad] * len(rows), device)
    values: dict[str, Any] = {"sequences": tokens.long()}
    if options.return_token_timestamps:
        times = [
            [segment.token_times for segment in audio.segments if segment.token_times is not None]
            for audio in audios
        ]
        time_rows = [torch.cat(row) if row else torch.zeros(1) for row in times]
        values["token_timestamps"] = _pad_rows(time_rows, [float(row[-1]) for row in time_rows], device)
    if options.return_segments or returns_dict:
        windows: dict[int, Any] = {}  # by id: the segments of a window share its result
        for segment in (segment for audio in audios for segment in audio.segments):
            if id(segment.result) not in windows:
                windows[id(segment.result)] = _window_output(segment.result, returns_dict)
        values["segments"] = [
            [_segment_dict(segment, windows[id(segment.result)]) for segment in audio.segments]
            for audio in audios
        ]
    return Transcript(**values) if len(values) > 1 else tokens.long()


def _pad_rows(rows: Sequence[Tensor], fill: Sequence[float], device: torch.device) -> Tensor:
    """Rows of different length, each padded on the right with its own value [B, L]."""
    width = max(map(len, rows))
    padded = [
        torch.nn.functional.pad(row.to(device), (0, width - len(row)), value=value)
        for row, value in zip(rows, fill, strict=True)
    ]
    return torch.stack(padded)


def _segment_dict(segment: Segment, result: Any) -> dict[str, Any]:
    span, width = segment.span, segment.result.prompt_width
    entries = {
        "start": torch.tensor(span.start, dtype=torch.float64),
        "end": torch.tensor(span.end, dtype=torch.float64),
        "tokens": segment.tokens,
        "idxs": (width + span.token_start, width + span.token_end),
        "result": result,
    }
    return entries if segment.token_times is None else entries | {"token_timestamps": segment.token_times}


def _window_output(result: WindowResult, returns_dict: bool) -> Any:
    """A window's part of its call's output: its sequence, or all requested values."""
    output, row = result.output, result.row
    if not returns_dict:
        return output["sequences"][row]
    beams = output["beam_indices"][row].tolist() if "beam_indices" in output else None
    steps = result.length_with_eos if beams is None else sum(beam >= 0 for beam in beams)

    def row_at(step: int) -> int:
        return row if beams is None else int(beams[step])

    values: dict[str, Any] = {}
    for name, value in output.items():
        if name in ("scores", "logits"):
            values[name] = [value[step][row_at(step)] for step in range(steps)]
        elif name in ("decoder_attentions", "decoder_hidden_states", "cross_attentions"):
            values[name] = tuple(
                tuple(layer[row_at(step)][None] for layer in value[step]) for step in range(steps)
            )
        else:
            values[name] = value[row]
    return values

"""What transcribe() returns: tokens, segments, and the records of the calls they came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from descant.api.outputs import GenerateOutput
from descant.api.whisper.fallback import WindowResult
from descant.api.whisper.options import WhisperOptions
from descant.api.whisper.windows import Audio, Segment
from descant.config.generation_config import GenerationConfig

__all__ = ["Transcript", "build_transcript"]


class Transcript(GenerateOutput):
    """Tokens of recordings with their segments.

    `segments` holds a list for each recording. A segment is a dict: `start` and `end` in seconds, `tokens`,
    `idxs`, where these stand in the window's call, and `result`, what that call gave.
    """

    NAMES = ("sequences", "token_timestamps", "segments")


def build_transcript(
    options: WhisperOptions,
    config: GenerationConfig,
    audios: Sequence[Audio],
    heard: Sequence[WindowResult],
    pad: int,
) -> Tensor | GenerateOutput:
    """Tokens [B, L], or a record, or segments, as documented."""
    recorded = config.return_dict_in_generate
    if options.force_unique_generate_call or (recorded and not config.return_timestamps):
        record = heard[0].output
        whole: Tensor = record["sequences"]
        return record if recorded else whole
    device = heard[0].tokens.device
    lines = [[one.tokens for one in audio.segments] for audio in audios]
    tokens = _pad_lines(
        [torch.cat(line) if line else torch.empty(0) for line in lines], [pad] * len(lines), device
    )
    values: dict[str, Any] = {"sequences": tokens.long()}
    if options.return_token_timestamps:
        times = [
            [one.token_times for one in audio.segments if one.token_times is not None] for audio in audios
        ]
        spoken = [torch.cat(line) if line else torch.zeros(1) for line in times]
        values["token_timestamps"] = _pad_lines(spoken, [float(line[-1]) for line in spoken], device)
    if options.return_segments or recorded:
        results: dict[int, Any] = {}
        for passage in (one for audio in audios for one in audio.segments):
            if id(passage.result) not in results:
                results[id(passage.result)] = _window_record(passage.result, recorded)
        values["segments"] = [
            [_segment_dict(one, results[id(one.result)]) for one in audio.segments] for audio in audios
        ]
    return Transcript(**values) if len(values) > 1 else tokens.long()


def _pad_lines(lines: Sequence[Tensor], fill: Sequence[float], device: torch.device) -> Tensor:
    """Lines of different length, each filled up with its own value [B, L]."""
    wide = max(map(len, lines))
    padded = [
        torch.nn.functional.pad(line.to(device), (0, wide - len(line)), value=value)
        for line, value in zip(lines, fill, strict=True)
    ]
    return torch.stack(padded)


def _segment_dict(passage: Segment, result: Any) -> dict[str, Any]:
    piece, width = passage.span, passage.result.prompt_width
    segment = {
        "start": torch.tensor(piece.start, dtype=torch.float64),
        "end": torch.tensor(piece.end, dtype=torch.float64),
        "tokens": passage.tokens,
        "idxs": (width + piece.token_start, width + piece.token_end),
        "result": result,
    }
    return segment if passage.token_times is None else segment | {"token_timestamps": passage.token_times}


def _window_record(heard: WindowResult, recorded: bool) -> Any:
    """What the call that heard a window gave for it: the whole line, or all that was asked for."""
    record, line = heard.output, heard.line
    if not recorded:
        return record["sequences"][line]
    trail = record["beam_indices"][line].tolist() if "beam_indices" in record else None
    steps = heard.length_with_eos if trail is None else sum(place >= 0 for place in trail)

    def at(step: int) -> int:
        return line if trail is None else int(trail[step])

    values: dict[str, Any] = {}
    for name, value in record.items():
        if name in ("scores", "logits"):
            values[name] = [value[step][at(step)] for step in range(steps)]
        elif name in ("decoder_attentions", "decoder_hidden_states", "cross_attentions"):
            values[name] = tuple(
                tuple(layer[at(step)][None] for layer in value[step]) for step in range(steps)
            )
        else:
            values[name] = value[line]
    return values

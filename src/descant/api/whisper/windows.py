"""The long-form loop: audio of any length in windows, each of which starts where the last one ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.api.whisper.fallback import TemperatureFallback, WindowResult, WindowTask
from descant.api.whisper.options import PromptHistory, WhisperOptions
from descant.config.generation_config import GenerationConfig
from descant.core.interfaces import Array
from descant.models.audio.whisper import WhisperAdapter
from descant.models.model_output import GenerateOutput


class AudioWindow(NamedTuple):
    """A part of the audio, in frames."""

    start: int
    frames: int  # of audio; the rest of the encoder's input is silence


@dataclass(frozen=True)
class TimestampScale:
    """Conversion of timestamp tokens and frames into seconds."""

    first_timestamp_id: int  # the token for the start of a window; later times have higher ids
    seconds_per_timestamp: float
    seconds_per_frame: float
    frames_per_timestamp: int

    def start_time(self, window: AudioWindow) -> float:
        """The start of a window in seconds."""
        return window.start * self.seconds_per_timestamp / self.frames_per_timestamp


class SegmentSpan(NamedTuple):
    """One segment: tokens `token_start` to `token_end` (exclusive) of a window, from `start` to `end`."""

    token_start: int
    token_end: int
    start: float  # seconds from the start of the audio
    end: float


def split_segments(
    tokens: Sequence[int], window: AudioWindow, scale: TimestampScale
) -> tuple[list[SegmentSpan], int]:
    """The segments of a window and their number of frames (Radford et al. 2022, section 3.8).

    Two adjacent timestamps end one segment and start the next. The segment after the last such pair is
    incomplete, so the next window starts there, unless the window ends with a single timestamp, which means
    that no speech follows. Without a pair the window is one segment.
    """
    window_start = scale.start_time(window)
    is_timestamp = [token >= scale.first_timestamp_id for token in tokens]
    pairs = [index for index in range(1, len(tokens)) if is_timestamp[index - 1] and is_timestamp[index]]
    if not pairs:
        duration = _last_timestamp(tokens, window, scale) * scale.seconds_per_timestamp
        return [SegmentSpan(0, len(tokens), window_start, window_start + duration)], window.frames

    def time(token: int) -> float:
        return window_start + float(token - scale.first_timestamp_id) * scale.seconds_per_timestamp

    is_complete = is_timestamp[-2:] == [False, True]
    # The last segment of an incomplete window keeps both timestamps of its pair.
    borders = [0, *pairs, len(tokens)] if is_complete else [0, *pairs[:-1], pairs[-1] + 1]
    spans = []
    for segment, (first, last) in enumerate(pairwise(borders), 1):
        ends_in_pair = not is_complete and segment == len(borders) - 1
        end_token = tokens[last - 2 if ends_in_pair else last - 1]
        spans.append(SegmentSpan(first, last, time(tokens[first]), time(end_token)))
    if is_complete:
        return spans, window.frames
    frames = (tokens[borders[-1] - 2] - scale.first_timestamp_id) * scale.frames_per_timestamp
    # Timestamps that violate the rules may give 0 frames; the whole window is consumed then.
    return spans, frames if frames > 0 else window.frames


def _last_timestamp(tokens: Sequence[int], window: AudioWindow, scale: TimestampScale) -> int:
    """The length of a window without pairs, in timestamps: up to its last timestamp, or all of its audio."""
    timestamps = [token for token in tokens if token >= scale.first_timestamp_id]
    if timestamps and timestamps[-1] != scale.first_timestamp_id:
        return timestamps[-1] - scale.first_timestamp_id
    return int(window.frames * scale.seconds_per_frame / scale.seconds_per_timestamp)


@dataclass(frozen=True)
class TimestampAligner:
    """Computes token times from the alignment heads."""

    heads: Sequence[tuple[int, int]]  # pairs of layer and head
    median_filter_width: int  # odd, in encoder positions
    seconds_per_position: float  # of the encoder

    def token_times(self, result: WindowResult, num_positions: int | None) -> Tensor:
        """The start of each token in seconds from the start of the window [T].

        Only the first `num_positions` encoder positions are audio; None: all.
        """
        count = len(result.tokens)
        # The last token was not fed, so it has no attention.
        num_fed = result.length_with_eos - 1
        output = torch.zeros(count)
        if num_fed <= 0:
            return output
        attention = self._alignment_attention(result, num_fed)
        attention = attention if num_positions is None else attention[..., : max(num_positions, 1)]
        starts = dynamic_time_warping(-self._normalize_attention(attention).double().numpy())
        times = torch.tensor(starts * self.seconds_per_position, dtype=torch.float32)
        output[: min(num_fed, count)] = times[:count]
        output[num_fed:] = times[-1]
        return output

    def _alignment_attention(self, result: WindowResult, num_fed: int) -> Tensor:
        """The attention of the alignment heads for each token that was fed [H, T, S]."""
        attention, output = result.output["cross_attentions"], result.output
        beams = output["beam_indices"][result.row].tolist() if "beam_indices" in output else None
        steps = []
        for step in range(1, num_fed + 1):
            row = result.row if beams is None or beams[step] < 0 else beams[step]
            steps.append(torch.stack([attention[step][layer][row, head, 0] for layer, head in self.heads]))
        return torch.stack(steps, 1).float().cpu()

    def _normalize_attention(self, attention: Tensor) -> Tensor:
        """The mean of the heads, each standardized over tokens and median-filtered over time [T, S]."""
        deviation = attention.std(-2, keepdim=True, unbiased=False)
        normalized = (attention - attention.mean(-2, keepdim=True)) / deviation
        half = self.median_filter_width // 2
        if normalized.shape[-1] > half:
            padded = torch.nn.functional.pad(normalized, (half, half, 0, 0), mode="reflect")
            normalized = padded.unfold(-1, self.median_filter_width, 1).sort(-1).values[..., half]
        return normalized.mean(0)


def dynamic_time_warping(cost: Array) -> Array:
    """The first column of each row on the cheapest monotonic path [T] through costs [T, S].

    The table is filled by diagonals, as a cell depends on the two diagonals before only.
    """
    rows, columns = cost.shape
    total = np.full((rows + 1, columns + 1), np.inf, dtype=np.float32)
    total[0, 0] = 0.0
    # The predecessor of each cell: 0 the diagonal one, 1 the row before, 2 the column before.
    previous = np.full((rows + 1, columns + 1), 2, dtype=np.int8)
    previous[1:, 0] = 1
    for diagonal in range(2, rows + columns + 1):
        row = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        column = diagonal - row
        both, above, left = total[row - 1, column - 1], total[row - 1, column], total[row, column - 1]
        choice = np.where((both < above) & (both < left), 0, np.where((above < both) & (above < left), 1, 2))
        minimum = np.choose(choice, (both, above, left))
        total[row, column] = cost[row - 1, column - 1] + minimum
        previous[row, column] = choice
    starts = np.zeros(rows, dtype=np.int64)
    row, column = rows, columns
    while row > 0 or column > 0:
        if row > 0:
            starts[row - 1] = max(column - 1, 0)
        step = previous[row, column]
        row, column = row - (step != 2), column - (step != 1)
    return starts


_MAX_CONTEXT_TEMPERATURE = 0.5  # results at this temperature or above are not used as context


@dataclass(frozen=True)
class Segment:
    """A segment of an audio, with the result of its window."""

    span: SegmentSpan
    tokens: Tensor  # [T]
    result: WindowResult
    token_times: Tensor | None = None  # [T] start of each token in seconds, if requested


@dataclass
class Audio:
    """One audio and its progress."""

    config: GenerationConfig
    num_frames: int
    unpadded_frames: int | None = None  # frames that are not padding; None: unknown
    init_tokens: Sequence[int] = ()  # start of the decoder's prompt
    features: Tensor | None = None  # [bins, F]; frames beyond `num_frames` are padding
    states: Tensor | None = None  # [positions, size] if the user gave encoder outputs
    prompt: Sequence[int] | None = None  # the whole prompt of the first window, if the user gave it
    seek: int = 0  # the next frame
    num_windows: int = 0  # number of decoded windows
    has_reliable_context: bool = True  # whether the next window may use the previous tokens
    segments: list[Segment] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        """Whether all frames are transcribed."""
        return self.seek >= self.num_frames

    def next_window(self, frames: int) -> AudioWindow:
        """The next window, of at most `frames`."""
        return AudioWindow(self.seek, min(self.num_frames - self.seek, frames))

    def padded_features(self, window: AudioWindow, frames: int) -> Tensor:
        """The encoder's input for a window [bins, frames], padded with silence."""
        assert self.features is not None
        part = self.features[:, window.start : window.start + window.frames]
        return torch.nn.functional.pad(part, (0, frames - part.shape[1]))


class LongFormTranscriber:
    """Transcribes audios in batches of windows, one per unfinished audio."""

    def __init__(
        self,
        whisper: WhisperAdapter,
        options: WhisperOptions,
        fallback: TemperatureFallback,
        timestamp_scale: TimestampScale,
        aligner: TimestampAligner | None = None,
    ) -> None:
        self._whisper, self._options, self._fallback = whisper, options, fallback
        self._timestamp_scale, self._aligner = timestamp_scale, aligner

    def run(self, audios: Sequence[Audio], history: PromptHistory) -> list[WindowResult]:
        """Fill the segments of all audios; returns the results of the last batch of windows."""
        results: list[WindowResult] = []
        while any(not audio.is_finished for audio in audios):
            if self._options.monitor_progress is not None:
                progress = [[audio.seek, audio.num_frames] for audio in audios]
                self._options.monitor_progress(torch.tensor(progress))
            results = self._transcribe_windows([audio for audio in audios if not audio.is_finished], history)
            if self._options.force_unique_generate_call:
                break
        return results

    def _transcribe_windows(self, audios: Sequence[Audio], history: PromptHistory) -> list[WindowResult]:
        """Decode the next window of each audio."""
        windows = [audio.next_window(self._whisper.window_frames) for audio in audios]
        tasks = []
        for audio in audios:
            segments = history.initial_segments + [segment.tokens.tolist() for segment in audio.segments]
            use_segments = self._options.condition_on_prev_tokens and audio.has_reliable_context
            prompt = [*history.previous_tokens(segments, use_segments), *audio.init_tokens]
            if audio.prompt is not None and audio.num_windows == 0:
                prompt = list(audio.prompt)
            tasks.append(WindowTask(audio.config, prompt, len(audio.init_tokens), audio.num_windows))
        results = self._fallback.decode(self._encode_windows(audios, windows), tasks)
        for audio, window, result in zip(audios, windows, results, strict=True):
            self._append_segments(audio, window, result)
        return results

    def _encode_windows(self, audios: Sequence[Audio], windows: Sequence[AudioWindow]) -> Tensor:
        """The encoder's output for the windows [N, positions, size]."""
        if audios[0].states is not None:
            return torch.stack([audio.states for audio in audios if audio.states is not None])
        frames = self._whisper.window_frames
        pairs = zip(audios, windows, strict=True)
        features = [audio.padded_features(window, frames) for audio, window in pairs]
        return self._whisper.encode(torch.stack(features))

    def _append_segments(self, audio: Audio, window: AudioWindow, result: WindowResult) -> None:
        """Add the segments of a window to its audio and advance `seek`."""
        audio.num_windows += 1
        audio.has_reliable_context = result.temperature < _MAX_CONTEXT_TEMPERATURE
        if result.is_silent:
            audio.seek += window.frames
            return
        spans, frames = split_segments(result.tokens.tolist(), window, self._timestamp_scale)
        times = self._token_times(audio, window, result)
        for span in spans:
            token_range = slice(span.token_start, span.token_end)
            span_times = None if times is None else times[token_range]
            audio.segments.append(Segment(span, result.tokens[token_range], result, span_times))
        # Encoder outputs of the user are one window, which cannot be re-encoded from the middle.
        audio.seek += frames if audio.states is None else window.frames

    def _token_times(self, audio: Audio, window: AudioWindow, result: WindowResult) -> Tensor | None:
        """The start of each token of a window, in seconds from the start of the audio [T]."""
        if self._aligner is None:
            return None
        num_positions = None
        if audio.unpadded_frames is not None:
            num_positions = (audio.unpadded_frames - window.start) // self._whisper.encoder_stride
        return self._aligner.token_times(result, num_positions) + self._timestamp_scale.start_time(window)


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

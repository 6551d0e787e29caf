"""The long-form loop: audio of any length in windows, each of which starts where the last one ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from descant.api.whisper.alignment import TimestampAligner
from descant.api.whisper.fallback import TemperatureFallback, WindowResult, WindowTask
from descant.api.whisper.options import WhisperOptions
from descant.api.whisper.prompt import PromptHistory
from descant.api.whisper.segments import AudioWindow, SegmentSpan, TimestampScale, split_segments
from descant.config.generation_config import GenerationConfig
from descant.models.whisper import WhisperAdapter

__all__ = ["Audio", "LongFormTranscriber", "Segment"]

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

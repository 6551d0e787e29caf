"""The long-form loop: audio of any length, heard in windows, each beginning where the last broke off."""

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

_MAX_CONTEXT_TEMPERATURE = 0.5  # what was heard at this temperature or above is no context to rely on


@dataclass(frozen=True)
class Segment:
    """A segment of an audio and the window that it was heard in."""

    span: SegmentSpan
    tokens: Tensor  # [T]
    result: WindowResult
    token_times: Tensor | None = None  # [T] when each token begins, in seconds, where that is asked for


@dataclass
class Audio:
    """One recording, and how far it has been heard."""

    config: GenerationConfig
    num_frames: int  # frames of it
    unpadded_frames: int | None = None  # frames that are no padding, where that is known
    init_tokens: Sequence[int] = ()  # what the decoder begins with
    features: Tensor | None = None  # [bins, F]; F may be more than `total`, which is padding
    states: Tensor | None = None  # [positions, size] where it has been encoded already
    prompt: Sequence[int] | None = None  # of the first window, where the user gives all of it
    seek: int = 0  # the frame that is next
    num_windows: int = 0  # how many windows were heard
    has_reliable_context: bool = True  # whether the next window may rely on what was said
    segments: list[Segment] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        """Whether all of it has been heard."""
        return self.seek >= self.num_frames

    def next_window(self, frames: int) -> AudioWindow:
        """What is next, at the most `frames`."""
        return AudioWindow(self.seek, min(self.num_frames - self.seek, frames))

    def padded_features(self, window: AudioWindow, frames: int) -> Tensor:
        """A window as the encoder takes it [bins, frames]: silence fills it up."""
        assert self.features is not None
        part = self.features[:, window.start : window.start + window.frames]
        return torch.nn.functional.pad(part, (0, frames - part.shape[1]))


class LongFormTranscriber:
    """Hears recordings side by side until all of them are over; one that ends leaves the others."""

    def __init__(
        self,
        listener: WhisperAdapter,
        options: WhisperOptions,
        fallback: TemperatureFallback,
        clock: TimestampScale,
        alignment: TimestampAligner | None = None,
    ) -> None:
        self._whisper, self._options, self._fallback = listener, options, fallback
        self._timestamp_scale, self._aligner = clock, alignment

    def run(self, audios: Sequence[Audio], past: PromptHistory) -> list[WindowResult]:
        """Fill the passages of all recordings; what was heard in the last round."""
        last: list[WindowResult] = []
        while any(not audio.is_finished for audio in audios):
            if self._options.monitor_progress is not None:
                self._options.monitor_progress(torch.tensor([[one.seek, one.num_frames] for one in audios]))
            last = self._transcribe_windows([audio for audio in audios if not audio.is_finished], past)
            if self._options.force_unique_generate_call:
                break
        return last

    def _transcribe_windows(self, audios: Sequence[Audio], past: PromptHistory) -> list[WindowResult]:
        """Hear the next window of each."""
        windows = [audio.next_window(self._whisper.window_frames) for audio in audios]
        tasks = []
        for audio in audios:
            said = past.initial_segments + [passage.tokens.tolist() for passage in audio.segments]
            prompt = [
                *past.previous_tokens(
                    said, self._options.condition_on_prev_tokens and audio.has_reliable_context
                ),
                *audio.init_tokens,
            ]
            if audio.prompt is not None and audio.num_windows == 0:
                prompt = list(audio.prompt)
            tasks.append(WindowTask(audio.config, prompt, len(audio.init_tokens), audio.num_windows))
        found = self._fallback.decode(self._encode_windows(audios, windows), tasks)
        for audio, window, heard in zip(audios, windows, found, strict=True):
            self._append_segments(audio, window, heard)
        return found

    def _encode_windows(self, audios: Sequence[Audio], windows: Sequence[AudioWindow]) -> Tensor:
        """The windows as the decoder sees them [N, positions, size]."""
        if audios[0].states is not None:
            return torch.stack([audio.states for audio in audios if audio.states is not None])
        frames = self._whisper.window_frames
        shown = [audio.padded_features(window, frames) for audio, window in zip(audios, windows, strict=True)]
        return self._whisper.encode(torch.stack(shown))

    def _append_segments(self, audio: Audio, window: AudioWindow, heard: WindowResult) -> None:
        """Write down what was heard, and go on behind it."""
        audio.num_windows += 1
        audio.has_reliable_context = heard.temperature < _MAX_CONTEXT_TEMPERATURE
        if heard.is_silent:
            audio.seek += window.frames
            return
        pieces, frames = split_segments(heard.tokens.tolist(), window, self._timestamp_scale)
        times = self._token_times(audio, window, heard)
        for piece in pieces:
            here = slice(piece.token_start, piece.token_end)
            told = None if times is None else times[here]
            audio.segments.append(Segment(piece, heard.tokens[here], heard, told))
        # What was encoded elsewhere is one window: nobody can begin in the middle of it.
        audio.seek += frames if audio.states is None else window.frames

    def _token_times(self, audio: Audio, window: AudioWindow, heard: WindowResult) -> Tensor | None:
        """When each token of a window was spoken, in seconds from the beginning of the audio [T]."""
        if self._aligner is None:
            return None
        left = (
            None
            if audio.unpadded_frames is None
            else (audio.unpadded_frames - window.start) // self._whisper.encoder_stride
        )
        return self._aligner.token_times(heard, left) + self._timestamp_scale.start_time(window)

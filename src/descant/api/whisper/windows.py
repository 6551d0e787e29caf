"""The long-form loop: audio of any length, heard in windows, each beginning where the last broke off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from descant.api.whisper.alignment import Alignment
from descant.api.whisper.fallback import Fallback, Heard, Task
from descant.api.whisper.options import Options
from descant.api.whisper.prompt import Past
from descant.api.whisper.segments import Clock, Piece, Window, split
from descant.config.generation_config import GenerationConfig
from descant.models.whisper import Listener

__all__ = ["Audio", "Passage", "Transcription"]

_COOL = 0.5  # what was heard at this temperature or above is no context to rely on


@dataclass(frozen=True)
class Passage:
    """A segment of an audio and the window that it was heard in."""

    piece: Piece
    tokens: Tensor  # [T]
    heard: Heard
    times: Tensor | None = None  # [T] when each token begins, in seconds, where that is asked for


@dataclass
class Audio:
    """One recording, and how far it has been heard."""

    config: GenerationConfig
    total: int  # frames of it
    spoken: int | None = None  # frames that are no padding, where that is known
    begin: Sequence[int] = ()  # what the decoder begins with
    features: Tensor | None = None  # [bins, F]; F may be more than `total`, which is padding
    states: Tensor | None = None  # [positions, size] where it has been encoded already
    prompt: Sequence[int] | None = None  # of the first window, where the user gives all of it
    seek: int = 0  # the frame that is next
    turn: int = 0  # how many windows were heard
    follows: bool = True  # whether the next window may rely on what was said
    passages: list[Passage] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """Whether all of it has been heard."""
        return self.seek >= self.total

    def window(self, frames: int) -> Window:
        """What is next, at the most `frames`."""
        return Window(self.seek, min(self.total - self.seek, frames))

    def shown(self, window: Window, frames: int) -> Tensor:
        """A window as the encoder takes it [bins, frames]: silence fills it up."""
        assert self.features is not None
        part = self.features[:, window.start : window.start + window.frames]
        return torch.nn.functional.pad(part, (0, frames - part.shape[1]))


class Transcription:
    """Hears recordings side by side until all of them are over; one that ends leaves the others."""

    def __init__(
        self,
        listener: Listener,
        options: Options,
        fallback: Fallback,
        clock: Clock,
        alignment: Alignment | None = None,
    ) -> None:
        self._listener, self._options, self._fallback = listener, options, fallback
        self._clock, self._alignment = clock, alignment

    def run(self, audios: Sequence[Audio], past: Past) -> list[Heard]:
        """Fill the passages of all recordings; what was heard in the last round."""
        last: list[Heard] = []
        while any(not audio.over for audio in audios):
            if self._options.monitor_progress is not None:
                self._options.monitor_progress(torch.tensor([[one.seek, one.total] for one in audios]))
            last = self._round([audio for audio in audios if not audio.over], past)
            if self._options.force_unique_generate_call:
                break
        return last

    def _round(self, audios: Sequence[Audio], past: Past) -> list[Heard]:
        """Hear the next window of each."""
        windows = [audio.window(self._listener.frames) for audio in audios]
        tasks = []
        for audio in audios:
            said = past.first + [passage.tokens.tolist() for passage in audio.passages]
            prompt = [
                *past.before(said, self._options.condition_on_prev_tokens and audio.follows),
                *audio.begin,
            ]
            if audio.prompt is not None and audio.turn == 0:
                prompt = list(audio.prompt)
            tasks.append(Task(audio.config, prompt, len(audio.begin), audio.turn))
        found = self._fallback.hear(self._states(audios, windows), tasks)
        for audio, window, heard in zip(audios, windows, found, strict=True):
            self._keep(audio, window, heard)
        return found

    def _states(self, audios: Sequence[Audio], windows: Sequence[Window]) -> Tensor:
        """The windows as the decoder sees them [N, positions, size]."""
        if audios[0].states is not None:
            return torch.stack([audio.states for audio in audios if audio.states is not None])
        frames = self._listener.frames
        shown = [audio.shown(window, frames) for audio, window in zip(audios, windows, strict=True)]
        return self._listener.encode(torch.stack(shown))

    def _keep(self, audio: Audio, window: Window, heard: Heard) -> None:
        """Write down what was heard, and go on behind it."""
        audio.turn += 1
        audio.follows = heard.temperature < _COOL
        if heard.silent:
            audio.seek += window.frames
            return
        pieces, frames = split(heard.tokens.tolist(), window, self._clock)
        times = self._times(audio, window, heard)
        for piece in pieces:
            here = slice(piece.first, piece.last)
            told = None if times is None else times[here]
            audio.passages.append(Passage(piece, heard.tokens[here], heard, told))
        # What was encoded elsewhere is one window: nobody can begin in the middle of it.
        audio.seek += frames if audio.states is None else window.frames

    def _times(self, audio: Audio, window: Window, heard: Heard) -> Tensor | None:
        """When each token of a window was spoken, in seconds from the beginning of the audio [T]."""
        if self._alignment is None:
            return None
        left = None if audio.spoken is None else (audio.spoken - window.start) // self._listener.stride
        return self._alignment.times(heard, left) + self._clock.begins(window)

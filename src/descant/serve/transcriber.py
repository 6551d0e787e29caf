"""A speech model behind a server: one recording at a time, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from descant.api.generate import generate
from descant.errors import EngineFull
from descant.models.whisper import language_codes
from descant.serve.api_errors import ApiError
from descant.serve.audio import read_audio
from descant.serve.settings import ServerSettings

__all__ = ["TimedText", "TranscribedAudio", "Transcriber"]

_WINDOW_SECONDS: Final = 30.0


class TimedText(NamedTuple):
    """A part of a transcript and its times in seconds."""

    start: float
    end: float
    text: str
    tokens: list[int]


class TranscribedAudio(NamedTuple):
    """What was said in a recording."""

    text: str
    segments: list[TimedText]
    seconds: float  # of the recording
    language: str | None


@dataclass(eq=False)
class Transcriber:
    """A Whisper model with its processor; requests wait for each other in order."""

    model: Any
    processor: Any
    settings: ServerSettings
    max_waiting: int = 64
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="descant-speech")
        self._num_waiting = 0
        self._is_closed = False

    @property
    def is_full(self) -> bool:
        """Whether a further recording would be refused."""
        return self._num_waiting >= self.max_waiting

    @property
    def is_healthy(self) -> bool:
        """Whether it takes recordings."""
        return not self._is_closed

    def close(self) -> None:
        """Cancel what waits, and end the thread."""
        self._is_closed = True
        self._pool.shutdown(cancel_futures=True)

    @property
    def _rate(self) -> int:
        return int(self.processor.feature_extractor.sampling_rate)

    @property
    def _is_multilingual(self) -> bool:
        return bool(getattr(self.model.generation_config, "is_multilingual", False))

    async def transcribe(self, data: bytes, options: Mapping[str, Any]) -> TranscribedAudio:
        """The transcript of a recording; cancelling the task ends it within a step."""
        if self._num_waiting >= self.max_waiting:
            raise EngineFull(self._num_waiting, self.max_waiting)
        is_cancelled = threading.Event()
        self._num_waiting += 1
        try:
            samples = await asyncio.to_thread(read_audio, data, self._rate)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._pool, self._run, samples, dict(options), is_cancelled)
        finally:
            is_cancelled.set()
            self._num_waiting -= 1

    def _run(self, samples: Any, options: dict[str, Any], is_cancelled: threading.Event) -> TranscribedAudio:
        if is_cancelled.is_set():
            raise ApiError(499, "the client has disconnected", code="disconnected")
        language, prompt = options.pop("language", None), options.pop("prompt", None)
        seconds = len(samples) / self._rate
        # Longer recordings are cut at timestamps, so the features must not be cut to one window.
        is_long = seconds > _WINDOW_SECONDS
        long = {"truncation": False, "padding": "longest"} if is_long else {}
        inputs = self.processor(
            samples, sampling_rate=self._rate, return_attention_mask=True, return_tensors="pt", **long
        )
        given: dict[str, Any] = {**options, **inputs.to(self.model.device)}
        given["input_features"] = given["input_features"].to(self.model.dtype)
        if language is not None:
            language = self._check_language(language)
            if self._is_multilingual:  # a model of one language takes no name of one
                given["language"] = language
        if prompt:
            given["prompt_ids"] = self.processor.get_prompt_ids(prompt, return_tensors="pt")
        output: Any = generate(
            self.model,
            return_timestamps=True,
            return_segments=True,
            stopping_criteria=[lambda *_, **__: is_cancelled.is_set()],
            **given,
        )
        segments = [self._segment(one) for one in output.segments[0]]
        return TranscribedAudio("".join(one.text for one in segments).strip(), segments, seconds, language)

    def _segment(self, segment: Mapping[str, Any]) -> TimedText:
        tokens = segment["tokens"].tolist()
        text = self.processor.tokenizer.decode(tokens, skip_special_tokens=True)
        return TimedText(float(segment["start"]), float(segment["end"]), text, tokens)

    def _check_language(self, language: str) -> str:
        codes = language_codes()
        code = codes.get(language.lower(), language.lower())
        known = set(codes.values()) if self._is_multilingual else {"en"}
        if code not in known:
            message = f"`language` must be one that the model knows, got {language[:40]!r}"
            raise ApiError(400, message, param="language", code="invalid_value")
        return code

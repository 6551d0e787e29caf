"""`/v1/audio/transcriptions`, and the Whisper model behind it: one recording at a time, in its own thread."""

from __future__ import annotations

import asyncio
import io
import threading
import time
import wave
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse
from starlette.types import Message

from descant.api.generate import generate
from descant.api.json_lines import parse_text
from descant.config.generation_config import FIELDS
from descant.errors import EngineFull, MissingExtra
from descant.models.audio.whisper import language_codes
from descant.serve.http.errors import ApiError, JsonResponse, invalid_value
from descant.serve.http.request import RequestState, read_body, until_disconnect
from descant.serve.model.served_model import check_parameter_name
from descant.serve.settings import ServerSettings, check_model_name

MAX_SECONDS: Final = 3 * 3600
_MAX_CHANNELS: Final = 8


def read_audio(data: bytes, rate: int) -> Any:
    """The samples [N] of a recording, between -1 and 1 and `rate` a second, its channels mixed.

    WAV with 16-bit samples is read as it is; other formats need the extra `audio`.
    """
    samples, own_rate = _read_wave(data) or _read_any(data)
    if len(samples) > MAX_SECONDS * own_rate:
        raise _audio_error(f"must be at most {MAX_SECONDS} seconds long")
    if not len(samples):
        raise _audio_error("must have at least one sample")
    mono = samples if samples.ndim == 1 else samples.mean(axis=1)
    return _resample(mono.astype(np.float32), own_rate, rate)


def _read_wave(data: bytes) -> tuple[Any, int] | None:
    """A WAV file of 16-bit samples; None: it is none."""
    try:
        with wave.open(io.BytesIO(data)) as sound:
            channels, width, rate = sound.getnchannels(), sound.getsampwidth(), sound.getframerate()
            if width != 2 or not 0 < channels <= _MAX_CHANNELS or rate <= 0:
                return None
            raw = sound.readframes(min(sound.getnframes(), MAX_SECONDS * rate + 1))
    except (wave.Error, EOFError, ValueError):
        return None
    whole = len(raw) // (2 * channels) * 2 * channels
    samples = np.frombuffer(raw[:whole], "<i2").astype(np.float32) / 32768
    return samples.reshape(-1, channels), rate


def _read_any(data: bytes) -> tuple[Any, int]:
    """A recording in any format that libsndfile reads: FLAC, Ogg, MP3 and others."""
    try:
        import soundfile
    except ImportError:
        raise MissingExtra("audio", "a recording that is not WAV with 16-bit samples") from None
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as sound:
            if not 0 < sound.channels <= _MAX_CHANNELS or sound.samplerate <= 0:
                raise _audio_error(f"must have 1 to {_MAX_CHANNELS} channels")
            samples = sound.read(MAX_SECONDS * sound.samplerate + 1, dtype="float32", always_2d=True)
            return samples, int(sound.samplerate)
    except (RuntimeError, ValueError, TypeError):  # what libsndfile raises for broken files
        raise _audio_error("must be a recording in a known format") from None


def _resample(samples: Any, own: int, rate: int) -> Any:
    if own == rate:
        return samples
    try:
        import soxr
    except ImportError:
        raise MissingExtra("audio", f"a recording with another rate than {rate} a second") from None
    if not 1000 <= own <= 400_000:
        raise _audio_error("must have a rate from 1,000 to 400,000 samples a second")
    return soxr.resample(samples, own, rate)


def _audio_error(must: str) -> ApiError:
    return invalid_value("file", f"`file` {must}")


_WINDOW_SECONDS: Final = 30.0


class TimedText(NamedTuple):
    """A part of a transcript and its times in seconds."""

    start: float
    end: float
    text: str
    tokens: list[int]


class TranscribedAudio(NamedTuple):
    """The transcript of a recording."""

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
        segments = [self._segment(segment) for segment in output.segments[0]]
        text = "".join(segment.text for segment in segments).strip()
        return TranscribedAudio(text, segments, seconds, language)

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
            raise invalid_value("language", message)
        return code


Format = Literal["json", "text", "srt", "verbose_json", "vtt"]
_FORMATS: Final = get_args(Format)
_GRANULARITIES: Final = "timestamp_granularities[]"


class TranscriptionForm(BaseModel):
    """The fields of a form with a recording; others are generation parameters."""

    model_config = ConfigDict(extra="allow")

    file: Annotated[bytes, WithJsonSchema({"type": "string", "format": "binary"})]
    model: str
    language: str | None = None
    prompt: str | None = None
    response_format: Format = "json"
    temperature: float | None = None
    timestamp_granularities: Annotated[Literal["segment"], Field(alias=_GRANULARITIES)] = "segment"


_OWN_FIELDS: Final = tuple(field.alias or name for name, field in TranscriptionForm.model_fields.items())


async def transcriptions(http: HttpRequest) -> Any:
    """Transcribe a recording."""
    model: Transcriber = http.app.state.model
    form = await _read_form(http, model.settings.max_audio_bytes)
    try:
        options, kind = _parse_options(model, form)
        upload = form.get("file")
        if not isinstance(upload, UploadFile):
            raise ApiError(400, "`file` must be a recording", param="file", code="missing_required_parameter")
        data = await upload.read()
    finally:
        await form.close()
    state = RequestState.of(http.scope)
    state.model_name = model.settings.model_name
    transcript = await until_disconnect(http.receive, model.transcribe(data, options))
    state.num_new_tokens = sum(len(segment.tokens) for segment in transcript.segments)
    if kind == "text":
        return PlainTextResponse(transcript.text + "\n")
    if kind in ("srt", "vtt"):
        return PlainTextResponse(_subtitles(transcript, kind))
    return JsonResponse(_verbose(transcript) if kind == "verbose_json" else {"text": transcript.text})


async def _read_form(http: HttpRequest, max_bytes: int) -> FormData:
    """The fields of a form, whose size is bounded before anything is parsed."""
    if not http.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise ApiError(415, "the body must be a form (multipart/form-data)", code="unsupported_media_type")
    body = await read_body(http.receive, http.headers.get("content-length"), max_bytes)

    async def replay() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    try:
        return await HttpRequest(http.scope, replay).form(max_files=1, max_fields=64)
    except MultiPartException as error:
        raise ApiError(400, f"the form must be valid: {error.message}", code="invalid_form") from None


def _parse_options(model: Transcriber, form: FormData) -> tuple[dict[str, Any], str]:
    """The arguments of the model, and the format of the answer."""
    values = {name: value for name, value in form.multi_items() if isinstance(value, str) and value}
    if "model" not in values:
        raise ApiError(400, "`model` must be given", param="model", code="missing_required_parameter")
    check_model_name(model.settings, values.pop("model"))
    kind = values.pop("response_format", "json")
    if kind not in _FORMATS:
        raise invalid_value("response_format", f"`response_format` must be one of {', '.join(_FORMATS)}")
    if values.pop(_GRANULARITIES, "segment") != "segment":
        raise invalid_value("timestamp_granularities", "`timestamp_granularities` must be `segment`")
    options: dict[str, Any] = {}
    for name, text in values.items():
        if name in ("language", "prompt"):
            options[name] = text
            continue
        check_parameter_name(name, (*FIELDS, *_OWN_FIELDS))
        options[name] = parse_text(text)
    if options.get("temperature") == 0:
        del options["temperature"]
    elif "temperature" in options:
        options["do_sample"] = True
    return options, kind


def _verbose(transcript: TranscribedAudio) -> dict[str, Any]:
    segments = [
        {"id": number, "start": part.start, "end": part.end, "text": part.text, "tokens": part.tokens}
        for number, part in enumerate(transcript.segments)
    ]
    return {
        "task": "transcribe",
        "language": transcript.language or "english",
        "duration": transcript.seconds,
        "text": transcript.text,
        "segments": segments,
        "usage": {"type": "duration", "seconds": int(transcript.seconds) + 1},
    }


def _subtitles(transcript: TranscribedAudio, kind: str) -> str:
    """The segments as SubRip or WebVTT."""
    mark = "," if kind == "srt" else "."

    def cue(number: int, part: TimedText) -> str:
        head = f"{number}\n" if kind == "srt" else ""
        return f"{head}{_clock(part.start, mark)} --> {_clock(part.end, mark)}\n{part.text.strip()}\n"

    cues = [cue(number, segment) for number, segment in enumerate(transcript.segments, 1)]
    return ("WEBVTT\n\n" if kind == "vtt" else "") + "\n".join(cues)


def _clock(seconds: float, mark: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{rest // 1000:02}{mark}{rest % 1000:03}"

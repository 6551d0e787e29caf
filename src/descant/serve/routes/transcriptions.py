"""`/v1/audio/transcriptions`, for Whisper models."""

from __future__ import annotations

import json
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse
from starlette.types import Message

from descant.config.generation_config import FIELDS
from descant.serve.http.errors import ApiError, JsonResponse, invalid_value
from descant.serve.http.request import RequestState, read_body, until_disconnect
from descant.serve.model.parameters import check_parameter_name
from descant.serve.model.transcriber import TimedText, TranscribedAudio, Transcriber
from descant.serve.settings import check_model_name

__all__ = ["TranscriptionForm", "transcriptions"]

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


_OWN_FIELDS: Final = tuple(one.alias or name for name, one in TranscriptionForm.model_fields.items())


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
    state.num_new_tokens = sum(len(one.tokens) for one in transcript.segments)
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
        options[name] = _parse_value(text)
    if options.get("temperature") == 0:
        del options["temperature"]
    elif "temperature" in options:
        options["do_sample"] = True
    return options, kind


def _parse_value(text: str) -> Any:
    """The value of a form's field, which is JSON or text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _verbose(transcript: TranscribedAudio) -> dict[str, Any]:
    segments = [
        {"id": number, "start": one.start, "end": one.end, "text": one.text, "tokens": one.tokens}
        for number, one in enumerate(transcript.segments)
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

    def cue(number: int, one: TimedText) -> str:
        head = f"{number}\n" if kind == "srt" else ""
        return f"{head}{_clock(one.start, mark)} --> {_clock(one.end, mark)}\n{one.text.strip()}\n"

    cues = [cue(number, one) for number, one in enumerate(transcript.segments, 1)]
    return ("WEBVTT\n\n" if kind == "vtt" else "") + "\n".join(cues)


def _clock(seconds: float, mark: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{rest // 1000:02}{mark}{rest % 1000:03}"

"""A server of a Whisper model, with OpenAI's client."""

from __future__ import annotations

import io
import wave

import openai
import pytest

from tests.support import pretrained
from tests.support.http_client import request
from tests.support.server_process import ServerProcess

NAME = "whisper-tiny.en"
SAID = "And so my fellow Americans ask not what your country can do for you"


@pytest.fixture(scope="module")
def speech_server():
    with ServerProcess(pretrained.folder(NAME)) as server:
        yield server


@pytest.fixture(scope="module")
def client(speech_server):
    with openai.OpenAI(base_url=f"{speech_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def jfk():
    return (pretrained.folder(NAME).parent / "speech" / "jfk.wav").read_bytes()


def transcribe(client, sound, **options):
    return client.audio.transcriptions.create(model=NAME, file=("sound.wav", sound), **options)


def resampled(sound: bytes, step: int) -> bytes:
    """The recording with every `step`-th sample, twice in two channels."""
    with wave.open(io.BytesIO(sound)) as source:
        frames = source.readframes(source.getnframes())
        rate = source.getframerate()
    samples = [frames[at : at + 2] for at in range(0, len(frames), 2 * step)]
    target = io.BytesIO()
    with wave.open(target, "wb") as other:
        other.setnchannels(2)
        other.setsampwidth(2)
        other.setframerate(rate // step)
        other.writeframes(b"".join(one + one for one in samples))
    return target.getvalue()


def test_a_recording_in_all_formats(client, jfk):
    answer = transcribe(client, jfk)
    assert answer.text.startswith(SAID)
    verbose = transcribe(client, jfk, response_format="verbose_json", language="en")
    assert verbose.text == answer.text
    assert verbose.duration == pytest.approx(11, abs=0.1)
    assert verbose.segments[0].start == 0
    assert transcribe(client, jfk, response_format="text") == answer.text + "\n"
    srt = transcribe(client, jfk, response_format="srt")
    assert srt.startswith("1\n00:00:00,000 --> 00:00:")
    assert transcribe(client, jfk, response_format="vtt").startswith("WEBVTT\n\n00:00:00.000 --> ")


def test_beams_another_rate_and_two_channels(client, jfk):
    answer = transcribe(client, resampled(jfk, 2), extra_body={"num_beams": 2}, temperature=0)
    assert "your country" in answer.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"language": "klingon"}, "`language` must be one"),
        ({"language": "de"}, "`language` must be one"),
        ({"response_format": "diarized_json"}, "response_format"),
        ({"timestamp_granularities": ["word"]}, "must be `segment`"),
        ({"extra_body": {"num_beam": 2}}, "did you mean `num_beams`"),
        ({"extra_body": {"num_beams": 0}}, "`num_beams` must be an int >= 1"),
    ],
)
def test_what_is_wrong_is_named(client, jfk, options, message):
    with pytest.raises(openai.BadRequestError, match=message):
        transcribe(client, jfk, **options)


@pytest.mark.parametrize("sound", [b"", b"RIFF", b"no sound at all" * 100])
def test_what_is_no_recording_is_refused(client, sound):
    with pytest.raises(openai.BadRequestError):
        transcribe(client, sound)


def test_other_endpoints_do_not_exist_here(speech_server, client):
    assert [model.id for model in client.models.list()] == [NAME]
    assert request(speech_server.port, "POST", "/v1/completions", {}).status == 404
    answer = request(speech_server.port, "POST", "/v1/audio/transcriptions", {})
    assert (answer.status, answer.json["error"]["code"]) == (415, "unsupported_media_type")
    assert speech_server.terminate() == 0

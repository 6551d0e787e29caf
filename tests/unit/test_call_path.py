"""The way of a call in numbers: its files and functions, its frames above the network, its calls."""

from __future__ import annotations

import collections
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from starlette.testclient import TestClient

import descant
from descant.serve.application import load_application
from descant.serve.settings import ServerSettings
from descant.testing import toy
from tests.support import pretrained

Calls = collections.Counter[tuple[str, str]]  # by file and function

SOURCE = str(Path(descant.__file__).parent)


class CallPath(NamedTuple):
    files: int
    functions: int
    frames: int  # of Descant above the network
    calls_per_step: float
    calls_beside_steps: float


# Ratchets: a bound goes down when the way gets shorter.
BOUNDS: Mapping[str, tuple[dict[str, Any], CallPath]] = {
    "greedy": ({}, CallPath(37, 281, 10, 63, 389)),
    "beams": ({"num_beams": 4}, CallPath(39, 344, 10, 117, 571)),
    "sampling": ({"do_sample": True, "top_p": 0.9, "seed": 1}, CallPath(39, 307, 10, 99, 519)),
    "contrastive": ({"penalty_alpha": 0.6, "top_k": 4}, CallPath(38, 322, 10, 154, 532)),
    # Measured times decide in which steps it drafts, so the calls of a step are 137 to 160 by chance.
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, CallPath(42, 355, 10, 170, 590)),
}


def profile(
    model: Any, length: int, options: Mapping[str, Any]
) -> tuple[collections.Counter[tuple[str, str]], int]:
    """The calls by file and function of a generation, and the frames above its first forward."""
    calls: Calls = collections.Counter()
    frames = 0

    def record(frame: FrameType | None, event: str, _: object) -> None:
        nonlocal frames
        if event != "call" or frame is None:
            return
        code = frame.f_code
        if code.co_filename.startswith(SOURCE):
            calls[code.co_filename, code.co_qualname] += 1
        elif not frames and code.co_name == "forward" and code.co_filename.endswith("modeling_llama.py"):
            while frame is not None:
                frames += frame.f_code.co_filename.startswith(SOURCE)
                frame = frame.f_back

    arguments = {"max_new_tokens": length, "min_new_tokens": length, **options}
    ids = torch.arange(5, 13)[None]
    descant.generate(model, ids, **arguments)  # what is cached by model and config is made here
    previous = sys.getprofile()
    sys.setprofile(record)
    try:
        descant.generate(model, ids, **arguments)
    finally:
        sys.setprofile(previous)
    return calls, frames


@pytest.mark.parametrize("method", BOUNDS)
def test_the_way_of_a_call_stays_short(method: str) -> None:
    options, bound = BOUNDS[method]
    model = toy()
    short, frames = profile(model, 10, options)
    long, _ = profile(model, 30, options)
    per_step = (sum(long.values()) - sum(short.values())) / 20
    beside = sum(short.values()) - 10 * per_step
    found = CallPath(len({file for file, _ in short}), len(short), frames, per_step, beside)
    over = {
        name: (value, limit)
        for name, value, limit in zip(CallPath._fields, found, bound, strict=True)
        if value > limit
    }
    assert over == {}


FULL_SESSION = 565  # calls of a step with eight requests of four methods


def test_a_step_of_a_full_session_stays_short() -> None:
    session = descant.Session(toy(), scheduler=descant.SchedulerConfig())
    methods = [
        {},
        {"num_beams": 2},
        {"do_sample": True, "top_p": 0.9, "seed": 1},
        {"penalty_alpha": 0.6, "top_k": 4},
    ]
    configs = [
        descant.GenerationConfig(max_new_tokens=30, min_new_tokens=30, **options) for options in methods
    ]
    session.admit(*[descant.Request([5, 6, 7 + index], config) for index, config in enumerate(configs * 2)])
    for _ in range(5):  # prompts are read, beams are forked
        session.step()
    calls = 0

    def count(frame: FrameType | None, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call" and frame is not None and frame.f_code.co_filename.startswith(SOURCE)

    previous = sys.getprofile()
    sys.setprofile(count)
    try:
        for _ in range(10):
            session.step()
    finally:
        sys.setprofile(previous)
    assert len(session) == 8
    assert calls / 10 <= FULL_SESSION


# It samples, in blocks, under the scheduler; its threads meet at other points in each run.
SERVER = CallPath(70, 640, 12, 310, 1500)


def test_the_way_of_a_request_of_the_server_stays_short() -> None:
    """A completion by HTTP, in the threads of the application and of its engine."""
    calls: Calls = collections.Counter()
    frames = 0
    is_recording = False

    def record(frame: FrameType, event: str, _: object) -> None:
        nonlocal frames
        if not is_recording or event != "call":
            return
        code = frame.f_code
        if code.co_filename.startswith(SOURCE):
            calls[code.co_filename, code.co_qualname] += 1
        elif not frames and code.co_name == "forward" and code.co_filename.endswith("modeling_llama.py"):
            caller: FrameType | None = frame
            while caller is not None:
                frames += caller.f_code.co_filename.startswith(SOURCE)
                caller = caller.f_back

    def complete(client: TestClient, length: int) -> Calls:
        nonlocal is_recording
        calls.clear()
        body = {"model": "m", "prompt": "Once", "max_tokens": length, "ignore_eos": True}
        is_recording = True
        answer = client.post("/v1/completions", json=body)
        is_recording = False
        assert answer.json()["usage"]["completion_tokens"] == length, answer.text
        return calls.copy()

    threading.setprofile(record)  # of the threads that start from here on
    try:
        app = load_application(str(pretrained.folder("smol-draft")), ServerSettings(model_name="m"))
        with TestClient(app, base_url="http://127.0.0.1") as client:
            complete(client, 2)
            short, long = complete(client, 10), complete(client, 30)
    finally:
        threading.setprofile(None)
    per_step = (sum(long.values()) - sum(short.values())) / 20
    beside = sum(short.values()) - 10 * per_step
    found = CallPath(len({file for file, _ in short}), len(short), frames, per_step, beside)
    assert all(value <= limit for value, limit in zip(found, SERVER, strict=True)), found

"""The way of a call in numbers: its files and functions, its frames above the network, its calls."""

from __future__ import annotations

import collections
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch

import descant
from descant.testing import toy

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
    "greedy": ({}, CallPath(66, 500, 14, 88, 900)),
    "beams": ({"num_beams": 4}, CallPath(68, 550, 14, 140, 1070)),
    "sampling": ({"do_sample": True, "top_p": 0.9, "seed": 1}, CallPath(67, 525, 14, 123, 1040)),
    "contrastive": ({"penalty_alpha": 0.6, "top_k": 4}, CallPath(66, 525, 14, 178, 1090)),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, CallPath(70, 560, 14, 174, 900)),
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

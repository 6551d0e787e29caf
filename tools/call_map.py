"""Pytest plugin: record which functions of `src/descant` each test calls, and its CPU seconds.

    DESCANT_CALL_MAP=calls.jsonl pytest -p tools.call_map -m "not slow and not heavy" tests/unit

`tools.mutants --calls calls.jsonl` then runs only the tests that call the changed function, quickest first.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

import pytest

SOURCE = str(Path(__file__).parents[1] / "src" / "descant") + os.sep


class CallRecorder:
    """Traces calls only, not lines: a traced run takes about a third longer."""

    def __init__(self) -> None:
        self.codes: dict[int, CodeType] = {}  # by id, because the hash of a code object reads all of it

    def trace(self, frame: FrameType, _event: str, _arg: object) -> None:
        """Note the function that is entered."""
        code = frame.f_code
        key = id(code)
        if key not in self.codes:
            self.codes[key] = code

    def functions(self) -> list[str]:
        """The functions called since the last call of this method, as `core/rows.py:take`."""
        codes, self.codes = self.codes, {}
        inside = (code for code in codes.values() if code.co_filename.startswith(SOURCE))
        return sorted({f"{code.co_filename.removeprefix(SOURCE)}:{code.co_name}" for code in inside})


RECORDER = CallRecorder()
FIXTURES: list[str] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    """Fixtures apart: the first test of a file makes what the others share."""
    yield
    FIXTURES[:] = RECORDER.functions()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Trace the test with its fixtures, and append one line to the file."""
    began = time.process_time()
    threading.settrace(RECORDER.trace)
    sys.settrace(RECORDER.trace)
    try:
        return (yield)
    finally:
        sys.settrace(None)
        threading.settrace(None)
        record = {
            "test": item.nodeid,
            "seconds": round(time.process_time() - began, 3),
            "calls": RECORDER.functions(),
            "fixtures": FIXTURES,
        }
        with Path(os.environ["DESCANT_CALL_MAP"]).open("a") as file:
            file.write(json.dumps(record) + "\n")

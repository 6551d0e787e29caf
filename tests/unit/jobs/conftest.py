"""A tiny model with a byte-level tokenizer, and jobs on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from descant import GenerationConfig
from descant.jobs import Job
from descant.models.loading.tiny_llama import toy
from tests.support import json_tokenizer

ROWS = [{"text": "a ship " * (number % 5 + 1) + str(number), "name": f"n{number}"} for number in range(23)]


@pytest.fixture(scope="session")
def loaded() -> tuple[Any, Any]:
    """The model and its tokenizer."""
    tokenizer = json_tokenizer.tokenizer()
    return toy(vocab_size=len(tokenizer)), tokenizer


@pytest.fixture
def make_job(tmp_path: Path) -> Callable[..., Job]:
    """A job on some rows, with any field changed."""

    def make(rows: list[Any] | None = None, **changes: Any) -> Job:
        source = tmp_path / "rows.jsonl"
        lines = [one if isinstance(one, str) else json.dumps(one) for one in (ROWS if rows is None else rows)]
        source.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        values = {
            "model": "toy",
            "source": str(source),
            "sink": str(tmp_path / "sink"),
            "template": "Tell of {text}:",
            "generation_config": GenerationConfig(do_sample=True, max_new_tokens=6),
            "shard_rows": 10,
        }
        return Job(**{**values, **changes})

    return make


@pytest.fixture
def contents() -> Callable[[str], dict[str, bytes]]:
    """The files of a folder by name, without the report, which has the time of its run."""
    return lambda folder: {
        path.name: path.read_bytes() for path in Path(folder).iterdir() if path.name != "report.html"
    }

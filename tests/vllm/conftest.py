"""vLLM in this process: one engine for each group of settings, on one thread."""

from __future__ import annotations

import os

# Before vLLM is imported, which reads them then.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
)

from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm.exceptions import VLLMValidationError

from tests.support import pretrained
from tests.vllm.engines import MODEL, Engines, ScheduleCounts

# vLLM replaces it by a function that does nothing.
set_num_threads = torch.set_num_threads


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore vLLM's own warnings, and put speculation last.

    vLLM cannot start another engine in a process that has compiled its drafter of n-grams.
    """
    items.sort(key=lambda item: item.path.name == "test_speculation.py")
    for item in items:
        if "vllm" in item.path.parts[-2:]:
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(scope="session")
def engines() -> Engines:
    """`engines(**settings)`: vLLM's `LLM` with these settings, started once."""
    return Engines(set_num_threads)


@pytest.fixture(scope="session")
def target() -> pretrained.Pretrained:
    """The model of most tests, for sessions."""
    return pretrained.load(MODEL)


@pytest.fixture
def schedule_counts(monkeypatch: pytest.MonkeyPatch) -> ScheduleCounts:
    """What vLLM's scheduler does in a test."""
    return ScheduleCounts(monkeypatch)


@pytest.fixture
def raises_for(engines: Engines) -> Callable[..., str]:
    """`raises_for(params, **settings)`: the message with which vLLM refuses a request."""

    def message(params: Any, **settings: Any) -> str:
        with pytest.raises((ValueError, VLLMValidationError)) as caught:
            engines(**settings).generate([{"prompt_token_ids": [1, 2]}], [params], use_tqdm=False)
        return str(caught.value)

    return message

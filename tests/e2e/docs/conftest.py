"""Continuous batching of transformers takes little memory here."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

CONFIG = transformers.ContinuousBatchingConfig
FEW = {"num_blocks": 16, "max_batch_tokens": 64}


@pytest.fixture(autouse=True)
def _small_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the size of the cache that `generate_batch` allocates.

    By default it takes most of the free memory, and to clear that takes 15 CPU seconds.
    """
    initialize = CONFIG.__init__

    def small(self: Any, *arguments: Any, **fields: Any) -> None:
        initialize(self, *arguments, **{**FEW, **fields})

    monkeypatch.setattr(CONFIG, "__init__", small)
